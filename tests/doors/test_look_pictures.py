"""A look has the pictures of its samples, one test for each family."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import CallError, SpecError, UnknownNameError
from tests.probing.attention import Language
from tests.probing.test_language import WORDS, rollout, weights_by_hand

X = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


def loss(output: Tensor) -> Tensor:
    return F.cross_entropy(output, LABELS)


def images() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    ).eval()


def words() -> Language:
    torch.manual_seed(0)
    return Language().eval()


def same(picture: Any, wanted: Tensor | np.ndarray[Any, Any]) -> None:
    expected = wanted.detach().numpy() if isinstance(wanted, Tensor) else wanted
    np.testing.assert_allclose(np.asarray(picture), expected, rtol=1e-5, atol=1e-6)


def with_hidden(model: nn.Sequential) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs, the output of the convolution, and the highest output of each sample."""
    x = X.clone().requires_grad_()
    hidden = model[0](x)
    hidden.retain_grad()
    top = model[1:](hidden).max(1)[0]
    return x, hidden, top


@pytest.mark.parametrize("no_grad", [False, True])
def test_gradients_of_the_input(*, no_grad: bool) -> None:
    model = images()
    pictures = {name: {"method": name} for name in ("saliency", "input_x_gradient")}
    with torch.set_grad_enabled(not no_grad):
        cache = comgra.look(model, X, pictures=pictures)
    x, _, top = with_hidden(model)
    (gradient,) = torch.autograd.grad(top.sum(), x)
    same(cache.picture("saliency"), gradient.abs())
    same(cache.picture("input_x_gradient"), gradient * X)
    assert cache.picture("saliency").axes == ("sample", "channel", "height", "width")
    same(cache.slot("0").value(0), model[0](X))
    assert all(p.grad is None for p in model.parameters())


def test_class_activation_maps() -> None:
    model = images()
    pictures = {"cam": {"method": "grad_cam", "select": "0"}}
    cache = comgra.look(model, X, pictures=pictures, loss=loss)
    _, hidden, top = with_hidden(model)
    top.sum().backward()
    weights = hidden.grad.mean((2, 3), keepdim=True) if hidden.grad is not None else hidden
    same(cache.picture("cam"), (weights * hidden).sum(1))  # signed
    of_loss = cache.picture("loss_cam", node="0")  # computed from the record, not declared
    assert of_loss.values.shape == (6, 6, 6)


def test_paths_and_occlusions() -> None:
    model = images()
    pictures = {
        "paths": {"method": "integrated_gradients", "points": 100, "target": 1},
        "covered": {"method": "occlusion", "window": [4, 4], "stride": 4, "target": 1},
    }
    cache = comgra.look(model, X, pictures=pictures)
    with torch.no_grad():
        change = (model(X) - model(torch.zeros_like(X)))[:, 1]
        covered = X.clone()
        covered[:, :, :4, :4] = 0
        lost = (model(X) - model(covered))[:, 1]
    total = np.asarray(cache.picture("paths")).sum((1, 2, 3))
    np.testing.assert_allclose(total, change, atol=1e-2)
    same(np.asarray(cache.picture("covered"))[:, 0, 0], lost)


def test_classes_of_captum() -> None:
    captum = pytest.importorskip("captum.attr")
    model = images()
    pictures = {"other": {"method": {"_target_": "captum.attr.InputXGradient"}, "target": 2}}
    cache = comgra.look(model, X, pictures=pictures)
    x = X.clone().requires_grad_()
    same(cache.picture("other"), captum.InputXGradient(model).attribute(x, target=2))


def test_what_a_language_model_reads_and_predicts() -> None:
    model = words()
    pictures = {
        "why": {"method": "saliency", "target": {"token": 3, "position": -1}},
        "read": {"method": "attention_rollout"},
        "lens": {"method": "logit_lens", "target": 3},
    }
    cache = comgra.look(model, WORDS, pictures=pictures)
    assert cache.picture("why").values.shape[:2] == WORDS.shape
    with torch.no_grad():
        layer = model.blocks[0](model.embed(WORDS))
        lens = model.head(layer).log_softmax(-1)[..., 3]
    same(cache.picture("lens", node="blocks.0"), lens)
    layers = weights_by_hand(model)
    wanted = [rollout([layer[i] for layer in layers])[-1] for i in range(len(WORDS))]
    same(np.asarray(cache.picture("read")).reshape(WORDS.shape), np.stack(wanted))


def test_the_curvature_of_the_loss_and_a_line_through_it() -> None:
    torch.manual_seed(0)
    model, x, labels = nn.Linear(3, 2).double(), torch.randn(5, 3).double(), LABELS[:5] % 2
    pictures = {
        "bent": {"method": "hessian", "points": 8, "lowest": 0},
        "line": {"method": "loss_slice", "points": 3},
    }
    cache = comgra.look(
        model, x, pictures=pictures, loss=lambda output: F.cross_entropy(output, labels)
    )

    def at(weight: Tensor, bias: Tensor) -> Tensor:
        return F.cross_entropy(x @ weight.T + bias, labels)

    blocks = torch.autograd.functional.hessian(at, (model.weight.detach(), model.bias.detach()))
    rows = [
        torch.cat([b.reshape(n, -1) for b in row], 1) for row, n in zip(blocks, (6, 2), strict=True)
    ]
    largest = torch.linalg.eigvalsh(torch.cat(rows))[-1]
    same(np.asarray(cache.picture("bent")).reshape(-1)[:1], largest[None])
    line = np.asarray(cache.picture("line")).reshape(-1)
    same(line[1:2], at(model.weight, model.bias)[None])
    assert len(line) == 3


def test_pictures_that_are_computed_from_records() -> None:
    model = images()
    capture = ["output", "output_grad", "parameter"]
    nodes = {"all": {"select": "**", "capture": capture, "values": True}}
    pictures = {"edges": {"method": "saliency"}}
    cache = comgra.look(model, X, pictures=pictures, loss=loss, spec={"nodes": nodes})
    guesses = model(X).argmax(1)
    counts = np.zeros((3, 3))
    np.add.at(counts, (LABELS.numpy(), guesses.numpy()), 1)
    same(np.asarray(cache.picture("confusion")).reshape(3, 3), counts)
    singular = torch.linalg.svdvals(model.get_parameter("4.weight").detach())
    same(np.asarray(cache.picture("spectrum", node="4"))[0], singular)
    hidden: Tensor = model[1](model[0](X))
    dead = (hidden <= 0).all(0).flatten(1).all(1)
    assert np.array_equal(np.asarray(cache.picture("dead_units", node="1")).reshape(-1), dead)
    likeness = np.asarray(cache.picture("likeness"))
    np.testing.assert_allclose(np.diagonal(likeness), 1.0, rtol=1e-5)
    assert cache.picture("reliability").values.shape == (10, 3)
    assert cache.picture("linear_probe").axes == ("step", "node")
    assert cache.picture("flow").axes == ("node",)
    assert cache.embedding("0").values.shape == (1, 6, 2)
    assert {"edges", "confusion", "likeness"} <= {*cache.pictures}


def test_the_call_and_the_generators_are_as_without_pictures() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)).train()
    x, pictures = torch.randn(6, 4), {"edges": {"method": "saliency"}}
    torch.manual_seed(3)
    plain = comgra.look(model, x, loss=loss)
    state = torch.get_rng_state()
    drawn = comgra.look(model, x, loss=loss, pictures=pictures)
    assert torch.equal(torch.get_rng_state(), state)
    for node in ("0", "1", "2"):
        for of in ("forward", "grad"):
            one, other = (run.slot(node, of=of).value(0) for run in (plain, drawn))
            assert np.array_equal(one, other)
    assert all(module.training for module in model.modules())


def test_values_are_those_of_the_call_and_not_of_a_picture() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    x = torch.randn(6, 4)
    found = comgra.look(model, x, pictures={"which": {"method": "saliency", "target": 1}})
    np.testing.assert_array_equal(found.slot("2").value(0), model(x).detach().numpy())
    assert len(found.slot("2").series("mean")) == 1


def test_pictures_of_the_spec_are_those_of_the_call() -> None:
    spec = {
        "nodes": {"all": {"select": "**"}},
        "probes": {"eyes": {"samples": {"count": 2}}},
        "pictures": {"edges": {"method": "saliency", "of": "eyes"}},
    }
    cache = comgra.look(images(), X, spec=spec)
    assert len(cache.picture("edges").values) == len(X)
    assert cache.types == ["eval", "probe:look"]


def test_wrong_pictures_are_said() -> None:
    model = images()
    with pytest.raises(SpecError, match="method"):
        comgra.look(model, X, pictures={"edges": {"method": "salience"}})
    with pytest.raises(CallError, match=r"pictures\['edges'\] must be a mapping, got 'saliency'"):
        comgra.look(model, X, pictures={"edges": "saliency"})
    with pytest.raises(CallError, match="pictures must map names to pictures, got 'saliency'"):
        comgra.look(model, X, pictures="saliency")  # type: ignore[arg-type]
    cache = comgra.look(model, X, pictures={"cam": {"method": "grad_cam", "select": "nowhere"}})
    with pytest.raises(UnknownNameError, match=r"'cam' could not be made at step 0: .*nowhere"):
        cache.picture("cam")
    with pytest.raises(UnknownNameError, match="no picture 'edges'"):
        comgra.look(model, X).picture("edges")

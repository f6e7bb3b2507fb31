"""What effects are measured by: precisely, whatever the model's dtype, and without side effects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Run

COUNT, CLASSES = 5, 3


class Net(nn.Module):
    """A classifier or, with tokens, a language model; its first layer is written to."""

    def __init__(self, dtype: torch.dtype, *, language: bool = False) -> None:
        super().__init__()
        self.first = nn.Embedding(CLASSES, 6) if language else nn.Linear(4, 6)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(6, CLASSES)
        self.to(dtype)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.head(self.relu(self.first(x)))


def inverted(output: Tensor) -> Tensor:
    """Return a measure, and leave nothing of the output."""
    return output.neg_()[:, 0]


def counted(output: Tensor) -> Tensor:
    return (output[:, 0] > 0).long() + 2**25


def train(model: nn.Module, *given: Tensor, declared: dict[str, Any], root: Path) -> Run:
    """Train for one step whose samples have the classes 0, 1, 2, 0, 1."""
    spec = {
        "nodes": {"all": {"select": "head"}},
        "probes": {"eyes": {"samples": {"count": COUNT}}},
        "interventions": {name: {"of": "eyes", **each} for name, each in declared.items()},
    }
    with comgra.trace(spec, root=root) as session:
        logits = model(*given)
        labels = torch.arange(COUNT) % CLASSES
        at_end = logits if logits.dim() == 2 else logits[:, -1]
        F.cross_entropy(at_end.float(), labels).backward()
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    assert session.path is not None
    return comgra.open_run(session.path)


def logits(model: nn.Module, x: Tensor, layer: nn.Module | None = None) -> np.ndarray[Any, Any]:
    """Return the outputs in float64, with a layer's own output reduced by 2%."""
    handles = [] if layer is None else [layer.register_forward_hook(lambda *a: a[2] * 0.98)]
    with torch.no_grad():
        found: np.ndarray[Any, Any] = model(x).double().numpy()
    for handle in handles:
        handle.remove()
    return found


def cross_entropy(scores: np.ndarray[Any, Any], classes: np.ndarray[Any, Any]) -> Any:
    likely = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    return -np.take_along_axis(likely, classes[..., None], -1)[..., 0]


def effects(run: Run, name: str) -> np.ndarray[Any, Any]:
    return run.effects(name)[[*range(COUNT)]].to_numpy()


SLIGHTLY = {"select": "first", "do": {"scale": 0.98}}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_effects_are_as_precise_as_the_outputs_of_the_model(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Net(dtype), torch.randn(COUNT, 4, dtype=dtype)
    plain = Net(dtype)
    plain.load_state_dict(model.state_dict())
    declared: dict[str, Any] = {
        "loss": SLIGHTLY,
        "swept": {**SLIGHTLY, "sweep": "node"},
        "label": {**SLIGHTLY, "measure": "label"},
        "difference": {**SLIGHTLY, "measure": {"difference": [0, 2]}},
        "function": {**SLIGHTLY, "measure": {"_target_": f"{__name__}.inverted"}},
        "whole": {**SLIGHTLY, "measure": {"_target_": f"{__name__}.counted"}},
        "again": SLIGHTLY,
    }
    run = train(model, x, declared=declared, root=tmp_path)
    before, after = logits(plain, x), logits(plain, x, plain.first)
    classes = np.arange(COUNT) % CLASSES
    change, own = after - before, np.arange(COUNT)
    tolerance = 1e-14 if dtype == torch.float64 else 5e-7
    for name, wanted in {
        "loss": cross_entropy(after, classes) - cross_entropy(before, classes),
        "label": change[own, classes],
        "difference": change[:, 0] - change[:, 2],
        "function": -change[:, 0],
        "whole": (after[:, 0] > 0).astype(int) - (before[:, 0] > 0),
    }.items():
        np.testing.assert_allclose(effects(run, name)[0], wanted, atol=tolerance, err_msg=name)
    assert np.abs(change).max() > 1e-3
    for name in ("again", "swept"):  # whatever functions wrote to
        np.testing.assert_allclose(effects(run, name), effects(run, "loss"), atol=tolerance)


def test_the_loss_of_tokens_is_precise_and_skips_those_without_a_label(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net(torch.bfloat16, language=True)
    plain = Net(torch.bfloat16, language=True)
    plain.load_state_dict(model.state_dict())
    tokens = torch.randint(CLASSES, (COUNT, 7))
    labels = tokens.clone()
    labels[1, :4] = -100
    labels[3] = -100  # a sample without any
    declared = {"loss": SLIGHTLY, "swept": {**SLIGHTLY, "sweep": "position"}}
    probe = {"batch": {"x": tokens.tolist(), "labels": labels.tolist()}}
    spec = {
        "nodes": {"all": {"select": "head"}},
        "probes": {"eyes": probe},
        "interventions": {name: {"of": "eyes", **each} for name, each in declared.items()},
    }
    with comgra.trace(spec, root=tmp_path) as session:
        model(tokens).float().square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert session.path is not None
    run = comgra.open_run(session.path)
    seen = labels.numpy()[:, 1:] != -100
    following = np.where(seen, labels.numpy()[:, 1:], 0)

    def losses(scores: np.ndarray[Any, Any]) -> Any:
        total = np.where(seen, cross_entropy(scores[:, :-1], following), 0).sum(1)
        return np.array([a / n if n else np.nan for a, n in zip(total, seen.sum(1), strict=True)])

    wanted = losses(logits(plain, tokens, plain.first)) - losses(logits(plain, tokens))
    np.testing.assert_allclose(effects(run, "loss")[0], wanted, atol=5e-7)
    assert np.isnan(wanted).tolist() == [False, False, False, True, False]

    known = wanted[~np.isnan(wanted)]
    table = run.effects("loss")
    assert table["mean"].item() == pytest.approx(known.mean(), abs=5e-7)
    assert table["error"].item() == pytest.approx(known.std(ddof=1) / 2, abs=5e-7)
    assert run.effects("swept")["mean"].notna().all()
    missing = [w for w in run.document("report")["warnings"] if "no measure" in w]
    assert [w.split(":")[0] for w in missing] == ["intervention 'loss'", "intervention 'swept'"]
    assert "sample 3 has no measure (NaN), even without the change" in missing[0]


def test_an_estimate_passes_through_a_frozen_layer_whose_output_is_written_to(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model, x = Net(torch.float32), torch.randn(COUNT, 4)
    model.first.requires_grad_(False)
    run = train(
        model,
        x,
        declared={
            "guess": {**SLIGHTLY, "sweep": "feature", "estimate": "gradient", "measure": 1},
            "exact": {**SLIGHTLY, "sweep": "feature", "measure": 1},
        },
        root=tmp_path,
    )
    # a slightly smaller value has the same sign, so that ReLU is linear there
    pd.testing.assert_frame_equal(run.effects("guess"), run.effects("exact"), atol=1e-6, rtol=0)
    assert np.abs(effects(run, "guess")).max() > 1e-3


def test_a_share_needs_something_to_restore(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Net(torch.float32), torch.randn(COUNT, 4)
    with torch.no_grad():
        x[2] = 0
        dict(model.named_parameters())["first.bias"].zero_()  # halving it leaves this sample alone
    halved = {"select": "first", "do": {"scale": 0.5}}
    declared = {
        "nothing": {**SLIGHTLY, "sweep": "node"},
        "restored": {"first": [halved], "select": "first", "do": {"patch": "clean"}},
        "swept": {"first": [halved], **SLIGHTLY, "do": {"patch": "clean"}, "sweep": "node"},
    }
    run = train(model, x, declared=declared, root=tmp_path)
    for name in ("nothing", "restored"):
        with pytest.raises(UnknownNameError, match="needs a sweep with changes in `first`"):
            run.effects(name, share=True)
    shares = run.effects("swept", share=True)
    np.testing.assert_allclose(shares[[*range(COUNT)]], [[1, 1, np.nan, 1, 1]], atol=1e-5)
    assert shares["mean"].item() == pytest.approx(1, abs=1e-5)


GIVEN = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))


def mixed_batch() -> tuple[tuple[Tensor], dict[str, Any], list[Any]]:
    """Returns samples of which one belongs to no class."""
    return (GIVEN,), {}, [0, 2, "letter", 1]


def test_a_sample_without_a_class_has_no_measure_and_the_others_have(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    given = GIVEN
    spec = {
        "nodes": {"all": {"select": "**"}},
        "probes": {"eyes": {"batch": {"_target_": f"{__name__}.mixed_batch"}}},
        "pictures": {"edges": {"of": "eyes", "method": "saliency", "target": "label"}},
        "interventions": {"none": {"of": "eyes", "select": "0", "do": "zero", "measure": "loss"}},
    }
    state = {name: value.clone() for name, value in net.state_dict().items()}
    with comgra.trace(spec, root=tmp_path, group="g"):
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
    net.load_state_dict(state)
    with torch.no_grad():
        known, target = given[[0, 1, 3]], torch.tensor([0, 2, 1])
        before = F.cross_entropy(net(known), target, reduction="none")
        zero = net[2](torch.tanh(torch.zeros(3, 4)))
        wanted = F.cross_entropy(zero, target, reduction="none") - before
    run = comgra.open_run(tmp_path / "g")
    found = run.effects("none").loc[0]
    np.testing.assert_allclose(found[[0, 1, 3]].to_numpy(float), wanted, rtol=1e-4)
    assert np.isnan(found[2])
    with pytest.raises(UnknownNameError, match="samples 2 have no class"):
        run.picture("edges", 0)

"""Pictures by Captum's classes equal what Captum returns for another copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import ProbeError, SpecError
from comgra_decl.hooks.probing.methods import drawn
from comgra_decl.spec import load_spec
from tests.probing.test_methods import picture, same, subject_of
from tests.support.recording import EVERYTHING, recording

captum = pytest.importorskip("captum.attr")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return (
        nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * 30, 3),
        )
        .double()
        .eval()
    )


X = torch.linspace(-3, 3, 180, dtype=torch.float64).reshape(3, 2, 6, 5).cos()

OF_INPUT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DeepLift": ({}, {"baselines": 0.5}),
    "Saliency": ({}, {"abs": False}),
    "IntegratedGradients": (
        {"multiply_by_inputs": False},
        {"n_steps": 9, "method": "riemann_left"},
    ),
    "Occlusion": ({}, {"sliding_window_shapes": [2, 3, 3], "strides": [2, 2, 1]}),
    "Deconvolution": ({}, {}),
    "ShapleyValueSampling": ({}, {"n_samples": 1}),
}
OF_LAYER: dict[str, dict[str, Any]] = {
    "LayerConductance": {"n_steps": 7},
    "LayerDeepLift": {},
    "LayerActivation": {},
    "InternalInfluence": {"n_steps": 5},
}


def tuples(value: Any) -> Any:
    return tuple(map(tuples, value)) if isinstance(value, list) else value


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", OF_INPUT)
def test_a_class_that_explains_the_input_is_called_as_one_would_call_it(name: str) -> None:
    made, given = OF_INPUT[name]
    model = net()
    found = picture(model, X, method={"_target_": f"captum.attr.{name}", **made, **given}, target=1)
    torch.manual_seed(0)
    ours = {key: tuples(value) for key, value in given.items()}
    leaf = X.clone().requires_grad_()
    wanted = getattr(captum, name)(copy.deepcopy(model), **made).attribute(leaf, target=1, **ours)
    (only,) = found.maps
    assert (only.node, only.role, found.facts["method"]) == (None, "input", f"captum.attr.{name}")
    if name == "ShapleyValueSampling":  # random permutations; their sum is always the difference
        score, base = model(X)[:, 1], model(torch.zeros_like(X))[:, 1]
        same(only.values.flatten(1).sum(1), score - base)  # Captum's are in float32
    else:
        same(only.values, wanted.detach(), 1e-9)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_class_that_sets_rules_on_modules_sees_those_of_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    x = X.flatten(1)
    found = picture(model, x, method={"_target_": "captum.attr.LRP"}, target=2)
    same(found.maps[0].values, captum.LRP(copy.deepcopy(model)).attribute(x, target=2).detach())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", OF_LAYER)
def test_a_class_that_explains_layers_has_a_map_for_each(name: str) -> None:
    model, given = net(), OF_LAYER[name]
    found = picture(
        model,
        X,
        [2, 0, 1],
        method={"_target_": f"captum.attr.{name}", **given},
        select=["0", "4"],
        target="label",
    )
    assert [(m.node, m.role) for m in found.maps] == [("0", "output"), ("4", "output")]
    for each in found.maps:
        other = copy.deepcopy(model)
        method = getattr(captum, name)(other, other[int(each.node or 0)])
        target = {} if name == "LayerActivation" else {"target": torch.tensor([2, 0, 1])}
        same(each.values, method.attribute(X, **target, **given).detach(), 1e-9)


class Words(nn.Module):
    """Tokens and a mask, both by name; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"scores": self.head((self.embed(tokens) * mask[..., None]).tanh().mean(1))}


def test_tokens_are_explained_at_a_layer_and_further_tensors_are_passed_on() -> None:
    torch.manual_seed(0)
    model, tokens = Words().double(), torch.randint(7, (3, 5))
    mask = (torch.arange(5) < 4).double().expand(3, 5)
    subject = subject_of(model, tokens)
    object.__setattr__(subject.samples, "args", ())
    object.__setattr__(subject.samples, "kwargs", {"tokens": tokens, "mask": mask})
    # the mask comes first in what Captum explains, because it has a gradient; tokens are passed on
    spec = {"method": {"_target_": "captum.attr.LayerGradientXActivation"}, "select": "embed"}
    declared = load_spec(
        {
            "probes": {"eyes": {"samples": {"count": 1}}},
            "pictures": {"it": {"of": "eyes", "target": 1, **spec}},
        }
    )
    (only,) = drawn(declared.pictures["it"], subject).maps
    hidden = model.embed(tokens).detach().requires_grad_()
    score = model.head((hidden * mask[..., None]).tanh().mean(1))[:, 1].sum()
    (gradient,) = torch.autograd.grad(score, hidden)
    assert only.node == "embed"
    same(only.values, gradient * hidden.detach(), 1e-12)


def test_the_gap_is_stored_if_it_is_asked_for() -> None:
    method = {"_target_": "captum.attr.IntegratedGradients", "n_steps": 5}
    found = picture(net(), X, method={**method, "return_convergence_delta": True}, target=0)
    _, wanted = captum.IntegratedGradients(net()).attribute(
        X, target=0, n_steps=5, return_convergence_delta=True
    )
    assert found.facts["gap"] == pytest.approx(wanted.tolist(), abs=1e-12)


def seeded() -> None:
    torch.manual_seed(5)
    np.random.seed(5)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("inner", ["Saliency", "IntegratedGradients"])
def test_a_method_can_be_made_from_another_one(inner: str) -> None:
    given = {"IntegratedGradients": {"n_steps": 5}}.get(inner, {})
    method = {
        "_target_": "captum.attr.NoiseTunnel",
        "attribution_method": {"_target_": f"captum.attr.{inner}", **given},
        "nt_type": "smoothgrad_sq",
        "nt_samples": 4,
        "stdevs": 0.2,
    }
    subject = subject_of(net(), X)
    subject.rewind = seeded
    declared = load_spec(
        {
            "probes": {"eyes": {"samples": {"count": 1}}},
            "pictures": {"it": {"of": "eyes", "target": 1, "method": method}},
        }
    )
    (only,) = drawn(declared.pictures["it"], subject).maps
    tunnel = captum.NoiseTunnel(getattr(captum, inner)(net()))
    seeded()
    wanted = tunnel.attribute(
        X.clone().requires_grad_(),
        nt_type="smoothgrad_sq",
        nt_samples=4,
        stdevs=0.2,
        target=1,
        **given,
    )
    assert (only.node, only.role) == (None, "input")
    same(only.values, wanted.detach(), 1e-9)


NEURONS: dict[str, dict[str, Any]] = {
    "NeuronGradient": {},
    "NeuronConductance": {"n_steps": 5},
    "NeuronIntegratedGradients": {"n_steps": 5},
    "NeuronGuidedBackprop": {},
    "NeuronDeepLift": {},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", NEURONS)
def test_a_class_that_explains_a_neuron_has_a_map_of_the_input(name: str) -> None:
    given = NEURONS[name]
    method = {"_target_": f"captum.attr.{name}", "neuron_selector": [2, 1, 3], **given}
    found = picture(net(), X, method=method, select="0", target=1)
    other = net()
    target = {"target": 1} if name == "NeuronConductance" else {}
    leaf = X.clone().requires_grad_()
    wanted = getattr(captum, name)(other, other[0]).attribute(leaf, (2, 1, 3), **target, **given)
    (only,) = found.maps
    assert (only.node, only.role) == (None, "input")
    same(only.values, wanted.detach(), 1e-9)


def test_a_layer_with_the_shape_of_the_input_is_no_input() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    method = {"_target_": "captum.attr.LayerActivation"}
    found = picture(model, torch.randn(3, 4), method=method, select="0")
    assert [(each.node, each.role) for each in found.maps] == [("0", "output")]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["GradientShap", "DeepLiftShap", "DeepLift"])
@pytest.mark.parametrize(
    ("declared", "value"),
    [
        ("zeros", torch.zeros_like(X)),
        ("mean", X.mean(0, keepdim=True).expand_as(X)),
        (0.5, torch.full_like(X, 0.5)),
        (X[:2].tolist(), X[:2]),
        (X[0].tolist(), X[:1]),
    ],
)
def test_baselines_become_tensors_like_the_input(name: str, declared: Any, value: Tensor) -> None:
    if name == "DeepLift" and len(value) == 2:
        pytest.skip("DeepLift has one baseline for each sample, or for all")
    subject = subject_of(net(), X)
    subject.rewind = seeded
    method = {"_target_": f"captum.attr.{name}", "baselines": declared}
    spec = load_spec(
        {
            "probes": {"eyes": {"samples": {"count": 1}}},
            "pictures": {"it": {"of": "eyes", "target": 1, "method": method}},
        }
    )
    (only,) = drawn(spec.pictures["it"], subject).maps
    baselines = value.repeat(2, 1, 1, 1) if len(value) == 1 and name != "DeepLift" else value
    reference, leaf = getattr(captum, name)(net()), X.clone().requires_grad_()
    seeded()
    wanted = reference.attribute(leaf, baselines=baselines, target=1)
    same(only.values, wanted.detach(), 1e-6)


def test_a_mask_becomes_a_tensor() -> None:
    mask = (torch.arange(60) // 20).reshape(1, 2, 6, 5)
    method = {"_target_": "captum.attr.FeatureAblation", "feature_mask": mask.tolist()}
    found = picture(net(), X, method=method, target=1)
    wanted = captum.FeatureAblation(net()).attribute(X, target=1, feature_mask=mask)
    same(found.maps[0].values, wanted, 1e-9)


@pytest.mark.parametrize("name", ["Saliency", "IntegratedGradients", "FeatureAblation"])
def test_the_loss_is_explained_by_every_class(name: str) -> None:
    classes = torch.tensor([2, 0, 1])
    method = {"_target_": f"captum.attr.{name}"}
    found = picture(net(), X, classes.tolist(), method=method, target="loss")
    model = net()

    def losses(x: Tensor) -> Tensor:
        times = len(x) // len(classes)  # Captum repeats the samples, one copy after the other
        return F.cross_entropy(model(x), classes.repeat(times), reduction="none")

    wanted = getattr(captum, name)(losses).attribute(X.clone().requires_grad_())
    same(found.maps[0].values, wanted.detach(), 1e-6)
    assert found.facts["target"] == "loss"


TARGETS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "logit": ({"token": 3, "position": 1}, lambda out: out[:, 1, 3]),
    "probability": (
        {"token": 3, "score": "log_probability"},
        lambda out: out[:, -1].log_softmax(-1)[:, 3],
    ),
    "contrast": (
        {"token": [3, 1, 0], "rather_than": [0, 2, 2]},
        lambda out: out[range(3), -1, [3, 1, 0]] - out[range(3), -1, [0, 2, 2]],
    ),
}


@pytest.mark.parametrize("case", TARGETS)
def test_tokens_are_targets_too(case: str) -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens).cumsum(1).tanh())

    torch.manual_seed(0)
    target, score = TARGETS[case]
    model, tokens = Language().double(), torch.randint(7, (3, 5))
    method = {"_target_": "captum.attr.LayerIntegratedGradients", "n_steps": 20}
    found = picture(model, tokens, method=method, select="embed", target=target)
    end, total = model.embed(tokens).detach(), torch.zeros(3, 5, 4, dtype=torch.float64)
    start = model.embed(torch.zeros_like(tokens)).detach()  # Captum's baseline
    nodes, weights = np.polynomial.legendre.leggauss(20)
    for node, weight in zip(nodes, weights, strict=True):
        leaf = (start + (node + 1) / 2 * (end - start)).requires_grad_()
        value = score(model.head(leaf.cumsum(1).tanh())).sum()
        total += weight / 2 * torch.autograd.grad(value, leaf)[0]
    same(found.maps[0].values, total * (end - start), 1e-5)


SALIENCY = {"_target_": "captum.attr.Saliency"}
SHAP = {"_target_": "captum.attr.GradientShap"}

REFUSED: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, Any], str]] = {
    "key": (net, X, {"_target_": "captum.attr.IntegratedGradients", "steps": 3}, "no 'steps'; did"),
    "layer": (net, X, {"_target_": "captum.attr.LayerConductance"}, "explains a layer; name it in"),
    "inner": (net, X, {"_target_": "captum.attr.NoiseTunnel"}, "is made from another method; name"),
    "key of the inner": (
        net,
        X,
        {"_target_": "captum.attr.NoiseTunnel", "attribution_method": {**SALIENCY, "abss": True}},
        "captum.attr.Saliency has no 'abss'; did you mean 'abs'",
    ),
    "window": (net, X, {"_target_": "captum.attr.Occlusion"}, "needs sliding_window_shapes, as in"),
    "baselines": (net, X, {"_target_": "captum.attr.GradientShap"}, "needs baselines, as in"),
    "name": (net, X, {**SHAP, "baselines": "zero"}, "'zero' is neither zeros, ones, mean"),
    "shape": (net, X, {**SHAP, "baselines": [1.0]}, r"shape \[1\], but a sample has \[2, 6, 5\]"),
    "class": (net, X, {"_target_": "captum.attr.visualization"}, "is not a class with a method"),
    "tokens": (
        lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 2)),
        torch.ones(3, 2, dtype=torch.int64),
        {"_target_": "captum.attr.Saliency"},
        "input is tokens, which have no gradient",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_class_that_does_not_fit_is_refused_with_the_reason(case: str) -> None:
    make, x, method, why = REFUSED[case]
    with pytest.raises(ProbeError, match=why):
        picture(make(), x, method=method)


def test_a_class_that_explains_a_neuron_needs_to_know_which() -> None:
    method = {"_target_": "captum.attr.NeuronGradient"}
    with pytest.raises(
        ProbeError, match=r"NeuronGradient needs neuron_selector, as in .*\[2, 1, 1\]"
    ):
        picture(net(), X, method=method, select="0")


def test_a_class_that_does_not_exist_is_reported_before_training(tmp_path: Path) -> None:
    spec = {
        "probes": {"eyes": {"samples": {"count": 1}}},
        "pictures": {"it": {"of": "eyes", "method": {"_target_": "captum.attr.DeepLft"}}},
    }
    with (
        pytest.raises(SpecError, match=r"pictures.it.method._target_: .*did you mean 'DeepLift'"),
        comgra.trace(spec, root=tmp_path),
    ):
        pass


def test_the_training_and_its_global_hooks_are_not_affected() -> None:
    calls: list[type] = []

    def trained(**spec: Any) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        with recording({**EVERYTHING, **spec}) as found:
            for _ in range(3):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(torch.randn(6, 1, 6, 6)), torch.randint(3, (6,)))
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        assert found.faults == []
        if spec:
            assert found.report["warnings"] == []
            assert any(key.pass_ == "picture:lift" for key in found.slots)
        return losses

    everywhere = nn.modules.module.register_module_forward_hook(
        lambda module, *_: calls.append(type(module))
    )
    try:
        plain = trained()
        count = len(calls)
        lift = {"of": "eyes", "method": {"_target_": "captum.attr.DeepLift"}, "target": "label"}
        probes = {"eyes": {"samples": {"count": 3}, "schedule": {"first": 3}}}
        assert trained(probes=probes, pictures={"lift": lift}) == plain
    finally:
        everywhere.remove()
    assert len(calls) == 2 * count
    assert np.isfinite(plain).all()

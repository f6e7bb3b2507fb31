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


REFUSED: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, Any], str]] = {
    "key": (net, X, {"_target_": "captum.attr.IntegratedGradients", "steps": 3}, "no 'steps'; did"),
    "layer": (net, X, {"_target_": "captum.attr.LayerConductance"}, "explains a layer; name it in"),
    "model": (net, X, {"_target_": "captum.attr.NoiseTunnel"}, "is not made from a model"),
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

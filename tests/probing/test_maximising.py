"""Inputs that maximise units equal those of a plain loop, and their values can be recomputed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import ProbeError, SpecError
from comgra_decl.hooks.module_tree import named_modules
from comgra_decl.hooks.probing.copying import CleanCopy
from comgra_decl.hooks.probing.methods import drawn
from comgra_decl.hooks.probing.samples import Samples
from comgra_decl.hooks.probing.subject import Drawn, Subject
from comgra_decl.spec import load_spec


class Net(nn.Module):
    """A convolution whose output a ReLU overwrites, and outputs that are no classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        x.mul_(weight)
        return self.relu(self.norm(self.conv(x)))


def dream(model: nn.Module, *inputs: Tensor, **spec: Any) -> Drawn:
    declared = {"method": "maximise", "of": "eyes", **spec}
    loaded = load_spec({"probes": {"eyes": {}}, "pictures": {"it": declared}})
    copy = CleanCopy(model, {id(m): path for path, m in named_modules(model)})
    samples = Samples(inputs, {}, list(range(len(inputs[0]))), [], None)
    return drawn(loaded.pictures["it"], Subject(copy, samples))


def net() -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Net().double().eval()
    assert model.norm.running_mean is not None
    model.norm.running_mean.normal_()
    return model, torch.randn(4, 2, 5, 5).double() + 3, torch.rand(4, 1, 1, 1).double() + 0.5


def loop(model: Net, x: Tensor, weight: Tensor, unit: int, spec: dict[str, Any]) -> Tensor:
    """Gradient ascent on the mean of one channel, one input at a time."""
    mean, scale = x.mean(0), x.std(correction=0)
    noise = torch.randn(
        (1, *mean.shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )[0]
    at = mean + spec["noise"] * scale * noise
    for _ in range(spec["points"]):
        leaf = at.clone().requires_grad_()
        model.norm(model.conv(leaf[None] * weight))[0, unit].mean().backward()
        assert leaf.grad is not None
        at = at + spec["step_size"] * scale * leaf.grad / leaf.grad.pow(2).mean().sqrt()
        at = mean + (1 - spec["decay"]) * (at - mean)
    return at


def test_it_is_gradient_ascent_on_the_mean_of_each_unit() -> None:
    model, x, weight = net()
    spec = {"points": 12, "step_size": 0.2, "decay": 0.05, "noise": 0.3}
    units = [5, 1, 1, 0, 3, 2]  # more than there are samples
    found = dream(model, x.clone(), weight, select="norm", units=units, **spec)
    inputs, values, start = (each.values for each in found.maps)
    assert [each.role for each in found.maps] == ["maximised", "maximised.value", "maximised.start"]
    for place, unit in enumerate(units):
        own = weight[place % 4]  # the other input is that of the sample in the same place
        wanted = loop(model, x, own, unit, spec)
        assert (inputs[place] - wanted).abs().max() < 1e-10
        with torch.no_grad():
            value = model.norm(model.conv(inputs[place][None] * own))[0, unit].mean()
        assert float(values[place]) == pytest.approx(float(value), rel=1e-10)
        assert values[place] > start[place] + 1


def test_without_names_the_first_units_are_shown() -> None:
    model, x, weight = net()
    found = dream(model, x, weight, select=["conv", "norm"], points=1)
    assert [each.node for each in found.maps] == ["conv"] * 3 + ["norm"] * 3
    assert found.maps[0].values.shape == (6, 2, 5, 5)


def test_a_unit_without_a_gradient_stays_near_the_mean() -> None:
    torch.manual_seed(0)
    first = nn.Linear(4, 3)
    with torch.no_grad():
        first.bias[1] = -100.0
    model = nn.Sequential(first, nn.ReLU())
    x = torch.randn(5, 4)
    found = dream(model, x, select="1", units=[1], noise=0.0)
    assert torch.equal(found.maps[0].values[0], x.mean(0))
    assert found.maps[1].values.tolist() == [0.0]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unit": ({"select": "conv", "units": [6]}, "conv has no unit 6; the last one is 5"),
    "uncalled": ({"select": "unused"}, "unused was not called"),
    "misspelled": ({"select": "cnov"}, "did you mean 'conv'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_maximised_is_refused_with_the_reason(case: str) -> None:
    spec, why = REFUSED[case]
    with pytest.raises(ProbeError, match=why):
        dream(*net(), **spec)


def test_tokens_are_refused_and_so_is_a_wrong_declaration() -> None:
    with pytest.raises(ProbeError, match="the input of the model is tokens"):
        dream(Words(), torch.zeros(2, 3, dtype=torch.int64), select="embed")
    with pytest.raises(SpecError, match="decay"):
        dream(*net(), select="conv", decay=1)


def test_a_run_has_inputs_whose_values_are_those_that_it_states(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    spec: dict[str, Any] = {
        "nodes": {"all": {"select": "**"}},
        "schedule": {"first": 100},
        "probes": {"eyes": {"samples": {"count": 3}, "schedule": {"every": 2}}},
        "pictures": {
            "dream": {"method": "maximise", "of": "eyes", "select": ["0", "3"], "units": [2, 0]}
        },
    }
    states = []
    with comgra.trace(spec, root=tmp_path) as session:
        for _ in range(3):
            states.append({k: v.clone() for k, v in model.state_dict().items()})
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(6, 1, 6, 6)), torch.arange(6) % 3).backward()
            optimizer.step()
    assert session.path is not None
    run = comgra.open_run(session.path)
    found = run.picture("dream", 2, "0")
    assert found.axes == ("unit", "channel", "height", "width")
    assert found.labels == {"unit": [2, 0]}
    assert found.facts["points"] == 64
    model.load_state_dict(states[2])
    for layer, node in ((model[:1], "0"), (model, "3")):
        seen = run.picture("dream", 2, node)
        with torch.no_grad():
            values = layer(torch.from_numpy(np.array(seen.values)))
        means = values.reshape(2, values.shape[1], -1).mean(2)
        wanted = [float(means[0, 2]), float(means[1, 0])]
        assert seen.facts["value"] == pytest.approx(wanted, rel=1e-5)
        assert seen.facts["value"] > seen.facts["start"]

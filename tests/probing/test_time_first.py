"""Interventions on tensors whose samples are not in the first dimension."""

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
from comgra_decl.errors import CallError, EditError, SpecError
from comgra_decl.spec import load_spec

COUNT, TIME, WIDTH = 4, 4, 6
"""As many samples as moments, so that no size tells the dimensions apart."""

V = torch.arange(1.0, 7.0) / 4
Change = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Receives [samples, time, features] and computes [time, samples, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.rnn(x.transpose(0, 1))[0]
        out, (state, _) = self.lstm(hidden)
        return self.head(torch.cat([out.mean(0), state[0]], -1))


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


X = torch.randn(COUNT, TIME, WIDTH, generator=torch.Generator().manual_seed(1))


def clean() -> Tensor:
    """Return the output of the first layer, [time, samples, features]."""
    found: list[Tensor] = []
    model = net()
    model.rnn.register_forward_hook(lambda _m, _a, y: found.append(y[0]))
    model(X)
    return found[0].detach()


def by_hook(change: Change) -> np.ndarray[Any, Any]:
    model = net()
    model.rnn.register_forward_hook(lambda _m, _a, y: (change(y[0].clone()), *y[1:]))
    return np.asarray(model(X).detach())  # torch has another kernel without gradients


def at(new: Tensor, *where: Any) -> Change:
    def change(x: Tensor) -> Tensor:
        x[where] = new.expand_as(x)[where]
        return x

    return change


def noise(x: Tensor) -> Tensor:
    """Return the tensor with noise that is drawn with the samples first."""
    by_sample = clean().transpose(0, 1)
    drawn = torch.randn(by_sample.shape, generator=torch.Generator().manual_seed(3))
    return x + 0.5 * by_sample.std(correction=0) * drawn.transpose(0, 1)


every = slice(None)
CASES: dict[str, tuple[dict[str, Any], Change]] = {
    "zero": ({"do": "zero"}, torch.zeros_like),
    "add": ({"do": {"add": V.tolist(), "scale": 2.0}}, lambda x: x + 2.0 * V),
    "noise": ({"do": {"noise": 0.5, "seed": 3}}, noise),
    "mean": ({"do": "mean"}, lambda x: clean().mean(1, keepdim=True).expand_as(x)),
    "other": ({"do": {"patch": "other"}}, lambda _: clean().roll(-1, 1)),
    "listed": ({"do": {"patch": [3, 2, 1, 0]}}, lambda _: clean().flip(1)),
    "moment": (
        {"parts": {"position": [1, -1]}, "do": {"patch": "other"}},
        at(clean().roll(-1, 1), [1, 3]),
    ),
    "feature": (
        {"parts": {"position": [0], "feature": [5]}, "do": {"patch": 2}},
        at(clean()[:, 2:3], 0, every, 5),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_to_the_last_bit_that_of_a_plain_hook(name: str) -> None:
    change, hook = CASES[name]
    found = comgra.look(net(), X, changes={"select": "rnn", "batch_dim": 1, **change})
    assert np.array_equal(found.slot("head").value(0), by_hook(hook))
    assert not np.array_equal(by_hook(hook), by_hook(lambda x: x))


SWEEP = {"of": "eyes", "select": "rnn", "batch_dim": 1, "do": {"patch": "other"}, "measure": 1}
SPEC: dict[str, Any] = {
    "nodes": {"all": {"select": "**"}, "rnn": {"select": "rnn", "batch_dim": 1}},
    "probes": {"eyes": {"batch": {"x": X.tolist()}}},
    "interventions": {
        "moments": {**SWEEP, "sweep": "position"},
        "estimate": {**SWEEP, "sweep": "position", "estimate": "gradient"},
        "whole": SWEEP,
    },
    "rules": "off",
}


def trained(root: Path, spec: dict[str, Any]) -> list[Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comgra.trace(spec, root=root):
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(x=X), torch.arange(COUNT) % 3).backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_effects_of_moments_are_those_of_one_hook_after_the_other(tmp_path: Path) -> None:
    plain, traced = trained(tmp_path, {"enabled": False}), trained(tmp_path, SPEC)
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))
    run = comgra.open_run(tmp_path)
    base = by_hook(lambda x: x)[:, 1]
    other = clean().roll(-1, 1)
    wanted = np.stack([by_hook(at(other, moment))[:, 1] - base for moment in range(TIME)])
    effects = run.effects("moments", 0)
    assert effects.index.to_list() == [(0, moment) for moment in range(TIME)]
    np.testing.assert_allclose(effects[[*range(COUNT)]], wanted, atol=1e-6)
    assert np.abs(wanted).max() > 1e-3
    whole = run.effects("whole", 0)[[*range(COUNT)]].to_numpy()[0]
    np.testing.assert_allclose(whole, by_hook(lambda _: other)[:, 1] - base, atol=1e-6)
    model, kept = net(), []
    model.rnn.register_forward_hook(lambda _m, _a, y: kept.append(y[0]))
    (gradient,) = torch.autograd.grad(model(X)[:, 1].sum(), kept)
    slopes = (gradient * (other - clean())).sum(2)  # [time, samples]
    found = run.effects("estimate", 0)[[*range(COUNT)]]
    np.testing.assert_allclose(found, slopes.numpy(), atol=1e-6)
    recorded = run.slot("rnn", role="output[0]").value(0, type="intervention:whole")
    wanted = other.transpose(0, 1).numpy()  # samples first, as all values
    np.testing.assert_allclose(recorded, wanted, atol=1e-6)


def test_values_of_another_run_have_the_samples_first(tmp_path: Path) -> None:
    trained(tmp_path / "first", SPEC)
    run = comgra.open_run(tmp_path / "first")
    patch = {
        "patch": {"run": str(run.path), "step": 0, "role": "output[0]", "sample": [3, 2, 1, 0]}
    }
    change = {"of": "eyes", "select": "rnn", "batch_dim": 1, "do": patch}
    trained(tmp_path / "second", {**SPEC, "interventions": {"flipped": change}})
    found = comgra.open_run(tmp_path / "second").slot("head").value(0, type="intervention:flipped")
    np.testing.assert_allclose(found, by_hook(lambda _: clean().flip(1)), atol=1e-6)


def test_what_needs_the_samples_first_is_refused() -> None:
    other = {"select": "rnn", "batch_dim": 1, "do": {"patch": "other"}}
    with pytest.raises(CallError, match=r"shape \[4, 4, 6\] has no dimension 3"):
        comgra.look(net(), X, changes={**other, "batch_dim": 3})
    with pytest.raises(SpecError, match=r"batch_dim: does not apply to the role 'weight_ih_l0'"):
        comgra.look(net(), X, changes={**other, "role": "weight_ih_l0", "do": "zero"})
    with pytest.raises(EditError, match=r"changes\[0\]\.batch_dim: an edit needs"):
        comgra.edit(net(), X, other)
    route = copy.deepcopy(SPEC)
    route["interventions"] = {"path": {"of": "eyes", **other, "into": "head"}}
    with pytest.raises(SpecError, match="into: paths need the samples in the first dimension"):
        load_spec(route)

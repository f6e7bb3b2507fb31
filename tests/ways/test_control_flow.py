"""Control flow that torch compiles itself, even in eager code: `torch.cond`, `scan`, `map`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as map_rows
from torch.nn.attention.flex_attention import flex_attention

import comgra_decl as comgra

# torch's own imports for compiling raise warnings
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

STEPS = 5
RECORDED = [0, 2, 4]
SPEC = {
    "nodes": {
        "all": {"select": "**", "capture": ["output", "output_grad", "parameter_grad"]},
        "values": {"select": "first", "values": True},
    },
    "schedule": {"first": 1, "every": 2},
    "rules": "off",
}


class Net(nn.Module):
    """A layer, control flow, and another layer; the control flow may call two more."""

    def __init__(self, flow: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.flow = flow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.flow(self, self.first(x)))
        return out


def functions(_net: Net, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    return out


def modules(net: Net, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.cond(x.sum() > 0, net.left, net.right, (x,))
    return out


def nested(net: Net, x: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> Any:
        return torch.cond(y.mean() > 0.1, net.left, torch.sin, (y,))

    out: torch.Tensor = torch.cond(x.sum() > 0, inner, torch.cos, (x,))
    return out


def recurrent(_net: Net, x: torch.Tensor) -> torch.Tensor:
    def step(carried: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        now = torch.tanh(carried + row)
        return now, now.clone()

    _, rows = scan(step, x.new_zeros(4), x)
    out: torch.Tensor = rows
    return out


def repeated(_net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        _, scale = while_loop(
            lambda i, _: i < 3, lambda i, y: (i + 1, y * 0.9), (torch.tensor(0), torch.ones(4))
        )
    return x * scale


def mapped(_net: Net, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = map_rows(lambda row: torch.tanh(row) * 2, x)
    return out


def summed(_net: Net, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic")
    return out


def attention(_net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():  # on the CPU it has no gradient
        rows = x.detach().view(1, 1, -1, 4)
        out = flex_attention(rows, rows, rows, score_mod=lambda score, _b, _h, q, k: score + q - k)
    assert isinstance(out, torch.Tensor)
    return x + out[0, 0]


FLOWS = [functions, modules, nested, recurrent, repeated, mapped, summed, attention]


def train(flow: Any, *, compiled: bool) -> tuple[Any, Any, list[np.ndarray[Any, Any]]]:
    """Returns the final state of a run, what was compiled, and each step's first output."""
    torch.manual_seed(0)
    torch.compiler.reset()
    counters.clear()
    net = Net(flow)
    model = torch.compile(net, backend="aot_eager") if compiled else net
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses, firsts = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(3, 4)
        firsts.append((x @ net.first.weight.T + net.first.bias).detach().numpy())
        loss = model(x).pow(2).sum()
        loss.backward()
        optimizer.step()
        net.eval()
        with torch.no_grad():
            losses += [loss.item(), model(x).sum().item()]
        net.train()
    end = [*losses, *(p.detach().numpy().tobytes() for p in net.parameters())]
    return end, dict(counters["stats"]), firsts


SHORT = [
    ("observed", modules),
    ("uncompiled", recurrent),
    ("eager", functions),
]
"""Branches in modules and in functions, and a loop, with little time for compiling."""


@pytest.mark.parametrize(
    ("mode", "flow"),
    [
        pytest.param(
            mode,
            flow,
            id=f"{mode}-{flow.__name__}",
            marks=[] if (mode, flow) in SHORT else [pytest.mark.slow],
        )
        for mode in ("eager", "observed", "uncompiled")
        for flow in FLOWS
    ],
)
def test_control_flow_runs_and_is_recorded(mode: str, flow: Any, tmp_path: Path) -> None:
    compiled = mode != "uncompiled"
    end, compilations, firsts = train(flow, compiled=compiled)
    spec = {**SPEC, "run": {"root": str(tmp_path)}, "compile": mode if compiled else "auto"}
    with comgra.trace(spec) as session:
        traced, found, _ = train(flow, compiled=compiled)
    assert traced == end
    if not compiled:
        assert found == compilations, "what is compiled serves recorded steps and all others"
    assert session.path is not None
    run = comgra.open_run(session.path)
    assert [*run.steps] == RECORDED
    for step in RECORDED:
        np.testing.assert_allclose(run.value("first", step), firsts[step], rtol=1e-6)
    assert ("first", "last") in run.edges(0)
    assert not any("run eagerly rather than" in line for line in run.report["warnings"])
    for node in ("first", "last"):
        assert len(run.slot(node, of="grad").series("l2")) == len(RECORDED)


@pytest.mark.parametrize("mode", ["eager", pytest.param("observed", marks=pytest.mark.slow)])
def test_compiled_attention_is_not_said_to_be_uncompiled(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.attention import flex_attention as module

    monkeypatch.setattr(module, "_WARNINGS_SHOWN", set())  # torch warns once
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="flex_attention called without")
        with comgra.trace({**SPEC, "run": {"root": str(tmp_path)}, "compile": mode}):
            train(attention, compiled=True)
        monkeypatch.setattr(module, "_WARNINGS_SHOWN", set())
        with pytest.raises(UserWarning, match="flex_attention called without"):
            train(attention, compiled=False)


@pytest.mark.parametrize("armed", [True, False], ids=["recorded", "between"])
def test_an_error_in_a_branch_reaches_the_program(armed: bool, tmp_path: Path) -> None:
    """And leaves everything in place: later steps are recorded as usual."""

    def torn(_net: Net, x: torch.Tensor) -> torch.Tensor:
        if broken:
            with pytest.raises(Exception, match=r"(?i)cond"):
                torch.cond(x.sum() > 0, lambda y: y.sum(), lambda y: y, (x,))
        return functions(_net, x)

    broken = False
    net = Net(torn)
    spec = {**SPEC, "run": {"root": str(tmp_path)}, "schedule": {"first": 1, "every": 2}}
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with comgra.trace(spec) as session:
        for step in range(STEPS):
            broken = step == (2 if armed else 3)
            net(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.path is not None
    run = comgra.open_run(session.path)
    assert [*run.steps] == RECORDED
    assert {*run.row(0).index} == {*run.row(4).index}


@pytest.mark.parametrize("traces", [1, 2])
def test_the_programs_own_stance_is_kept(traces: int, tmp_path: Path) -> None:
    spec = {**SPEC, "run": {"root": str(tmp_path)}}
    net = Net(functions)
    with comgra.trace(spec), comgra.trace(spec) if traces == 2 else nullcontext():
        with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError):
            net(torch.randn(3, 4))
        net(torch.randn(3, 4)).sum().backward()
    from torch._dynamo import eval_frame

    assert eval_frame._stance.stance == "default"

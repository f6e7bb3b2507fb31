"""An error of ours inside a torch function mode: training is unaffected, and no mode remains."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode

import comgra_decl
from comgra_decl.hooks import HookManager, modes
from comgra_decl.hooks.functions import attention
from comgra_decl.hooks.functions.functions import FunctionTracer
from comgra_decl.hooks.functions.watching import Watching
from comgra_decl.hooks.graph import provenance
from comgra_decl.hooks.graph.call_lineage import Follower
from comgra_decl.hooks.graph.opaque import OpaqueCalls
from comgra_decl.hooks.tensors.targets import Targets
from comgra_decl.hooks.tracer import ModuleTracer
from comgra_decl.records import RawStep
from comgra_decl.spec import load_spec
from tests.support.recording import EVERYTHING, recording

PACKAGE = Path(comgra_decl.__file__).parent

SPEC = {
    **EVERYTHING,
    "nodes": {
        **EVERYTHING["nodes"],  # type: ignore[dict-item]
        "probs": {"select": {"function": "torch.softmax"}, "capture": ["input", "output"]},
        "losses": {"select": {"function": "torch.nn.functional.mse_loss"}},
    },
}

FAULTS: dict[str, tuple[Any, str]] = {
    "following a call": (Follower, "follow"),
    "the meaning of a call": (provenance, "meaning"),
    "an opaque call": (OpaqueCalls, "_elsewhere"),
    "what a call is given": (FunctionTracer, "begins"),
    "what a call returns": (FunctionTracer, "ended"),
    "a target": (Targets, "met"),
    "a target's place": (Targets, "_take"),
    "the loss, in backward": (ModuleTracer, "read_loss"),
}


class FaultError(Exception):
    """The injected error."""


class Cube(torch.autograd.Function):
    """A function with a custom backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class Net(nn.Module):
    """Calls torch, a custom function and a fragile one; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = torch.softmax(self.first(x), dim=1)
        result: torch.Tensor = self.second(self.dropout(Cube.apply(hidden)))  # type: ignore[no-untyped-call]
        return result


class Counting(TorchFunctionMode):
    """A mode of the program: sees each of its calls once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def training(*, steps: int = 4, throughout: bool = False) -> tuple[Any, ...]:
    """Everything that tracing might change: losses, parameters, randomness, the calls made.

    Args:
        steps: the number of steps.
        throughout: whether the program's mode is also active between forward passes.
    """
    torch.manual_seed(0)
    model, mode = Net(), Counting()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    losses = []
    with mode if throughout else nullcontext():
        for _ in range(steps):
            x, y = torch.randn(5, 3), torch.randn(5, 2)
            with nullcontext() if throughout else mode:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
    state = [parameter.tolist() for parameter in model.parameters()]
    return losses, state, model.calls, mode.seen, torch.get_rng_state().tolist()


def never(error: BaseException) -> None:
    raise AssertionError from error


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = torch.autograd.backward, torch.softmax, F.softmax, torch.Tensor.as_subclass
    yield
    assert _get_current_function_mode_stack() == []
    assert (torch.autograd.backward, torch.softmax, F.softmax, torch.Tensor.as_subclass) == before


def fails(monkeypatch: pytest.MonkeyPatch, where: str, *, after: int = 0) -> list[int]:
    """Makes one of our functions fail from its `after`-th call on; counts the calls."""
    owner, name = FAULTS[where]
    original: Callable[..., Any] = getattr(owner, name)
    calls = [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise FaultError(where)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    return calls


@pytest.mark.parametrize("spec", [SPEC, EVERYTHING], ids=["with calls", "modules"])
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "no graph"])
@pytest.mark.parametrize("throughout", [True, False], ids=["throughout", "in forward"])
def test_a_mode_of_the_program_sees_its_own_calls_alone(
    spec: Any, graph: bool, throughout: bool
) -> None:
    plain = training(steps=5, throughout=throughout)  # from the third on, no graph is followed
    with recording({**spec, "graph": graph}):
        assert training(steps=5, throughout=throughout) == plain


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("where", FAULTS)
def test_a_fault_inside_a_mode_is_told_once_and_leaves_no_mode(
    where: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = training()
    calls = fails(monkeypatch, where, after=after)
    with recording(SPEC) as run:
        traced = training()
        assert _get_current_function_mode_stack() == [], "gone when the loop ends, not later"
    assert calls[0] > after, "the place was reached"
    assert [str(fault) for fault in run.faults] == [where]
    assert traced == plain


@pytest.mark.parametrize("where", FAULTS)
def test_nothing_is_recorded_of_the_step_in_which_it_went_wrong(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(monkeypatch, where)
    with recording(SPEC) as run:
        training(steps=2)
    assert run.steps == []


@pytest.mark.parametrize("where", ["following a call", "what a call is given", "a target"])
def test_a_program_that_ends_in_the_middle_of_a_step_is_told_too(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(monkeypatch, where)
    with recording(SPEC) as run:
        F.mse_loss(Net()(torch.randn(5, 3)), torch.randn(5, 2))
    assert [str(fault) for fault in run.faults] == [where]
    assert run.steps == []


@pytest.mark.parametrize("where", ["following a call", "what a call returns", "a target"])
def test_the_programs_own_errors_pass_unchanged(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(monkeypatch, where)
    with recording(SPEC) as run:
        output = Net()(torch.randn(5, 3))
        with pytest.raises(IndexError, match="Dimension out of range"):
            torch.softmax(output, dim=7)
        with pytest.raises(RuntimeError, match="must match the size"):
            output + torch.ones(3, 3)
    assert [str(fault) for fault in run.faults] == [where]


def test_an_optimizer_that_steps_within_backward_leaves_no_mode_behind() -> None:
    def train() -> list[Any]:
        torch.manual_seed(0)
        model = Net()
        optimizers = {id(p): torch.optim.SGD([p], 0.1) for p in model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            optimizer = optimizers[id(parameter)]
            optimizer.step()
            optimizer.zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            F.mse_loss(model(torch.randn(5, 3)), torch.randn(5, 2)).backward()
        return [parameter.tolist() for parameter in model.parameters()]

    plain = train()
    with recording(SPEC) as run:
        assert train() == plain
    assert run.faults == []
    assert _get_current_function_mode_stack() == []


def test_tracing_that_is_stopped_within_a_call_ends_after_it() -> None:
    """The writer may fail at any time; this is noticed when a step ends, here within backward."""
    records: list[RawStep] = []
    manager = HookManager(load_spec(SPEC), records.append, on_fault=never)
    manager.attach()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: optimizer.step())
    F.mse_loss(model(torch.randn(5, 3)), torch.randn(5, 2)).backward()
    manager.stop()
    for _ in range(2):
        F.mse_loss(model(torch.randn(5, 3)), torch.randn(5, 2)).backward()
    optimizer.step()
    assert _get_current_function_mode_stack() == []
    assert [record.info.step for record in records] == [0]


def test_unhashable_functions_are_called_as_they_are() -> None:
    class Odd:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    odd = Odd()
    watching = Watching(_Nobody(), on_fault=never)
    x = torch.zeros(2)
    with watching._mode:
        assert torch.overrides.handle_torch_function(odd, (x,), x).tolist() == [1.0, 1.0]


class _Nobody:
    def begins(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise FaultError(name)

    def ended(self, token: Any, result: Any) -> None:
        raise FaultError(str(token))


def test_attention_that_cannot_be_computed_again_is_a_fault_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise FaultError("weights")

    monkeypatch.setattr(attention, "recomputed_weights", broken)
    nodes = {"attn": {"select": {"class": "MultiheadAttention"}, "attention": {"recompute": True}}}

    def train() -> list[Any]:
        torch.manual_seed(0)
        layer = nn.MultiheadAttention(4, 2, batch_first=True)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        for _ in range(2):
            x = torch.randn(2, 3, 4)
            layer(x, x, x, need_weights=False)[0].square().sum().backward()
            optimizer.step()
        return [parameter.tolist() for parameter in layer.parameters()]

    plain = train()
    with recording(SPEC, nodes=nodes) as run:
        assert train() == plain
    assert [str(fault) for fault in run.faults] == ["weights"]


@pytest.mark.slow
def test_every_mode_calls_the_function_that_the_program_called() -> None:
    """Only the base class derives from torch's."""
    found = {
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith("TorchFunctionMode") for base in node.bases)
    }
    assert found == {"hooks/modes.py: CallWatch"}


def test_a_mode_that_is_gone_from_the_stack_is_inserted_again_and_lets_tracing_end() -> None:
    """Removed during a call, put back by torch, and popped by somebody else."""

    class RemovesItself(modes.OwnMode):
        def handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            modes.remove(self)
            assert modes.at_work(), "torch puts it back after this call"
            return func(*args, **kwargs)

    mode = RemovesItself(never)
    modes.insert_at_bottom(mode)
    torch.zeros(2) + 1
    assert _get_current_function_mode_stack() == [mode]
    _pop_mode()
    assert not modes.at_work()
    modes.insert_at_bottom(mode)
    assert modes.is_active(mode)
    modes.remove(mode)
    assert _get_current_function_mode_stack() == []

"""Tracing changes nothing: no bit of training differs, and no hook is left behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from tests.support.recording import EVERYTHING, recording


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3)
        )
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.body(x)))


def run(optimizer_class: Callable[..., Any], *, steps: int = 10) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Small()
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x, y = torch.randn(8, 6), torch.randint(3, (8,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 4 == 3:
            model.eval()
            with torch.no_grad():
                losses.append(model(x).sum().item())
            model.train()
    state = {**model.state_dict(), **{f"grad {n}": p.grad for n, p in model.named_parameters()}}
    flags = [(p.requires_grad, p.is_leaf) for p in model.parameters()]
    return model, losses, state, flags, torch.get_rng_state()


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("schedule", [{"first": 100}, {"first": 1, "every": 3}])
def test_training_is_bit_for_bit_the_same(
    optimizer_class: Callable[..., Any], schedule: dict[str, int]
) -> None:
    _, losses, state, flags, rng = run(optimizer_class)
    with recording(EVERYTHING, schedule=schedule) as traced:
        _, traced_losses, traced_state, traced_flags, traced_rng = run(optimizer_class)
    assert traced.faults == []
    assert len(traced.of("train")) == (10 if schedule["first"] == 100 else 4)
    assert len(traced.of("eval")) == 2
    assert traced_losses == losses
    assert traced_flags == flags
    assert torch.equal(traced_rng, rng)
    for name, value in state.items():
        assert (value is None) == (traced_state[name] is None), name
        assert value is None or torch.equal(value, traced_state[name]), name


def global_hooks() -> list[int]:
    return [
        len(torch_module._global_forward_hooks),
        len(torch_module._global_forward_pre_hooks),
        len(torch_module._global_module_registration_hooks),
        len(torch_optimizer._global_optimizer_post_hooks),
        torch._C._len_torch_function_stack(),
    ]


def test_nothing_is_left_behind() -> None:
    before, evaluate, backward = global_hooks(), nn.Module.eval, torch.autograd.backward
    compiler = torch.compile
    with recording():
        model, *_ = run(torch.optim.SGD)
    assert global_hooks() == before
    assert (nn.Module.eval, torch.autograd.backward, torch.compile) == (
        evaluate,
        backward,
        compiler,
    )
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_between_recorded_steps_only_the_optimizer_hook_is_attached() -> None:
    seen = []
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = global_hooks()
    with recording(EVERYTHING, schedule={"first": 1, "every": 1000}):
        for _ in range(4):
            model(torch.randn(4, 3)).sum().backward()
            seen.append(global_hooks())
            optimizer.step()
    assert seen[0] != before
    for counts in seen[1:]:
        assert counts[:2] == before[:2]
        assert counts[3] == before[3] + 1
        assert counts[4] == before[4]


def test_activations_and_models_are_not_kept_alive() -> None:
    outputs: list[weakref.ref[torch.Tensor]] = []
    with recording() as traced:
        model, *_ = run(torch.optim.SGD, steps=1)
        model.head.register_forward_hook(lambda _m, _a, out: outputs.append(weakref.ref(out)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(8, 6)).sum().backward()
            optimizer.step()
        gc.collect()
        assert [ref() for ref in outputs] == [None, None]
        reference = weakref.ref(model)
        del model, optimizer
        gc.collect()
        assert reference() is None
    assert traced.faults == []


def test_an_exception_of_the_program_passes_through_and_tracing_goes_on() -> None:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as traced:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.randn(8, 7))
        for _ in range(2):
            model(torch.randn(8, 6)).sum().backward()
            optimizer.step()
    assert traced.faults == []
    assert len(traced.steps) == 2
    assert traced.has("head", step=1)


def test_an_interrupted_forward_pass_costs_at_most_one_record() -> None:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with recording() as traced:
        for step in range(5):
            handle = model.head.register_forward_hook(interrupt) if step == 1 else None
            try:
                model(torch.randn(8, 6)).sum().backward()
            except KeyboardInterrupt:
                assert handle is not None
                handle.remove()
            optimizer.step()
    assert traced.faults == []
    assert {0, 3, 4} <= {s.info.step for s in traced.steps}


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_a_program_traced_by_jit_holds_nothing_of_ours() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    plain = str(torch.jit.trace(model, torch.ones(2, 3)).inlined_graph)
    with recording():
        traced = str(torch.jit.trace(model, torch.ones(2, 3)).inlined_graph)
    assert traced.count("aten::") == plain.count("aten::")


def test_a_fault_of_ours_stops_tracing_and_never_reaches_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from comgra_decl.stats import Reducer

    _, losses, state, *_ = run(torch.optim.SGD)
    monkeypatch.setattr(Reducer, "add_anew", lambda *_a, **_k: 1 / 0)
    before = global_hooks()
    with recording() as traced:
        _, traced_losses, traced_state, *_ = run(torch.optim.SGD)
        assert global_hooks() == before
    assert [type(fault) for fault in traced.faults] == [ZeroDivisionError]
    assert traced_losses == losses
    assert all(torch.equal(state[n], traced_state[n]) for n in state if state[n] is not None)

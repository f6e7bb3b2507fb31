"""Our hooks among the program's: torch iterates over them, and programs copy and save them."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as of_torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from comgra_decl.hooks import HookManager
from comgra_decl.hooks.hook_lists import Hook, OptimizerHooks
from comgra_decl.query import open_run
from comgra_decl.spec import load_spec
from tests.hooks.tiny import net, step
from tests.support.forked import forked
from tests.support.recording import EVERYTHING, recording

DIRECT = """
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook as after, register_optimizer_step_pre_hook as before
)
calls = []
for register in (before, after):
    register(lambda *_: calls.append(1))
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(6):
    optimizer.zero_grad()
    model.forward(torch.ones(2, 3)).sum().backward()
    optimizer.step()
assert len(calls) == 12, calls
"""


def test_tracing_may_begin_in_a_step_that_others_have_hooks_for(tmp_path: Path) -> None:
    """Nothing calls the model itself, so an optimizer step is the first sign of it."""
    (tmp_path / "train.py").write_text(DIRECT)
    spec = {"COMGRA": f"debug run.root={tmp_path}/runs run.group=g run.name=r"}
    ended = forked(tmp_path, "train.py", env=spec)
    assert ended.returncode == 0, ended.stderr
    assert len(open_run(tmp_path / "runs" / "g" / "r").steps) >= 5


@pytest.mark.parametrize("register", [None, "before", "after"])
@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("how", ["detach", "fault"])
def test_tracing_may_end_in_a_step_that_others_have_hooks_for(
    how: str, ours_first: bool, register: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends it: a request in one of the program's hooks, or an error in tracing."""
    model = net()
    calls: list[int] = []
    faults: list[BaseException] = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    steps: list[Any] = []
    manager = HookManager(load_spec(EVERYTHING), steps.append, on_fault=faults.append)

    def own(*_: Any) -> None:
        calls.append(1)
        if how == "detach" and len(calls) == 5:
            manager.detach()

    def begin() -> list[Any]:
        kinds: dict[str, Callable[[Any], Any]] = {
            "before": register_optimizer_step_pre_hook,
            "after": register_optimizer_step_post_hook,
        }
        return [make(own) for name, make in kinds.items() if register in (None, name)]

    handles = [] if ours_first else begin()
    manager.attach()
    if ours_first:
        handles = begin()
    try:
        for number in range(6):
            if how == "fault" and number == 3:
                monkeypatch.setattr(manager._steps, "_optimizers", None)
            step(model, optimizer)
    finally:
        manager.detach()
        for handle in handles:
            handle.remove()
    with recording():  # an entry that was left behind is used, and released
        step(model, optimizer)
    assert len(calls) == 6 * (1 + (register is None))
    assert len(faults) == (how == "fault")
    assert steps
    assert not of_torch._global_optimizer_pre_hooks
    assert not of_torch._global_optimizer_post_hooks


def test_a_place_that_another_thread_leaves_meanwhile_is_given_up_as_well() -> None:
    places: dict[int, Hook] = OrderedDict()  # torch requires weak references
    hooks = OptimizerHooks(lambda hook: _registered(places, hook), places, lambda _: False)
    first, second = hooks.add(print), _registered(places, print)

    class Free(list[RemovableHandle]):
        """Another thread leaves its entry where this one has just looked at the last."""

        left = False

        def leave(self) -> None:
            if not self.left:
                self.left = True
                self.append(second)

        def __iter__(self) -> Iterator[RemovableHandle]:
            yield from super().__iter__()
            self.leave()

        def pop(self, *at: Any) -> RemovableHandle:
            found = super().pop(*at)
            self.leave()
            return found

    hooks._free = Free()
    first.remove()
    assert not places


def _registered(places: dict[int, Hook], hook: Hook) -> RemovableHandle:
    handle = RemovableHandle(places)
    places[handle.id] = hook
    return handle


class Own(nn.Module):
    """Has hooks of its own, so that ours come after them on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.layer.register_forward_hook(_double)
        self.layer.register_forward_pre_hook(_halve)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.layer(x)
        return answer


def _double(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def _halve(_module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0] / 2,)


def _saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "taken", [copy.deepcopy, copy.copy, _saved, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_model_with_hooks_is_copied_and_saved_in_a_recorded_step(
    taken: Callable[[nn.Module], nn.Module],
) -> None:
    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(2, 3)
    spec = {"all": {"select": "**", "capture": ["input", "output"]}}
    with recording(EVERYTHING, nodes=spec) as run:
        for _ in range(3):
            answer = model(x)
            other = taken(model)
            assert torch.equal(other(x), answer)
            optimizer.zero_grad()
            answer.sum().backward()
            optimizer.step()
    assert run.faults == []
    assert len(run.steps) == 3
    model(x)
    assert torch.equal(taken(model)(x), model(x))
    assert len(model.layer._forward_hooks) == len(model.layer._forward_pre_hooks) == 1


class Clamped(nn.Sequential):
    """Its layers and the module itself have hooks; occasionally its forward fails."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3), nn.Linear(3, 2))
        for module in (self, *self):
            module.register_forward_hook(_clamp)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self[1](self[0](x))
        if self.fails:
            raise ZeroDivisionError
        return out


def _clamp(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.clamp(-1.0, 1.0)


@pytest.mark.parametrize("taken", [copy.deepcopy, _saved])
def test_no_hook_of_ours_is_on_a_module_between_its_calls(
    taken: Callable[[nn.Module], nn.Module],
) -> None:
    model = Clamped()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    others = []
    with recording() as run:
        for number in range(4):
            model.fails = number == 2
            with suppress(ZeroDivisionError):
                model(torch.ones(2, 3)).sum().backward()
            model.fails = False
            assert torch.isfinite(model(torch.ones(2, 3))).all()
            others.append(taken(model))
            optimizer.step()
    assert run.faults == []
    for other in (model, *others):
        assert [len(module._forward_hooks) for module in other.modules()] == [1, 1, 1]
        assert not any(module._forward_hooks_always_called for module in other.modules())
    for number, other in enumerate(others[:2]):
        assert run.has("Clamped", step=number)
        assert other(torch.ones(1, 3)).abs().max() <= 1


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_model_with_a_hook_becomes_a_script_in_a_recorded_step() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model[0].register_forward_hook(_scriptable)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recording() as run:
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            for taken in (model, copy.deepcopy(model)):
                scripted = torch.jit.script(taken)
                assert torch.equal(scripted(torch.ones(1, 3)), taken(torch.ones(1, 3)))
    assert run.faults == []


def _scriptable(
    self: nn.Module,  # noqa: ARG001
    input: tuple[torch.Tensor],  # noqa: A002, ARG001
    output: torch.Tensor,
) -> torch.Tensor:
    return output.clamp(-1.0, 1.0)


def test_what_a_program_saves_warns_as_little_as_untraced() -> None:
    """Warnings are errors here: torch warns about hooks on saved tensors, but not about ours."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    image = torch.ones(4, 3, requires_grad=True)
    with recording(EVERYTHING) as run:
        for _ in range(2):
            out = model(image)
            loss = out.square().mean()
            loss.backward()
            for tensor in (out, loss, image, model.weight, model):
                torch.save(tensor, io.BytesIO())
                pickle.dumps(tensor)
            optimizer.step()
    assert run.faults == []
    assert run.has("Linear", pass_="grad", step=1)

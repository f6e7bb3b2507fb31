"""Track a program's optimizers, and the called models that they train."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from comgra_decl.hooks.guarded import guarded
from comgra_decl.hooks.objects import instances_of
from comgra_decl.hooks.recursion import EveryCall
from comgra_decl.hooks.scalars.numbers import read_number
from comgra_decl.hooks.step_clock import Seen

_WATCHED = 4
"""The number of optimizer steps, after a new optimizer's first step, during which calls are
watched."""


class Optimizers:
    """The optimizers of a program by their `id`, held weakly.

    Args:
        forget: called with the `id` of an optimizer that no longer exists.
    """

    def __init__(self, *, forget: Callable[[int], None]) -> None:
        self._forget = forget
        self._known: dict[int, weakref.ref[Optimizer]] = {}
        self._searched: dict[int, weakref.ref[nn.Module]] = {}
        self._aside: dict[int, bool] = {}  # whether an optimizer trains no model, see `_is_aside`
        self._used: dict[int, weakref.ref[Optimizer]] = {}  # in the order of their first steps
        self._stepped: list[set[int]] = []  # parameter ids of optimizers that stepped in this step

    def note(self, optimizer: Optimizer) -> None:
        """Register an optimizer."""
        number = id(optimizer)
        if number not in self._known:
            self._known[number] = weakref.ref(optimizer, lambda _: self._gone(number))

    def use(self, optimizer: Optimizer) -> None:
        """Register an optimizer that steps."""
        number = id(optimizer)
        if number not in self._used:
            self.note(optimizer)
            self._used[number] = self._known[number]

    def _gone(self, number: int) -> None:
        self._known.pop(number, None)
        self._used.pop(number, None)
        self._aside.pop(number, None)
        self._forget(number)

    def held(self) -> set[int]:
        """Return the ids of all parameters held by the known optimizers."""
        known = (o for reference in self._known.values() if (o := reference()) is not None)
        return {number for optimizer in known for number in _parameters(optimizer)}

    def holders(self) -> dict[int, list[int]]:
        """Return the numbers of the optimizers that hold each parameter, by the parameter's id."""
        found: dict[int, list[int]] = {}
        known = [o for reference in self._known.values() if (o := reference()) is not None]
        for number, optimizer in enumerate(known):
            for parameter in dict.fromkeys(_parameters(optimizer)):
                found.setdefault(parameter, []).append(number)
        return found

    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Return the id of each known optimizer and the number of parameters it holds."""
        sizes = []
        for number, reference in self._known.items():  # no generators: runs for every record
            optimizer = reference()
            if optimizer is not None:
                groups = getattr(optimizer, "param_groups", ())
                sizes.append((number, sum([len(group["params"]) for group in groups])))
        return tuple(sizes)

    def rates(self) -> list[float]:
        """Return the learning rate of each parameter group; NaN for one that is on a device.

        Optimizers that have never stepped are left out, unless none has.
        """
        rates: dict[int, float] = {}  # wrappers of optimizers share the groups
        for reference in [*(self._used or self._known).values()]:
            optimizer = reference()
            for group in getattr(optimizer, "param_groups", ()):
                rate = group.get("lr")
                if isinstance(rate, torch.Tensor):
                    number = read_number(rate) if rate.is_cpu else None
                    rate = number if isinstance(number, float) else math.nan
                if isinstance(rate, (int, float)):
                    rates[id(group)] = float(rate)
        return list(rates.values())

    def held_in(self, model: nn.Module) -> set[int]:
        """Search for the optimizers of a model, then return the ids as `held` does."""
        self._search([model])
        return self.held()

    def begin_step(self) -> None:
        """Reset the state of the step in progress."""
        self._stepped.clear()

    def seen(self, optimizer: Optimizer, called: Iterator[nn.Module]) -> Seen:
        """Return how the models called in this step relate to optimizers.

        If an optimizer that has stepped holds all parameters of another one, the other one is not
        counted separately. It is either a wrapper, as in Lightning and Accelerate, or outdated.
        """
        self.note(optimizer)
        models = list(called)
        self._search(models)
        if len(self._known) == 1:
            return Seen([id(model) for model in models], {})
        mine = set(_parameters(optimizer))
        self._stepped.append(mine)
        own: list[int] = []
        others: dict[int, list[int]] = {}
        for model in models:
            held = {id(parameter) for parameter in model.parameters()}
            if not held.isdisjoint(mine):
                own.append(id(model))
            if not held <= mine:
                for number in self._holders(held):
                    others.setdefault(number, []).append(id(model))
        others = {o: its for o, its in others.items() if o != id(optimizer) and self._is_other(o)}
        return Seen(own, others, not own and self._is_aside(optimizer, mine))

    def _is_aside(self, optimizer: Optimizer, held: set[int]) -> bool:
        """Return whether an optimizer trains only tensors outside the called models.

        These tensors belong to no module, or to a module that contains called models.
        """
        number = id(optimizer)
        if number not in self._aside:
            called = (model for ref in self._searched.values() if (model := ref()) is not None)
            within = {id(part) for model in called for part in model.modules()}
            owners = [m for m in instances_of(nn.Module) if _holds(m, held)]
            around = (not within.isdisjoint(map(id, owner.modules())) for owner in owners)
            self._aside[number] = not owners or any(around)
        return self._aside[number]

    def hold(self, parameters: list[torch.Tensor]) -> bool:
        """Return whether an existing optimizer holds any of the tensors; may scan all objects."""
        wanted = {id(parameter) for parameter in parameters}
        if not any(True for _ in self._holders(wanted)):
            for optimizer in instances_of(Optimizer):
                if not wanted.isdisjoint(_parameters(optimizer)):
                    self.note(optimizer)
        return any(True for _ in self._holders(wanted))

    def train(self, leaves: list[torch.Tensor], *, models: Iterable[nn.Module]) -> bool:
        """Return whether an existing optimizer trains any of the tensors or the called models.

        The models are considered only if none of the tensors is a parameter. Programs with an
        optimizer may also update other tensors manually, such as the samples of an energy-based
        model or the inputs of an adversarial attack.
        """
        if self.hold(leaves):
            return True
        if any(isinstance(leaf, nn.Parameter) for leaf in leaves):
            return False
        return self.hold([parameter for model in models for parameter in model.parameters()])

    def _is_other(self, number: int) -> bool:
        optimizer = self._known[number]()
        held = set() if optimizer is None else set(_parameters(optimizer))
        return not any(held <= stepped for stepped in self._stepped)

    def _holders(self, parameters: set[int]) -> Iterator[int]:
        for number, reference in list(self._known.items()):
            optimizer = reference()
            if optimizer is not None and not parameters.isdisjoint(_parameters(optimizer)):
                yield number

    def _search(self, models: list[nn.Module]) -> None:
        """Scan all objects for the optimizers of models that are called for the first time.

        Optimizers of frozen models are included, because a generator may not require gradients
        while its critic steps. An optimizer created later is registered when it steps.
        """
        new = [model for model in models if not self._is_searched(model)]
        if not new:
            return
        self._searched.update((id(model), weakref.ref(model)) for model in new)
        held = {id(parameter) for model in new for parameter in model.parameters()}
        known = (o for reference in self._known.values() if (o := reference()) is not None)
        for optimizer in known:
            held -= set(_parameters(optimizer))
        if held:
            for optimizer in instances_of(Optimizer):
                if not held.isdisjoint(_parameters(optimizer)):
                    self.note(optimizer)

    def _is_searched(self, model: nn.Module) -> bool:
        searched = self._searched.get(id(model))
        return searched is not None and searched() is model


def _parameters(optimizer: Optimizer) -> Iterator[int]:
    """Yield the ids of an optimizer's parameters; none while the optimizer is being constructed."""
    for group in getattr(optimizer, "param_groups", ()):
        yield from map(id, group["params"])


def _holds(module: nn.Module, parameters: set[int]) -> bool:
    """Return whether a module itself, not a submodule, holds one of these parameters."""
    held = module.__dict__.get("_parameters") or {}
    return any(id(parameter) in parameters for parameter in held.values())


class CalledModels:
    """The models called in the step in progress.

    In recorded steps, the tracer reports the models. For a few steps after a new optimizer's first
    step, a hook reports every module with parameters instead, which serves the same purpose.

    Args:
        on_fault: called with errors in tracing itself.
    """

    def __init__(self, *, on_fault: Callable[[BaseException], None]) -> None:
        self._on_fault = on_fault
        self._called: dict[int, weakref.ref[nn.Module]] = {}
        self._calls = EveryCall(self._before)
        self._left = 0
        self._whole = False  # whether calls have been watched since the start of the step

    def note(self, module: nn.Module) -> None:
        """Add a module that is called."""
        if id(module) not in self._called:
            self._called[id(module)] = weakref.ref(module)

    def __iter__(self) -> Iterator[nn.Module]:
        return (module for ref in self._called.values() if (module := ref()) is not None)

    @property
    def watched(self) -> bool:
        """Whether the hook has reported all calls in the step in progress."""
        return self._whole

    def clear(self) -> None:
        """Discard the calls so far, which belonged to an evaluation."""
        self._called.clear()

    def begin_step(self) -> None:
        """Begin a step: discard earlier calls, and stop watching after the last watched step."""
        self._called.clear()
        self._whole = self._calls.on
        self._left -= 1
        if self._left <= 0:
            self.stop()

    def watch(self) -> None:
        """Watch which modules are called for the next few steps."""
        self._left = _WATCHED
        if not self._calls.on:
            self._calls.install()
            self._whole = True

    def stop(self) -> None:
        """Stop watching calls."""
        self._whole = False
        self._calls.remove()

    @guarded
    def _before(self, module: nn.Module, _args: tuple[Any, ...]) -> None:
        if module._parameters and not torch.compiler.is_compiling():
            self.note(module)

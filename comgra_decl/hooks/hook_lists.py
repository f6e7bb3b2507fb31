"""Hooks of the program's optimizers and modules, of which others go through the lists.

torch goes through the hooks of optimizers as it calls them: if one is taken off or added in the
midst of that, the walk ends with an error where others come after it, in the program's own
`optimizer.step()`. Those of modules are copied and saved with their module.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, MutableMapping
from contextlib import nullcontext, suppress
from types import CodeType
from typing import Any, cast

from torch.optim import optimizer as _of_torch
from torch.utils.hooks import RemovableHandle

from comgra_decl.hooks.call_context import OPTIMIZER_STEP
from comgra_decl.hooks.other_threads import running

Hook = Callable[..., Any]


def _lines_with(name: str) -> list[int]:
    """Returns where that code has a name, in lines."""
    return [
        each.positions.lineno
        for each in (() if OPTIMIZER_STEP is None else dis.get_instructions(OPTIMIZER_STEP))
        if each.argval == name and each.positions is not None and each.positions.lineno is not None
    ]


_FUNCTION = max(_lines_with("func"), default=None)  # None: torch has been written anew
"""Where it calls the step itself, behind the hooks before it."""

_AFTER = min(_lines_with("post_hook"), default=None)
"""Where it goes through the hooks after it."""


class OptimizerHooks:
    """The hooks before, or after, the steps of all optimizers.

    A hook that is taken off while torch goes through them leaves its place behind, with nothing in
    it, for the next one; a place that nobody needs goes as soon as that is possible. Where several
    threads train, that is when tracing ends: another one may begin a step at any moment.

    Args:
        register: of torch.
        places: the hooks that it registers, by number.
        walks: whether the code that calls an optimizer's step is among these hooks, in a line.
    """

    def __init__(
        self,
        register: Callable[[Hook], RemovableHandle],
        places: MutableMapping[int, Hook],
        walks: Callable[[int], bool],
    ) -> None:
        self._register = register
        self._places = places
        self._walks = walks
        self._free: list[RemovableHandle] = []

    def add(self, hook: Hook) -> Placed:
        """Calls a hook from now on, until what is returned is removed."""
        with suppress(IndexError):
            handle = self._free.pop()
            self._places[handle.id] = hook  # a walk does not mind another value
            return Placed(self, handle)
        return Placed(self, self._register(hook))

    def take_off(self, handle: RemovableHandle, *, keep_place: bool) -> None:
        """Calls a hook no longer."""
        if self._places.get(handle.id, _nothing) is not _nothing:
            self._places[handle.id] = _nothing
            self._free.append(handle)
        if not keep_place:
            self.tidy()

    def tidy(self) -> None:
        """Gives up the places that nobody needs, unless torch goes through them now."""
        if self._free and not any(map(self._walks, running(_is_step))):
            while self._free:  # one by one: another thread may leave a place meanwhile
                with suppress(IndexError):
                    self._free.pop().remove()


class Placed:
    """A hook that is called, until it is removed."""

    def __init__(self, hooks: OptimizerHooks, handle: RemovableHandle) -> None:
        self._hooks = hooks
        self._handle: RemovableHandle | None = handle

    def remove(self, *, keep_place: bool = False) -> None:
        """Takes it off; calling it twice is harmless.

        Args:
            keep_place: leaves its place for the next hook, until `tidy`.
        """
        if self._handle is not None:
            self._hooks.take_off(self._handle, keep_place=keep_place)
            self._handle = None  # not before: if that has failed, it is done again


def _is_step(code: CodeType) -> bool:
    return code is OPTIMIZER_STEP


def _nothing(*_: object) -> None:
    pass


before_steps = OptimizerHooks(
    cast(Any, _of_torch.register_optimizer_step_pre_hook),
    _of_torch._global_optimizer_pre_hooks,
    lambda line: _FUNCTION is None or line < _FUNCTION,
)
after_steps = OptimizerHooks(
    cast(Any, _of_torch.register_optimizer_step_post_hook),
    _of_torch._global_optimizer_post_hooks,
    lambda line: _AFTER is None or line >= _AFTER,
)


def tidy() -> None:
    """Gives up the places that nobody needs, before and after steps."""
    before_steps.tidy()
    after_steps.tidy()


class ModuleHook:
    """A hook of ours on one module; a copy of the module, or a file of it, has one without effect.

    Args:
        hook: what it calls.
    """

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        """The module is called."""
        self._hook(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Stands for a function of Python's own that does nothing, so that it can be loaded."""
        return getattr, (nullcontext(), "__exit__")

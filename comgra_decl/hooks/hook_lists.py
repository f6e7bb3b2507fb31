"""Optimizer and module hooks that can safely be changed while torch iterates over them.

torch calls optimizer hooks while iterating over their dict. Adding or removing a hook during the
iteration raises an error in the program's `optimizer.step()` if other hooks follow. Module hooks
are copied and saved together with their modules.
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
    """Return the line numbers at which the code of an optimizer step uses a name."""
    return [
        each.positions.lineno
        for each in (() if OPTIMIZER_STEP is None else dis.get_instructions(OPTIMIZER_STEP))
        if each.argval == name and each.positions is not None and each.positions.lineno is not None
    ]


_FUNCTION = max(_lines_with("func"), default=None)  # None if torch's code has changed
"""The line that calls the step itself, after the pre-hooks."""

_AFTER = min(_lines_with("post_hook"), default=None)
"""The line that iterates over the post-hooks."""


class OptimizerHooks:
    """The global hooks that run before, or after, the steps of all optimizers.

    If a hook is removed while torch iterates over the hooks, a hook that does nothing takes its
    place. The entry of that hook is reused for the next hook. Unused entries are removed as soon as
    that is safe. If multiple threads train, they are removed only when tracing ends, because
    another thread may begin a step at any time.

    Args:
        register: torch's function that registers a hook.
        places: torch's dict of registered hooks by id.
        walks: given a line in the code of an optimizer step, returns whether torch iterates over
            these hooks at that line.
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
        """Register a hook, and return a handle that removes it."""
        with suppress(IndexError):
            handle = self._free.pop()
            self._places[handle.id] = hook  # replacing a value is safe during an iteration
            return Placed(self, handle)
        return Placed(self, self._register(hook))

    def take_off(self, handle: RemovableHandle, *, keep_place: bool) -> None:
        """Stop calling a hook; with `keep_place`, keep its entry for reuse."""
        if self._places.get(handle.id, _nothing) is not _nothing:
            self._places[handle.id] = _nothing
            self._free.append(handle)
        if not keep_place:
            self.tidy()

    def tidy(self) -> None:
        """Remove unused entries, unless torch is iterating over the hooks."""
        if self._free and not any(map(self._walks, running(_is_step))):
            while self._free:  # one at a time, since another thread may add an entry
                with suppress(IndexError):
                    self._free.pop().remove()


class Placed:
    """The handle of a registered hook."""

    def __init__(self, hooks: OptimizerHooks, handle: RemovableHandle) -> None:
        self._hooks = hooks
        self._handle: RemovableHandle | None = handle

    def remove(self, *, keep_place: bool = False) -> None:
        """Remove the hook. Idempotent.

        Args:
            keep_place: whether to keep its entry for reuse until `tidy` is called.
        """
        if self._handle is not None:
            self._hooks.take_off(self._handle, keep_place=keep_place)
            self._handle = None  # last, so that a failed removal can be retried


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
    """Remove the unused entries of both lists of hooks."""
    before_steps.tidy()
    after_steps.tidy()


class ModuleHook:
    """A hook on one module; copied or saved modules contain a hook that does nothing instead.

    Args:
        hook: the function to call.
    """

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        """Call the hook."""
        self._hook(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a built-in function that does nothing, which loads without comgra_decl."""
        return getattr, (nullcontext(), "__exit__")

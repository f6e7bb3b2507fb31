"""Placing a torch function mode below every mode of the user, and taking it out again.

Modes are a stack, but the user's own `with torch.device(...)` may be entered before ours and left
before it: popping by position would then remove the wrong mode. So ours goes to the bottom and is
removed by identity.
"""

from __future__ import annotations

from typing import Any, cast
from weakref import WeakSet

import torch
from torch.overrides import TorchFunctionMode

_placed: WeakSet[TorchFunctionMode] = WeakSet()
"""What is on the stack, or will be when the call that it handles has returned."""
_removed: WeakSet[TorchFunctionMode] = WeakSet()
_returning: WeakSet[TorchFunctionMode] = WeakSet()
"""What was removed while it handled a call: torch puts it back when that call returns."""


def insert_at_bottom(mode: TorchFunctionMode) -> None:
    """Makes `mode` the outermost active torch function mode."""
    at_work = (mode in _placed or mode in _returning) and not is_active(mode)
    _removed.discard(mode)
    _returning.discard(mode)
    _placed.add(mode)
    if not at_work:  # else it comes back by itself
        _replace_all([mode, *(other for other in _all() if other is not mode)])


def remove(mode: TorchFunctionMode) -> None:
    """Removes `mode` wherever it is on the stack; does nothing if it is not there."""
    was_placed = mode in _placed
    _placed.discard(mode)
    _removed.add(mode)  # first of all: should the rest fail, `sweep` takes it off
    if was_placed and not is_active(mode):
        _returning.add(mode)
    _replace_all([other for other in _all() if other is not mode])


def sweep() -> None:
    """Removes modes that have come back.

    Torch takes a mode off the stack while it handles a call, and puts it back afterwards. If it is
    removed within that call (an optimizer that steps within `loss.backward()`), it comes back.
    """
    if _C._len_torch_function_stack() and _removed:
        found = _all()
        _replace_all([mode for mode in found if mode not in _removed])
        for mode in found:
            _returning.discard(mode)


def at_work() -> bool:
    """Whether a mode of ours is handling a call: what is removed now comes back."""
    return not all(is_active(mode) for mode in (*_placed, *_returning))


def is_placed(mode: TorchFunctionMode) -> bool:
    """Whether `mode` is on the stack, or will be when the call that it handles has returned."""
    return mode in _placed


def is_active(mode: TorchFunctionMode) -> bool:
    """Whether `mode` is anywhere on the stack."""
    return any(active is mode for active in _all())


_C = cast("Any", torch._C)  # the stack functions have no stubs


def _all() -> list[TorchFunctionMode]:
    """Returns the active modes, outermost first."""
    return [_C._get_function_stack_at(i) for i in range(_C._len_torch_function_stack())]


def _replace_all(modes: list[TorchFunctionMode]) -> None:
    """Makes `modes` the active ones: the program's are never off the stack while we compute."""
    for _ in range(_C._len_torch_function_stack()):
        _C._pop_torch_function_stack()
    for mode in modes:
        _C._push_on_torch_function_stack(mode)

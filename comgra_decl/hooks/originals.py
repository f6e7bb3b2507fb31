"""Find the original function for a torch function mode to call, rather than a replacement.

Torch looks up the function that it passes to a mode by its public name. The program may have
replaced that function, as in `F.relu = mine`, where `mine` calls the original. The mode would then
call the replacement again, from within the replacement. The functions here return the function that
was running when torch called the mode.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import overrides

from comgra_decl.hooks.frames import TORCH_FOLDER
from comgra_decl.hooks.objects import functions_with
from comgra_decl.torch_private import OperatorBase, OpOverloadPacket, TensorBase

_OF_C = (
    BuiltinFunctionType
    | ClassMethodDescriptorType
    | GetSetDescriptorType
    | MethodDescriptorType
    | MethodWrapperType
    | WrapperDescriptorType
)
_OPERATORS = OperatorBase | OpOverloadPacket
"""Types of callable objects that cannot be identified by the code that is running."""

_ASKING = overrides.handle_torch_function.__code__

_known: set[Callable[..., Any]] = set()
"""Python functions known to be torch's own, not replacements."""

_originals: dict[CodeType, Callable[..., Any]] = {}
"""A cache of replaced torch functions; the search for one may visit many objects."""

_MOST = 1_000_000  # objects to search for a replaced function


def genuine(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that was running when torch called a mode.

    Must be called directly from the mode's `__torch_function__`.

    Args:
        func: the function that torch passed to the mode.
    """
    if isinstance(func, _OF_C | _OPERATORS):
        return func
    if type(func) is FunctionType and func in _known:
        return func
    asking = sys._getframe(2)  # the caller of `__torch_function__`
    if asking.f_code is not _ASKING:
        return _of_c(func)
    running = asking.f_back
    assert running is not None
    return _of_python(func, running)


def _of_python(func: Callable[..., Any], running: FrameType) -> Callable[..., Any]:
    """Return the function whose code runs in a frame, given the function found by its name."""
    code = running.f_code
    if not _is_torchs(code):
        return func  # a library or the program itself called `handle_torch_function`
    if _is_genuine(func):
        _known.add(func)
        return func
    original = _originals.get(code) or _held(code, func) or _found(code, running)
    if original is None:
        return func
    _originals[code] = original
    return original


def _is_torchs(code: CodeType) -> bool:
    return code.co_filename.startswith(TORCH_FOLDER)


def _is_genuine(func: Any) -> bool:
    """Return whether a function and all functions that it wraps belong to torch.

    The running code may differ from that of the function: `F.max_pool2d` calls one of two
    functions.
    """
    while func is not None:
        if type(func) is not FunctionType or not _is_torchs(func.__code__):
            return False
        func = getattr(func, "__wrapped__", None)
    return True


def _held(code: CodeType, func: Any) -> Callable[..., Any] | None:
    """Return the function with this code among the objects reachable from its replacement.

    The objects that the replacement holds directly are searched first, because modules and classes
    lead to everything else.
    """
    near: deque[Any] = deque([func])
    far: deque[Any] = deque([sys.modules])  # other references, such as `kept = F.relu`
    seen: set[int] = set()
    while (near or far) and len(seen) < _MOST:
        holder = near.popleft() if near else far.popleft()
        for held in gc.get_referents(holder):
            if type(held) is FunctionType and held.__code__ is code:
                return held
            kind = type(held)  # `isinstance` would trigger lazy proxies
            if id(held) in seen or kind in (FrameType, CodeType):
                continue
            seen.add(id(held))
            leads_far = issubclass(kind, ModuleType | type) or (
                kind is dict and "__builtins__" in held
            )
            (far if leads_far else near).append(held)
    return None


def _found(code: CodeType, running: FrameType) -> Callable[..., Any] | None:
    """Return the function with this code, wherever it is referenced, or an equivalent new one."""
    if functions := functions_with(code):
        return functions[0]
    if code.co_freevars:
        return None
    # `gc.freeze` hides the function. None is a safe default: torch passes a mode all arguments
    # except those that are None.
    made = FunctionType(code, running.f_globals, code.co_name)
    made.__defaults__ = (None,) * code.co_argcount
    made.__kwdefaults__ = dict.fromkeys(
        code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    )
    return made


def _of_c(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the C method that was replaced under the name of a function."""
    for name, value in vars(torch.Tensor).items():
        if value is func or getattr(value, "__func__", None) is func:
            original: Callable[..., Any] = getattr(TensorBase, name, func)
            return original
    return func

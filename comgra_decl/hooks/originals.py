"""The function that a torch function mode has to call: not what somebody put in its place.

Torch hands a mode the function by its public name. Where the program has replaced that
(`F.relu = mine`, which calls the original one), the mode would call the replacement once more, in
the middle of itself. What is called here is what was running when torch asked the mode.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
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
"""Objects that are called: the code that runs is not all of one."""

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_ASKING = overrides.handle_torch_function.__code__

_known: set[Callable[..., Any]] = set()
"""Python functions of torch that were seen to be torch's own."""

_originals: dict[CodeType, Callable[..., Any]] = {}
"""Functions of torch that somebody has replaced: looking for one may go through many objects."""

_MOST = 1_000_000  # objects that are looked through for one of them


def genuine(func: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that was running when torch asked a mode to handle it.

    To be called by the mode's `__torch_function__` itself.

    Args:
        func: what torch calls it.
    """
    if isinstance(func, _OF_C | _OPERATORS):
        return func
    if type(func) is FunctionType and func in _known:
        return func
    asking = sys._getframe(2)  # whoever has called `__torch_function__`
    if asking.f_code is not _ASKING:
        return _of_c(func)
    running = asking.f_back
    assert running is not None
    return _of_python(func, running)


def _of_python(func: Callable[..., Any], running: FrameType) -> Callable[..., Any]:
    """Returns the function whose code runs in a frame, given how it is called by its name."""
    code = running.f_code
    if not _is_torchs(code):
        return func  # a library or the program itself asks for another function to be called
    if _is_genuine(func):
        _known.add(func)
        return func
    original = _originals.get(code) or _held(code, func) or _found(code, running)
    if original is None:
        return func
    _originals[code] = original
    return original


def _is_torchs(code: CodeType) -> bool:
    return code.co_filename.startswith(_TORCH)


def _is_genuine(func: Any) -> bool:
    """Whether all of a function, and of what it wraps, is torch's.

    Some of torch's are not the code that runs: `F.max_pool2d` chooses one of two.
    """
    while func is not None:
        if type(func) is not FunctionType or not _is_torchs(func.__code__):
            return False
        func = getattr(func, "__wrapped__", None)
    return True


def _held(code: CodeType, func: Any) -> Callable[..., Any] | None:
    """Returns the function with this code that is held by what has been put in its place.

    What a function holds itself comes first: modules and classes lead to everything there is.
    """
    near: deque[Any] = deque([func])
    far: deque[Any] = deque([sys.modules])  # whoever else holds it: `kept = F.relu`
    seen: set[int] = set()
    while (near or far) and len(seen) < _MOST:
        holder = near.popleft() if near else far.popleft()
        for held in gc.get_referents(holder):
            if type(held) is FunctionType and held.__code__ is code:
                return held
            kind = type(held)  # `isinstance` wakes lazy proxies
            if id(held) in seen or kind in (FrameType, CodeType):
                continue
            seen.add(id(held))
            leads_far = issubclass(kind, ModuleType | type) or (
                kind is dict and "__builtins__" in held
            )
            (far if leads_far else near).append(held)
    return None


def _found(code: CodeType, running: FrameType) -> Callable[..., Any] | None:
    """Returns the function with this code, wherever it is held."""
    if functions := functions_with(code):
        return functions[0]
    if code.co_freevars:
        return None
    # `gc.freeze` hides what there is. What torch hands a mode leaves out nothing but arguments
    # that are None.
    made = FunctionType(code, running.f_globals, code.co_name)
    made.__defaults__ = (None,) * code.co_argcount
    made.__kwdefaults__ = dict.fromkeys(
        code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    )
    return made


def _of_c(func: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method in C that goes by the name under which something else was found."""
    for name, value in vars(torch.Tensor).items():
        if value is func or getattr(value, "__func__", None) is func:
            original: Callable[..., Any] = getattr(TensorBase, name, func)
            return original
    return func

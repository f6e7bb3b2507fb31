"""Determine the context of a call: inside a module, an optimizer step, autograd or tracing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from comgra_decl.hooks.frames import TORCH_FOLDER
from comgra_decl.hooks.probing.seclusion import SECLUDED, is_secluded
from comgra_decl.torch_private import graph_task, module_call, tracing_state


def _code_within(function: Any, name: str) -> CodeType | None:
    """Return the code object of a nested function; None if there is no function with that name."""
    constants = getattr(getattr(function, "__code__", None), "co_consts", ())
    found = (c for c in constants if isinstance(c, CodeType) and c.co_name == name)
    return next(found, None)


_MODULE_CALL = module_call.__code__
MODULE_HOOKS = _code_within(module_call, "inner")
"""The code that runs a module's hooks during a call; None in torch versions that lack it."""
_COMPILED_CALL = str(Path("torch", "_dynamo", "eval_frame.py"))

OPTIMIZER_STEP = _code_within(torch.optim.Optimizer.profile_hook_step, "wrapper")
"""The code that runs an optimizer step and its hooks; None in torch versions that lack it."""


def is_no_step() -> bool:
    """Return whether a module call made now would not be part of the forward pass.

    While autograd is running, the call is a recomputation for checkpointing. Under
    `torch.jit.trace`, any computation made by comgra_decl would become part of the traced program.
    A probe calls a copy of the model.
    """
    if graph_task() != -1 or tracing_state() is not None:
        return True
    return bool(SECLUDED) and is_secluded()


def is_traced() -> bool:
    """Return whether `torch.jit.trace` is running, which would record any access to a tensor."""
    return tracing_state() is not None


def is_backward() -> bool:
    """Return whether autograd is running in this thread."""
    return graph_task() != -1


def is_called_by_module(frame: FrameType | None) -> bool:
    """Return whether a frame or any of its callers is a module call."""
    while frame is not None and frame.f_code is not _MODULE_CALL:
        frame = frame.f_back
    return frame is not None


def is_in_optimizer(frame: FrameType | None) -> bool:
    """Return whether a frame or any of its callers is an optimizer step, as in a closure."""
    while frame is not None and frame.f_code is not OPTIMIZER_STEP:
        frame = frame.f_back
    return frame is not None


@lru_cache(maxsize=64)
def _has_one_step(cls: type) -> bool:
    """Return whether a class of optimizers has only one `step` besides that of torch's base."""
    return sum("step" in vars(base) for base in cls.__mro__) <= 2


def is_nested_step(frame: FrameType | None, optimizer: Any) -> bool:
    """Return whether a frame runs inside an optimizer step called by the same optimizer's step.

    Torch wraps the `step` method of each optimizer class with hooks, so an optimizer that calls
    `super().step()` passes through two wrappers in a single step.
    """
    kind: Any = type(optimizer)
    if _has_one_step(kind):  # nearly always: walking up the stack creates objects
        return False
    steps: list[FrameType] = []
    while frame is not None:
        if frame.f_code is OPTIMIZER_STEP:
            steps.append(frame)
        frame = frame.f_back
    if len(steps) < 2:  # nearly always; reading the variables of a frame copies them
        return False
    given = [torch_variable(step, "args") for step in steps]
    return sum(bool(args) and args[0] is optimizer for args in given) > 1


def is_inner_step(frame: FrameType | None) -> bool:
    """Return whether the optimizer step that a frame belongs to runs inside another one."""
    steps = 0
    while frame is not None and steps < 2:
        steps += frame.f_code is OPTIMIZER_STEP
        frame = frame.f_back
    return steps > 1


def is_within_call(frame: FrameType | None) -> bool:
    """Return whether the module call that a frame belongs to is nested in another module call."""
    calls = 0
    while frame is not None and calls < 2:
        calls += frame.f_code is _MODULE_CALL
        frame = frame.f_back
    return calls > 1


def is_compiled_call(frame: FrameType) -> bool:
    """Return whether a frame is the wrapper of `torch.compile`."""
    code = frame.f_code
    return code.co_name == "compile_wrapper" and code.co_filename.endswith(_COMPILED_CALL)


def is_module_call(frame: FrameType) -> bool:
    """Return whether a `torch.compile` wrapper frame wraps a module call (`module.compile()`)."""
    called = getattr(torch_variable(frame, "fn"), "__func__", None)
    return called is module_call


def torch_variable(frame: FrameType, name: str) -> Any:
    """Return a local variable of a running torch function; None if no variable has that name.

    Also returns None for functions of the program, because before Python 3.13, reading their
    variables overwrites the dict that `locals()` returned to them.
    """
    if not frame.f_code.co_filename.startswith(TORCH_FOLDER):
        return None
    return frame.f_locals.get(name)


def variables_in_use() -> Iterator[list[Any]]:
    """Yield the local variables of each running function, innermost first.

    Yields nothing before Python 3.13, where reading them could change a dict of the program.
    """
    for frame in sys._current_frames().values() if sys.version_info >= (3, 13) else ():
        above: FrameType | None = frame
        while above is not None:
            yield list(above.f_locals.values())
            above = above.f_back

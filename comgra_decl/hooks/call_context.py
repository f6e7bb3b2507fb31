"""Where the program is when something is called: in a step, in autograd, in a module."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from comgra_decl.torch_private import graph_task, module_call, tracing_state


def _code_within(function: Any, name: str) -> CodeType | None:
    """Returns the code of a function that another one makes."""
    constants = getattr(getattr(function, "__code__", None), "co_consts", ())
    found = (c for c in constants if isinstance(c, CodeType) and c.co_name == name)
    return next(found, None)


_MODULE_CALL = module_call.__code__
MODULE_HOOKS = _code_within(module_call, "inner")
"""What goes through the hooks of a module that is called; None in a torch without it."""
_COMPILED_CALL = str(Path("torch", "_dynamo", "eval_frame.py"))
_TORCH = f"{Path(torch.__file__).resolve().parent}{os.sep}"

OPTIMIZER_STEP = _code_within(torch.optim.Optimizer.profile_hook_step, "wrapper")
"""What calls the step of an optimizer, and the hooks around it; None in a torch without it."""


def is_no_step() -> bool:
    """Whether a module called now is not part of the training's forward pass.

    While autograd is running it is a recomputation (checkpointing); under `torch.jit.trace` what
    we compute would become part of the traced program.
    """
    return graph_task() != -1 or tracing_state() is not None


def is_traced() -> bool:
    """Whether `torch.jit.trace` is under way: whatever is asked of a tensor becomes part of it."""
    return tracing_state() is not None


def is_backward() -> bool:
    """Whether autograd is running in this thread."""
    return graph_task() != -1


def is_called_by_module(frame: FrameType | None) -> bool:
    """Whether a frame, or one that it was called from, is the call of a module."""
    while frame is not None and frame.f_code is not _MODULE_CALL:
        frame = frame.f_back
    return frame is not None


def is_in_optimizer(frame: FrameType | None) -> bool:
    """Whether a frame, or one that it was called from, is the step of an optimizer: its closure."""
    while frame is not None and frame.f_code is not OPTIMIZER_STEP:
        frame = frame.f_back
    return frame is not None


def is_nested_step(frame: FrameType | None, optimizer: object) -> bool:
    """Whether a frame was called by an optimizer's step that its own step has called.

    Torch wraps the `step` of each class of which there is an optimizer, with hooks. One that calls
    `super().step()` passes through two of them in a single step.
    """
    steps: list[FrameType] = []
    while frame is not None:
        if frame.f_code is OPTIMIZER_STEP:
            steps.append(frame)
        frame = frame.f_back
    if len(steps) < 2:  # nearly always; looking at the variables of a frame copies them
        return False
    given = [torch_variable(step, "args") for step in steps]
    return sum(bool(args) and args[0] is optimizer for args in given) > 1


def is_within_call(frame: FrameType | None) -> bool:
    """Whether the call of a module that a frame belongs to was made within that of another one."""
    calls = 0
    while frame is not None and calls < 2:
        calls += frame.f_code is _MODULE_CALL
        frame = frame.f_back
    return calls > 1


def is_compiled_call(frame: FrameType) -> bool:
    """Whether a frame is what `torch.compile` puts around something."""
    code = frame.f_code
    return code.co_name == "compile_wrapper" and code.co_filename.endswith(_COMPILED_CALL)


def is_module_call(frame: FrameType) -> bool:
    """Whether such a frame is around the call of a module: of `module.compile()`."""
    called = getattr(torch_variable(frame, "fn"), "__func__", None)
    return called is module_call


def torch_variable(frame: FrameType, name: str) -> Any:
    """Returns a variable of a function of torch that is running; None if it has none of that name.

    Of torch's functions alone: before Python 3.13, asking a function of the program for its
    variables rewrites the dict that `locals()` has returned to it.
    """
    if not frame.f_code.co_filename.startswith(_TORCH):
        return None
    return frame.f_locals.get(name)


def variables_in_use() -> Iterator[list[Any]]:
    """Yields the variables of each running function, nearest first; none before Python 3.13.

    From then on asking for them changes no dict of the program.
    """
    for frame in sys._current_frames().values() if sys.version_info >= (3, 13) else ():
        above: FrameType | None = frame
        while above is not None:
            yield list(above.f_locals.values())
            above = above.f_back

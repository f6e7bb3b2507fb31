"""Where a program is when it fails or hangs: its step, its phase, and the names of its modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from comgra_decl.hooks.call_context import OPTIMIZER_STEP
from comgra_decl.hooks.frames import Visit
from comgra_decl.torch_private import ENGINE_CALL


@dataclass(frozen=True)
class ProgramPlace:
    """Where a program is.

    Attributes:
        step: the number of the step in progress.
        recorded: whether this step is being recorded.
        naming: returns a module's node and the outermost module that contains it; None if the run
            does not know the module.
        models: returns the models that were called.
    """

    step: int
    recorded: bool
    naming: Callable[[nn.Module], tuple[str, nn.Module] | None]
    models: Callable[[], list[nn.Module]]


def phase_of(frames: list[Visit]) -> tuple[str, Visit | None]:
    """Return what a thread is doing, and the frame that shows it.

    Args:
        frames: the frames of the thread, outermost first.

    Returns:
        "forward" (in a module call), "backward", "optimizer", "data" or "other".
    """
    for visit in reversed(frames):
        if visit.in_torch and visit.frame.f_code.co_name == ENGINE_CALL:
            return "backward", visit
        if visit.frame.f_code is OPTIMIZER_STEP:
            return "optimizer", visit
        if visit.calls_module:
            return "forward", visit
        if "/torch/utils/data/" in visit.file.replace("\\", "/"):
            return "data", visit
    return "other", None

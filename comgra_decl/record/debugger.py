"""Stop a program in pdb at its next module call, as requested by a finding."""

from __future__ import annotations

import pdb  # noqa: T100 (intended)
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.nn.modules import module as _torch_module

from comgra_decl.hooks.recursion import EveryCall


class Breakpoint:
    """Opens a debugger once, in the program's frame that makes the next module call.

    No hook is installed until a stop is requested, so a program without findings is unaffected.

    Args:
        debugger: creates the debugger.
    """

    def __init__(self, debugger: Callable[[], pdb.Pdb] = pdb.Pdb) -> None:
        self._debugger = debugger
        self._reason: str | None = None
        self._used = False
        self._calls = EveryCall(self._before)

    def request(self, reason: str) -> None:
        """Stop the program at its next module call; only the first request counts.

        Args:
            reason: printed above the prompt.
        """
        if not self._used and self._reason is None:
            self._reason = reason
            self._calls.install()

    def remove(self) -> None:
        """Drop a request that has not stopped the program yet."""
        self._calls.remove()
        self._used = True

    def _before(self, _module: Any, _args: Any) -> None:
        if torch.compiler.is_compiling() or self._used or self._reason is None:
            return
        self.remove()
        sys.stderr.write(
            "comgra: stopped before this call (comgra.on_finding.break) because of "
            f"{self._reason}\n"
        )
        self._open(_program_frame())

    def _open(self, frame: FrameType) -> None:
        """Prompt in a frame; continue to trace frames if the user steps, and exit on `quit`."""
        debugger = self._debugger()
        debugger.reset()
        debugger.interaction(frame, None)
        if debugger.quitting:
            raise SystemExit("comgra: the program was stopped in the debugger")
        if debugger.stoplineno == -1 and not debugger.breaks:
            return  # `continue`: no further stops
        above: FrameType | None = frame
        while above is not None:
            above.f_trace = debugger.trace_dispatch
            debugger.botframe = above
            above = above.f_back
        sys.settrace(debugger.trace_dispatch)


def _program_frame() -> FrameType:
    """Return the innermost frame outside comgra_decl and torch's module calls."""
    frame = sys._getframe(2)  # noqa: SLF001
    while frame.f_back is not None and frame.f_code.co_filename == _torch_module.__file__:
        frame = frame.f_back
    return frame

"""Gradients as they arrive during backward, and what the backward passes of a step are called."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from comgra_decl.hooks.reading.capture import StepCapture
    from comgra_decl.hooks.reading.slots import Slot

_OURS = f"{Path(__file__).resolve().parents[1]}{os.sep}"
_TORCH = f"{Path(torch.__file__).resolve().parent}{os.sep}"
_MOST_FRAMES = 64

WITHOUT_BACKWARD = "grad:autograd.grad"
"""The pass of gradients that `torch.autograd.grad` computes (a gradient penalty, for example)."""


class Backwards:
    """Names the backward passes of a program.

    The first loss ever seen is that of the pass `grad`. Another one is called after the variable
    that holds it: `loss_g.backward()` is the pass `grad:loss_g`. A loss that no variable holds is
    known by the place in the program where `backward` is called, and numbered: `grad:2`. So the
    micro-batches of an accumulated gradient, one `loss.backward()` in a loop, are one pass.
    """

    def __init__(self) -> None:
        self.current: str | None = None  # the pass of the backward that is running
        self.first: str | None = None  # the variable that held the first loss
        self._passes: dict[str | None, str] = {}  # by the loss's variable; for all steps
        self._places: dict[str, list[tuple[str, int]]] = {}  # of each pass, in this step

    def begin_step(self) -> None:
        """Forgets where the last step called `backward`."""
        self._places.clear()
        self.current = None

    def begin(self, loss: torch.Tensor, backwarded: torch.Tensor) -> str:
        """Returns the pass that begins with `backward` of a loss (`backwarded`: AMP's scaled)."""
        name, place = _caller(loss, backwarded)
        if not self._passes:
            self._passes[name], self.first = "grad", name
        base = self._passes.setdefault(name, f"grad:{name or len(self._passes) + 1}")
        places = self._places.setdefault(base, [])
        if place not in places:
            places.append(place)
        self.current = _numbered(base, places.index(place) + 1)
        return self.current

    def end(self) -> None:
        """The backward has ended."""
        self.current = None

    def share(self, pass_: str) -> str:
        """Returns what to call one of several backwards; `grad` alone means all of them."""
        return f"grad:{self.first or 1}" if pass_ == "grad" else pass_


def loss_node(pass_: str) -> str:
    """Returns the node of the loss that a pass begins with: `loss` for `grad`."""
    return "loss" + pass_.removeprefix("grad")


def gradient_slot(capture: StepCapture, slot: Slot) -> Slot:
    """Returns the slot of the gradient that has just arrived at the tensor of `slot`.

    A tensor hook sees the gradient of one backward alone, before anything is accumulated. Where
    one backward pass reaches a tensor twice in a step, the later gradient is numbered.
    """
    return unused(capture, slot, capture.backwards.current or WITHOUT_BACKWARD)


def unused(capture: StepCapture, slot: Slot, pass_: str) -> Slot:
    """Returns `slot` in `pass_`, numbered if that pass has a record in this step already."""
    number, name = 1, pass_
    while capture.count((slot, name)):
        number += 1
        name = _numbered(pass_, number)
    return slot.in_pass(name)


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}:{number}"


def _caller(*tensors: torch.Tensor) -> tuple[str | None, tuple[str, int]]:
    """Returns the name of the outermost variable that holds a tensor, and who called us.

    Outermost, because what a helper calls `loss` is `loss_g` to the program that called it.
    """
    name: str | None = None
    place = ("", 0)
    for frame in _frames():
        if not place[0]:
            place = (frame.f_code.co_filename, frame.f_lineno)
        name = _variable(frame, tensors) or name
    return name, place


def _frames() -> Iterator[FrameType]:
    """Yields the frames of the program, innermost first, without ours and torch's."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        if not frame.f_code.co_filename.startswith((_OURS, _TORCH)):
            yield frame
        frame = frame.f_back


def _variable(frame: FrameType, tensors: tuple[torch.Tensor, ...]) -> str | None:
    variables = frame.f_locals
    found = [n for n, value in variables.items() if any(value is tensor for tensor in tensors)]
    if _is_copy(frame):
        variables.clear()  # the frame keeps it, and so the tensors of this step
    return found[0] if found else None


def _is_copy(frame: FrameType) -> bool:
    """Whether the variables of a frame are a dict of its own, which nobody writes back."""
    optimized = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    return optimized and sys.version_info < (3, 13) and sys.gettrace() is None

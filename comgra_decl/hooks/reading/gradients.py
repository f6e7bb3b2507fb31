"""Gradients as they arrive during backward, and what the backward passes of a step are called."""

from __future__ import annotations

import inspect
import os
import sys
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
_MOST_CALLERS = 256  # places that are remembered; a notebook has ever new ones

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
        self._callers = _Callers()

    def begin_step(self) -> None:
        """Forgets where the last step called `backward`."""
        self._places.clear()
        self.current = None

    def begin(self, loss: torch.Tensor, backwarded: torch.Tensor) -> str:
        """Returns the pass that begins with `backward` of a loss (`backwarded`: AMP's scaled)."""
        name, place = self._callers.find(loss, backwarded)
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


class _Callers:
    """Finds out who calls `backward`, and in which variable the loss is.

    Reading the variables of a frame makes a copy of them all, so where a program calls from the
    same place again, only the frame that held the loss then is asked.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[int, str]] = {}  # frame and variable, by place

    def find(self, *tensors: torch.Tensor) -> tuple[str | None, tuple[str, int]]:
        """Returns the name of the outermost variable that holds a tensor, and who called us.

        Outermost, because what a helper calls `loss` is `loss_g` to the program that called it.
        """
        frames = _frames()
        if not frames:
            return None, ("", 0)
        place = frames[0].f_code.co_filename, frames[0].f_lineno
        key = tuple([n for frame in frames for n in (id(frame.f_code), frame.f_lasti)])
        depth, name = self._known.get(key, (0, ""))
        if name and _variable(frames[depth], tensors, name):
            return name, place
        return self._search(key, frames, tensors), place

    def _search(
        self, key: tuple[int, ...], frames: list[FrameType], tensors: tuple[torch.Tensor, ...]
    ) -> str | None:
        for depth in reversed(range(len(frames))):
            name = _variable(frames[depth], tensors)
            if name is not None:
                if len(self._known) >= _MOST_CALLERS:
                    self._known.clear()
                self._known[key] = depth, name
                return name
        return None


def _frames() -> list[FrameType]:
    """Returns the frames of the program, innermost first, without ours and torch's."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        if not frame.f_code.co_filename.startswith((_OURS, _TORCH)):
            frames.append(frame)
        frame = frame.f_back
    return frames


def _variable(
    frame: FrameType, tensors: tuple[torch.Tensor, ...], name: str | None = None
) -> str | None:
    """Returns the first variable that holds a tensor, or `name` if that one does."""
    variables = frame.f_locals
    names = variables if name is None else [name]
    found = [n for n in names if any(variables.get(n) is tensor for tensor in tensors)]
    if _is_copy(frame):
        variables.clear()  # the frame keeps it, and so the tensors of this step
    return found[0] if found else None


def _is_copy(frame: FrameType) -> bool:
    """Whether the variables of a frame are a dict of its own, which nobody writes back."""
    optimized = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    return optimized and sys.version_info < (3, 13) and sys.gettrace() is None

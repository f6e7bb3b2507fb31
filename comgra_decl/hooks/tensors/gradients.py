"""Gradients as they arrive during backward, and what the backward passes of a step are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from comgra_decl.hooks.tensors.loss_names import Place, calling_places, loss_name

if TYPE_CHECKING:
    from types import CodeType

    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.hooks.tensors.slots import Slot

_MOST_CALLERS = 256  # places that are remembered; a notebook has ever new ones

WITHOUT_BACKWARD = "grad:autograd.grad"
"""The pass of gradients that `torch.autograd.grad` computes (a gradient penalty, for example)."""


class _Known(NamedTuple):
    """A place that `backward` is called from.

    Attributes:
        base: the name of its pass in any step, before it is numbered.
        line: its file and line.
        places: keeps the code objects alive, whose ids are the key.
    """

    base: str
    line: tuple[str, int]
    places: tuple[Place, ...]


class Backwards:
    """Names the backward passes of a program.

    The first loss ever seen is that of the pass `grad`. Another one is called after the variable
    that holds it: `loss_g.backward()` is the pass `grad:loss_g`. A loss that no variable holds is
    known by the place in the program where `backward` is called, and numbered: `grad:2`. So the
    micro-batches of an accumulated gradient, one `loss.backward()` in a loop, are one pass.
    """

    def __init__(self) -> None:
        self.current: str | None = None  # the pass of the backward that is running
        self._first: tuple[Place, ...] | None = None  # from where the first loss was backwarded
        self._passes: dict[str | None, str] = {}  # by the loss's name; for all steps
        self._known: dict[tuple[tuple[int, int], ...], _Known] = {}
        self._lines: dict[str, list[tuple[str, int]]] = {}  # of each pass, in this step

    def begin_step(self) -> None:
        """Forgets where the last step called `backward`."""
        self._lines.clear()
        self.current = None

    def name(self) -> str:
        """Returns the pass of the `backward` that is being called, on one of its tensors."""
        return self.current or self.begin()

    def begin(self) -> str:
        """Returns the pass that begins with the `backward` that is being called."""
        places = calling_places()
        # by id, because the hash of a code object goes through all its constants, each time
        key = tuple([(id(code), instruction) for code, instruction in places])
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_CALLERS:
                self._known.clear()
            line = _line(*places[0]) if places else ("", 0)
            known = self._known[key] = _Known(self._base(places), line, places)
        base, line, _ = known
        lines = self._lines.setdefault(base, [])
        if line not in lines:
            lines.append(line)
        self.current = _numbered(base, lines.index(line) + 1)
        return self.current

    def _base(self, places: tuple[Place, ...]) -> str:
        """Returns the pass of a place that `backward` is called from for the first time.

        Reading source takes a millisecond; with one loss, which most programs have, none is read.
        """
        if self._first is None:
            self._first = places
            return "grad"
        if not self._passes:
            self._passes[loss_name(self._first)] = "grad"
        name = loss_name(places)
        return self._passes.setdefault(name, f"grad:{name or len(self._passes) + 1}")

    def end(self) -> None:
        """The backward has ended."""
        self.current = None

    def share(self, pass_: str) -> str:
        """Returns what to call one of several backwards; `grad` alone means all of them."""
        if pass_ != "grad" or self._first is None:
            return pass_
        return f"grad:{loss_name(self._first) or 1}"


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
    calls = capture.calls
    if not capture.aside and not calls[slot, pass_]:  # nearly always, for each gradient of a step
        calls[slot, pass_] = 1
        return slot.passes.get(pass_) or slot.in_pass(pass_)
    number, name = 1, pass_
    while capture.count((slot, name)):
        number += 1
        name = _numbered(pass_, number)
    return slot.in_pass(name)


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}:{number}"


def _line(code: CodeType, instruction: int) -> tuple[str, int]:
    """Returns the file and the line that a function is at."""
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    return code.co_filename, next(lines, None) or code.co_firstlineno

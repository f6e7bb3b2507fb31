"""Handle gradients as they arrive in backward, and name the backward passes of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from comgra_decl.hooks.tensors.loss_names import Place, calling_places, loss_name

if TYPE_CHECKING:
    from types import CodeType

    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.hooks.tensors.slots import Slot

_MOST_CALLERS = 256  # call sites that are stored; a notebook creates new ones continually

WITHOUT_BACKWARD = "grad:autograd.grad"
"""The pass of gradients that `torch.autograd.grad` computes (a gradient penalty, for example)."""


class _Known(NamedTuple):
    """A call site of `backward`.

    Attributes:
        base: the name of its pass in any step, without a number.
        line: its file and line.
        places: keeps the code objects alive, because their ids are the key.
    """

    base: str
    line: tuple[str, int]
    places: tuple[Place, ...]


class Backwards:
    """Names the backward passes of a program.

    The first loss ever observed belongs to the `grad` pass. Other passes are named after the
    variable that holds the loss; for example, `loss_g.backward()` is the `grad:loss_g` pass. If a
    loss is not in a variable, it is identified by the place where `backward` is called, and its
    pass is numbered, as in `grad:2`. With gradient accumulation, where `loss.backward()` is called
    in a loop over micro-batches, there is therefore a single pass.
    """

    def __init__(self) -> None:
        self.current: str | None = None  # the pass of the running backward
        self._first: tuple[Place, ...] | None = None  # where backward was called on the first loss
        self._passes: dict[str | None, str] = {}  # by the loss's name; for all steps
        self._known: dict[tuple[tuple[int, int], ...], _Known] = {}
        self._lines: dict[str, list[tuple[str, int]]] = {}  # call sites of each pass, in this step

    def begin_step(self) -> None:
        """Discard the `backward` calls in the last step."""
        self._lines.clear()
        self.current = None

    def name(self) -> str:
        """Return the pass of the current `backward` call; begin it if necessary."""
        return self.current or self.begin()

    def begin(self) -> str:
        """Begin the pass of the current `backward` call and return its name."""
        places = calling_places()
        # by id, because hashing a code object hashes all its constants every time
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
        """Return the pass of a call site of `backward` that is seen for the first time.

        Reading source code takes a millisecond. It is never needed in the usual case of a program
        with one loss.
        """
        if self._first is None:
            self._first = places
            return "grad"
        if not self._passes:
            self._passes[loss_name(self._first)] = "grad"
        name = loss_name(places)
        return self._passes.setdefault(name, f"grad:{name or len(self._passes) + 1}")

    def end(self) -> None:
        """End the current backward pass."""
        self.current = None

    def share(self, pass_: str) -> str:
        """Return the pass of the current one of several backward passes; `grad` stands for all."""
        if pass_ != "grad" or self._first is None:
            return pass_
        return f"grad:{loss_name(self._first) or 1}"


def loss_node(pass_: str) -> str:
    """Return the loss node at which a pass begins; `loss` for `grad`."""
    return "loss" + pass_.removeprefix("grad")


def gradient_slot(capture: StepCapture, slot: Slot) -> Slot:
    """Return the slot of the gradient that has just arrived at the tensor of `slot`.

    A tensor hook receives the gradient of a single backward pass, before accumulation. If a
    backward pass reaches a tensor twice in a step, the later gradient is numbered.
    """
    return unused(capture, slot, capture.backwards.current or WITHOUT_BACKWARD)


def unused(capture: StepCapture, slot: Slot, pass_: str) -> Slot:
    """Return `slot` in `pass_`, numbered if that pass already has a record in this step."""
    calls = capture.calls
    if not capture.aside and not calls[slot, pass_]:  # the usual case, for each gradient of a step
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
    """Return the file and line of an instruction in a function."""
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    return code.co_filename, next(lines, None) or code.co_firstlineno

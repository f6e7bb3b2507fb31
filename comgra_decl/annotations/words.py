"""What a program may say about the step in progress."""

from __future__ import annotations

import sys
from typing import Any

from comgra_decl.annotations import hub


def connect(source: Any, sink: Any) -> None:
    """Says that `sink` was computed from `source`, where the tracer cannot see it.

    For what leaves PyTorch and comes back (numpy, a simulator, a kernel of your own): the graph
    then has the edge. Both may be nested structures of tensors. Call it after `sink` was made.
    """
    if hub.recording and hub.listener is not None:
        hub.listener.connect(source, sink)


def tag(*names: str) -> None:
    """Labels the step in progress, beside its type: `comgra.tag("long", "augmented")`.

    Raises:
        AnnotationError: a label is empty or no text.
    """
    for name in names:
        _checked_text(name, "a tag")
    if hub.listener is not None:
        hub.listener.tag(*names)


def note(text: str) -> None:
    """Writes down a text with a step, as `kpi` does; `run.notes()` and the viewer show it.

    Raises:
        AnnotationError: the text is empty or no text.
    """
    _checked_text(text, "a note")
    if hub.listener is not None:
        hub.listener.note(text)


def kpi(name: str, value: Any) -> None:
    """Keeps a number of a step; `run.kpis()` and the viewer show all of them.

    Every value is kept, whether or not the step is recorded, and costs a few microseconds. It
    belongs to the step in progress, or, further down in the loop than the optimizer's step, to the
    one that ended there. A tensor on a device is not waited for. Not for use inside code under
    `torch.compile`: what is said there is not heard.

    Args:
        name: the curve's name; the loss that `backward` is called on is kept as "loss" anyway.
        value: a number, or a tensor of one element.

    Raises:
        AnnotationError: the name is empty, or the value is no single number.
    """
    _checked_text(name, "a KPI's name")
    if not _is_number(value):
        _refuse(f"the KPI {name!r} must be a number or a tensor of one element, not {value!r}.")
    if hub.listener is not None:
        hub.listener.kpi(name, value)


def step() -> None:
    """Ends a step, in programs whose steps no optimizer of PyTorch ends."""
    if hub.listener is not None:
        hub.listener.step()


def _checked_text(text: Any, what: str) -> None:
    if not isinstance(text, str) or not text.strip():
        _refuse(f"{what} must be a text that is not empty, not {text!r}.")


def _is_number(value: Any) -> bool:
    if isinstance(value, float | int):
        return True
    if not hasattr(value, "__float__"):
        return False
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - the program's modes see nothing
            return bool(value.numel() == 1)
    return bool(getattr(value, "size", 1) == 1)


def _refuse(message: str) -> None:
    from comgra_decl.errors import AnnotationError

    raise AnnotationError(message)

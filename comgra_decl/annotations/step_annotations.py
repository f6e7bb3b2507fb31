"""Annotations of the step in progress: `connect`, `tag`, `note`, `kpi` and `step`."""

from __future__ import annotations

import sys
from typing import Any

from comgra_decl.annotations import hub


def connect(source: Any, sink: Any) -> None:
    """Declare that `sink` was computed from `source` in a way that the tracer cannot see.

    Use it to add an edge to the graph where values leave PyTorch and come back, as with numpy, a
    simulator or your own kernel. Both arguments may be nested structures of tensors. Call it after
    creating `sink`.
    """
    if hub.recording and hub.listener is not None:
        hub.listener.connect(source, sink)


def tag(*names: str) -> None:
    """Add labels to the step in progress, in addition to its type.

    For example, `comgra.tag("long", "augmented")`.

    Raises:
        AnnotationError: a label is empty or not a string.
    """
    for name in names:
        _checked_text(name, "a tag")
    if hub.listener is not None:
        hub.listener.tag(*names)


def note(text: str) -> None:
    """Log a note for a step, chosen as in `kpi`; `run.notes()` and the viewer show the note.

    Raises:
        AnnotationError: the text is empty or not a string.
    """
    _checked_text(text, "a note")
    if hub.listener is not None:
        hub.listener.note(text)


def kpi(name: str, value: Any) -> None:
    """Log a value for a step; `run.kpis()` and the viewer show the values of all steps.

    Every value is stored, whether or not the step is recorded, at a cost of a few microseconds. The
    value belongs to the step in progress or, if called after the optimizer step of a loop, to the
    step that has just ended. A tensor on a device is read without synchronising. Calls inside code
    compiled by `torch.compile` have no effect.

    Args:
        name: the metric's name. The loss on which `backward` is called is always logged as "loss".
        value: a number, or a one-element tensor.

    Raises:
        AnnotationError: the name is empty, or the value is not a single number.
    """
    _checked_text(name, "a KPI's name")
    if not _is_number(value):
        _refuse(f"the KPI {name!r} must be a number or a one-element tensor, got {value!r}.")
    if hub.listener is not None:
        hub.listener.kpi(name, value)


def step() -> None:
    """End the current step, in programs that do not use a PyTorch optimizer."""
    if hub.listener is not None:
        hub.listener.step()


def _checked_text(text: Any, what: str) -> None:
    if not isinstance(text, str) or not text.strip():
        _refuse(f"{what} must be a non-empty string, got {text!r}.")


def _is_number(value: Any) -> bool:
    if isinstance(value, float | int):
        return True
    if not hasattr(value, "__float__"):
        return False
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - hidden from the program's modes
            return bool(value.numel() == 1)
    return bool(getattr(value, "size", 1) == 1)


def _refuse(message: str) -> None:
    from comgra_decl.errors import AnnotationError

    raise AnnotationError(message)

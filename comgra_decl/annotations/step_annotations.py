"""Annotations of the step in progress: `connect`, `tag`, `note`, `kpi`, `image`, `step`, ...."""

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


def image(value: Any, name: str) -> None:
    """Keep an image for a step, chosen as in `kpi`; `run.shown` and the viewer show it.

    For example, `comgra.image(photo, "worst sample, predicted cat")` in a validation loop. Every
    image is stored, whether or not the step is recorded. An image of more than 4 MiB is not stored,
    which the run's report says. A tensor on a device is copied immediately.

    Args:
        value: an array or tensor: [height, width], [height, width, channels] or [channels, height,
            width] with 1, 3 or 4 channels. If both ends may be channels, those of a tensor come
            first and those of an array last. Floating-point values from 0 to 1, or whole numbers
            from 0 to 255; others are clipped, and NaN becomes 0.
        name: the name of the image, under which the viewer shows it at each step.

    Raises:
        AnnotationError: the name is empty, or the value has no such shape, is empty or complex.
    """
    _checked_text(name, "the name of an image")
    shape = tuple(getattr(value, "shape", ()))
    if len(shape) not in (2, 3) or (len(shape) == 3 and not {shape[0], shape[-1]} & {1, 3, 4}):
        _refuse(
            f"the image {name!r} must have the shape [height, width], [height, width, channels] or "
            f"[channels, height, width] with 1, 3 or 4 channels, got {[*shape]}."
        )
    if 0 in shape or "complex" in str(getattr(value, "dtype", "")):
        _refuse(
            f"the image {name!r} must have real numbers and at least one pixel, got the shape "
            f"{[*shape]} and the dtype {getattr(value, 'dtype', None)}. For complex values, show "
            "their magnitude: comgra.image(abs(x), ...)."
        )
    if hub.listener is not None:
        hub.listener.show(name, "image", value)


def figure(value: Any, name: str) -> None:
    """Keep a matplotlib figure for a step as an image; see `image`.

    Raises:
        AnnotationError: the name is empty, or the value is not a matplotlib figure.
    """
    _checked_text(name, "the name of a figure")
    if not (hasattr(value, "savefig") and hasattr(value, "bbox")):
        _refuse(f"the figure {name!r} must be a matplotlib figure, got {type(value).__name__}.")
    if hub.listener is not None:
        hub.listener.show(name, "figure", value)


def text(value: str, name: str) -> None:
    """Keep a text for a step, such as a generated sentence; see `image`.

    A text of more than 64 KiB is not stored.

    Raises:
        AnnotationError: the name or the text is empty or not a string.
    """
    _checked_text(name, "the name of a text")
    _checked_text(value, f"the text {name!r}")
    if hub.listener is not None:
        hub.listener.show(name, "text", value)


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

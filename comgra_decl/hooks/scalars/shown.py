"""Images, figures and texts that the program shows, as records of their own."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from comgra_decl.hooks.tensors.capture import StepCapture
from comgra_decl.hooks.tensors.slots import Slot
from comgra_decl.records import PROBE_MODE, SHOWN, RawStep, StepInfo
from comgra_decl.stats import Reducer
from comgra_decl.torch_private import without_functions

if TYPE_CHECKING:
    from comgra_decl.hooks.tensors.slots import SlotTable
    from comgra_decl.spec import Spec

_MOST = {"image": 4 << 20, "figure": 4 << 20, "text": 64 << 10}
"""Maximum sizes in bytes."""

_TOO_LARGE = "the {} {!r} has {:,} bytes and is not stored; the limit is {:,} bytes"

_FAILED = "the {} {!r} cannot be stored ({}: {})"

_CHANNELS = (1, 3, 4)


class Shown:
    """Stores what a program shows, one record each.

    Args:
        spec: the spec of the run.
        table: assigns the ids of slots.
        sink: receives each record.
        warn: called with the reason why something is not stored.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        table: SlotTable,
        sink: Callable[[RawStep], None],
        warn: Callable[[str], None],
    ) -> None:
        self._histogram = None if spec.histogram is None else spec.histogram.elements
        self._table = table
        self._sink = sink
        self._warn = warn
        self._capture: StepCapture | None = None  # created when something is shown
        self._slots: dict[tuple[str, str], Slot] = {}

    def show(self, name: str, kind: str, value: Any, *, step: int) -> None:
        """Store an image, a figure or a text.

        Args:
            name: its name.
            kind: "image", "figure" or "text".
            value: what the program passed, in a form that the annotation has checked.
            step: the step to which it belongs.
        """
        with without_functions(), torch.no_grad():
            try:
                array = _FORMS[kind](value)
            except Exception as error:
                self._warn(_FAILED.format(kind, name, type(error).__name__, error))
                return
            size = len(_encoded(value)) if kind == "text" else array.nbytes  # without padding
            if size > _MOST[kind]:
                self._warn(_TOO_LARGE.format(kind, name, size, _MOST[kind]))
                return
            self._store(name, kind, array, step)

    def _store(self, name: str, kind: str, array: NDArray[np.uint8], step: int) -> None:
        slot = self._slots.get((name, kind))
        if slot is None:
            slot = self._slots[name, kind] = Slot(lambda: name, kind, pass_=SHOWN)
        if self._capture is None:
            self._capture = StepCapture(
                Reducer(histogram_elements=self._histogram, sample_count=1),
                max_value_elements=max(_MOST.values()),
                sample_count=1,
                followed=False,
            )
        self._capture.begin()
        self._capture.add(slot, torch.from_numpy(array), batch_dim=None, values=True)
        info = StepInfo(max(0, step), time.time(), SHOWN, PROBE_MODE)
        self._sink(self._capture.close(info, self._table))


def _of_image(value: Any) -> NDArray[np.uint8]:
    """Return an image as [height, width, channels]."""
    first = isinstance(value, torch.Tensor)  # where the channels are if both ends may be them
    if isinstance(value, torch.Tensor):
        whole = value.detach().cpu()
        value = (whole.float() if whole.is_floating_point() else whole).numpy()
    array = np.asarray(value)
    if array.ndim == 2:
        array = array[..., None]
    elif array.shape[-1] not in _CHANNELS or (first and array.shape[0] in _CHANNELS):
        array = array.transpose(1, 2, 0)
    if array.dtype.kind == "f":
        array = np.rint(np.nan_to_num(array) * 255)
    elif array.dtype == bool:
        array = array * np.uint8(255)
    return np.ascontiguousarray(np.clip(array, 0, 255).astype(np.uint8))


def _of_figure(value: Any) -> NDArray[np.uint8]:
    """Return a matplotlib figure as [height, width, 3]."""
    drawn = io.BytesIO()
    value.savefig(drawn, format="rgba", dpi=value.dpi)
    width, height = (int(size) for size in value.bbox.size)
    colours = np.frombuffer(drawn.getvalue(), np.uint8).reshape(height, width, 4)
    return np.ascontiguousarray(colours[..., :3])


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _of_text(value: str) -> NDArray[np.uint8]:
    """Return the bytes of a text, padded to a power of two so that texts share few shapes."""
    encoded = _encoded(value)
    padded = np.zeros(1 << max(4, (len(encoded) - 1).bit_length()), np.uint8)
    padded[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    return padded


_FORMS: dict[str, Callable[[Any], NDArray[np.uint8]]] = {
    "image": _of_image,
    "figure": _of_figure,
    "text": _of_text,
}

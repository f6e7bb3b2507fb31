"""Arrays that travel to the browser inside the message that says where they belong."""

from __future__ import annotations

import gzip
import sys
from base64 import b64encode
from typing import Any

import numpy as np
from bokeh.core.serialization import BytesRep, NDArrayRep, Serializable, Serializer
from numpy.typing import ArrayLike, DTypeLike

_LARGE = 1 << 18
"""Bytes from which on the longer text costs more than the messages."""


class Inline(np.ndarray[Any, Any], Serializable):
    """An array that is written into a message as text.

    Bokeh sends each array after the message as two messages of its own, and each of these takes a
    browser longer than reading some kilobytes of text: for the thirty arrays of a changed tensor
    it was 7 to 11 ms against less than 2.
    """

    def to_serializable(self, serializer: Serializer) -> NDArrayRep:
        """Returns what Bokeh's own arrays look like where it sends no buffers."""
        if self.nbytes > _LARGE:
            rep: NDArrayRep = serializer.encode(self.view(np.ndarray))
            return rep
        stored = gzip.compress(self.tobytes(), compresslevel=0, mtime=0)  # it wants gzip's frame
        return NDArrayRep(
            type="ndarray",
            array=BytesRep(type="bytes", data=b64encode(stored).decode("ascii")),
            shape=list(self.shape),
            dtype=self.dtype.name,
            order=sys.byteorder,
        )


def inline(values: ArrayLike, dtype: DTypeLike = np.float32) -> Inline:
    """Returns values as an array that travels in its message.

    Args:
        values: Numbers of any shape; larger ones than `dtype` holds become infinite.
        dtype: One that Bokeh knows: any but integers of 64 bits.
    """
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, dtype).view(Inline)


def inline_steps(steps: ArrayLike) -> Inline:
    """Returns whole numbers as such an array; JavaScript has none of 64 bits."""
    values = np.asarray(steps)
    small = not len(values) or abs(values).max() < 1 << 31
    return inline(values, np.int32 if small else np.float64)

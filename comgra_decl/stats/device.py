"""Tensors on an accelerator: reduced there, brought over in one piece, never waited for.

Everything runs on the stream that is current when the tensor is seen, so it is ordered after the
operation that made it and before what overwrites it. The sums of a step and its histogram elements
travel in one non-blocking copy to pinned memory, followed by an event; only the writer thread waits
for that event. A NaN costs nothing extra here: `exact` has no branch that depends on a value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comgra_decl.records import RAW_STATISTICS
from comgra_decl.stats.quiet import buffer
from comgra_decl.stats.sums import exact, exact_large
from comgra_decl.stats.support import CannotReduceError, as_numpy
from comgra_decl.stats.trie import Form, Node, Part

ASYNCHRONOUS = ("cuda", "xpu")
"""Device types with streams, events, pinned copies and float64; others are read as host copies."""

_HOST = torch.device("cpu")


class DeviceStep:
    """What one device contributes to the step in progress; used again for the next."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = getattr(torch, device.type) if device.type in ASYNCHRONOUS else None
        self._stream: Any = None  # the last one used, also over steps: they share the groups
        self.restart()

    def restart(self) -> None:
        """Forgets the step in progress."""
        self._several_streams = False
        self._rows: list[Tensor] = []
        self._picks: dict[int, Tensor] = {}

    def follow(self) -> None:
        """Orders what comes next on the current stream after all we did on others.

        Raises:
            CannotReduceError: while a graph is being captured, which would then replay us.
        """
        if self._module is None:
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CannotReduceError("cannot reduce a tensor while a CUDA graph is being captured")
        stream = self._module.current_stream(self.device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
            self._several_streams = True
        self._stream = stream

    def reduce(self, node: Node, rows: Tensor) -> None:
        """Reduces contiguous rows [r, n] at once, r and n > 0."""
        self._rows.append(exact_large(rows))
        if node.count:
            self._picks[node.index] = _sample(rows, node.stride)

    def add_rows(self, rows: Tensor) -> None:
        """Takes raw sums [r, 8] as they are."""
        self._rows.append(rows)

    def to_host(self, value: Tensor) -> NDArray[Any]:
        """Returns the array that will hold a copy of `value` once the step has been waited for."""
        value = value.resolve_conj().resolve_neg().contiguous()
        if value.dtype == torch.complex32:
            value = value.to(torch.complex64)
        host = buffer(
            *value.shape, dtype=value.dtype, device=_HOST, pinned=self._module is not None
        )
        host.copy_(value, non_blocking=True)
        return as_numpy(host)

    def launch(self, form: Form, part: Part) -> Fetch:
        """Reduces the groups of this step and starts the one copy to the host."""
        self.follow()
        if self._several_streams:  # memory of one stream, read on another
            for tensor in (*self._rows, *self._picks.values()):
                tensor.record_stream(self._stream)
        sums = [exact(group.rows[0, :rows]) for group, rows, _ in part.groups] + self._rows
        pieces = [s.reshape(-1).view(torch.uint8) for s in sums]
        pieces += [self._pick(node).view(torch.uint8) for node in part.nodes if node.count]
        packed = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=_HOST)
        pinned = self._module is not None
        host = buffer(packed.numel(), dtype=torch.uint8, device=_HOST, pinned=pinned)
        host.copy_(packed, non_blocking=True)
        event = None
        if self._module is not None:
            event = self._module.Event()
            event.record(self._stream)
        return Fetch(host, event, form, part)

    def _pick(self, node: Node) -> Tensor:
        if node.group is None:
            return self._picks[node.index]
        mine = node.group.rows[0, node.row : node.row + node.shape.samples]
        return _sample(mine, node.stride)


def _sample(rows: Tensor, stride: int) -> Tensor:
    """Returns a copy of every `stride`-th element of contiguous rows, float32."""
    return rows.view(-1)[::stride].to(torch.float32, copy=True)


class Fetch:
    """A copy under way: bytes in pinned memory, valid after the event."""

    def __init__(self, host: Tensor, event: Any, form: Form, part: Part) -> None:
        self._host: Tensor | None = host
        self._event, self._form, self._part = event, form, part

    def wait(self, raw: NDArray[np.float64], histogram: NDArray[np.float32]) -> None:
        """Waits for the copy and puts it where the step's results lie; the second call is free."""
        host, self._host = self._host, None
        if host is None:
            return
        if self._event is not None:
            self._event.synchronize()
        data = host.numpy()
        first, stop = self._first_row(), self._part.stop
        size = (stop - first) * RAW_STATISTICS * 8
        raw[first:stop] = data[:size].view(np.float64).reshape(-1, RAW_STATISTICS)
        sample = data[size:].view(np.float32)
        for node in self._part.nodes:
            if node.count:
                start = int(self._form.histogram_starts[node.index])
                histogram[start : start + node.count] = sample[: node.count]
                sample = sample[node.count :]

    def _first_row(self) -> int:
        return self._part.groups[0][2] if self._part.groups else self._part.start

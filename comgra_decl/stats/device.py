"""Tensors on an accelerator: reduced there, brought over in one piece, never waited for.

Everything runs on the stream that is current when the tensor is seen, so it is ordered after the
operation that made it and before what overwrites it. The sums of a step and its histogram elements
travel in one non-blocking copy to pinned memory, followed by an event; only the writer thread waits
for that event. A NaN costs nothing extra here: nothing branches on a value.

On a GPU with Triton each number is read once (`fused`). Small tensors are put off, so that one
launch reads many: they are held until then, and what has been written meanwhile (`_version` says
so) is not recorded but named, and read at once from the next step on. Writes that torch does not
count (`.data`, kernels of others) are found by trying: before a tensor is put off for the first
time, it is read both at once and later, and must give the same numbers.

Elsewhere torch's operations serve (`sums.lean`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comgra_decl.records import RAW_STATISTICS
from comgra_decl.stats.fused import Launched, Launcher, Rows, batches, launcher_class
from comgra_decl.stats.quiet import buffer
from comgra_decl.stats.sums import exact, lean
from comgra_decl.stats.support import CannotReduceError, as_numpy, work_dtype
from comgra_decl.stats.trie import Form, Node, Part, PutOff

ASYNCHRONOUS = ("cuda", "xpu")
"""Device types with streams, events, pinned copies and float64; others are read as host copies."""

_HOST = torch.device("cpu")
_log = logging.getLogger("comgra_decl")

_SMALL = 1 << 20
"""Bytes of a tensor from which on it is read at once: a launch of its own is no loss then."""
_MOST_HELD, _MOST_BYTES_HELD = 64, 32 << 20
"""Tensors, and bytes, that are held until they are read together."""

OVERWRITTEN = "it was written in place before it was read; it is read at once from now on"


class _Held:
    """A tensor that is read later."""

    __slots__ = ("node", "rows", "source", "tried", "version")

    def __init__(self, node: Node, rows: Tensor, source: Tensor, *, tried: bool) -> None:
        self.node, self.rows, self.tried = node, rows, tried
        # a copy of ours is written by nobody; a view made without autograd counts no versions
        self.source = source if rows.data_ptr() == source.data_ptr() else None
        self.version = source._version

    @property
    def is_written(self) -> bool:
        return self.source is not None and self.source._version != self.version


@dataclass
class _Read:
    """Nodes whose results are in memory of the device; `tried`: only to compare."""

    nodes: list[Node]
    launched: Launched | None = None  # None: results of torch's operations, in order
    tried: bool = False


@dataclass
class _Step:
    """What a device contributes to the step in progress."""

    reads: list[_Read] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)  # by torch's operations, as `reads` has them
    picks: list[Tensor] = field(default_factory=list)  # of those, where there is a sample
    held: list[_Held] = field(default_factory=list)
    bytes_held: int = 0
    lost: list[int] = field(default_factory=list)
    several_streams: bool = False


class DeviceStep:
    """What one device contributes to the step in progress; used again for the next.

    Args:
        device: which one.
        launcher: of the fused kernels; None where torch's operations serve.
    """

    def __init__(self, device: torch.device, launcher: Launcher | None = None) -> None:
        self.device = device
        self.launcher = launcher
        self._before: Launcher | None = None  # which has failed in this step, and read some of it
        self._module: Any = getattr(torch, device.type) if device.type in ASYNCHRONOUS else None
        self._stream: Any = None  # the last one used, also over steps: they share the memory
        self._together = False
        self._step = _Step()

    def restart(self) -> None:
        """Forgets the step in progress."""
        self._step = _Step()
        self._before = None
        if self.launcher is not None:
            self.launcher.results.restart()
            self.launcher.samples.restart()

    @property
    def lost(self) -> list[int]:
        """Numbers of the tensors that were written before they could be read."""
        return self._step.lost

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
            with self._module.stream(self._stream):
                self.flush()  # where those that are held were made
            stream.wait_stream(self._stream)
            self._step.several_streams = True
        self._stream = stream

    def begin_together(self) -> None:
        """Holds whatever is added, until `end_together` reads it: nothing else runs meanwhile."""
        self.flush()
        self._together = True

    def end_together(self) -> None:
        """Reads what was added since `begin_together` in as few launches as possible."""
        self._together = False
        if self._step.held:
            self.follow()
            self.flush()

    def reduce(self, node: Node, rows: Tensor, source: Tensor) -> None:
        """Reduces the rows of a tensor: at once, or as soon as it is worth it.

        Args:
            node: what is known of it.
            rows: contiguous [r, n], r and n > 0.
            source: the tensor, whose memory that may be.
        """
        if self.launcher is None:
            self._by_torch(node, rows)
            return
        if not self.launcher.takes(rows.dtype):
            rows = rows.to(work_dtype(rows.dtype))
        counted = not source.is_inference()
        if self._together and counted:
            self._hold(_Held(node, rows, source, tried=False))
        elif rows.numel() * rows.element_size() >= _SMALL or not counted:
            self._launch([rows], [node])
        elif node.put_off is PutOff.SAFE:
            self._hold(_Held(node, rows, source, tried=False))
        else:
            self._launch([rows], [node])
            if node.put_off is PutOff.UNKNOWN:
                node.put_off = PutOff.SEEN
            elif node.put_off is PutOff.SEEN:
                self._hold(_Held(node, rows, source, tried=True))

    def _hold(self, held: _Held) -> None:
        step = self._step
        step.held.append(held)
        step.bytes_held += held.rows.numel() * held.rows.element_size()
        limit = len(step.held) >= _MOST_HELD or step.bytes_held >= _MOST_BYTES_HELD
        if limit and not self._together:
            self.flush()

    def flush(self) -> None:
        """Reads the tensors that are held."""
        step = self._step
        held, step.held, step.bytes_held = step.held, [], 0
        for each in held:
            if each.is_written:
                each.node.put_off = PutOff.NEVER
                if not each.tried:
                    step.lost.append(each.node.index)
        for tried in (False, True):
            mine = [each for each in held if each.tried is tried and not each.is_written]
            for numbers in batches([(each.rows.dtype, _rows(each.node)) for each in mine]):
                chosen = [mine[number] for number in numbers]
                self._launch([each.rows for each in chosen], [each.node for each in chosen], tried)

    def _launch(self, tensors: list[Tensor], nodes: list[Node], tried: bool = False) -> None:
        launcher = self.launcher
        if launcher is not None:
            try:
                launched = launcher.launch(tensors, tuple(_rows(node) for node in nodes))
            except Exception as error:  # noqa: BLE001 - whatever a compiler fails of
                self.launcher, self._before = None, launcher
                _log.warning(
                    "comgra: Triton's kernels cannot be used on %s (%s: %s): torch's operations "
                    "serve, which takes several times as long",
                    self.device,
                    type(error).__name__,
                    error,
                )
            else:
                self._step.reads.append(_Read(nodes, launched, tried))
                return
        for tensor, node in zip(tensors, nodes, strict=True):
            if not tried:
                self._by_torch(node, tensor)

    def _by_torch(self, node: Node, rows: Tensor) -> None:
        sample = _sample(rows, node.stride) if node.count else None
        self._take(node, lean(rows), sample)

    def add_rows(self, node: Node, rows: Tensor) -> None:
        """Takes raw sums [r, 8] as they are."""
        self._take(node, rows, None)

    def _take(self, node: Node, sums: Tensor, sample: Tensor | None) -> None:
        self._step.reads.append(_Read([node]))
        self._step.sums.append(sums)
        if sample is not None:
            self._step.picks.append(sample)

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
        """Reduces what is left of this step and starts the copy to the host."""
        self.follow()
        self.flush()
        step = self._step
        if step.several_streams:  # memory of one stream, read on another
            for tensor in (*step.sums, *step.picks):
                tensor.record_stream(self._stream)
        sums = [exact(group.rows[0, :rows]) for group, rows, _ in part.groups] + step.sums
        grouped = [node for node in part.nodes if node.group is not None and node.count]
        picks = step.picks + [_group_sample(node) for node in grouped]
        launcher = self.launcher or self._before
        results = [] if launcher is None else [*launcher.results.used()]
        samples = [] if launcher is None else [*launcher.samples.used()]
        # what takes eight bytes comes first, so that all of it is aligned
        pieces = [_bytes_of(sums), *results, _bytes_of(picks), *samples]
        host, places = self._fetched([_bytes_of([piece]) for piece in pieces])
        event = None
        if self._module is not None:
            event = self._module.Event()
            event.record(self._stream)
        where = _Places(
            sums=places[0],
            results=places[1 : 1 + len(results)],
            picks=places[1 + len(results)],
            samples=places[2 + len(results) :],
        )
        return Fetch(host, event, form, part, _Contents(step.reads, grouped, step.lost, where))

    def _fetched(self, pieces: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """Starts copies into one piece of memory of the host; returns it, and each one's place."""
        ends = np.cumsum([0, *(piece.numel() for piece in pieces)]).tolist()
        pinned = self._module is not None
        host = buffer(ends[-1], dtype=torch.uint8, device=_HOST, pinned=pinned)
        for piece, place in zip(pieces, ends[:-1], strict=True):
            if piece.numel():
                host[place : place + piece.numel()].copy_(piece, non_blocking=True)
        return host, ends[:-1]


def _bytes_of(tensors: Sequence[Tensor]) -> Tensor:
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    if len(flat) == 1:
        return flat[0]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=_HOST)


def _rows(node: Node) -> Rows:
    return Rows(node.shape.samples, node.shape.elements, node.stride, node.count)


def _group_sample(node: Node) -> Tensor:
    assert node.group is not None
    return _sample(node.group.rows[0, node.row : node.row + node.shape.samples], node.stride)


def _sample(rows: Tensor, stride: int) -> Tensor:
    """Returns a copy of every `stride`-th element of contiguous rows, float32."""
    return rows.view(-1)[::stride].to(torch.float32, copy=True)


class _Places(NamedTuple):
    """Where, in bytes, what was fetched begins: all sums by torch, each block of an arena, ..."""

    sums: int
    results: list[int]
    picks: int
    samples: list[int]


class _Contents(NamedTuple):
    reads: list[_Read]
    grouped: list[Node]  # those of groups that have samples
    lost: list[int]
    places: _Places


class Fetch:
    """Copies under way: bytes in pinned memory, valid after the event."""

    def __init__(
        self, host: Tensor, event: Any, form: Form, part: Part, contents: _Contents
    ) -> None:
        self._host: Tensor | None = host
        self._event, self._form, self._part, self._contents = event, form, part, contents

    def wait(self, raw: NDArray[np.float64], histogram: NDArray[np.float32]) -> None:
        """Waits for the copy and puts it where the step's results lie; the second call is free."""
        host, self._host = self._host, None
        if host is None:
            return
        if self._event is not None:
            self._event.synchronize()
        data = host.numpy()
        self._put_sums(data, raw)
        self._put_launched(data, raw, histogram)
        self._put_picks(data, histogram)
        for index in self._contents.lost:
            raw[self._rows_of(index)] = np.nan

    def _rows_of(self, index: int) -> slice:
        start = int(self._form.starts[index])
        return slice(start, start + int(self._form.samples[index]))

    def _put_sums(self, data: NDArray[np.uint8], raw: NDArray[np.float64]) -> None:
        """Those that torch's operations have computed: of the groups, then of single tensors."""
        spans = [slice(first, first + rows) for _, rows, first in self._part.groups]
        reads = self._contents.reads
        spans += [self._rows_of(r.nodes[0].index) for r in reads if r.launched is None]
        at = self._contents.places.sums
        for span in spans:
            size = (span.stop - span.start) * RAW_STATISTICS * 8
            raw[span] = data[at : at + size].view(np.float64).reshape(-1, RAW_STATISTICS)
            at += size

    def _put_launched(
        self, data: NDArray[np.uint8], raw: NDArray[np.float64], histogram: NDArray[np.float32]
    ) -> None:
        places = self._contents.places
        for read in sorted(self._contents.reads, key=lambda read: read.tried):
            if read.launched is None:
                continue
            plan, (block, row), (part, first) = read.launched
            at = places.results[block] + row * RAW_STATISTICS * 8
            size = plan.results * RAW_STATISTICS * 8
            found = data[at : at + size].view(np.float64).reshape(-1, RAW_STATISTICS)
            merged = plan.merged(found)
            at = places.samples[part] + 4 * first if plan.samples else 0
            sample = data[at : at + 4 * plan.samples].view(np.float32)
            start = taken = 0
            for node in read.nodes:
                mine = merged[start : start + node.shape.samples]
                start += node.shape.samples
                span = self._rows_of(node.index)
                if read.tried:
                    _judge(node, mine, raw[span])
                    continue
                raw[span] = mine
                if node.count:
                    to = int(self._form.histogram_starts[node.index])
                    histogram[to : to + node.count] = sample[taken : taken + node.count]
                taken += node.count

    def _put_picks(self, data: NDArray[np.uint8], histogram: NDArray[np.float32]) -> None:
        reads = (read.nodes[0] for read in self._contents.reads if read.launched is None)
        picked = [node for node in reads if node.count and node.shape.elements]
        at = self._contents.places.picks
        for node in [*picked, *self._contents.grouped]:
            to = int(self._form.histogram_starts[node.index])
            histogram[to : to + node.count] = data[at : at + 4 * node.count].view(np.float32)
            at += 4 * node.count


def _judge(node: Node, later: NDArray[np.float64], at_once: NDArray[np.float64]) -> None:
    """A tensor was read at once and later: only if that gave the same it may be put off."""
    if node.put_off is PutOff.SEEN:
        same = np.array_equal(later, at_once, equal_nan=True)
        node.put_off = PutOff.SAFE if same else PutOff.NEVER


def device_step(device: torch.device) -> DeviceStep:
    """Returns what reduces tensors on a device as cheaply as it can be done there."""
    launcher = launcher_class(device.type)
    return DeviceStep(device, None if launcher is None else launcher(device))

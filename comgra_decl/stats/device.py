"""Reduce tensors on an accelerator and copy the sums to the host asynchronously.

All operations run on the stream that is current when the tensor is added, so they are ordered after
the operation that created the tensor and before any that overwrites it. The sums of a step and its
histogram elements are copied to pinned memory in one non-blocking copy, followed by an event. Only
the writer thread waits for that event. NaN values cause no extra cost, because no code branches on
values.

On a GPU with Triton, each element is read once (`fused`). Small tensors are deferred, so that one
launch reads many of them. If a tensor is written to before it is read, its `_version` changes. It
is then reported instead of recorded, and from the next step on, it is read immediately. Some writes
are not counted by torch, such as those through `.data` or by kernels outside torch. They are
detected by a trial: before a tensor is deferred for the first time, it is read both immediately and
later, and both readings must be identical.

On other accelerators, torch's operations are used (`sums.lean`).

A step uses at most a few tens of MiB on a device. Beyond that, results are copied to the host
within the step, and tensors with very many samples are reduced to `moments`.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comgra_decl import torch_private
from comgra_decl.records import RAW_STATISTICS, Raw
from comgra_decl.stats.fused import (
    Launched,
    Launcher,
    Pooled,
    Rows,
    kind_of,
    launcher_class,
    merge_pieces,
    to_host,
    warn_once,
)
from comgra_decl.stats.moments import MOMENTS, joined, moments
from comgra_decl.stats.quiet import buffer
from comgra_decl.stats.statistics import FORMULAS
from comgra_decl.stats.sums import MOST_BLOCK, exact, lean
from comgra_decl.stats.support import (
    CannotReduceError,
    as_numpy,
    is_one_block,
    memory_address,
    parts_of,
    real,
    work_dtype,
)
from comgra_decl.stats.trie import Form, Node, Part, PutOff

ASYNCHRONOUS = ("cuda", "xpu")
"""Device types with streams, events and pinned copies."""
AWAY = (*ASYNCHRONOUS, "mps")
"""Device types on which tensors are reduced. Tensors on other devices are copied to the host and
read there."""

_HOST = torch.device("cpu")
_NOTHING = torch.empty(0, dtype=torch.uint8)

_SMALL = 1 << 20
"""Size in bytes from which a tensor is read immediately. At this size, a separate launch costs
little.
"""
_MOST_HELD, _MOST_BYTES_HELD = 64, 16 << 20
"""Maximum number of deferred tensors, and of bytes in them, before they are read together."""

_MOST_COPIED = 16 << 20
"""If a tensor must be copied to be read and has more bytes than this, it is copied in parts."""
_PART = 1 << 20
"""Number of elements in such a part: 4 or 8 MiB. Reading it takes the same amount again."""

_ROUNDING = 1e-5  # relative; float32 lanes add up to 64 numbers

OVERWRITTEN = "it was written in place before it was read; from now on it is read immediately"


class Held:
    """A deferred tensor.

    Args:
        node: node of the tensor.
        rows: contiguous memory with its numbers.
        source: the tensor itself if `rows` is its memory; a view created without autograd counts no
        versions. None for a private copy, to which no other code writes.
        tried: whether it was also read immediately.
    """

    __slots__ = ("node", "rows", "source", "tried", "version")

    def __init__(
        self, node: Node, rows: Tensor, source: Tensor | None, *, tried: bool = False
    ) -> None:
        self.node, self.rows, self.source, self.tried = node, rows, source, tried
        self.version = 0 if source is None else source._version

    @property
    def index(self) -> int:
        """Number of the tensor within the step."""
        return self.node.index

    @property
    def is_written(self) -> bool:
        """Whether the tensor has been written to since it was deferred."""
        return self.source is not None and self.source._version != self.version

    def shows(self, tensor: Tensor, batch_dim: int | None, values: bool) -> bool:
        """Whether this is the given tensor, unchanged and reduced in the same way."""
        shape = self.node.shape
        same = self.source is tensor and not values and shape.batch_dim == batch_dim
        return same and not self.is_written


@dataclass
class _Read:
    """Nodes whose results are in device memory; `tried`: only for comparison."""

    nodes: list[Node]
    launched: Launched | None = None  # None: computed by torch's operations, in order
    tried: bool = False


class _Parted(NamedTuple):
    """A tensor read in parts, with its results on the host, as bytes that become valid later.

    Attributes:
        sums: first sample, elements per row, and raw sums of each part.
        sample: histogram elements, if any.
    """

    node: Node
    sums: list[tuple[int, int, Tensor]]
    sample: Tensor


@dataclass
class _Step:
    """One device's contribution to the current step."""

    reads: list[_Read] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)  # by torch's operations, as in `reads`
    picks: list[Tensor] = field(default_factory=list)  # their histogram samples, if any
    pooled: list[tuple[Node, Pooled]] = field(default_factory=list)
    # by torch's operations: raw sums of sample chunks, as bytes on the host
    chunks: list[tuple[Node, Tensor]] = field(default_factory=list)
    parted: list[_Parted] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    bytes_held: int = 0
    bytes_copied: int = 0  # those of private copies
    lost: list[int] = field(default_factory=list)
    several_streams: bool = False


class DeviceStep:
    """One device's contribution to the current step; reused for later steps.

    Args:
        device: the device.
        launcher: launcher of the fused kernels; None: use torch's operations.
    """

    def __init__(self, device: torch.device, launcher: Launcher | None = None) -> None:
        self.device = device
        self.launcher = launcher
        self._before: Launcher | None = None  # failed in this step after reading part of it
        self._module: Any = getattr(torch, device.type) if device.type in ASYNCHRONOUS else None
        self._stream: Any = None  # last stream used; kept across steps, since they share memory
        self._address = 0  # address of that stream, on CUDA
        self.wide = wide_dtype(device)
        self._together = False
        self._step = _Step()

    def restart(self) -> None:
        """Discard the current step."""
        self._step = _Step()
        self._before = None
        if self.launcher is not None:
            self.launcher.restart()

    def take_compiling(self) -> float:
        """Return the seconds spent compiling kernels since the last call."""
        launcher = self.launcher or self._before
        seconds = 0.0
        if launcher is not None:
            seconds, launcher.compiling = launcher.compiling, 0.0
        return seconds

    @property
    def lost(self) -> list[int]:
        """Indices of the tensors that were written to before they could be read."""
        return self._step.lost

    def follow(self) -> None:
        """Order later work on the current stream after this object's work on other streams.

        Raises:
            CannotReduceError: a graph is being captured, which would replay our operations.
        """
        if self._module is None:
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CannotReduceError("cannot reduce a tensor while a CUDA graph is being captured")
        stream = self._module.current_stream(self.device)
        if self._stream is not None and stream != self._stream:
            with self._module.stream(self._stream):
                self.flush()  # on the stream where the deferred tensors were created
            stream.wait_stream(self._stream)
            self._step.several_streams = True
        self._stream = stream
        self._address = getattr(stream, "cuda_stream", 0)

    def _stays(self) -> bool:
        """Return whether `follow` would do nothing; costs a fraction of calling it."""
        if self._module is None:
            return True
        current: int = torch_private.raw_stream(self.device.index)
        return current == self._address and not torch.cuda.is_current_stream_capturing()

    def describe(self, node: Node, tensor: Tensor) -> None:
        """Fill in facts computed once per tensor of this device."""
        shape, launcher = node.shape, self.launcher
        node.size = Rows(shape.samples, shape.elements, node.stride, node.count)
        if launcher is None:
            return
        taken = launcher.takes(tensor.dtype)
        node.kind = kind_of(tensor.dtype if taken else work_dtype(tensor.dtype), node.size)
        plain = taken and tensor.layout is torch.strided and shape.batch_dim in (None, 0)
        if plain and tensor.numel() and not node.is_pooled:
            node.holder = self

    def hold(self, node: Node, tensor: Tensor) -> Held | None:
        """Defer a tensor unchanged; return None if the tensor needs more work (`reduce`).

        Calls no torch operation, so no mode or hook can observe it.
        """
        step = self._step
        if self.launcher is None or not (self._together or node.put_off is PutOff.SAFE):
            return None
        if not self._together and (
            len(step.held) >= _MOST_HELD - 1 or step.bytes_held + _SMALL >= _MOST_BYTES_HELD
        ):
            return None  # adding a tensor would cause all of them to be read now
        usual = tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_inference())
        if not (usual and memory_address(tensor) and self._stays()):
            return None
        held = Held(node, tensor, tensor)
        step.held.append(held)
        step.bytes_held += tensor.nbytes
        return held

    def let_go(self, held: Held) -> None:
        """Undo the last `hold`."""
        self._step.held.remove(held)
        self._step.bytes_held -= held.rows.nbytes

    def begin_together(self) -> None:
        """Defer all added tensors until `end_together`; no other code runs in between."""
        self.flush()
        self._together = True

    def end_together(self) -> None:
        """Read all tensors added since `begin_together`, in as few launches as possible."""
        self._together = False
        if self._step.held:
            self.follow()
            self.flush()

    def reduce(self, node: Node, rows: Tensor, source: Tensor) -> None:
        """Reduce the rows of a tensor, immediately or deferred.

        Args:
            node: node of the tensor.
            rows: contiguous tensor of shape [r, n], r and n > 0.
            source: the tensor, which may own that memory.
        """
        if self.launcher is None:
            self._by_torch(node, rows)
            return
        if node.is_pooled:
            self._pool(node, rows)
            return
        if not self.launcher.takes(rows.dtype):
            rows = rows.to(work_dtype(rows.dtype))
        counted = not source.is_inference()
        owner = source if counted and rows.data_ptr() == source.data_ptr() else None
        if self._together and counted:
            self._hold(Held(node, rows, owner))
        elif rows.nbytes >= _SMALL or not counted:
            self._launch([rows], [node])
        elif node.put_off is PutOff.SAFE:
            self._hold(Held(node, rows, owner))
        else:
            self._launch([rows], [node])
            if node.put_off is PutOff.UNKNOWN:
                node.put_off = PutOff.SEEN
            elif node.put_off is PutOff.SEEN:
                self._hold(Held(node, rows, owner, tried=True))

    def must_copy_much(self, tensor: Tensor, batch_dim: int | None) -> bool:
        """Whether `reduce` would need a copy of the tensor that exceeds 16 MiB."""
        if tensor.numel() * work_dtype(tensor.dtype).itemsize <= _MOST_COPIED:
            return False
        converted = self.launcher is not None and not self.launcher.takes(tensor.dtype)
        altered = converted or tensor.is_complex() or tensor.is_neg()
        return altered or not is_one_block(tensor, batch_dim)

    def reduce_in_parts(self, node: Node, tensor: Tensor) -> None:
        """Reduce a tensor immediately, and copy a part of it at a time.

        Args:
            node: node of the tensor.
            tensor: any tensor with elements.
        """
        sums, picks, read = [], [], 0
        for first, part in parts_of(tensor.detach(), node.shape.batch_dim, _PART):
            rows = real(part)
            rows = rows.to(work_dtype(rows.dtype))
            sums.append((first, rows.shape[1], self._chunk(lean(rows, self.wide))))
            if node.count:
                picks.append(_sample(rows, node.stride, first=-read % node.stride))
            read += rows.numel()
        sample = torch.cat(picks) if picks else _NOTHING
        self._step.parted.append(_Parted(node, sums, to_host(sample)))

    def _hold(self, held: Held) -> None:
        step = self._step
        step.held.append(held)
        step.bytes_held += held.rows.nbytes
        step.bytes_copied += 0 if held.source is not None else held.rows.nbytes
        limit = len(step.held) >= _MOST_HELD or step.bytes_held >= _MOST_BYTES_HELD
        if (limit and not self._together) or step.bytes_copied >= _MOST_BYTES_HELD:
            self.flush()

    def flush(self) -> None:
        """Read the deferred tensors."""
        step = self._step
        held, step.held, step.bytes_held, step.bytes_copied = step.held, [], 0, 0
        kinds: dict[Hashable, list[Held]] = {}
        for each in held:
            if not each.is_written:
                kinds.setdefault((each.node.kind, each.tried), []).append(each)
                continue
            each.node.put_off = PutOff.NEVER
            if not each.tried:
                step.lost.append(each.node.index)
        for mine in kinds.values():
            nodes = [each.node for each in mine]
            self._launch([each.rows for each in mine], nodes, mine[0].tried)

    def _launch(self, tensors: list[Tensor], nodes: list[Node], tried: bool = False) -> None:
        launcher = self.launcher
        if launcher is not None:
            try:
                launched = launcher.launch(tensors, tuple([node.size for node in nodes]))
            except Exception as error:  # noqa: BLE001 - a compiler can fail in any way
                self._give_up(launcher, error)
            else:
                self._step.reads.append(_Read(nodes, launched, tried))
                return
        for tensor, node in zip(tensors, nodes, strict=True):
            if not tried:
                rows = tensor.detach().view(node.shape.samples, node.shape.elements)
                self._by_torch(node, rows)

    def _pool(self, node: Node, rows: Tensor) -> None:
        launcher = self.launcher
        assert launcher is not None
        if not launcher.takes(rows.dtype):
            rows = rows.to(work_dtype(rows.dtype))
        try:
            pooled = launcher.pool(rows, node.size, node.kept)
        except Exception as error:  # noqa: BLE001 - a compiler can fail in any way
            self._give_up(launcher, error)
            self._by_torch(node, rows)
        else:
            self._step.pooled.append((node, pooled))

    def _give_up(self, launcher: Launcher, error: Exception) -> None:
        self.launcher, self._before = None, launcher
        warn_once(str(self.device), error)

    def _by_torch(self, node: Node, rows: Tensor) -> None:
        sample = _sample(rows, node.stride) if node.count else None
        self._take(node, lean(rows[: node.kept], self.wide), sample)
        if node.is_pooled:
            chunks = rows.split(max(1, MOST_BLOCK // node.shape.elements))
            self._step.chunks += [(node, self._chunk(lean(chunk, self.wide))) for chunk in chunks]

    def _chunk(self, sums: Tensor) -> Tensor:
        if self.wide is torch.float64:
            return to_host(sums)
        return _bytes_of([sums.to(_HOST).to(torch.float64)])

    def add_rows(self, node: Node, rows: Tensor) -> None:
        """Add precomputed raw sums of shape [r, 8]."""
        self._take(node, rows, None)

    def _take(self, node: Node, sums: Tensor, sample: Tensor | None) -> None:
        self._step.reads.append(_Read([node]))
        self._step.sums.append(sums)
        if sample is not None:
            self._step.picks.append(sample)

    def to_host(self, value: Tensor) -> NDArray[Any]:
        """Return an array that holds a copy of `value` as soon as the step's event has passed."""
        value = value.resolve_conj().resolve_neg().contiguous()
        if value.dtype == torch.complex32:
            value = value.to(torch.complex64)
        host = buffer(
            *value.shape, dtype=value.dtype, device=_HOST, pinned=self._module is not None
        )
        host.copy_(value, non_blocking=self._module is not None)
        return as_numpy(host)

    def launch(self, form: Form, part: Part) -> Fetch:
        """Reduce the rest of this step and start the copy to the host."""
        self.follow()
        self.flush()
        step = self._step
        if step.several_streams:  # memory of one stream is read on another
            for tensor in (*step.sums, *step.picks):
                tensor.record_stream(self._stream)
        sums = [self._group_sums(group.rows[0, :rows]) for group, rows, _ in part.groups]
        sums += step.sums
        if self.wide is not torch.float64 and sums:  # a single copy, since each blocks the program
            sums = [torch.cat(sums).to(_HOST).to(torch.float64)]
        grouped = [node for node in part.nodes if node.group is not None and node.count]
        picks = step.picks + [_group_sample(node) for node in grouped]
        launcher = self.launcher or self._before
        arenas = () if launcher is None else launcher.arenas
        results, samples, moments = [[*arena.used()] for arena in arenas] or ([], [], [])
        # samples have four bytes each: they come last to keep all aligned
        pieces = [_bytes_of(sums), *results, *moments, _bytes_of(picks), *samples]
        ends = np.cumsum([1, len(results), len(moments), 1]).tolist()
        fetched = self._fetched(pieces)
        shipped = [arena.shipped for arena in arenas] or [[], [], []]
        step.sums, step.picks = [], []  # free their memory before the copy is awaited
        event = None
        if self._module is not None:
            # a blocking event, since a spinning wait would keep a core busy
            how = {"blocking": True} if self.device.type == "cuda" else {}
            event = self._module.Event(**how)
            event.record(self._stream)
        hosts = _Hosts(
            sums=fetched[0],
            results=shipped[0] + fetched[1 : ends[1]],
            moments=shipped[2] + fetched[ends[1] : ends[2]],
            picks=fetched[ends[2]],
            samples=shipped[1] + fetched[ends[3] :],
        )
        return Fetch(event, form, part, _Contents(step, grouped, hosts))

    def _group_sums(self, rows: Tensor) -> Tensor:
        return exact(rows) if self.wide is torch.float64 else lean(rows, self.wide)

    def _fetched(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Start copies into one block of host memory; return each copy's part of it, as bytes."""
        sizes = [piece.nbytes for piece in pieces]
        pinned = self._module is not None
        host = buffer(sum(sizes), dtype=torch.uint8, device=_HOST, pinned=pinned).split(sizes)
        for piece, target in zip(pieces, host, strict=True):
            if target.numel():
                target.copy_(_bytes_of([piece]), non_blocking=pinned)
        return [*host]


def _bytes_of(tensors: Sequence[Tensor]) -> Tensor:
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    if len(flat) == 1:
        return flat[0]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=_HOST)


def _group_sample(node: Node) -> Tensor:
    assert node.group is not None
    return _sample(node.group.rows[0, node.row : node.row + node.shape.samples], node.stride)


def _sample(rows: Tensor, stride: int, *, first: int = 0) -> Tensor:
    """Return a float32 copy of every `stride`-th element of contiguous rows."""
    return rows.view(-1)[first::stride].to(torch.float32, copy=True)


class _Hosts(NamedTuple):
    """Locations of fetched data on the host, as bytes; for an arena, block by block."""

    sums: Tensor
    results: list[Tensor]
    moments: list[Tensor]
    picks: Tensor
    samples: list[Tensor]


class _Contents(NamedTuple):
    step: _Step
    grouped: list[Node]  # nodes of groups with samples
    hosts: _Hosts


class Fetch:
    """Pending copies in host memory, valid after the event."""

    def __init__(self, event: Any, form: Form, part: Part, contents: _Contents) -> None:
        self._event, self._form, self._part = event, form, part
        self._contents: _Contents | None = contents

    def wait(
        self,
        raw: NDArray[np.float64],
        histogram: NDArray[np.float32],
        aggregates: dict[int, NDArray[np.float64]],
    ) -> None:
        """Wait for the copy and store the step's results; a second call does nothing."""
        contents, self._contents = self._contents, None
        if contents is None:
            return
        if self._event is not None:
            self._event.synchronize()
        step, hosts = contents.step, contents.hosts
        self._put_sums(step, hosts, raw)
        self._put_launched(step, hosts, raw, histogram)
        self._put_picks(step, contents.grouped, hosts, histogram)
        self._put_pooled(step, hosts, raw, histogram)
        self._put_aggregates(step, hosts, aggregates)
        for parted in step.parted:
            self._put_parted(parted, raw, histogram, aggregates)
        for index in step.lost:
            raw[self._rows_of(index)] = np.nan

    def _rows_of(self, index: int) -> slice:
        start = int(self._form.starts[index])
        return slice(start, start + int(self._form.kept[index]))

    def _sample_of(self, node: Node) -> slice:
        start = int(self._form.histogram_starts[node.index])
        return slice(start, start + node.count)

    def _put_sums(self, step: _Step, hosts: _Hosts, raw: NDArray[np.float64]) -> None:
        """Store sums computed by torch's operations: groups first, then single tensors."""
        spans = [slice(first, first + rows) for _, rows, first in self._part.groups]
        spans += [self._rows_of(r.nodes[0].index) for r in step.reads if r.launched is None]
        found, at = _raw_sums(hosts.sums), 0
        for span in spans:
            raw[span] = found[at : at + span.stop - span.start]
            at += span.stop - span.start

    def _put_launched(
        self,
        step: _Step,
        hosts: _Hosts,
        raw: NDArray[np.float64],
        histogram: NDArray[np.float32],
    ) -> None:
        for read in sorted(step.reads, key=lambda read: read.tried):
            if read.launched is None:
                continue
            plan, (block, row), (part, first) = read.launched
            merged = plan.merged(_raw_sums(hosts.results[block])[row : row + plan.results])
            sample = _floats(hosts.samples[part])[first:] if plan.samples else _floats(_NOTHING)
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
                    histogram[self._sample_of(node)] = sample[taken : taken + node.count]
                taken += node.count

    def _put_picks(
        self, step: _Step, grouped: list[Node], hosts: _Hosts, histogram: NDArray[np.float32]
    ) -> None:
        reads = (read.nodes[0] for read in step.reads if read.launched is None)
        picked = [node for node in reads if node.count and node.shape.elements]
        sample, at = _floats(hosts.picks), 0
        for node in [*picked, *grouped]:
            histogram[self._sample_of(node)] = sample[at : at + node.count]
            at += node.count

    def _put_pooled(
        self,
        step: _Step,
        hosts: _Hosts,
        raw: NDArray[np.float64],
        histogram: NDArray[np.float32],
    ) -> None:
        for node, (rows, _, _, sample) in step.pooled:
            found = _raw_sums(hosts.results[rows[0]])
            raw[self._rows_of(node.index)] = found[rows[1] : rows[1] + node.kept]
            if node.count:
                picks = _floats(hosts.samples[sample[0]])
                histogram[self._sample_of(node)] = picks[sample[1] : sample[1] + node.count]

    def _put_parted(
        self,
        parted: _Parted,
        raw: NDArray[np.float64],
        histogram: NDArray[np.float32],
        aggregates: dict[int, NDArray[np.float64]],
    ) -> None:
        node, parts = parted.node, [_raw_sums(host) for _, _, host in parted.sums]
        numbers = [len(part) for part in parts]
        samples = np.concatenate(
            [
                first + np.arange(len(part))
                for (first, _, _), part in zip(parted.sums, parts, strict=True)
            ]
        )
        lengths = np.repeat([float(length) for _, length, _ in parted.sums], numbers)
        starts = np.flatnonzero(np.diff(samples, prepend=-1))
        merged = merge_pieces(np.concatenate(parts), starts, lengths)
        raw[self._rows_of(node.index)] = merged[: node.kept]
        if node.count:
            histogram[self._sample_of(node)] = _floats(parted.sample)
        if node.is_pooled:
            aggregates[node.index] = joined(moments(merged.T, node.shape.elements)[None])

    def _put_aggregates(
        self, step: _Step, hosts: _Hosts, aggregates: dict[int, NDArray[np.float64]]
    ) -> None:
        for node, pooled in step.pooled:
            block, place = pooled.moments
            found = hosts.moments[block].numpy().view(np.float64)
            parts = found.reshape(-1, len(FORMULAS), MOMENTS)[place : place + pooled.chunks]
            aggregates[node.index] = joined(parts)
        for node, group in groupby(step.chunks, key=itemgetter(0)):
            rows = [_raw_sums(chunk) for _, chunk in group]
            each = [moments(chunk.T, node.shape.elements) for chunk in rows]
            aggregates[node.index] = joined(np.stack(each))


def _raw_sums(host: Tensor) -> NDArray[np.float64]:
    return host.numpy().view(np.float64).reshape(-1, RAW_STATISTICS)


def _floats(host: Tensor) -> NDArray[np.float32]:
    return host.numpy().view(np.float32)


def _judge(node: Node, later: NDArray[np.float64], at_once: NDArray[np.float64]) -> None:
    """Allow a tensor to be deferred if the late and the immediate reading gave the same sums."""
    if node.put_off is PutOff.SEEN:
        same = is_same(later, at_once, node.shape.elements)
        node.put_off = PutOff.SAFE if same else PutOff.NEVER


def is_same(one: NDArray[np.float64], other: NDArray[np.float64], elements: int) -> bool:
    """Whether two sets of raw sums [r, 8] can come from the same elements, split differently.

    Counts, minimum and maximum are exact; sums may have been rounded differently.
    """
    exact = [Raw.MIN, Raw.MAX, Raw.NONZERO, Raw.NONFINITE]
    if not np.array_equal(one[:, exact], other[:, exact], equal_nan=True):
        return False
    with np.errstate(all="ignore"):
        (a, size), (b, _) = (_about_zero(rows, elements) for rows in (one, other))
        close = np.abs(a - b) <= _ROUNDING * size
    return bool((close | (a == b) | (np.isnan(a) & np.isnan(b))).all())


def _about_zero(
    rows: NDArray[np.float64], elements: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return sum, sum of magnitudes and sum of squares [3, r], and their scales."""
    pivot, total, absolute = rows[:, Raw.PIVOT], rows[:, Raw.SUM], rows[:, Raw.ABS_SUM]
    squares = rows[:, Raw.SQUARES] + pivot * (2.0 * total + elements * pivot)
    sums = np.stack([total + elements * pivot, absolute, squares])
    return sums, np.stack([absolute, absolute, squares])


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums on a device: float64 where supported."""
    if device.type == "mps":
        return torch.float32
    if device.type == "xpu":
        properties: Any = torch.xpu.get_device_properties(device)
        return torch.float64 if getattr(properties, "has_fp64", True) else torch.float32
    return torch.float64


def device_step(device: torch.device) -> DeviceStep:
    """Return the cheapest reducer for a device."""
    started = time.perf_counter()
    made = launcher_class(device.type)
    launcher = None if made is None else made(device)
    if launcher is not None:
        launcher.compiling = time.perf_counter() - started  # importing Triton counts too
    return DeviceStep(device, launcher)

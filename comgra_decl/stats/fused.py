"""Compute raw sums of many tensors on a GPU in few launches, reading each number once.

For tensors with the same sizes, the work of a launch is planned only once (`Plan`), and its table
remains on the device. There is one result for each piece of a long row and for each short row. The
results go to memory that every step reuses (`Arena`), and are fetched in one copy. The writer
thread merges the pieces of a row on the host, in float64.

The kernels are in `triton_kernels`; without Triton there is no `Launcher`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comgra_decl.records import RAW_STATISTICS, Raw
from comgra_decl.stats.moments import CHUNK_ROWS, MOMENTS
from comgra_decl.stats.quiet import buffer
from comgra_decl.stats.statistics import FORMULAS
from comgra_decl.stats.support import work_dtype

Floats = NDArray[np.float64]
_log = logging.getLogger("comgra_decl")

_WIDTHS = (16, 64, 256, 1024, 4096)
"""Tile widths for short rows: only a few, because each requires a compiled variant."""
_TILE = 4096
"""Number of elements per tile. Rows up to this length count as short."""
_BLOCK = 1024
"""Number of elements of a long row that a program reads at a time."""
_LEAST_PIECE, _MOST_PIECE = 4 * _BLOCK, 64 * _BLOCK
"""Number of elements per program; each float32 lane sums at most 64 of them."""
_PROGRAMS = 528
"""Number of programs that keep a GPU busy: four per multiprocessor of the largest GPUs."""
_MOST_PLANS, _MOST_TABLES = 512, 8 << 20
"""Maximum number of cached plans, and maximum size of their tables on the device, in bytes."""
_RESULT_ROWS, _SAMPLES = 1 << 14, 1 << 18
"""Number of rows and of samples per arena block: 1 MiB each."""
_KEPT = 8
"""Number of blocks of that size that an arena keeps between steps; larger ones are freed."""
_MOST_LIVE = 8 << 20
"""If an arena has more bytes than this on the device, it is copied to the host within the step."""
_MOMENT_ROWS = 1024
"""Number of samples whose moments a program computes."""
_LONG_CHUNK = CHUNK_ROWS // 16
"""Number of samples with long rows that are reduced at a time, one program for each, in tensors
with very many samples."""


class Rows(NamedTuple):
    """A contiguous tensor as rows, and its elements in the histogram sample."""

    rows: int
    length: int
    stride: int
    picked: int


class Plan:
    """How to read tensors of given sizes in one launch.

    Args:
        tensors: sizes of tensors of one dtype; rows are all long, or all short of one width.
        whole: whether to read each row in one piece, whatever its length.

    Attributes:
        width: tile width; 0 for long rows.
        table: int64 [programs, columns], see `triton_kernels`.
        results: number of result rows.
        samples: number of histogram elements.
        rows: number of rows of all tensors.
    """

    def __init__(self, tensors: Sequence[Rows], *, whole: bool = False) -> None:
        self.width = width_of(tensors[0].length)
        programs: list[NDArray[np.int64]] = []
        ends: list[NDArray[np.int64]] = []
        self.results = self.samples = self.rows = 0
        total = sum(each.rows * each.length for each in tensors)
        piece = min(_MOST_PIECE, max(_LEAST_PIECE, -(-total // (_PROGRAMS * _BLOCK)) * _BLOCK))
        if whole:
            piece = max(each.length for each in tensors)
        for number, each in enumerate(tensors):
            assert width_of(each.length) == self.width
            part = self._short(each) if self.width else self._long(each, piece)
            part[:, 0] = number
            part[:, 4] += self.results
            self._add_samples(part, each)
            programs.append(part)
            ends.append(self._ends(each, piece))
            self.results = int(ends[-1][-1])
            self.samples += each.picked
            self.rows += each.rows
        self.table = np.concatenate(programs)
        self._starts = np.concatenate([[0], *ends])[:-1]
        self._lengths = self.table[:, 2].astype(np.float64)

    def _short(self, each: Rows) -> NDArray[np.int64]:
        tile = _TILE // self.width
        first = np.arange(0, each.rows, tile)
        part = np.zeros((len(first), 9), np.int64)
        part[:, 1] = first * each.length
        part[:, 2] = each.length
        part[:, 3] = np.minimum(tile, each.rows - first)
        part[:, 4] = first
        return part

    def _long(self, each: Rows, piece: int) -> NDArray[np.int64]:
        first = np.arange(0, each.length, piece)
        part = np.zeros((each.rows, len(first), 9), np.int64)
        part[:, :, 1] = first + np.arange(each.rows)[:, None] * each.length
        part[:, :, 2] = np.minimum(piece, each.length - first)
        part[:, :, 3] = 1
        flat = part.reshape(-1, 9)
        flat[:, 4] = np.arange(len(flat))
        return flat

    def _ends(self, each: Rows, piece: int) -> NDArray[np.int64]:
        """Return the index after the last result of each row."""
        pieces = 1 if self.width else -(-each.length // piece)
        return self.results + pieces * np.arange(1, each.rows + 1)

    def _add_samples(self, part: NDArray[np.int64], each: Rows) -> None:
        """Assign to each program the sample elements that it already reads."""
        if not each.picked:
            part[:, 6] = 1
            return
        first, last = part[:, 1], part[:, 1] + part[:, 2] * part[:, 3]
        begin, end = -(-first // each.stride), -(-last // each.stride)
        part[:, 5], part[:, 6] = begin * each.stride, each.stride
        part[:, 7], part[:, 8] = end - begin, self.samples + begin

    def merged(self, results: Floats) -> Floats:
        """Return the raw sums [rows, 8] of whole rows, about the pivot of their first piece."""
        if self.width or len(results) == self.rows:
            return results
        return merge_pieces(results, self._starts, self._lengths)


def merge_pieces(results: Floats, starts: NDArray[np.intp], lengths: Floats) -> Floats:
    """Return the raw sums of whole rows, about the pivot of their first piece.

    Args:
        results: raw sums [pieces, 8], each about its own pivot; the pieces of a row are adjacent.
        starts: index of each row's first piece.
        lengths: numbers in each piece.
    """
    pivot = results[starts, Raw.PIVOT]
    pieces = np.diff(np.append(starts, len(results)))
    shift = results[:, Raw.PIVOT] - np.repeat(pivot, pieces)
    sums, squares = results[:, Raw.SUM], results[:, Raw.SQUARES]
    with np.errstate(all="ignore"):
        # shift to the common pivot; non-finite sums stay unchanged
        known = np.isfinite(sums)
        moved = np.where(known, sums + lengths * shift, sums)
        spread = squares + shift * (2.0 * np.where(known, sums, 0.0) + lengths * shift)
        out: Floats = np.add.reduceat(results, starts, axis=0)
        out[:, Raw.PIVOT] = pivot
        out[:, Raw.SUM] = np.add.reduceat(moved, starts)
        out[:, Raw.SQUARES] = np.add.reduceat(np.where(known, spread, squares), starts)
        out[:, Raw.MIN] = np.minimum.reduceat(results[:, Raw.MIN], starts)
        out[:, Raw.MAX] = np.maximum.reduceat(results[:, Raw.MAX], starts)
    return out


def width_of(length: int) -> int:
    """Return the tile width for rows of the given length; 0 for long rows."""
    return next((width for width in _WIDTHS if length <= width), 0)


class Arena:
    """Device memory for the results of a step's launches, reused by the next step.

    If a step produces much data, copies to the host start within the step and the memory is reused.

    Attributes:
        shipped: the first blocks on the host, uint8; valid once the stream has reached the copy.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, size: int, columns: int) -> None:
        self._device, self._dtype = device, dtype
        self._size, self._columns = size, columns
        self._blocks: list[Tensor] = []
        self._used: list[int] = []
        self.shipped: list[Tensor] = []

    def take(self, size: int) -> tuple[int, int]:
        """Return (block, row) of the next `size` rows.

        Work on previously taken rows must already have been queued on the stream, because this call
        may copy them.
        """
        if self._used and self._used[-1] + size <= len(self._blocks[len(self._used) - 1]):
            self._used[-1] += size
            return len(self.shipped) + len(self._used) - 1, self._used[-1] - size
        if sum(block.nbytes for block in self.used()) >= _MOST_LIVE:
            self.shipped += [to_host(block) for block in self.used()]
            self._clear()
        number = len(self._used)
        if number == len(self._blocks) or len(self._blocks[number]) < size:
            rows = max(size, self._size)
            block = buffer(rows, self._columns, dtype=self._dtype, device=self._device)
            self._blocks.insert(number, block)
        self._used.append(size)
        return len(self.shipped) + number, 0

    def block(self, number: int) -> Tensor:
        """Return the memory of the current block, [rows, columns]."""
        return self._blocks[number - len(self.shipped)]

    def used(self) -> Iterator[Tensor]:
        """Yield the taken rows that have not been copied yet, block by block."""
        for block, size in zip(self._blocks, self._used, strict=False):
            yield block[:size]

    def restart(self) -> None:
        """Discard everything taken; free blocks above the usual size."""
        self._clear()
        self.shipped = []

    def _clear(self) -> None:
        self._used.clear()
        self._blocks = [b for b in self._blocks if len(b) == self._size][:_KEPT]


def to_host(tensor: Tensor) -> Tensor:
    """Start a copy of contiguous memory to the host; return it as bytes, valid later."""
    source = tensor.reshape(-1).view(torch.uint8)
    pinned = tensor.device.type != "cpu"
    host = buffer(source.numel(), dtype=torch.uint8, device=torch.device("cpu"), pinned=pinned)
    host.copy_(source, non_blocking=True)
    return host


class Launched(NamedTuple):
    """Results of a launch and their locations."""

    plan: Plan
    results: tuple[int, int]
    samples: tuple[int, int]


class Pooled(NamedTuple):
    """Results for a tensor with very many samples and their locations.

    Attributes:
        rows: (block, row) of the raw sums of the first samples.
        moments: the same for the moments of chunks of all samples.
        chunks: number of chunks.
        sample: the same for the histogram's sample.
    """

    rows: tuple[int, int]
    moments: tuple[int, int]
    chunks: int
    sample: tuple[int, int]


class Launcher:
    """Launches the kernels on one device.

    Args:
        device: a GPU, or the host under Triton's interpreter.
    """

    def __init__(self, device: torch.device) -> None:
        from comgra_decl.stats import triton_kernels

        self._kernels: Any = triton_kernels
        self._device = device
        self._plans: dict[tuple[tuple[Rows, ...], bool], tuple[Plan, Tensor]] = {}
        self._table_bytes = 0
        self._handles: dict[Hashable, Any] = {}  # compiled handles by launch signature
        self._by_handle = True
        self.compiling = 0.0  # compile time in seconds, reset when read
        self.results = Arena(device, torch.float64, _RESULT_ROWS, RAW_STATISTICS)
        self.samples = Arena(device, torch.float32, _SAMPLES, 1)
        self.moments = Arena(device, torch.float64, _MOMENT_ROWS, len(FORMULAS) * MOMENTS)

    @property
    def arenas(self) -> tuple[Arena, Arena, Arena]:
        """All arenas: results, samples and moments."""
        return self.results, self.samples, self.moments

    def restart(self) -> None:
        """Discard the current step."""
        for arena in self.arenas:
            arena.restart()

    @staticmethod
    def takes(dtype: torch.dtype) -> bool:
        """Whether the kernels read this dtype directly; others are converted first."""
        return dtype in _POINTERS

    def launch(self, tensors: Sequence[Tensor], sizes: tuple[Rows, ...]) -> Launched:
        """Read contiguous tensors of one dtype whose rows have the same width.

        Args:
            tensors: tensors on the device; not retained.
            sizes: size of each tensor.
        """
        plan, table = self._plan(sizes)
        results, samples = self.results.take(plan.results), self.samples.take(plan.samples)
        into = self.results.block(results[0]), self.samples.block(samples[0])
        with self._here():
            self._read(tensors, sizes, plan, table, into, (results[1], samples[1]))
        return Launched(plan, results, samples)

    def pool(self, tensor: Tensor, rows: Rows, kept: int) -> Pooled:
        """Read a contiguous tensor with very many samples, one chunk of them at a time.

        Args:
            tensor: tensor on the device; not retained.
            rows: its size and histogram sample.
            kept: number of samples that keep a row of raw sums.
        """
        at_once = CHUNK_ROWS if width_of(rows.length) else _LONG_CHUNK
        chunks = tensor.view(rows.rows, rows.length).split(at_once)
        programs = [-(-len(chunk) // _MOMENT_ROWS) for chunk in chunks]
        first, moments = self.results.take(kept), self.moments.take(sum(programs))
        sample = self.samples.take(rows.picked)
        place, out = moments[1], self.moments.block(moments[0])
        with self._here():
            scratch = buffer(
                len(chunks[0]), RAW_STATISTICS, dtype=torch.float64, device=self._device
            )
            for chunk, number in zip(chunks, programs, strict=True):
                sizes = (Rows(len(chunk), rows.length, 1, 0),)
                plan, table = self._plan(sizes, whole=True)
                self._read([chunk], sizes, plan, table, (scratch, self.samples.block(sample[0])))
                if place == moments[1]:
                    self.results.block(first[0])[first[1] : first[1] + kept].copy_(scratch[:kept])
                arguments = scratch, out, len(chunk), rows.length, place
                self._run(self._kernels.row_moments, number, arguments, (_MOMENT_ROWS,))
                place += number
            if rows.picked:
                picks = self.samples.block(sample[0])[sample[1] : sample[1] + rows.picked]
                picks.copy_(tensor.view(-1, 1)[:: rows.stride])
        return Pooled(first, moments, sum(programs), sample)

    def _here(self) -> AbstractContextManager[Any]:
        """Make this device current, because launches go to the current device."""
        if self._device.type != "cuda" or torch.cuda.current_device() == self._device.index:
            return nullcontext()
        return torch.cuda.device(self._device)

    def _read(
        self,
        tensors: Sequence[Tensor],
        sizes: Sequence[Rows],
        plan: Plan,
        table: Tensor,
        into: tuple[Tensor, Tensor],
        places: tuple[int, int] = (0, 0),
    ) -> None:
        dtype, many, sampled = tensors[0].dtype, len(tensors) > 1, plan.samples > 0
        first = _readable(tensors[0].detach())
        pointers = self._pointers(tensors) if many else table
        arguments = first, pointers, table, *into, *places
        language = self._kernels.tl.dtype
        type_, work = language(_POINTERS[dtype]), language(_WORK[work_dtype(dtype)])
        constants: tuple[Any, ...]
        if plan.width:
            kernel = self._kernels.short_rows
            constants = type_, work, _TILE // plan.width, plan.width, many, sampled
        else:
            kernel = self._kernels.long_rows
            aligned = _is_aligned(tensors, sizes, first.element_size())
            constants = type_, work, _BLOCK, many, aligned, sampled
        self._run(kernel, len(plan.table), arguments, constants)

    def _run(
        self, kernel: Any, programs: int, arguments: Sequence[Any], constants: Sequence[Any]
    ) -> None:
        """Launch a kernel, through its compiled handle if it was launched before.

        Triton's own lookup of the compiled variant takes longer than the launch. For these kernels,
        only the alignment of the first address matters.
        """
        grid = (programs, 1, 1)
        key = (kernel, arguments[0].data_ptr() % 16 == 0, arguments[0].dtype, *constants)
        handle = self._handles.get(key)
        if handle is not None and self._by_handle:
            try:
                handle[grid](*arguments, *constants)
            except TypeError:  # other Triton versions take other arguments
                self._by_handle = False
            else:
                return
        started = time.perf_counter()
        handle = kernel[grid](*arguments, *constants)
        if key not in self._handles:
            self._handles[key] = handle
            self.compiling += time.perf_counter() - started

    def _plan(self, sizes: tuple[Rows, ...], *, whole: bool = False) -> tuple[Plan, Tensor]:
        found = self._plans.get((sizes, whole))
        if found is None:
            plan = Plan(sizes, whole=whole)
            self._table_bytes += plan.table.nbytes
            if len(self._plans) >= _MOST_PLANS or self._table_bytes > _MOST_TABLES:
                self._plans.clear()
                self._table_bytes = plan.table.nbytes
            table = torch.from_numpy(plan.table)
            found = plan, table.to(self._device, non_blocking=True, copy=True)
            self._plans[sizes, whole] = found
        return found

    def _pointers(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the start addresses of tensors, on the device.

        The copy is made from unpinned memory. The driver has read that memory when the call
        returns, so the memory can be freed without waiting for the device.
        """
        addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)
        return addresses.to(self._device, non_blocking=True, copy=True)


_POINTERS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.bool: "uint8",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
}
_WORK = {torch.float32: "fp32", torch.float64: "fp64"}


def _readable(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def _is_aligned(tensors: Sequence[Tensor], sizes: Sequence[Rows], size: int) -> bool:
    """Whether each row starts at a multiple of 16 bytes, and therefore also each piece of a row."""
    lengths = (each.length * size for each in sizes if each.rows > 1)
    addresses = (tensor.data_ptr() for tensor in tensors)
    return not any(number % 16 for number in (*lengths, *addresses))


def kind_of(dtype: torch.dtype, size: Rows) -> Hashable:
    """Return a key for tensors that one launch can cover: same dtype, same width."""
    return dtype, width_of(size.length)


@cache
def launcher_class(device_type: str) -> type[Launcher] | None:
    """Return the launcher class for a device type; None if Triton does not support it.

    The host is supported only under Triton's interpreter, for tests.
    """
    if device_type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        return None
    try:
        from comgra_decl.stats import triton_kernels  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "triton":
            warn_once(device_type, error)
        return None
    except Exception as error:  # noqa: BLE001 - it can fail in any way
        warn_once(device_type, error)
        return None
    return Launcher


_warned: set[tuple[str, str]] = set()


def warn_once(device: str, error: Exception) -> None:
    """Log, once per process, why torch's operations are used for a device."""
    why = f"{type(error).__name__}: {error}"
    if (device, why) in _warned:
        return
    _warned.add((device, why))
    _log.warning(
        "comgra: Triton's kernels cannot be used on %s (%s): torch's operations are used instead "
        "and take several times as long",
        device,
        why,
    )

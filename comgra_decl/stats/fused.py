"""Raw sums of any number of tensors on a GPU in few launches, each number read once.

What a launch covers is worked out once for tensors of the same sizes (`Plan`) and its table stays
on the device. Its results, one row for each piece of a long row and for each short row, stay in
memory that every step uses again (`Arena`), until all of them are fetched in one copy. The pieces
of a row are put together on the host, in float64, by the thread that writes.

The kernels are those of `triton_kernels`; where Triton is missing, there is no `Launcher`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comgra_decl.records import RAW_STATISTICS, Raw
from comgra_decl.stats.quiet import buffer
from comgra_decl.stats.support import work_dtype

Floats = NDArray[np.float64]

_WIDTHS = (16, 64, 256, 1024, 4096)
"""Of the tiles that short rows are read in: each is a variant to compile, so there are few."""
_TILE = 4096
"""Numbers of a tile: rows of up to so many are short ones."""
_BLOCK = 1024
"""Numbers of a long row that a program reads at a time."""
_LEAST_PIECE, _MOST_PIECE = 4 * _BLOCK, 64 * _BLOCK
"""Numbers that a program reads: float32 lanes add up at most 64 of them."""
_PROGRAMS = 528
"""Programs that keep a GPU busy: four for each multiprocessor of the largest ones."""
_MOST_PLANS = 512
_RESULT_ROWS, _SAMPLES = 1 << 14, 1 << 18
"""Rows and samples of one block of an arena: 1 MiB each."""
_KEPT = 8
"""Blocks of that size that an arena keeps from step to step; larger ones are given back."""


class Rows(NamedTuple):
    """A contiguous tensor as rows, and which of its elements are its histogram's sample."""

    rows: int
    length: int
    stride: int
    picked: int


class Plan:
    """How tensors of given sizes are read in one launch.

    Args:
        tensors: of one dtype; all of their rows long, or all short and of one width.

    Attributes:
        width: of the tiles; 0 where rows are long.
        table: int64 [programs, columns], as `triton_kernels` says.
        results: rows of results.
        samples: histogram elements.
        rows: rows of all the tensors.
    """

    def __init__(self, tensors: Sequence[Rows]) -> None:
        self.width = width_of(tensors[0].length)
        programs: list[NDArray[np.int64]] = []
        ends: list[NDArray[np.int64]] = []
        self.results = self.samples = self.rows = 0
        total = sum(each.rows * each.length for each in tensors)
        piece = min(_MOST_PIECE, max(_LEAST_PIECE, -(-total // (_PROGRAMS * _BLOCK)) * _BLOCK))
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
        """Returns the results after the last one of each row."""
        pieces = 1 if self.width else -(-each.length // piece)
        return self.results + pieces * np.arange(1, each.rows + 1)

    def _add_samples(self, part: NDArray[np.int64], each: Rows) -> None:
        """Gives each program the elements of the sample that it reads anyway."""
        if not each.picked:
            part[:, 6] = 1
            return
        first, last = part[:, 1], part[:, 1] + part[:, 2] * part[:, 3]
        begin, end = -(-first // each.stride), -(-last // each.stride)
        part[:, 5], part[:, 6] = begin * each.stride, each.stride
        part[:, 7], part[:, 8] = end - begin, self.samples + begin

    def merged(self, results: Floats) -> Floats:
        """Returns the raw sums [rows, 8] of whole rows, about the pivot of their first piece."""
        if self.width or len(results) == self.rows:
            return results
        starts = self._starts
        pivot = results[starts, Raw.PIVOT]
        pieces = np.diff(np.append(starts, len(results)))
        shift = results[:, Raw.PIVOT] - np.repeat(pivot, pieces)
        sums, squares = results[:, Raw.SUM], results[:, Raw.SQUARES]
        with np.errstate(all="ignore"):
            # about another pivot; what is not finite stays what it is
            known = np.isfinite(sums)
            moved = np.where(known, sums + self._lengths * shift, sums)
            spread = squares + shift * (2.0 * np.where(known, sums, 0.0) + self._lengths * shift)
            out: Floats = np.add.reduceat(results, starts, axis=0)
            out[:, Raw.PIVOT] = pivot
            out[:, Raw.SUM] = np.add.reduceat(moved, starts)
            out[:, Raw.SQUARES] = np.add.reduceat(np.where(known, spread, squares), starts)
            out[:, Raw.MIN] = np.minimum.reduceat(results[:, Raw.MIN], starts)
            out[:, Raw.MAX] = np.maximum.reduceat(results[:, Raw.MAX], starts)
        return out


def width_of(length: int) -> int:
    """Returns the width of the tiles in which rows of a length are read; 0: they are long."""
    return next((width for width in _WIDTHS if length <= width), 0)


class Arena:
    """Memory on a device for what the launches of a step leave, used again by the next one."""

    def __init__(self, device: torch.device, dtype: torch.dtype, size: int, columns: int) -> None:
        self._device, self._dtype = device, dtype
        self._size, self._columns = size, columns
        self._blocks: list[Tensor] = []
        self._used: list[int] = []

    def take(self, size: int) -> tuple[int, int]:
        """Returns (block, place) of the next `size` rows."""
        if self._used and self._used[-1] + size <= len(self._blocks[len(self._used) - 1]):
            self._used[-1] += size
            return len(self._used) - 1, self._used[-1] - size
        number = len(self._used)
        if number == len(self._blocks) or len(self._blocks[number]) < size:
            rows = max(size, self._size)
            block = buffer(rows, self._columns, dtype=self._dtype, device=self._device)
            self._blocks.insert(number, block)
        self._used.append(size)
        return number, 0

    def block(self, number: int) -> Tensor:
        """Returns the memory of a block, [rows, columns]."""
        return self._blocks[number]

    def used(self) -> Iterator[Tensor]:
        """Yields what was taken, block by block."""
        for block, size in zip(self._blocks, self._used, strict=False):
            yield block[:size]

    def restart(self) -> None:
        """Forgets what was taken; what is larger than usual is given back."""
        self._used.clear()
        self._blocks = [b for b in self._blocks if len(b) == self._size][:_KEPT]


class Launched(NamedTuple):
    """What a launch leaves, and where."""

    plan: Plan
    results: tuple[int, int]
    samples: tuple[int, int]


class Launcher:
    """Launches the kernels on one device.

    Args:
        device: a GPU, or the host under Triton's interpreter.
    """

    def __init__(self, device: torch.device) -> None:
        from comgra_decl.stats import triton_kernels

        self._kernels: Any = triton_kernels
        self._device = device
        self._plans: dict[tuple[Rows, ...], Plan] = {}
        self._tables: dict[tuple[Rows, ...], Tensor] = {}
        self.results = Arena(device, torch.float64, _RESULT_ROWS, RAW_STATISTICS)
        self.samples = Arena(device, torch.float32, _SAMPLES, 1)

    @staticmethod
    def takes(dtype: torch.dtype) -> bool:
        """Whether the kernels read this dtype; others are converted first."""
        return dtype in _POINTERS

    def launch(self, tensors: Sequence[Tensor], sizes: tuple[Rows, ...]) -> Launched:
        """Reads contiguous tensors of one dtype, all of whose rows have the same width.

        Args:
            tensors: on the device; not kept.
            sizes: of each.
        """
        plan, table = self._plan(sizes)
        dtype = tensors[0].dtype
        results, samples = self.results.take(plan.results), self.samples.take(plan.samples)
        many = len(tensors) > 1
        first = _readable(tensors[0])
        constants: dict[str, Any] = {
            "TYPE": self._kernels.tl.dtype(_POINTERS[dtype]),
            "WORK": self._kernels.tl.dtype(_WORK[work_dtype(dtype)]),
            "MANY": many,
            "SAMPLED": plan.samples > 0,
        }
        if plan.width:
            kernel = self._kernels.short_rows
            constants |= {"WIDTH": plan.width, "ROWS": _TILE // plan.width}
        else:
            kernel = self._kernels.long_rows
            size = first.element_size()
            constants |= {"BLOCK": _BLOCK, "ALIGNED": _is_aligned(tensors, sizes, size)}
        kernel[(len(plan.table),)](
            first,
            self._pointers(tensors) if many else table,
            table,
            self.results.block(results[0]),
            self.samples.block(samples[0]),
            results[1],
            samples[1],
            **constants,
        )
        return Launched(plan, results, samples)

    def _plan(self, sizes: tuple[Rows, ...]) -> tuple[Plan, Tensor]:
        plan = self._plans.get(sizes)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
                self._tables.clear()
            plan = self._plans[sizes] = Plan(sizes)
            table = torch.from_numpy(plan.table)
            self._tables[sizes] = table.to(self._device, non_blocking=True, copy=True)
        return plan, self._tables[sizes]

    def _pointers(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns where tensors begin, on the device.

        From memory that is not pinned: the driver has read it when the call returns, so that it
        may be freed, and nobody waits for the device.
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
    """Whether each row begins at a multiple of 16 bytes; pieces of rows do, if rows do."""
    lengths = (each.length * size for each in sizes if each.rows > 1)
    addresses = (tensor.data_ptr() for tensor in tensors)
    return not any(number % 16 for number in (*lengths, *addresses))


def batches(sizes: Sequence[tuple[torch.dtype, Rows]]) -> list[list[int]]:
    """Returns which of some tensors one launch each covers: one dtype, one width."""
    kinds: dict[tuple[torch.dtype, int], list[int]] = {}
    for number, (dtype, each) in enumerate(sizes):
        kinds.setdefault((dtype, width_of(each.length)), []).append(number)
    return list(kinds.values())


@cache
def launcher_class(device_type: str) -> type[Launcher] | None:
    """Returns what launches kernels on a type of device; None where Triton cannot.

    The host is such a device only under Triton's interpreter, for tests.
    """
    if device_type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        return None
    try:
        from comgra_decl.stats import triton_kernels  # noqa: F401
    except Exception:  # noqa: BLE001 - whatever is wrong with it, torch's own operations serve
        return None
    return Launcher

"""Reduce the short rows of several steps with the same layout together.

A small network has dozens of tensors with a few hundred elements each. If every step were reduced
separately, the calls would cost more than the arithmetic. The training thread therefore only copies
the tensors, and a `Batch` reduces the copies from many steps with one set of operations. It does so
when its memory is full or when the writer thread needs the results, whichever comes first.
"""

from __future__ import annotations

from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comgra_decl.records import RAW_STATISTICS
from comgra_decl.stats.memory import Memory
from comgra_decl.stats.quiet import quiet
from comgra_decl.stats.sums import BLOCK, Rows, compiled, exact, small
from comgra_decl.stats.trie import Form, Pick

SERIAL_ELEMENTS = 1 << 15
"""torch runs operations below this size on one thread. The writer thread uses only such operations,
because its first parallel operation would start a second thread pool in addition to the program's.
"""
RESULT_BYTES = 16 << 20
"""Maximum size of one batch's results, in bytes, unless a single step needs more."""


class Batch:
    """Results of up to `capacity` steps, in slots `first`, `first + 1`, ... of the groups.

    `raw` and `histogram` are allocated separately, because steps return views of them. After
    `settle`, nothing writes to them until the last step has been stored and `memory` reuses them.
    """

    def __init__(
        self, form: Form, host: torch.device, first: int, *, most: int, memory: Memory
    ) -> None:
        self.form = form
        picked = int(form.histogram_starts[-1])
        step_bytes = max(1, 8 * RAW_STATISTICS * form.rows + 4 * picked)
        capacity = self.capacity = min(most, max(1, RESULT_BYTES // step_bytes))
        self.raw = memory.take((capacity, form.rows, RAW_STATISTICS), np.float64)
        self.histogram = memory.take((capacity, picked), np.float32)
        self.finished = 0
        self.settled = 0
        self._first = first
        self._lock = Lock()
        # keeps this memory alive: a group that grows later replaces only its own reference
        self._groups = [(g.rows, rows, row) for g, rows, row in form.parts[host].groups]
        self._picks = [(p.group.rows, p) for p in form.picks]
        self.deferred = bool(self._groups)

    def settle(self, upto: int | None = None, *, writer: bool = False) -> None:
        """Compute the results of all finished steps. Idempotent; callable from either thread.

        Args:
            upto: return early if this many steps are already final.
            writer: whether the writer thread is calling, which must use only one thread.
        """
        if upto is not None and self.settled >= upto:
            return
        with self._lock, quiet():
            start, stop = self.settled, self.finished
            if start < stop:
                limit = SERIAL_ELEMENTS - 1 if writer else BLOCK * torch.get_num_threads()
                self._reduce(start, stop, limit)
                self._pick(start, stop)
                self.settled = stop

    def _reduce(self, start: int, stop: int, limit: int) -> None:
        for memory, rows, row in self._groups:
            x = memory[self._first + start : self._first + stop, :rows]
            out = self.raw[start:stop, row : row + rows]
            if compiled(x, out):
                continue
            steps = max(1, limit // (rows * x.shape[2]))
            height = rows if steps > 1 else max(1, limit // x.shape[2])
            for s in range(0, stop - start, steps):
                for r in range(0, rows, height):
                    _sums(x[s : s + steps, r : r + height], out[s : s + steps, r : r + height])

    def _pick(self, start: int, stop: int) -> None:
        if not self._picks:
            return
        samples = torch.from_numpy(self.histogram)[start:stop]
        for memory, pick in self._picks:
            x = memory[self._first + start : self._first + stop, pick.row : pick.row + pick.rows]
            samples[:, pick.start : pick.stop].copy_(_strided(x, pick))


def _sums(x: Tensor, out: Rows) -> None:
    if x.dtype is torch.float32:
        small(x, out)
    else:
        out[...] = exact(x).numpy()


def _strided(x: Tensor, pick: Pick) -> Tensor:
    return x.flatten(1)[:, :: pick.stride]


def strided_sample(rows: Tensor, stride: int, count: int) -> NDArray[np.float32]:
    """Return every `stride`-th element of contiguous rows on the host, as float32."""
    if rows.dtype is torch.float32:
        return rows.numpy().reshape(-1)[::stride].copy()
    sample = np.empty(count, np.float32)
    torch.from_numpy(sample).copy_(rows.view(-1)[::stride])
    return sample

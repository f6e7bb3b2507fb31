"""Runs with numbers like those of real training: individual levels, a drift, and noise.

The noise fills the mantissa, so the numbers do not compress better than recorded statistics.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import (
    AGGREGATES,
    STATISTICS,
    SlotInfo,
    SlotKey,
    StepBatch,
    StepInfo,
)
from comgra_decl.store import RunMeta, RunWriter

SAMPLES = 2
_CHUNK = 128  # records generated at once


@dataclass(frozen=True)
class Size:
    """Size of a run: recorded steps, slots, and records per commit."""

    records: int
    slots: int
    commit: int = 8

    @property
    def name(self) -> str:
        return f"{self.records:,} x {self.slots:,}"

    @property
    def raw_bytes(self) -> int:
        """Bytes of the statistics as plain float32: aggregates and samples."""
        per_slot = len(STATISTICS) * (len(AGGREGATES) + SAMPLES) * 4
        return self.records * self.slots * per_slot


def meta() -> RunMeta:
    """Every statistic, two samples, no histograms."""
    return RunMeta(
        statistics=STATISTICS,
        sample_count=SAMPLES,
        bins=None,
        spec={},
        config=None,
        facts={},
        started=time.time(),
    )


class Numbers:
    """The statistics of all records, independent of how they are divided into batches."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        rng = np.random.default_rng(1)
        width = len(STATISTICS) * (len(AGGREGATES) + SAMPLES)
        self._level = rng.lognormal(0, 2, (slots, width)).astype(np.float32)
        self._drift = rng.normal(0, 1e-4, (slots, width)).astype(np.float32)
        self._chunk: tuple[int, NDArray[np.float32]] | None = None

    def take(self, first: int, count: int) -> NDArray[np.float32]:
        """Return float32 [count, slots, statistics x (aggregates + samples)]."""
        parts = []
        while count:
            at = first % _CHUNK
            size = min(count, _CHUNK - at)
            parts.append(self._of_chunk(first // _CHUNK)[at : at + size])
            first, count = first + size, count - size
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _of_chunk(self, number: int) -> NDArray[np.float32]:
        if self._chunk is None or self._chunk[0] != number:
            rng = np.random.default_rng(number)
            noise = rng.standard_normal((_CHUNK, *self._level.shape), np.float32)
            steps = np.arange(number * _CHUNK, (number + 1) * _CHUNK, dtype=np.float32)
            noise *= np.float32(0.02)
            noise += 1 + np.sin(steps)[:, None, None] * self._drift
            noise *= self._level
            self._chunk = number, noise
        return self._chunk[1]


def batch(numbers: Numbers, first: int, count: int) -> StepBatch:
    """Create the records from `first` on, as the writer thread would pass them on."""
    data, slots = numbers.take(first, count), numbers.slots
    split = len(STATISTICS) * len(AGGREGATES)
    return StepBatch(
        steps=[
            StepInfo(step=first + i, time=1e9 + first + i, type="train", mode="train")
            for i in range(count)
        ],
        slots=np.arange(slots, dtype=np.int32),
        aggregates=data[:, :, :split].reshape(count, slots, len(STATISTICS), len(AGGREGATES)),
        samples=data[:, :, split:].reshape(count, slots, SAMPLES, len(STATISTICS)),
        counts=None,
        ranges=None,
        values=[{} for _ in range(count)],
        kpis=[{"loss": 1.0 / (1 + first + i)} for i in range(count)],
        new_slots=[_slot(number) for number in range(slots)] if first == 0 else [],
        new_structures=[],
    )


def batches(size: Size) -> Iterator[StepBatch]:
    """Yield the run, commit by commit."""
    numbers = Numbers(size.slots)
    for first in range(0, size.records, size.commit):
        yield batch(numbers, first, min(size.commit, size.records - first))


def write(folder: Path, size: Size) -> dict[str, Any]:
    """Write the run and return the cost, excluding the generation of the numbers."""
    writer = RunWriter.create(folder, meta())
    seconds, cpu, commits, held = 0.0, 0.0, [], []
    for made in batches(size):
        held.append(memory("VmRSS"))
        start, used = time.perf_counter(), time.process_time()
        writer.commit([made])
        commits.append(time.perf_counter() - start)
        seconds, cpu = seconds + commits[-1], cpu + time.process_time() - used
        writer.merge_files()
    writer.close()
    return {
        "seconds": seconds,
        "cpu": cpu,
        "commits": len(commits),
        "times": commits,
        "memory_at_a_fifth": held[len(held) // 5],
        "memory_at_the_end": held[-1],
    }


def memory(which: str) -> float:
    """Return a line of /proc/self/status in MB (VmRSS: current, VmHWM: peak), or 0 without it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(which)), 0.0)


def _slot(number: int) -> SlotInfo:
    key = SlotKey(f"blocks.{number // 8}.part{number % 8}", "output", 0, "forward")
    return SlotInfo(number, key, "computed", "float32", (16, 64), 0, "Linear")

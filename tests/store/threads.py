"""A writer that stores its batches, steps to pass to its thread, and a way to wait for results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from comgra_decl.records import Layout, RawStep, ScalarBatch, SlotInfo, StepBatch, StepInfo
from comgra_decl.store import WriterThread

_ZERO = np.zeros(1, np.int64)
LAYOUT = Layout(
    slots=np.zeros(1, np.int32),
    tensors=_ZERO,
    starts=_ZERO,
    rows=_ZERO,
    samples=_ZERO,
    elements=_ZERO,
    batched=np.zeros(1, bool),
)
PATIENCE = 20.0  # seconds until a test stops waiting


def raw(step: int, size: int = 100, slots: list[SlotInfo] | None = None) -> RawStep:
    info = StepInfo(step=step, time=float(step), type="train", mode="train")
    return RawStep(info, LAYOUT, np.full((1, size), step, np.float64), slots or [])


def transform(steps: list[RawStep]) -> list[StepBatch]:
    """One slot whose every statistic is the number of the step."""
    count = len(steps)
    numbers = np.array([step.info.step for step in steps], np.float32)
    return [
        StepBatch(
            steps=[step.info for step in steps],
            slots=np.zeros(1, np.int32),
            aggregates=np.broadcast_to(numbers[:, None, None, None], (count, 1, 3, 3)).copy(),
            samples=np.broadcast_to(numbers[:, None, None, None], (count, 1, 2, 3)).copy(),
            counts=np.zeros((count, 1, 4), np.uint32),
            ranges=np.zeros((count, 1, 2), np.float32),
            values=[{}] * count,
            kpis=[{}] * count,
            new_slots=[slot for step in steps for slot in step.new_slots],
            new_structures=[],
        )
    ]


class FakeWriter:
    """Stores commits; fails or waits when told to."""

    block_steps: int | None = None

    def __init__(self) -> None:
        self.commits: list[list[int]] = []
        self.scalars: list[ScalarBatch] = []
        self.times: list[float] = []
        self.closed: list[str | None] = []
        self.failures: Iterator[BaseException] = iter(())
        self.gate = threading.Event()
        self.gate.set()

    @property
    def records(self) -> int:
        return sum(map(len, self.commits))

    def commit(self, batches: list[StepBatch], scalars: Sequence[ScalarBatch] = ()) -> None:
        self.scalars += scalars
        self.gate.wait(PATIENCE)
        for failure in self.failures:
            raise failure
        self.times.append(time.monotonic())
        self.commits.append([info.step for batch in batches for info in batch.steps])

    def close(self, *, error: str | None = None, failed: bool = False) -> None:
        self.closed.append(error)

    crowded = False

    def merge_files(self, *, wait: bool = False) -> bool:
        """Has no files."""
        return False

    def release(self) -> None:
        """Has no handle of a folder."""


def thread_of(writer: Any, **options: Any) -> tuple[WriterThread, list[BaseException]]:
    errors: list[BaseException] = []
    defaults: dict[str, Any] = {
        "transform": transform,
        "commit_interval": 0.02,
        "queue_bytes": 1 << 20,
        "on_error": errors.append,
    }
    return WriterThread(lambda: writer, **{**defaults, **options}), errors


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)

"""The interface of a tool that can be measured."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from benchmarks.nets import Training

Step = Callable[[], Tensor]


class Tool(ABC):
    """A tool that is attached to a training run; one instance per line of the table.

    Attributes:
        name: short key, used on the command line and in the JSON.
        label: name in the table.
        most_records: largest number of records needed to determine the bytes of one; 0 if the tool
            records nothing.
        requires: modules that must be importable.
        warmup_fraction: number of warm-up steps, as a share of the measured ones.
    """

    name: str
    label: str
    most_records: int = 0
    requires: tuple[str, ...] = ()
    warmup_fraction: float = 0.1

    @abstractmethod
    def attach(self, training: Training, folder: Path) -> AbstractContextManager[Step]:
        """Yield the step function to measure; everything is on disk when the context exits."""

    def refuses(self, training: Training) -> str | None:
        """Return why this tool cannot be measured on `training`, or None."""
        del training
        return None

    def records(self, folder: Path) -> int | None:
        """Return the number of steps recorded in `folder`; None for a tool that never records."""
        del folder
        return None

    def expected(self, steps: int) -> int | None:
        """Return how many of `steps` steps should be recorded: all, unless overridden."""
        return steps if self.most_records else None

    def check(self, folder: Path, steps: int) -> None:
        """Check that the measured steps were recorded.

        Raises:
            RuntimeError: they were not, so their timings are meaningless.
        """
        found, expected = self.records(folder), self.expected(steps)
        if found != expected:
            raise RuntimeError(f"{self.label}: expected {expected} records, got {found}")

    def series(self, folder: Path) -> int | None:
        """Return the number of series (tensor, pass) in the newest record in `folder`."""
        del folder
        return None

    def commits(self) -> AbstractContextManager[CommitClock]:
        """Time the function that writes the records while the context is open."""
        return _nothing_committed()


@dataclass
class CommitClock:
    """Seconds spent in a tool's writing function, and the number of its calls."""

    seconds: float = 0.0
    calls: int = 0


@contextmanager
def _nothing_committed() -> Iterator[CommitClock]:
    yield CommitClock()


@contextmanager
def timed_method(owner: type, method: str) -> Iterator[CommitClock]:
    """Time every call to `owner.method` until the context exits."""
    clock = CommitClock()
    original: Callable[..., Any] = getattr(owner, method)

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            clock.seconds += time.perf_counter() - started
            clock.calls += 1

    with mock.patch.object(owner, method, timed):
        yield clock

"""The training without a tool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.nets import Training
from benchmarks.tools.base import Step, Tool


class Nothing(Tool):
    """Plain training; a second instance in the table shows the noise of the measurement."""

    def __init__(self, name: str, label: str) -> None:
        self.name, self.label = name, label

    @contextmanager
    def attach(self, training: Training, folder: Path) -> Iterator[Step]:
        """Yield the training's own step."""
        del folder
        yield training.step

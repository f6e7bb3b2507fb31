"""The interface of a tool that receives what is recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .graph import Graph
from .points import Points

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
"""What names of artifacts do not contain."""

Findings = Mapping[str, Any]
"""The document that the rules store; its entry "findings" lists them."""


class Moment(NamedTuple):
    """When something was recorded: the training step and the time in unix seconds."""

    step: int
    time: float


@dataclass(frozen=True)
class About:
    """Facts about a run.

    Attributes:
        path: its folder or URL.
        config: settings of the program, nested.
        statistics: names of the stored statistics.
    """

    name: str
    group: str
    path: str
    started: float
    config: Mapping[str, Any] = field(default_factory=dict)
    statistics: tuple[str, ...] = ()

    @property
    def artifact(self) -> str:
        """The name under which tools store a copy of the run, unique within a project."""
        return _UNSAFE.sub("_", f"{self.group}-{self.name}")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings on one level, as other tools show them: `{"model.dim": 8}`.

        Lists and empty mappings remain.
        """
        return _flat(self.config)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= {f"{name}.{inner}": each for inner, each in _flat(value).items()}
        else:
            found[str(name)] = value
    return found


class Sink(Protocol):
    """A tool that receives numbers, histograms, pictures and text.

    All methods are called on one thread, `begin` first and `end` last. After an exception, only
    `end` is called. Names are series names as in `naming`; a sink encodes characters that its tool
    does not accept so that they can be decoded.
    """

    def begin(self, about: About) -> None:
        """Create or join the tool's run."""

    @property
    def link(self) -> dict[str, str]:
        """Where the tool's run is found; known after `begin`."""

    def scalars(self, at: Moment, values: Mapping[str, float]) -> None:
        """Write numbers by name; they may be NaN or infinite."""

    def histogram(
        self, at: Moment, name: str, counts: NDArray[np.int64], edges: NDArray[np.float64]
    ) -> None:
        """Write a histogram: counts [bins] and edges [bins + 1]."""

    def image(self, at: Moment, name: str, pixels: NDArray[np.uint8]) -> None:
        """Write a picture, [height, width, 3]."""

    def text(self, at: Moment, name: str, text: str) -> None:
        """Write a text."""

    def graph(self, at: Moment, graph: Graph) -> None:
        """Write the dependency graph; called once for each new graph."""

    def points(self, records: Sequence[Points]) -> None:
        """Show the newest values as points, in place of those from before."""

    def artifact(self, folder: Path) -> None:
        """Store a copy of the run, whose folder is removed afterwards; called before `end`."""

    def end(self, state: str) -> None:
        """Write what is still buffered and close the tool's run; `state` as in `Run.state`."""

"""Summarize blocks: medians, ratios and their noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.sizes import Size
from benchmarks.timing import Block

TIMES = ("step", "stored", "cpu", "background", "attach", "first", "close")
"""Fields of `Block` to summarize, in seconds."""


@dataclass(frozen=True)
class Ratio:
    """The median of the per-round ratios; `low` and `high` are their quartiles."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, mine: Sequence[float], base: Sequence[float]) -> Ratio:
        """Return the ratio of two measurements, paired by round."""
        one, other = np.asarray(mine, float), np.asarray(base, float)
        low, middle, high = np.percentile(one / other, [25, 50, 75])
        return cls(float(middle), float(low), float(high))


@dataclass(frozen=True)
class Summary:
    """One tool on one net: medians over rounds in seconds, and ratios to nothing attached.

    `same_losses` is True if every loss is bit-identical to that of plain training.
    """

    label: str
    seconds: dict[str, float]
    ratios: dict[str, Ratio]
    size: Size
    same_losses: bool


@dataclass(frozen=True)
class ScenarioResult:
    """All tools on one net; `left_out` maps labels of tools to the reasons why they did not run."""

    name: str
    description: str
    parameters: int
    rounds: int
    tools: dict[str, Summary]
    left_out: dict[str, str]


def summarise(
    label: str, blocks: Sequence[Block], baseline: Sequence[Block], *, size: Size
) -> Summary:
    """Summarize the blocks of a tool relative to those without a tool, paired by round."""
    return Summary(
        label=label,
        seconds={name: float(np.median(_values(blocks, name))) for name in TIMES},
        ratios={name: _ratio(blocks, baseline, name=name) for name in ("step", "stored", "cpu")},
        size=size,
        same_losses=all(_same_start(a, b) for a, b in zip(blocks, baseline, strict=True)),
    )


def recording_cost(tools: Mapping[str, Summary], name: str) -> float:
    """Return the seconds that tool `name` adds to a step, including the store."""
    return tools[name].seconds["stored"] - tools["nothing"].seconds["stored"]


def _values(blocks: Sequence[Block], name: str) -> list[float]:
    return [getattr(block, name) for block in blocks]


def _ratio(blocks: Sequence[Block], baseline: Sequence[Block], *, name: str) -> Ratio:
    return Ratio.of(_values(blocks, name), _values(baseline, name))


def _same_start(a: Block, b: Block) -> bool:
    n = min(len(a.losses), len(b.losses))
    return bool(np.array_equal(a.losses[:n], b.losses[:n]))

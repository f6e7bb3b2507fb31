"""From blocks to figures: medians, ratios and the noise they carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.sizes import Size
from benchmarks.timing import Block

TIMES = ("step", "stored", "cpu", "background", "attach", "first", "close")
"""The fields of `Block` that are summarised, in seconds."""


@dataclass(frozen=True)
class Ratio:
    """The ratio of two medians; `low` and `high` are the quartiles of the ratios round by round."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """One tool on one net: medians over rounds in seconds, and ratios to nothing attached.

    `same_losses` is True if every loss equals that of the plain training bit for bit.
    """

    label: str
    seconds: dict[str, float]
    ratios: dict[str, Ratio]
    size: Size
    same_losses: bool


@dataclass(frozen=True)
class ScenarioResult:
    """All tools on one net; `left_out` maps the label of a tool to why it did not run."""

    name: str
    description: str
    parameters: int
    rounds: int
    tools: dict[str, Summary]
    left_out: dict[str, str]


def summarise(
    label: str, blocks: Sequence[Block], baseline: Sequence[Block], *, size: Size
) -> Summary:
    """Summarises the blocks of a tool against those of nothing attached, paired by round."""
    return Summary(
        label=label,
        seconds={name: float(np.median(_values(blocks, name))) for name in TIMES},
        ratios={name: _ratio(blocks, baseline, name=name) for name in ("step", "stored", "cpu")},
        size=size,
        same_losses=all(_same_start(a, b) for a, b in zip(blocks, baseline, strict=True)),
    )


def recording_cost(tools: Mapping[str, Summary], name: str) -> float:
    """Returns the seconds that recording adds to one step of tool `name`, store included."""
    return tools[name].seconds["stored"] - tools["nothing"].seconds["stored"]


def _values(blocks: Sequence[Block], name: str) -> list[float]:
    return [getattr(block, name) for block in blocks]


def _ratio(blocks: Sequence[Block], baseline: Sequence[Block], *, name: str) -> Ratio:
    tool, plain = np.array(_values(blocks, name)), np.array(_values(baseline, name))
    low, high = np.percentile(tool / plain, [25, 75])
    return Ratio(float(np.median(tool) / np.median(plain)), float(low), float(high))


def _same_start(a: Block, b: Block) -> bool:
    n = min(len(a.losses), len(b.losses))
    return bool(np.array_equal(a.losses[:n], b.losses[:n]))

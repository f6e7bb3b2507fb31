"""Time whole steps in interleaved blocks, within a time limit."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.device.places import Place
from benchmarks.device.recording import Declared, recorded
from benchmarks.nets import Training
from benchmarks.results import Ratio

_MOST_ROUNDS = 9
_LEAST_ROUNDS = 3
_WARMUP = 2  # recorded steps before timing; the first one discovers the model


@dataclass(frozen=True)
class Times:
    """Seconds per step, by name of what was attached, with one value per round."""

    seconds: Mapping[str, Sequence[float]]
    rounds: int

    def median(self, name: str) -> float:
        """Return the median over all rounds."""
        return float(np.median(self.seconds[name]))

    def ratio(self, name: str, to: str = "plain") -> Ratio:
        """Return the ratio of two medians, with the quartiles of the per-round ratios."""
        mine, plain = (np.asarray(self.seconds[which]) for which in (name, to))
        low, high = np.percentile(mine / plain, [25, 75])
        return Ratio(float(np.median(mine) / np.median(plain)), float(low), float(high))


class Deadline:
    """A point in time by which something should be done."""

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self._end - self._clock()


def interleaved(
    place: Place,
    training: Training,
    attached: Mapping[str, Declared | None],
    *,
    store: bool,
    block: int,
    deadline: Deadline,
) -> Times:
    """Time blocks of `block` steps alternately with each of `attached` (None: nothing).

    Nothing in the loop waits for the device; no work is queued when the timing of a block starts
    and ends. The order is redrawn for each round. There are nine rounds, fewer if the deadline is
    reached earlier, but at least three.

    Raises:
        RuntimeError: a recording failed or is incomplete.
    """
    seconds: dict[str, list[float]] = {name: [] for name in attached}
    order, dice = [*attached], random.Random(0)
    rounds, took = 0, 0.0
    for name in order:  # one-time work: compiling kernels, allocating memory
        _block(place, training, attached[name], store=store, steps=1)
    while rounds < _MOST_ROUNDS and (rounds < _LEAST_ROUNDS or deadline.left > took):
        began = time.monotonic()
        dice.shuffle(order)
        for name in order:
            spent = _block(place, training, attached[name], store=store, steps=block)
            seconds[name].append(spent)
        rounds, took = rounds + 1, time.monotonic() - began
    return Times(seconds, rounds)


def _block(
    place: Place, training: Training, what: Declared | None, *, store: bool, steps: int
) -> float:
    """Return the seconds per step."""
    training.reset()
    gc.collect()

    def work() -> None:
        for _ in range(steps):
            training.step()

    if what is None:
        _warm(training)
        return place.seconds(work) / steps
    with recorded(what, store=store) as recording:
        _warm(training)
        spent = place.seconds(work) / steps
    recording.check(_WARMUP + steps if what.every else 1)
    return spent


def _warm(training: Training) -> None:
    for _ in range(_WARMUP):
        training.step()


@dataclass(frozen=True)
class Within:
    """Measurements of a training with a single attachment.

    Attributes:
        times: of "recorded" and "idle" blocks.
        first: seconds of the first step of each kind, which compiles: "plain" without a record,
            "recorded" with one.
        graphs: number of graphs compiled in the first recorded step.
        peak: peak of the bytes allocated by recorded steps; None if unknown.
    """

    times: Times
    first: Mapping[str, float]
    graphs: int
    peak: int | None


def within_one(
    place: Place, training: Training, what: Declared, *, store: bool, block: int, rounds: int
) -> Within:
    """Time blocks with and without records within a single attachment.

    This is for compiled models, whose variants would otherwise be compiled for every block. Step 0
    is recorded eagerly and discovers the model; step 1 is not recorded and compiles the plain
    graph. Then idle and recorded blocks alternate. The first step of each block is not timed; the
    first recorded one compiles the variant with observers.

    Raises:
        RuntimeError: the recording failed or is incomplete.
    """
    length = block + 1
    starts = [2 + (2 * i + 1) * length for i in range(rounds)]
    last = starts[-1] + length
    steps = [step for start in starts for step in range(start, start + length)]
    steps += range(last, last + block)  # the steps whose memory is counted
    seconds: dict[str, list[float]] = {"recorded": [], "idle": []}
    first: dict[str, float] = {}
    graphs = 0

    def work(number: int = block) -> None:
        for _ in range(number):
            training.step()

    training.reset()
    gc.collect()
    with recorded(what.with_steps(steps), store=store) as recording:
        work(1)
        first["plain"] = place.seconds(lambda: work(1))
        for _ in range(rounds):
            for name in ("idle", "recorded"):
                before = graphs_compiled()
                began = place.seconds(lambda: work(1))
                if name == "recorded" and name not in first:
                    first[name], graphs = began, graphs_compiled() - before
                seconds[name].append(place.seconds(work) / block)
        peak = place.peak(work)
    recording.check(1 + len(steps))
    return Within(Times(seconds, rounds), first, graphs, peak)


def graphs_compiled() -> int:
    """Return the number of graphs compiled so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])

"""Time whole steps in interleaved blocks, within a time limit."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from benchmarks.device.places import Place
from benchmarks.device.recording import Declared, recorded
from benchmarks.nets import Training
from benchmarks.results import Ratio

_MOST_ROUNDS = 9
_LEAST_ROUNDS = 1
_WARMUP = 2  # recorded steps before timing; the first one discovers the model


@dataclass(frozen=True)
class Times:
    """Seconds per step by the name of the attachment, with one value per round."""

    seconds: Mapping[str, Sequence[float]]
    rounds: int

    def median(self, name: str) -> float:
        """Return the median over all rounds."""
        return float(np.median(self.seconds[name]))

    def ratio(self, name: str, to: str = "plain") -> Ratio:
        """Return the ratio of two medians, with the quartiles of the per-round ratios."""
        return Ratio.of(self.seconds[name], self.seconds[to])


class OutOfTimeError(RuntimeError):
    """A part has used up its time, so its remaining lines have no result."""


class Deadline:
    """A point in time by which something must be done."""

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self._end - self._clock()

    def check(self, needed: float = 0.0) -> None:
        """Raise an error if fewer than `needed` seconds are left.

        Raises:
            OutOfTimeError: see above.
        """
        if self.left < needed:
            raise OutOfTimeError


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

    Nothing in the loop waits for the device; no work is queued at the start or end of a timed
    block. The order is redrawn for each round. There are nine rounds, or as many as fit before the
    deadline.

    Raises:
        OutOfTimeError: not even one round fits.
        RuntimeError: a recording failed or is incomplete.
    """
    seconds: dict[str, list[float]] = {name: [] for name in attached}
    order, dice = [*attached], random.Random(0)
    rounds, took = 0, 0.0
    for name in order:  # one-time work: compiling kernels, allocating memory
        deadline.check()
        _block(place, training, attached[name], store=store, steps=1)
    while rounds < _MOST_ROUNDS and (rounds < _LEAST_ROUNDS or deadline.left > took):
        began = time.monotonic()
        dice.shuffle(order)
        spent = {}
        for name in order:
            if rounds < _LEAST_ROUNDS:
                deadline.check()
            spent[name] = _block(place, training, attached[name], store=store, steps=block)
        for name, each in spent.items():
            seconds[name].append(each)
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
    """Measurements of a compiled training with a single attachment.

    Attributes:
        times: of "recorded" and "idle" blocks.
        first: seconds of the first recorded step that is compiled, which includes compiling.
        graphs: number of graphs compiled in that step.
        peak: peak of the bytes allocated by recorded steps; None if unknown.
    """

    times: Times
    first: float
    graphs: int
    peak: int | None


def within_one(
    place: Place,
    training: Training,
    what: Declared,
    *,
    store: bool,
    block: int,
    rounds: int,
    deadline: Deadline,
    compiling: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Within:
    """Time blocks with and without records within a single attachment.

    For compiled models: otherwise, their variants would be compiled for every block. Step 0
    is recorded eagerly and discovers the model. Then idle and recorded blocks alternate, as many as
    fit before the deadline. The first step of each block is not timed; the first recorded step
    compiles the variant with observers, in the `compiling` context.

    Raises:
        OutOfTimeError: not even one round fits.
        RuntimeError: the recording failed or is incomplete.
    """
    plan = [("idle", block + 1), ("recorded", 2 * block + 1)]  # with steps whose memory is counted
    plan += [("idle", block + 1), ("recorded", block + 1)] * (rounds - 1)
    ends = list(accumulate((length for _, length in plan), initial=1))
    recorded_steps = [
        step
        for (name, length), end in zip(plan, ends[1:], strict=True)
        for step in range(end - length, end)
        if name == "recorded"
    ]
    seconds: dict[str, list[float]] = {"recorded": [], "idle": []}
    first, graphs, peak, expected = 0.0, 0, None, 1

    def work(number: int = block) -> None:
        for _ in range(number):
            training.step()

    training.reset()
    gc.collect()
    deadline.check()
    with recorded(what.with_steps(recorded_steps), store=store) as recording:
        work(1)
        took = began = 0.0
        for name, length in plan:
            if name == "idle":  # a round begins
                took, began = time.monotonic() - began, time.monotonic()
                if seconds["recorded"] and deadline.left < took:
                    break
            deadline.check()
            compiles = name == "recorded" and not seconds[name]
            before = graphs_compiled()
            with compiling() if compiles else nullcontext():
                spent = place.seconds(lambda: work(1))
            if compiles:
                first, graphs = spent, graphs_compiled() - before
            seconds[name].append(place.seconds(work) / block)
            if length > block + 1:
                peak = place.peak(work)
            expected += length if name == "recorded" else 0
    recording.check(expected)
    return Within(Times(seconds, len(seconds["recorded"])), first, graphs, peak)


def graphs_compiled() -> int:
    """Return the number of graphs compiled so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])

"""Measure tools in short interleaved blocks, so that changes in load affect all of them equally."""

from __future__ import annotations

import gc
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.nets import Training
from benchmarks.tools import Tool


@dataclass(frozen=True)
class Plan:
    """Length of one block of a tool: warm-up steps and measured steps."""

    warmup: int
    steps: int


@dataclass(frozen=True)
class Block:
    """Times of one block of one tool, in seconds.

    `step` is the median over the measured steps. `stored` is the time from the first measured step
    until everything was on disk, per measured step, and `cpu` is the processor time of all threads
    in that span, per step; `background` is the part of `cpu` not spent by the training thread.
    `first` is the first step, which discovers the model. `losses` are the float32 losses of all
    steps.
    """

    step: float
    stored: float
    cpu: float
    background: float
    attach: float
    first: float
    close: float
    losses: NDArray[np.float32]


class Meter:
    """Runs blocks of one training run."""

    def __init__(self, training: Training, root: Path) -> None:
        self.training = training
        self._root = root

    def block(self, tool: Tool, plan: Plan) -> Block:
        """Attach `tool`, warm up, measure, detach, and remove its files.

        Raises:
            RuntimeError: the tool did not record the expected steps.
        """
        with self.fresh_folder() as folder:
            self.training.reset()
            gc.collect()
            block = _measure(tool, plan, self.training, folder)
            tool.check(folder, plan.warmup + plan.steps)
            return block

    @contextmanager
    def fresh_folder(self) -> Iterator[Path]:
        """Yield an empty folder that is removed afterwards."""
        folder = Path(tempfile.mkdtemp(dir=self._root))
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


def _measure(tool: Tool, plan: Plan, training: Training, folder: Path) -> Block:
    clock = time.perf_counter
    losses = []
    times = np.empty(plan.warmup + plan.steps)
    entering = clock()
    with tool.attach(training, folder) as step:
        attached = clock()
        for i in range(plan.warmup):
            started = clock()
            loss = step()
            times[i] = clock() - started
            losses.append(loss.detach())
        measuring, cpu, own = clock(), time.process_time(), time.thread_time()
        for i in range(plan.warmup, len(times)):
            started = clock()
            loss = step()
            times[i] = clock() - started
            losses.append(loss.detach())
        leaving = clock()
    closed = clock()
    cpu, own = time.process_time() - cpu, time.thread_time() - own
    return Block(
        step=float(np.median(times[plan.warmup :])),
        stored=(closed - measuring) / plan.steps,
        cpu=cpu / plan.steps,
        background=max(cpu - own, 0.0) / plan.steps,
        attach=attached - entering,
        first=float(times[0]),
        close=closed - leaving,
        losses=np.array([float(loss) for loss in losses], dtype=np.float32),
    )


def plan_for(tool: Tool, *, step_seconds: float, block_seconds: float) -> Plan:
    """Return the number of steps that fill a block, given the duration of one step of `tool`."""
    steps = min(max(round(block_seconds / step_seconds), 2), 5000)
    return Plan(warmup=max(1, round(tool.warmup_fraction * steps)), steps=steps)


def interleave(
    meter: Meter, plans: Mapping[str, Plan], *, tools: Sequence[Tool], rounds: int
) -> dict[str, list[Block]]:
    """Run every tool once per round, in an order redrawn for each round, with a fixed seed.

    Returns:
        The blocks of each tool by name, one per round.
    """
    blocks: dict[str, list[Block]] = {tool.name: [] for tool in tools}
    order = list(tools)
    dice = random.Random(0)
    for _ in range(rounds):
        dice.shuffle(order)
        for tool in order:
            blocks[tool.name].append(meter.block(tool, plans[tool.name]))
    return blocks

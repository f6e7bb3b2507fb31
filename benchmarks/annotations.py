"""Measure the cost of annotations and of logging every loss while no step is recorded.

    python -m benchmarks.annotations [--rounds 60] [--save FILE]

Each line is timed with and without its annotation, in an order redrawn for each round. The price is
the difference between the medians, and the noise is the difference between two timings of the same
plain line. Steps are measured in the processor time of their thread.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import comgra_decl as comgra
from benchmarks.machine import machine_facts
from benchmarks.nets import build_mlp

_NEVER = {"nodes": {"all": {"select": "**"}}, "schedule": {"first": 1, "every": 10**9}}


@dataclass(frozen=True)
class Case:
    """A line without and with the annotation to measure; `calls` per timing."""

    name: str
    plain: str
    annotated: str
    calls: int


class Words:
    """Objects that the lines use."""

    def __init__(self) -> None:
        self.x = torch.zeros(3)
        self.loss = torch.zeros(())

    def plain(self, x: Any) -> Any:
        return x

    @comgra.node("annotated")
    def annotated(self, x: Any) -> Any:
        return x


class Plain(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Marked(nn.Module):
    @comgra.node("marked")
    def forward(self, x: Any) -> Any:
        return x


def empty(x: Any, _name: str) -> Any:
    return x


CASES = (
    Case("an empty function, for comparison", "y = x", "y = empty(x, 'name')", 20_000),
    Case("node(x, 'name')", "y = x", "y = comgra.node(x, 'name')", 20_000),
    Case("node(x, 'name', kind='input')", "y = x", "y = comgra.node(x, 'n', kind='input')", 20_000),
    Case("@node on a method", "words.plain(x)", "words.annotated(x)", 20_000),
    Case("@node on forward", "plain(x)", "marked(x)", 10_000),
    Case("connect(a, b)", "pass", "comgra.connect(x, x)", 20_000),
    Case("tag('name')", "pass", "comgra.tag('name')", 20_000),
)
IN_SESSION = (
    Case("kpi('name', float)", "pass", "comgra.kpi('name', 0.5)", 2_000),
    Case("kpi('name', tensor)", "pass", "comgra.kpi('name', loss)", 2_000),
)


def compared(cases: Iterable[Case], rounds: int) -> list[tuple[str, float, float]]:
    """Return (name, price, noise) of each case in nanoseconds per call."""
    words = Words()
    space = {"comgra": comgra, "words": words, "x": words.x, "loss": words.loss}
    space |= {"empty": empty, "plain": Plain(), "marked": Marked()}
    return [_compared(case, space, rounds) for case in cases]


def _compared(case: Case, space: dict[str, Any], rounds: int) -> tuple[str, float, float]:
    timers = {
        key: timeit.Timer(statement, globals=space)
        for key, statement in (
            ("plain", case.plain),
            ("again", case.plain),
            ("annotated", case.annotated),
        )
    }
    times = _interleaved(timers, rounds, case.calls)
    price, noise = (times[key] - times["plain"] for key in ("annotated", "again"))
    return case.name, 1e9 * price, 1e9 * abs(noise)


def _interleaved(timers: dict[str, Any], rounds: int, calls: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {key: [] for key in timers}
    for _ in range(rounds):
        for key in random.sample(sorted(timers), len(timers)):
            taken[key].append(timers[key].timeit(calls) / calls)
    return {key: statistics.median(times) for key, times in taken.items()}


def steps(rounds: int) -> list[tuple[str, float]]:
    """Return microseconds per step of the `mlp` net: plain, again, idle, idle with losses.

    An idle step is an unrecorded step of a session.
    """
    training = build_mlp()
    taken: dict[str, list[float]] = {key: [] for key in ("plain", "again", "idle", "idle + loss")}
    with tempfile.TemporaryDirectory() as root:
        for _ in range(rounds):
            for key in random.sample(sorted(taken), len(taken)):
                training.reset()
                taken[key].append(_block(training, key, root))
    return [(key, 1e6 * statistics.median(times)) for key, times in taken.items()]


def _block(training: Any, key: str, root: str, count: int = 60) -> float:
    def run() -> float:
        for _ in range(5):
            training.step()
        return statistics.median(
            timeit.repeat(training.step, timer=time.thread_time, number=1, repeat=count)
        )

    if not key.startswith("idle"):
        return run()
    with comgra.trace({**_NEVER, "kpis": {"loss": "loss" in key}}, root=root):
        return run()


def report(rounds: int) -> str:
    """Measure everything and return the tables as Markdown."""
    outside = compared(CASES, rounds)
    with tempfile.TemporaryDirectory() as root, comgra.trace(_NEVER, root=root):
        training = build_mlp()
        training.step()
        training.step()
        inside = compared(CASES[:5], rounds) + compared(IN_SESSION, max(3, rounds // 4))
    facts = machine_facts()
    lines = [f"{facts['processor']}, load {facts['load_before']}, Python {facts['python']}", ""]
    lines += ["| no session | ns | noise |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {price:.0f} | {noise:.0f} |" for name, price, noise in outside]
    lines += ["", "| session, step not recorded | ns | noise |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {price:.0f} | {noise:.0f} |" for name, price, noise in inside]
    measured = steps(max(5, rounds // 2))
    plain = measured[0][1]
    lines += ["", "| step of `mlp` | us | ratio |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {us:.1f} | {us / plain:.3f} |" for name, us in measured]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args(arguments)
    text = report(options.rounds)
    print(text)
    if options.save is not None:
        options.save.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])

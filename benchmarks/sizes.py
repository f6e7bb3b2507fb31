"""Measure the disk space of a recorded step and the time to write it, separately from timings."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.timing import Meter
from benchmarks.tools import Step, Tool


@dataclass(frozen=True)
class Size:
    """`per_step` and `fixed` are bytes in files before compaction; `commit` is seconds per record.

    `step` is the seconds that one step took here, which suffices for planning the blocks.
    """

    step: float
    per_step: float | None = None
    fixed: float | None = None
    commit: float | None = None
    commits: int = 0
    series: int | None = None


def probe(tool: Tool, meter: Meter, *, records: int) -> Size:
    """Run `tool` for one step and for `records` more.

    The difference is the size of the additional steps. The runs also warm up the process: imports,
    allocators, and the tool's one-time work.
    """
    if tool.most_records == 0:
        return _run(tool, meter, steps=20).size
    records = min(records, tool.most_records)
    short, long = _run(tool, meter, steps=1), _run(tool, meter, steps=1 + records)
    per_step = (long.bytes - short.bytes) / records
    return replace(long.size, per_step=per_step, fixed=short.bytes - per_step)


@dataclass(frozen=True)
class _Run:
    bytes: int
    size: Size


def _run(tool: Tool, meter: Meter, *, steps: int) -> _Run:
    training = meter.training
    training.reset()
    with meter.fresh_folder() as folder:
        with tool.commits() as clock, tool.attach(training, folder) as step:
            times = [_timed(step) for _ in range(steps)]
        tool.check(folder, steps)
        size = Size(
            step=median(times),
            commit=clock.seconds / steps if clock.calls else None,
            commits=clock.calls,
            series=tool.series(folder),
        )
        return _Run(bytes=folder_bytes(folder), size=size)


def _timed(step: Step) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def folder_bytes(folder: Path) -> int:
    """Return the total size of all files below `folder` in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

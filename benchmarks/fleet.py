"""`python -m benchmarks.fleet`: what many runs, many ranks and long runs cost, and how it grows.

Each operation runs in a process of its own, after the same imports. Files are counted in a second
process, with strace (`apt-get install strace`): opened files and folders, but no stats.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine_facts
from benchmarks.store.data import Size, batches, meta

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
GROUPS, RANKS, LONG = (50, 200, 1_000), (4, 8, 16, 32, 64), (10_000, 30_000, 100_000)
_MORE_RUNS, _MORE_RANKS, _MORE_RECORDS = (10_000, 100_000), (1_024, 16_384), (1_000_000,)
_OF_GROUP, _OF_RANK = Size(64, 20, commit=64), Size(256, 200, commit=16)
_MARK = "/comgra-mark-"


# -- the folders -----------------------------------------------------------------------------------


def make_group(root: Path, count: int) -> None:
    """Write runs that differ in one setting."""
    from comgra_decl.store import RunWriter

    made = list(batches(_OF_GROUP))
    for number in range(count):
        facts = replace(meta(), config={"lr": 10.0 ** -(number % 5)}, started=1e9 + number)
        writer = RunWriter.create(root / "group" / f"run {number:04}", facts)
        writer.commit(made)
        writer.close()


def make_ranks(root: Path, count: int) -> None:
    """Write a run of several ranks."""
    from comgra_decl.store import RunWriter

    made = list(batches(_OF_RANK))
    for rank in range(count):
        ranks = {"run": "x", "world_size": count, "recorded": list(range(count)), "rank": rank}
        folder = root / "ranks" / str(rank) if rank else root
        writer = RunWriter.create(folder, replace(meta(), facts={"ranks": ranks}))
        writer.commit(made)
        writer.close()


# -- in the process that measures ------------------------------------------------------------------


class _Stopwatch:
    """Times operations; marks where each begins, for strace."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}
        gc.collect()
        self._start = _memory("VmRSS")

    def __call__(self, name: str, run: Callable[[], Any]) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # restarts the peak
        os.access(f"{_MARK}{name.replace(' ', '_')}", os.F_OK)
        began = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - began
        os.access(f"{_MARK}end", os.F_OK)
        self.found[name] = {"seconds": seconds, "peak": _memory("VmHWM") - self._start}
        return result


def _memory(field: str) -> int:
    """Return a field of the process's memory, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(re.findall(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)[0]) << 10


def measure_group(root: Path) -> dict[str, dict[str, float]]:
    """Open a group, refresh it, and compare its runs twice."""
    from comgra_decl.query import open_group

    timed = _Stopwatch()
    group = timed("open", lambda: open_group(root))
    timed("refresh", group.refresh)
    node = group[0].nodes[0]
    timed("compare", lambda: group.compare(node))
    timed("compare again", lambda: group.compare(node))
    timed("overview", group.overview)
    return timed.found


def measure_ranks(root: Path) -> dict[str, dict[str, float]]:
    """Read a run of several ranks."""
    from comgra_decl.query import open_run

    timed = _Stopwatch()
    run = timed("open", lambda: open_run(root))
    timed("slots", lambda: (run.steps, run.slots))
    timed("row", lambda: run.row(0))
    timed("series", lambda: run.slot(run.nodes[0]).series("std"))
    timed("heat", lambda: run.heat("l2"))
    timed("poll", run.refresh)
    return timed.found


def measure_long(root: Path) -> dict[str, dict[str, float]]:
    """Write a long run of 100 tensors, open it, resume it and verify it.

    Args:
        root: an empty folder, whose name is the number of records.
    """
    from benchmarks.store.data import write
    from comgra_decl.query import open_run
    from comgra_decl.store.appending import append_to
    from comgra_decl.store.verify import verify

    def files() -> int:
        return sum(path.is_file() for path in run.rglob("*"))

    run, timed = root / "run", _Stopwatch()
    cost = timed("write", lambda: write(run, Size(int(root.name), 100, commit=64)))
    timed.found["write"] |= {"seconds": cost["seconds"], "files": files()}
    timed("open", lambda: open_run(run).steps)
    timed("resume", lambda: append_to(run, meta())[0].close())
    timed("verify", lambda: verify(run))
    for name in ("open", "resume", "verify"):
        timed.found[name]["files"] = files()
    return timed.found


_MEASURES = {"group": measure_group, "ranks": measure_ranks, "long": measure_long}


# -- in the process that reports -------------------------------------------------------------------


def measured(
    what: str, root: Path, *, indexed: bool = True, counted: bool = True
) -> dict[str, dict[str, float]]:
    """Return seconds, peak memory above the start and opened files of each operation.

    Args:
        what: what to measure.
        root: the folder.
        indexed: whether an index of the folder may exist.
        counted: whether to count opened files, which takes a second process.
    """
    index = root / ".comgra-index.parquet"
    if not indexed:
        index.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.fleet", "--measure", what, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    if counted and shutil.which("strace"):
        if not indexed:
            index.unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile("r") as log:
            traced = [
                "strace",
                "-f",
                "--seccomp-bpf",
                "-e",
                "trace=open,openat,openat2,access,faccessat,faccessat2",
            ]
            subprocess.run([*traced, "-o", log.name, *command], capture_output=True, check=True)
            counts = _opened(log.read())
        for name, each in found.items():
            each["files"] = counts.get(name.replace(" ", "_"), 0)
    return found


def _opened(log: str) -> dict[str, int]:
    """Return the number of opened files between the marks of strace's log."""
    counts: dict[str, int] = {}
    current = ""
    for line in log.splitlines():
        if mark := re.search(rf'"{_MARK}(\w+)"', line):
            current = "" if mark[1] == "end" else mark[1]
        elif current and re.match(r"\d+ +open", line) and " = -1 " not in line:
            counts[current] = counts.get(current, 0) + 1
    return counts


def figures(parts: Collection[str] = tuple(_MEASURES)) -> dict[str, Any]:
    """Take the measurements of some parts, or of all."""
    groups, ranks, long = [], [], []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as made:
        for count in GROUPS if "group" in parts else ():
            root = Path(made) / f"group {count}"
            make_group(root, count)
            first = measured("group", root, indexed=False)["open"]
            groups.append({"runs": count, "first open": first, **measured("group", root)})
            print(f"{count} runs", file=sys.stderr)
        for count in RANKS if "ranks" in parts else ():
            root = Path(made) / f"ranks {count}"
            make_ranks(root, count)
            ranks.append({"ranks": count, **measured("ranks", root)})
            print(f"{count} ranks", file=sys.stderr)
            shutil.rmtree(root)
        for count in LONG if "long" in parts else ():
            root = Path(made) / str(count)
            long.append({"records": count, **measured("long", root, counted=False)})
            print(f"{count} records", file=sys.stderr)
            shutil.rmtree(root)
    return {
        "date": date.today().isoformat(),
        "machine": machine_facts(),
        "groups": groups,
        "ranks": ranks,
        "long": long,
    }


def tables(found: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    machine = found["machine"]
    how = (
        f"Measured on {found['date']} on {machine['cores']} cores ({machine['processor']}), load "
        f"{machine['load_before']} before. Each cell: milliseconds; files and folders opened; peak "
        "memory in MB above the start of the process."
    )
    of_group = f"A group of runs with {_OF_GROUP.records} records of {_OF_GROUP.slots} tensors:"
    of_ranks = f"One run of several ranks, {_OF_RANK.records} records of {_OF_RANK.slots} tensors:"
    of_long = (
        "One long run: 100 tensors, nine statistics, two samples, and 64 records in a commit. The "
        "second number in each cell is that of the files in its folder."
    )
    parts = [
        (of_group, "runs", found["groups"], _MORE_RUNS),
        (of_ranks, "ranks", found["ranks"], _MORE_RANKS),
        (of_long, "records", found["long"], _MORE_RECORDS),
    ]
    lines = [how]
    for title, kind, rows, more in parts:
        if rows:
            lines += ["", title, "", *_table(kind, rows), "", *_fits(kind, rows, more)]
    return "\n".join(lines)


def _table(kind: str, rows: list[dict[str, Any]]) -> list[str]:
    names = [name for name in rows[0] if name != kind]
    lines = [f"| operation | {' | '.join(f'{row[kind]:,} {kind}' for row in rows)} |"]
    lines.append("|---" * (len(rows) + 1) + "|")
    for name in names:
        cells = [
            f"{1e3 * row[name]['seconds']:,.0f} ms; {row[name].get('files', float('nan')):,.0f}; "
            f"{row[name]['peak'] / 2**20:,.0f}"
            for row in rows
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _fits(kind: str, rows: list[dict[str, Any]], more: Sequence[int]) -> list[str]:
    """Return what follows for larger sizes from a line through all sizes but the largest."""
    *fitted, kept_out = rows
    sizes = [row[kind] for row in fitted]
    largest = f"{kept_out[kind]:,} {kind}"
    how = (
        f"Predicted by `a + b * {kind}`, fitted (least squares of relative errors) to all sizes "
        f"but the largest. The second column is the measured value at {largest} divided by the "
        "predicted one."
    )
    larger = " | ".join(f"{n:,} {kind}" for n in more)
    lines = [how, "", f"| operation | measured : predicted | {larger} |"]
    lines.append("|---" * (len(more) + 2) + "|")
    for name in (name for name in rows[0] if name != kind):
        parts: list[list[str]] = []
        for field, shown in _FIELDS.items():
            values = [row[name].get(field, float("nan")) for row in fitted]
            weights = 1 / np.maximum(np.array(values, float), 1e-9)
            line = np.polynomial.polynomial.polyfit(sizes, values, 1, w=weights)
            predicted = np.polynomial.polynomial.polyval([kept_out[kind], *more], line)
            ratio = kept_out[name].get(field, float("nan")) / max(predicted[0], 1e-9)
            parts.append([f"{ratio:.2f}", *map(shown, predicted[1:])])
        cells = ["; ".join(each) for each in zip(*parts, strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _seconds(value: float) -> str:
    return f"{1e3 * value:,.0f} ms" if value < 10 else f"{value:,.0f} s"


_FIELDS: dict[str, Callable[[float], str]] = {
    "seconds": _seconds,
    "files": lambda value: f"{value:,.0f}",
    "peak": lambda value: f"{value / 2**20:,.0f}",
}

_BEGIN, _END = "<!-- measured: python -m benchmarks.fleet --save -->", "<!-- end -->"


def main() -> int:
    """Take the measurements, print them, and store them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="store the figures and write the page")
    parser.add_argument("--only", choices=_MEASURES, help="measure one part; not with --save")
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "ROOT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        what, root = options.measure
        print(json.dumps(_MEASURES[what](Path(root))))
        return 0
    if options.only and options.save:
        parser.error("--save needs all parts, because it replaces the whole table")
    found = figures([options.only] if options.only else _MEASURES)
    text = tables(found)
    print(text)
    if options.save:
        (RESULTS / f"fleet-{found['date']}.json").write_text(json.dumps(found, indent=1) + "\n")
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
        after = rest.partition(_END)[2]
        PAGE.write_text(f"{before}{_BEGIN}\n\n{text}\n\n{_END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

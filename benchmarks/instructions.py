"""`python -m benchmarks.instructions OLDER`: count the instructions of a step in two checkouts.

On a machine that other programs share, the duration of a step varies by half within a minute, and a
difference of a tenth is not measurable. The number of instructions that the training thread
executes is nearly the same in every run, within 2% for most tools and 6% for `debug`, because some
work is done by whichever thread comes first. Valgrind's callgrind counts them, per thread. They do
not show the time that a thread waits, nor cache misses. The other threads work at intervals of
time, so their counts agree only within a third.

Under callgrind, a step takes about a hundred times as long. The clocks that Python programs read
are therefore slowed down by the same factor, so that whatever happens at intervals of time happens
as often per step as usual.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")
STEPS = {"mlp": 200, "tutorial": 60, "transformer": 6}
"""The nets, with the number of steps that are counted."""
TOOLS = ("nothing", "idle", "record", "light", "debug")
WARMUP = 60
_FEW = 5
SLOWDOWN = 100
COLUMNS = ("net", "tool", "older", "this", "ratio", "older, others", "this, others", "all threads")


@dataclass(frozen=True)
class Count:
    """Instructions per step: those of the training thread, and those of all other threads."""

    training: float
    others: float


@dataclass(frozen=True)
class Counted:
    """The counts of one tool on one net, in the older checkout and in this one."""

    net: str
    tool: str
    older: Count
    this: Count

    def line(self) -> tuple[str, ...]:
        """Return a line of the table, in thousands of instructions."""
        older, this = self.older, self.this
        whole = (this.training + this.others) / (older.training + older.others)
        counts = [f"{n / 1000:,.0f}" for n in (older.training, this.training)]
        others = [f"{n / 1000:,.0f}" for n in (older.others, this.others)]
        ratio = f"{this.training / older.training:.3f}"
        return (self.net, self.tool, *counts, ratio, *others, f"{whole:.3f}")


def count(checkout: Path, net: str, tool: str, steps: int) -> Count:
    """Count some steps and the end of the run, in a process of its own.

    Raises:
        RuntimeError: the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="instructions-") as folder:
        scratch = Path(folder)
        (scratch / "comgra_decl").symlink_to((checkout / "comgra_decl").resolve())
        for name in ("benchmarks", "examples"):
            (scratch / name).symlink_to(ROOT / name)
        command = [
            *("valgrind", "--tool=callgrind", "--separate-threads=yes", "--instr-atstart=no"),
            f"--callgrind-out-file={scratch / 'counted'}",
            *(sys.executable, "-m", "benchmarks.instructions", "--measure", net, tool, str(steps)),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": folder,
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            # valgrind knows no later instructions
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        }
        done = subprocess.run(
            command, cwd=scratch, env=environment, capture_output=True, text=True, check=False
        )
        files = sorted(scratch.glob("counted*-*"))
        if done.returncode or not files:
            raise RuntimeError(f"{tool} on {net}: {done.stderr[-2000:]}")
        totals = [_total(file) for file in files]
        return Count(totals[0], sum(totals[1:]))


def _per_step(few: Count, many: Count, steps: int) -> Count:
    """Return the counts per step of two runs, of which one is longer by some steps."""
    training, others = many.training - few.training, many.others - few.others
    return Count(training / steps, others / steps)


def _total(file: Path) -> int:
    lines = file.read_text(errors="replace").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("totals:"))


def measure(net: str, tool: str, steps: int) -> None:
    """Train within callgrind, which counts the steps after the warm-up and the end of the run."""
    _slow_down_clocks()
    import torch

    import comgra_decl  # noqa: F401 - with the objects that a full garbage collection would visit
    from benchmarks.nets import SCENARIOS
    from benchmarks.tools import TOOLS as KNOWN

    torch.set_num_threads(1)
    training = next(s for s in SCENARIOS if s.name == net).build()
    attached = next(t for t in KNOWN if t.name == tool)
    gc.collect()
    gc.freeze()  # one full collection more or less would change the count by several percent
    with tempfile.TemporaryDirectory(prefix="instructions-runs-") as folder:
        with attached.attach(training, Path(folder)) as step:
            for _ in range(WARMUP):
                step()
            _count(on=True)
            for _ in range(steps):
                step()
        _count(on=False)


def _count(*, on: bool) -> None:
    command = ["callgrind_control", "--instr=" + ("on" if on else "off"), str(os.getpid())]
    subprocess.run(command, check=True, capture_output=True)


def _slow_down_clocks() -> None:
    def slowed(clock: Callable[[], Any]) -> Callable[[], Any]:
        start = clock()
        if isinstance(start, int):
            return lambda: start + (clock() - start) // SLOWDOWN
        return lambda: start + (clock() - start) / SLOWDOWN

    for name in ("monotonic", "perf_counter", "time", "process_time", "thread_time"):
        for clock in (name, f"{name}_ns"):
            setattr(time, clock, slowed(getattr(time, clock)))


def to_markdown(counted: Sequence[Counted]) -> str:
    """Return the table of counts."""
    from benchmarks.report import table

    return (
        "Instructions per step in thousands: of the training thread in the older checkout and in "
        "this one, with their ratio; of all other threads; and the ratio for all threads "
        "together. Counted by callgrind; repeated counts of the training thread agree within 2% "
        "(`debug`: 6%), those of the other threads only within a third, because they work at "
        "intervals of time.\n\n" + table([COLUMNS, *(each.line() for each in counted)]) + "\n"
    )


def main() -> int:
    """Compare two checkouts; return the exit status."""
    options = _options()
    if options.measure:
        net, tool, steps = options.measure
        measure(net, tool, int(steps))
        return 0
    if options.older is None or shutil.which("valgrind") is None:
        print("name an older checkout; valgrind must be installed", file=sys.stderr)
        return 2
    from benchmarks.against import commit_of
    from benchmarks.machine import machine_facts
    from benchmarks.report import facts_line, write

    pairs = [(net, tool) for net in options.nets for tool in options.tools]
    checkouts = options.older, ROOT
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # counts do not depend on the load
        jobs = {
            (*pair, checkout, steps): pool.submit(count, checkout, *pair, steps)
            for pair in pairs
            for checkout in checkouts
            for steps in (_FEW, _FEW + STEPS[pair[0]])
        }
        found = {key: job.result() for key, job in jobs.items()}
    counted = [
        Counted(
            *pair,
            *(
                _per_step(
                    found[*pair, checkout, _FEW],
                    found[*pair, checkout, _FEW + STEPS[pair[0]]],
                    STEPS[pair[0]],
                )
                for checkout in checkouts
            ),
        )
        for pair in pairs
    ]
    facts = machine_facts()
    page = to_markdown(counted)
    print(page)
    if options.save is not None:
        document = {
            "older": commit_of(options.older),
            "machine": facts,
            "counted": [asdict(each) for each in counted],
        }
        head = (
            f"# Instructions per step in an older checkout and in this one\n\n{facts_line(facts)}"
        )
        write(options.save, document, f"{head}\n\n{page}", prefix="instructions-")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions")
    parser.add_argument("older", nargs="?", type=Path, help="an older checkout")
    parser.add_argument("--nets", nargs="+", choices=STEPS, default=["mlp", "tutorial"])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=[*TOOLS])
    parser.add_argument("--save", type=Path, default=RESULTS, help="a folder for the results")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

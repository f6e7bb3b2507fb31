"""Compare the cost of tracing in two checkouts, in blocks that alternate within one run.

Each checkout's `comgra_decl` is imported by a separate process, which measures blocks of this
checkout's training runs and tools on request. Only one of the processes works at a time.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.nets import Scenario
from benchmarks.report import facts_line, table, write
from benchmarks.results import Ratio
from benchmarks.run import refusal
from benchmarks.timing import Plan, plan_for
from benchmarks.tools import Tool

ROOT = Path(__file__).parents[1]
TOOLS = ("nothing", "idle", "record", "light", "debug")
"""The tools that are compared by default; each exists in every checkout."""

_PROBE = Plan(warmup=3, steps=10)
COLUMNS = (
    "net",
    "tool",
    "older",
    "this",
    "ratio (quartiles)",
    "CPU ratio",
    "older/plain",
    "/plain",
)


class Checkout:
    """A process that imports `comgra_decl` from one checkout and measures blocks.

    Args:
        path: the checkout's root.
        scratch: an empty folder.
    """

    def __init__(self, path: Path, scratch: Path) -> None:
        package = (path / "comgra_decl").resolve()
        if not (package / "__init__.py").is_file():
            raise SystemExit(f"--against: {str(path)!r} is not a checkout: it has no comgra_decl/")
        (scratch / "comgra_decl").symlink_to(package)
        for name in ("benchmarks", "examples"):
            (scratch / name).symlink_to(ROOT / name)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.against"],
            cwd=scratch,
            env={
                **os.environ,
                "PYTHONPATH": str(scratch),
                "OMP_NUM_THREADS": "1",
                # The installed entry point names a module that an older checkout may not have.
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        imported = Path(self._answer()["package"]).resolve()
        if imported != package:
            self.close()
            raise RuntimeError(f"imported {imported} instead of {package}")

    def block(self, net: str, tool: str, plan: Plan) -> dict[str, Any]:
        """Measure one block; return its `step` and `cpu` in seconds, and whether it is `plain`.

        Raises:
            RuntimeError: the block failed, or the process has ended.
        """
        assert self._process.stdin is not None
        asked = {"net": net, "tool": tool, "warmup": plan.warmup, "steps": plan.steps}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the comparison ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


@dataclass(frozen=True)
class Comparison:
    """One tool on one net; times in seconds, medians over rounds.

    Attributes:
        steps: a step in the older checkout and in this one.
        step: ratio of this checkout's step to the older one's, with quartiles of the rounds.
        cpu: the same for the processor time of all threads.
    """

    net: str
    tool: str
    steps: tuple[float, float]
    step: Ratio
    cpu: Ratio


def compare(
    path: Path, scenarios: Sequence[Scenario], tools: Sequence[Tool], *, rounds: int
) -> list[Comparison]:
    """Measure every tool on every net in an older checkout and in this one, alternately."""
    with _checkouts(path) as checkouts:
        found = []
        for scenario in scenarios:
            training = scenario.build()
            running = [tool for tool in tools if refusal(tool, training) is None]
            plans = {tool.name: _plan(checkouts[1], scenario, tool) for tool in running}
            blocks = _blocks(checkouts, scenario.name, plans, rounds=rounds)
            found += [compared(scenario.name, name, blocks[name]) for name in plans]
    return found


@contextmanager
def _checkouts(path: Path) -> Iterator[tuple[Checkout, Checkout]]:
    with ExitStack() as stack:
        both = []
        for root in (path, ROOT):
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="against-"))
            both.append(Checkout(root, Path(scratch)))
            stack.callback(both[-1].close)
        yield both[0], both[1]


def _plan(checkout: Checkout, scenario: Scenario, tool: Tool) -> Plan:
    step = checkout.block(scenario.name, tool.name, _PROBE)["step"]
    return plan_for(tool, step_seconds=step, block_seconds=scenario.block_seconds)


def _blocks(
    checkouts: tuple[Checkout, Checkout], net: str, plans: dict[str, Plan], *, rounds: int
) -> dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Return per tool a pair of adjacent blocks for each round; which goes first is drawn."""
    dice = random.Random(0)
    found: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {name: [] for name in plans}
    for number in range(rounds):
        for name in dice.sample([*plans], len(plans)):
            first = dice.randrange(2)
            one = checkouts[first].block(net, name, plans[name])
            two = checkouts[1 - first].block(net, name, plans[name])
            found[name].append((two, one) if first else (one, two))
        print(f"{net}: round {number + 1} of {rounds}", file=sys.stderr)
    return found


def compared(
    net: str, tool: str, blocks: Sequence[tuple[dict[str, Any], dict[str, Any]]]
) -> Comparison:
    """Return the ratios for pairs of blocks, each from the older checkout and from this one."""
    (older, this), (older_cpu, this_cpu) = (
        [[block[name] for block in side] for side in zip(*blocks, strict=True)]
        for name in ("step", "cpu")
    )
    steps = float(np.median(older)), float(np.median(this))
    return Comparison(net, tool, steps, Ratio.of(this, older), Ratio.of(this_cpu, older_cpu))


def to_markdown(comparisons: Sequence[Comparison], *, rounds: int) -> str:
    """Return the table of ratios; ratios to plain training require the `nothing` tool."""
    plain = {c.net: c.steps for c in comparisons if c.tool == "nothing"}
    lines = []
    for c in comparisons:
        base = plain.get(c.net)
        shares = [f"{c.steps[i] / base[i]:.2f}" if base else "-" for i in range(2)]
        ratio = f"{c.step.value:.3f} ({c.step.low:.3f} to {c.step.high:.3f})"
        times = [f"{1000 * seconds:.3f}" for seconds in c.steps]
        lines.append((c.net, c.tool, *times, ratio, f"{c.cpu.value:.3f}", *shares))
    return (
        f"Medians of {rounds} rounds; a step in ms. *ratio*: this checkout's step to the older "
        "one's, in brackets the quartiles of the ratios of adjacent blocks; *CPU ratio*: the same "
        "for the processor time of all threads; */plain*: a step to one with `nothing`.\n\n"
        + table([COLUMNS, *lines])
        + "\n"
    )


def save(
    folder: Path,
    comparisons: Sequence[Comparison],
    *,
    rounds: int,
    older: Path,
    machine: Mapping[str, Any],
) -> Path:
    """Write `against-DATE.json` and `.md` into `folder`; return the path of the latter."""
    document = {
        "older": commit_of(older),
        "rounds": rounds,
        "machine": dict(machine),
        "comparisons": [asdict(comparison) for comparison in comparisons],
    }
    page = f"# Tracing in an older checkout and in this one\n\n{facts_line(machine)}\n\n"
    page += to_markdown(comparisons, rounds=rounds)
    return write(folder, document, page, prefix="against-")


def commit_of(checkout: Path) -> str:
    """Return the short hash of the commit that is checked out; empty if git reports none."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return ""
    return done.stdout.strip()


def serve() -> None:
    """Measure the blocks requested on standard input, one JSON object per line."""
    import torch

    import comgra_decl
    from benchmarks.nets import SCENARIOS
    from benchmarks.timing import Meter
    from benchmarks.tools import TOOLS as KNOWN

    torch.set_num_threads(1)
    scenarios, tools = {s.name: s for s in SCENARIOS}, {tool.name: tool for tool in KNOWN}
    meters: dict[str, Meter] = {}
    _say({"package": str(Path(comgra_decl.__file__).parent)})
    with tempfile.TemporaryDirectory(prefix="against-runs-") as root:
        for line in sys.stdin:
            asked = json.loads(line)
            name = asked["net"]
            if name not in meters:
                meters[name] = Meter(scenarios[name].build(), Path(root))
            plan = Plan(warmup=asked["warmup"], steps=asked["steps"])
            try:
                block = meters[name].block(tools[asked["tool"]], plan)
            except Exception as error:  # noqa: BLE001 - the other process reports it
                _say({"error": f"{asked['tool']} on {name}: {type(error).__name__}: {error}"})
            else:
                _say({"step": block.step, "cpu": block.cpu})


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()

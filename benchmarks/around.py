"""`python -m benchmarks.around`: the price of what a run records around the network.

In steps that are not recorded: automatic metrics with the watch for stalls and growing memory. In
the steps that are named for it: the profile and the measurement of memory. After an error: the
post-mortem.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks import machine, report
from benchmarks.nets import SCENARIOS, Scenario, Training
from benchmarks.results import Ratio
from benchmarks.timing import Block, Meter, Plan, interleave, plan_for
from benchmarks.tools import Tool
from benchmarks.tools.nothing import Nothing
from benchmarks.tools.ours import FIRST_STEP_ONLY, OUTPUTS_AND_GRADIENTS, Idle, spec

RESULTS = Path(__file__).with_name("results")
NETS = ("mlp", "transformer")
_MEASURED = 16
_WARMUP = 4
_ERRORS = 15

_PLAIN = Nothing("nothing", "nothing attached")


def _idle(name: str, label: str, **fields: Any) -> Idle:
    return Idle(name, label, source=spec(OUTPUTS_AND_GRADIENTS, schedule=FIRST_STEP_ONLY, **fields))


_IDLE: tuple[Tool, ...] = (
    Nothing("again", "nothing attached, again (noise)"),
    _idle("bare", "idle, without automatic metrics", kpis={"automatic": False}),
    _idle("automatic", "idle, with automatic metrics and the watch for stalls"),
)
_STEPS = [_WARMUP, _WARMUP + _MEASURED - 1]
_INTENSE: tuple[Tool, ...] = (
    _idle("memory", "a step whose memory is measured", memory={"steps": _STEPS}),
    _idle("profile", "a step that is profiled", profile={"steps": _STEPS}),
)


@dataclass(frozen=True)
class Price:
    """A tool on one net: seconds of a step, and the ratio to plain steps with its quartiles."""

    net: str
    tool: str
    label: str
    step: float
    ratio: Ratio


def measure(scenario: Scenario, root: Path, *, rounds: int, seconds: float) -> list[Price]:
    """Measure all tools on one net, in blocks of some seconds that alternate."""
    training = scenario.build()
    meter = Meter(training, root)
    probe = meter.block(_PLAIN, Plan(3, 10)).step
    long = plan_for(_PLAIN, step_seconds=probe, block_seconds=seconds)
    found = _prices(scenario.name, meter, _IDLE, long, rounds)
    return found + _prices(scenario.name, meter, _INTENSE, Plan(_WARMUP, _MEASURED), rounds)


def _prices(net: str, meter: Meter, tools: Sequence[Tool], plan: Plan, rounds: int) -> list[Price]:
    running = (_PLAIN, *tools)
    plans = dict.fromkeys((tool.name for tool in running), plan)
    blocks = interleave(meter, plans, tools=running, rounds=rounds)
    plain = _steps(blocks["nothing"])
    return [
        Price(net, tool.name, tool.label, float(np.median(mine)), Ratio.of(mine, plain))
        for tool in tools
        for mine in [_steps(blocks[tool.name])]
    ]


def _steps(blocks: Sequence[Block]) -> list[float]:
    return [block.step for block in blocks]


def post_mortem(training: Training, root: Path) -> float:
    """Return the median seconds by which an error lengthens the end of a run."""

    def end(number: int, *, fails: bool) -> float:
        import comgra_decl

        began = 0.0
        with (
            suppress(ZeroDivisionError),
            comgra_decl.trace("light", root=root / f"{number}{fails}"),
        ):
            training.step()
            loss = training.step()
            began = time.perf_counter()
            if fails:
                raise ZeroDivisionError(loss.ndim)
        return time.perf_counter() - began

    pairs = [(end(i, fails=True), end(i, fails=False)) for i in range(_ERRORS)]
    return float(np.median([failed - plain for failed, plain in pairs]))


def to_markdown(prices: Sequence[Price], errors: Mapping[str, float]) -> str:
    """Return the table of all prices."""
    rows = [("", "net", "step", "ratio (quartiles)")]
    for price in prices:
        ratio = price.ratio
        between = f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
        rows.append((price.label, price.net, f"{1000 * price.step:.3g} ms", between))
    rows += [
        ("the post-mortem of an error", net, f"{1000 * seconds:.3g} ms, once", "")
        for net, seconds in errors.items()
    ]
    return report.table(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and store it; return the exit status."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks.around", description=__doc__)
    parser.add_argument("--nets", nargs="+", metavar="NAME", default=NETS)
    parser.add_argument("--rounds", type=int, default=15, help="blocks per tool (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a block (%(default)s)")
    parser.add_argument("--save", type=Path, default=RESULTS, help="folder (%(default)s)")
    parser.add_argument("--no-save", dest="save", action="store_const", const=None)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    facts = machine.machine_facts()
    prices: list[Price] = []
    errors: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="around-") as root:
        for scenario in (each for each in SCENARIOS if each.name in options.nets):
            blocks = {"rounds": options.rounds, "seconds": options.seconds}
            prices += measure(scenario, Path(root), **blocks)
            errors[scenario.name] = post_mortem(scenario.build(), Path(root) / scenario.name)
    document = {
        "machine": facts,
        "rounds": options.rounds,
        "prices": [asdict(price) for price in prices],
        "post_mortem": errors,
    }
    report.publish(options.save, document, to_markdown(prices, errors), prefix="around-")
    return 0


if __name__ == "__main__":
    sys.exit(main())

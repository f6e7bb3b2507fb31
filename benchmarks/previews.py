"""`python -m benchmarks.previews`: what previews add to the time and the size of recorded steps.

Every step is recorded, with the outputs and gradients of every module. Three specs run in
alternating blocks: without previews, with one in every 50th record (the default), and with one in
every record. A block contains as many records with previews as its share of steps requires. Times
include storage, and bytes are those of all files of a run of 100 records.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks import machine, report
from benchmarks.nets import SCENARIOS, Training
from benchmarks.probes import images
from benchmarks.results import Ratio
from benchmarks.timing import Block, Meter, Plan, interleave
from benchmarks.tools import Tool
from benchmarks.tools.ours import EVERY_STEP, OUTPUTS_AND_GRADIENTS, Ours, spec
from comgra_decl.spec.preview import PreviewSpec

RESULTS = Path(__file__).with_name("results")
NETS: dict[str, Callable[[], Training]] = {
    **{each.name: each.build for each in SCENARIOS},
    "images": images,
}
EVERY = PreviewSpec().every
_WARMUP = EVERY // 2
"""Steps before the measured ones, so that a block of a multiple of `EVERY` steps is not one off."""

SLOWEST, LARGEST = 1.02, 2.0
"""Targets: the largest ratios of the time and of the bytes of a recorded step by default."""


def _recording(name: str, label: str, preview: Any) -> Ours:
    fields = {"schedule": EVERY_STEP, "graph": False, "preview": preview}
    return Ours(name, label, source=spec(OUTPUTS_AND_GRADIENTS, **fields))


_WITHOUT = _recording("without", "no previews", False)
_TOOLS: tuple[Tool, ...] = (
    _recording("again", "no previews, again (noise)", False),
    _recording("default", f"in every {EVERY}th record (default)", {"every": EVERY}),
    _recording("always", "in every record", {"every": 1}),
)


@dataclass(frozen=True)
class Price:
    """A spec on one net: seconds and bytes of a record, and their ratios to those without previews.

    Attributes:
        net: the net.
        tool: the spec.
        label: its name in the table.
        step: seconds of a step, until it is stored.
        ratio: the ratio of these, with quartiles over the rounds.
        cpu: the ratio of the processor time of all threads.
        bytes: bytes of a record.
        grown: the ratio of these.
    """

    net: str
    tool: str
    label: str
    step: float
    ratio: Ratio
    cpu: Ratio
    bytes: float
    grown: float


def measure(net: str, root: Path, *, rounds: int, periods: int) -> list[Price]:
    """Measure all specs on one net, in blocks of `periods` times 50 steps that alternate."""
    meter = Meter(NETS[net](), root)
    running = (_WITHOUT, *_TOOLS)
    plans = dict.fromkeys((tool.name for tool in running), Plan(_WARMUP, periods * EVERY))
    sizes = {tool.name: stored(tool, meter, records=2 * EVERY) for tool in running}
    blocks = interleave(meter, plans, tools=running, rounds=rounds)
    plain = blocks["without"]
    return [
        Price(
            net,
            tool.name,
            tool.label,
            float(np.median(_of(mine, "stored"))),
            Ratio.of(_of(mine, "stored"), _of(plain, "stored")),
            Ratio.of(_of(mine, "cpu"), _of(plain, "cpu")),
            sizes[tool.name],
            sizes[tool.name] / sizes["without"],
        )
        for tool in _TOOLS
        for mine in [blocks[tool.name]]
    ]


def stored(tool: Tool, meter: Meter, *, records: int) -> float:
    """Return the bytes per record of a run of that many records, in all its files."""
    meter.training.reset()
    with meter.fresh_folder() as folder:
        with tool.attach(meter.training, folder) as step:
            for _ in range(records):
                step()
        tool.check(folder, records)
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / records


def _of(blocks: Sequence[Block], field: str) -> list[float]:
    return [getattr(block, field) for block in blocks]


def to_markdown(prices: Sequence[Price]) -> str:
    """Return the table of all prices; what exceeds its target is bold."""
    rows = [("previews", "net", "step", "ratio (quartiles)", "processor time", "bytes", "ratio")]
    for price in prices:
        ratio, judged = price.ratio, price.tool == "default"
        slow = _bold(f"{ratio.value:.3f}", when=judged and ratio.value > SLOWEST)
        large = _bold(f"{price.grown:.2f}", when=judged and price.grown > LARGEST)
        rows.append((
            price.label, price.net, f"{1000 * price.step:.3g} ms",
            f"{slow} ({ratio.low:.3f} to {ratio.high:.3f})", f"{price.cpu.value:.3f}",
            f"{price.bytes:,.0f}", large,
        ))  # fmt: skip
    return report.table(rows)


def _bold(text: str, *, when: bool) -> str:
    return f"**{text}**" if when else text


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and store it; return the exit status."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks.previews", description=__doc__)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--rounds", type=int, default=5, help="blocks per spec (%(default)s)")
    parser.add_argument("--periods", type=int, default=1, help="a block in 50 steps (%(default)s)")
    parser.add_argument("--save", type=Path, default=RESULTS, help="folder (%(default)s)")
    parser.add_argument("--no-save", dest="save", action="store_const", const=None)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    facts = machine.machine_facts()
    prices: list[Price] = []
    with tempfile.TemporaryDirectory(prefix="previews-") as root:
        for net in options.nets:
            prices += measure(net, Path(root), rounds=options.rounds, periods=options.periods)
    document = {
        "machine": facts,
        "rounds": options.rounds,
        "prices": [asdict(price) for price in prices],
    }
    report.publish(options.save, document, to_markdown(prices), prefix="previews-")
    return 0


if __name__ == "__main__":
    sys.exit(main())

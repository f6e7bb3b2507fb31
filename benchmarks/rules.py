"""The cost of rules during recording: `python -m benchmarks.rules`.

Records every step of a training with the `debug` preset, and measures the processor time that the
writer thread spends on rules, per record, next to the processor time of all threads. Processor time
is also meaningful on a machine that is not idle. `--profile` prints where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

RESULTS = Path(__file__).with_name("results")
STEPS = {"mlp": 600, "tutorial": 300, "transformer": 30}
"""Recorded steps of each net in one round."""


@dataclass(frozen=True)
class Cost:
    """Processor time per record, in seconds.

    Attributes:
        rules: spent by the writer thread on rules.
        record: spent by all threads on a recorded step, with its storage and rules.
    """

    rules: float
    record: float

    @property
    def share(self) -> float:
        """Share of the recorded step that rules take."""
        return self.rules / self.record


class _Watch:
    """Measures the calls through which the writer thread runs the rules."""

    def __init__(self, profile: cProfile.Profile | None) -> None:
        self.seconds = 0.0
        self._profile = profile

    def around(self, safely: Callable[..., None]) -> Callable[..., None]:
        def timed(rules: Any, work: Callable[[], None]) -> None:
            began = time.thread_time()
            if self._profile is None:
                safely(rules, work)
            else:
                self._profile.runcall(safely, rules, work)
            self.seconds += time.thread_time() - began

        return timed


def measure(net: str, *, profile: cProfile.Profile | None = None) -> Cost:
    """Record a training run with a benchmark net and return the cost of a record."""
    import comgra_decl
    from benchmarks.nets import SCENARIOS
    from benchmarks.tools.ours import EVERY_STEP
    from comgra_decl.rules.live import LiveRules

    (scenario,) = [scenario for scenario in SCENARIOS if scenario.name == net]
    training, steps, watch = scenario.build(), STEPS[net], _Watch(profile)
    overrides = [f"schedule.{name}={value}" for name, value in EVERY_STEP.items()]
    own = LiveRules._safely  # noqa: SLF001  (the only way into the rules)
    setattr(LiveRules, "_safely", watch.around(own))  # noqa: B010
    try:
        with tempfile.TemporaryDirectory() as root:
            with comgra_decl.trace("debug", root=root, overrides=overrides):
                training.step()  # discovers the model
                watch.seconds, cpu = 0.0, time.process_time()
                for _ in range(steps):
                    training.step()
            cpu = time.process_time() - cpu
    finally:
        setattr(LiveRules, "_safely", own)  # noqa: B010
    return Cost(watch.seconds / steps, cpu / steps)


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the measurements requested on the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rules", description=__doc__)
    parser.add_argument("--nets", nargs="+", default=["mlp", "transformer"], choices=list(STEPS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print where the time is spent")
    parser.add_argument("--save", action="store_true", help="write results/rules-DATE.json")
    options = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for net in options.nets:
        if options.profile:
            profile = cProfile.Profile()
            measure(net, profile=profile)
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
            pstats.Stats(profile).sort_stats("cumtime").print_stats(70)
            continue
        costs = [measure(net) for _ in range(options.rounds)]
        middle = Cost(median(c.rules for c in costs), median(c.record for c in costs))
        found[net] = {**asdict(middle), "share": median(c.share for c in costs)}
        print(
            f"{net:12} {1e3 * middle.rules:.3f} ms of {1e3 * middle.record:.2f} ms per record, "
            f"{found[net]['share']:.1%}",
            flush=True,
        )
    if options.save and found:
        today = time.strftime("%Y-%m-%d")
        content = {"date": today, "rounds": options.rounds, "nets": found}
        (RESULTS / f"rules-{today}.json").write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

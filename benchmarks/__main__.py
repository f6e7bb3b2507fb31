"""`python -m benchmarks`: measure every tool on every net, and print and store the table."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# One thread everywhere; OpenMP reads this when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

RESULTS = Path(__file__).with_name("results")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks that the command line selects; return the exit status."""
    options = _options(arguments)
    if options.device is not None:
        from benchmarks.device import run

        return run.main(
            options.device,
            smoke=options.smoke,
            save=None if options.smoke and options.save == RESULTS else options.save,
            only=options.parts,
            store=options.store,
            minutes=options.minutes,
        )
    if options.against is not None:
        return _against(options)
    import torch

    from benchmarks import machine, peers, report, targets
    from benchmarks.run import measure, selected

    torch.set_num_threads(1)
    if not peers.install():
        print("comgra could not be installed; its lines are left out", file=sys.stderr)
    facts = machine.machine_facts()
    if facts["load_before"] > 0.5:
        print(f"this machine is busy (load {facts['load_before']})", file=sys.stderr)
    scenarios, tools = selected(options.nets, options.tools)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as root:
        results = [
            measure(scenario, tools, root=Path(root), rounds=options.rounds)
            for scenario in scenarios
        ]
    verdicts = targets.verdicts({result.name: result for result in results})
    print(report.to_markdown(results, verdicts, machine=facts))
    if options.save is not None:
        path = report.save(options.save, results, verdicts=verdicts, machine=facts)
        print(f"written to {path}", file=sys.stderr)
    return 0


def _against(options: argparse.Namespace) -> int:
    from benchmarks import against, machine, report
    from benchmarks.run import selected

    scenarios, tools = selected(options.nets, options.tools or against.TOOLS)
    older, rounds = options.against, options.rounds
    facts = machine.machine_facts()
    found = against.compare(older, scenarios, tools, rounds=rounds)
    print(f"{report.facts_line(facts)}\n\n{against.to_markdown(found, rounds=rounds)}")
    if options.save is not None:
        path = against.save(options.save, found, rounds=rounds, older=older, machine=facts)
        print(f"written to {path}", file=sys.stderr)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--nets", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--tools", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--rounds", type=int, default=15, help="blocks per tool (%(default)s)")
    parser.add_argument("--save", type=Path, default=RESULTS, help="folder (%(default)s)")
    parser.add_argument("--no-save", dest="save", action="store_const", const=None)
    parser.add_argument(
        "--against", type=Path, metavar="PATH", help="compare with an older checkout, in one run"
    )
    device = parser.add_argument_group("on a device")
    device.add_argument(
        "--device", choices=("cuda", "cpu"), help="measure the cost of tracing there"
    )
    device.add_argument("--smoke", action="store_true", help="use tiny sizes, to test the code")
    device.add_argument("--parts", nargs="+", metavar="NAME", help="default: all")
    device.add_argument(
        "--without-store",
        dest="store",
        action="store_const",
        const=False,
        help="drop the records (the default if the store's packages are missing)",
    )
    device.add_argument("--minutes", type=float, default=8.0, help="time limit (%(default)g)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks.bugs`: train, diagnose, and print which bugs were found and missed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute the training runs selected on the command line; return the exit status."""
    options = _options(arguments)
    import torch

    from benchmarks.bugs import play, report
    from benchmarks.bugs.collection import cases
    from benchmarks.bugs.recipes import Half

    torch.set_num_threads(1)
    half: Half = options.half
    outcomes = []
    for case in cases():
        if any(fnmatchcase(case.name, pattern) for pattern in options.only):
            if options.plain:
                losses = play.plain(case, half)
                print(f"{case.name:32} {losses[0]:12.5g} {losses[-1]:12.5g} {len(losses)}")
                continue
            outcomes.append(play.play(case, half))
            print(report.line(outcomes[-1], details=options.details), flush=True)
    if outcomes:
        print(report.summary(outcomes))
    if options.save is not None:
        options.save.write_text(json.dumps(report.document(outcomes), indent=1) + "\n")
        print(f"written to {options.save}", file=sys.stderr)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bugs", description=__doc__)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="default: all")
    parser.add_argument("--half", choices=("tune", "second", "report"), default="tune")
    parser.add_argument("--details", action="store_true", help="print every finding")
    parser.add_argument(
        "--plain", action="store_true", help="only train, without tracing and rules"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the outcomes as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

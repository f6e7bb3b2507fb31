"""`python -m benchmarks.neutrality`: test every program of the zoo and store the verdicts."""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine, verdicts
from benchmarks.neutrality import pool, results, zoo

KIND = "neutrality"


def main(arguments: Sequence[str] | None = None) -> int:
    """Test the programs that the command line selects; return the exit status."""
    options = _options(arguments)
    chosen = _chosen(options.only)
    table = verdicts.load(options.save, kind=KIND) if options.resume else verdicts.Table()
    table.machine = machine.machine_facts(("torch", "transformers", "timm", "torchvision"))
    started = time.monotonic()
    todo = [name for name in chosen if name not in table.verdicts]
    for number, verdict in enumerate(pool.run_all(todo, jobs=options.jobs, limit=options.limit), 1):
        table.verdicts[verdict["name"]] = verdict
        print(f"{number:4}/{len(todo)} {results.line(verdict)}", flush=True)
        if options.save is not None:
            verdicts.save(table, options.save, kind=KIND)
    table.seconds += time.monotonic() - started
    if options.save is not None:
        print(f"written to {verdicts.save(table, options.save, kind=KIND)}", file=sys.stderr)
    print(results.summary(table))
    return int(any(not v["sound"] for v in table.verdicts.values()))


def _chosen(patterns: Sequence[str] | None) -> list[str]:
    for family in zoo.FAMILIES:
        if not zoo.installed(family):
            print(f"{family} is not installed: its programs are left out", file=sys.stderr)
    known = [n for f in zoo.FAMILIES if zoo.installed(f) for n in zoo.names(f)]
    if not patterns:
        return known
    return [name for name in known if any(fnmatch.fnmatch(name, p) for p in patterns)]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.neutrality", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="GLOB", help="such as 'torch/*'; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="parallel processes (%(default)s)")
    parser.add_argument(
        "--limit", type=float, default=120, help="seconds per program (%(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="keep the verdicts stored today")
    parser.add_argument("--save", type=Path, default=verdicts.FOLDER, help="folder (%(default)s)")
    parser.add_argument("--no-save", dest="save", action="store_const", const=None)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

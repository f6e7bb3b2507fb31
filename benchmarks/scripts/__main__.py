"""`python -m benchmarks.scripts [NAME...]`: run public scripts and store the verdicts."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from benchmarks import machine, verdicts
from benchmarks.scripts import fetching, page, running
from benchmarks.scripts.catalogue import Entry, entries
from benchmarks.scripts.judging import Verdict, judge

KIND = "scripts"


def try_entry(
    entry: Entry, scratch: Path, *, offline: bool = False, launch: running.Launch | None = None
) -> Verdict:
    """Run a script three times and return the verdict.

    Args:
        entry: the script.
        scratch: folder for the script's output and records.
        offline: whether to skip repositories that are not in the cache instead of fetching them.
        launch: function that starts the process; None for a new Python process.
    """
    reason = running.missing(entry)
    if reason:
        return Verdict(entry.name, commit=entry.commit, skipped=reason)
    try:
        tree = fetching.fetched(entry.repo, entry.commit, offline=offline)
    except fetching.MissingRepositoryError as error:
        return Verdict(entry.name, commit=entry.commit, skipped=str(error))
    runs = scratch / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    watched = running.start(entry, tree, scratch, watch="calls", launch=launch)
    why = _broken(entry, watched)
    if why:
        return Verdict(entry.name, commit=entry.commit, broken=why)
    plain = running.start(entry, tree, scratch, watch="bits", launch=launch)
    traced = running.start(entry, tree, scratch, watch="bits", runs=runs, launch=launch)
    verdict = judge(entry, watched, plain, traced, runs)
    neutral = verdict.promises.get("neutral")
    if neutral is not None and neutral.wrong:
        again = running.start(entry, tree, scratch, watch="bits", launch=launch)
        if judge(entry, watched, plain, again, runs).promises["neutral"].wrong:
            neutral.wrong = [f"(also between two plain runs) {text}" for text in neutral.wrong]
    return verdict


def _broken(entry: Entry, watched: running.Started) -> str:
    """Return why a script does not train here without tracing, or "" if it does."""
    steps = sum(s["optimizer"] is not None for p in watched.processes for s in p["segments"])
    trains = steps or any(s["losses"] for p in watched.processes for s in p["segments"])
    interrupted = entry.stop and watched.code not in entry.ends and steps < entry.stop
    if watched.code in running.ends(entry) and not interrupted and (trains or not entry.runs):
        return ""
    return f"ends with {watched.code} without tracing: {running.last(watched.errors)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scripts that the command line selects; return the exit status."""
    options = _options(arguments)
    known = entries()
    chosen = [e for e in known.values() if _wanted(e, options.only)]
    chosen.sort(key=lambda entry: entry.limit > 1000)  # the longest last
    table = verdicts.load(options.save, kind=KIND)
    if not options.only and not options.resume:
        table = verdicts.Table()
    table.machine = machine.machine_facts(("torch", "lightning", "transformers", "accelerate"))
    if options.fork:
        table.machine["remark"] = (
            ", but not the imports of torch and comgra_decl, which happen beforehand"
        )
    for number, entry in enumerate(chosen, 1):
        if options.resume and entry.name in table.verdicts:
            continue
        scratch = options.scratch / re.sub(r"[^\w.]+", "-", entry.name)
        scratch.mkdir(parents=True, exist_ok=True)
        alone = entry.processes or entry.runs > 1 or not entry.bits
        launch = running.started if alone or not options.fork else running.forked
        verdict = try_entry(entry, scratch, offline=options.offline, launch=launch)
        table.verdicts[entry.name] = page.stored(verdict)
        print(f"{number:3}/{len(chosen)} {page.line(table.verdicts[entry.name])}", flush=True)
        if options.save is not None:
            verdicts.save(table, options.save, kind=KIND)
        if not options.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    print(page.summary(table))
    chosen_verdicts = [table.verdicts[e.name] for e in chosen if e.name in table.verdicts]
    return int(any(not v["sound"] and not v["skipped"] for v in chosen_verdicts))


def _wanted(entry: Entry, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch(entry.name, f"*{p}*") for p in patterns)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripts", description=__doc__)
    parser.add_argument("only", nargs="*", metavar="NAME", help="part of a name, or a glob")
    parser.add_argument("--offline", action="store_true", help="only repositories in the cache")
    parser.add_argument(
        "--fork", action="store_true", help="faster: fork processes with torch imported"
    )
    parser.add_argument("--resume", action="store_true", help="keep the verdicts stored today")
    parser.add_argument("--keep", action="store_true", help="keep runs and output in --scratch")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "scripts")
    parser.add_argument("--save", type=Path, default=verdicts.FOLDER, help="folder (%(default)s)")
    parser.add_argument("--no-save", dest="save", action="store_const", const=None)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

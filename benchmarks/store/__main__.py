"""`python -m benchmarks.store`: size and speed of long runs, compared with other formats."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine_facts
from benchmarks.store import exports, handover, large, page, peers, reading
from benchmarks.store.data import Size, write

RESULTS = Path(__file__).parents[1] / "results"
SIZES = {
    "small": (Size(2_000, 100),),
    "full": (Size(10_000, 1_000), Size(100_000, 100)),
}
PEERS_SIZE = Size(1_024, 100, commit=1)


PARTS = ("handover", "large", "exports", "peers", "write", "read", "compact")


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the measurements selected on the command line, and write the results and the page."""
    options = _options(arguments)
    figures = {**_figures(options), "alone": options.alone}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as made:
        root = Path(options.folder or made)
        if "handover" in options.parts:
            with tempfile.TemporaryDirectory(dir=root) as folder:
                figures["handover"] = handover.measure(Path(folder))
        if "large" in options.parts:
            with tempfile.TemporaryDirectory(dir=root) as folder:
                figures["large"] = large.measure(Path(folder))
        if "exports" in options.parts:
            with tempfile.TemporaryDirectory(dir=root) as folder:
                figures["exports"] = exports.measure(Path(folder))
        if "peers" in options.parts:
            figures["peers_size"] = asdict(PEERS_SIZE)
            figures["peers"] = _peers(root)
        for size in _sizes(options):
            print(size.name, file=sys.stderr)
            _run(root / f"{size.records}x{size.slots}", size, options.parts, figures["runs"])
            if options.save:  # saved after each size, as long runs take minutes
                _save(figures)
    if options.save:
        _save(figures)
    print(page.tables(figures))
    return 0


def _figures(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures to start from: the newest stored ones if only some parts are measured."""
    new: dict[str, Any] = {"date": date.today().isoformat(), "machine": machine_facts()}
    known: dict[str, Any] = {"runs": [], "peers": []}
    if set(options.parts) != set(PARTS) or options.only:
        known |= json.loads(sorted(RESULTS.glob("store-*.json"))[-1].read_text())
        load = max(known["machine"]["load_before"], new["machine"]["load_before"])
        new["machine"]["load_before"] = load
    return {**known, **new}


def _save(figures: dict[str, Any]) -> None:
    path = RESULTS / f"store-{figures['date']}.json"
    path.write_text(json.dumps(figures, indent=1) + "\n")
    page.write(figures)
    print(f"written to {path}", file=sys.stderr)


def _peers(root: Path) -> list[dict[str, Any]]:
    found = []
    for name in peers.PEERS:
        print(name, file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=root) as folder:
            found.append(peers.measure(name, Path(folder) / name, PEERS_SIZE))
    return found


def _sizes(options: argparse.Namespace) -> list[Size]:
    wanted = {"write", "read", "compact"} & set(options.parts)
    chosen = SIZES[options.size] if wanted else ()
    return [size for size in chosen if options.only in (None, f"{size.records}x{size.slots}")]


def _run(folder: Path, size: Size, parts: Sequence[str], runs: list[dict[str, Any]]) -> None:
    """Write and read a run, compact it and read it again; update its line in `runs`."""
    line = next((run for run in runs if run["name"] == size.name), None)
    if line is None:
        line = {}
        runs.append(line)
    if "write" in parts:
        line.clear()
        line.update(_written(folder, size))
    if "read" in parts:
        line["read"] = reading.in_fresh_process(folder)
    if "compact" in parts:
        line.update(_compacted(folder, size))
        shutil.rmtree(folder)


def _written(folder: Path, size: Size) -> dict[str, Any]:
    wrote = write(folder, size)
    times = wrote.pop("times")
    half = len(times) // 2
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        "name": size.name,
        **asdict(size),
        **wrote,
        "commit_ms": 1e3 * float(np.median(times)),
        "commit_ms_first_half": 1e3 * float(np.median(times[:half])),
        "commit_ms_second_half": 1e3 * float(np.median(times[half:])),
        "files": len(files),
        "ratio": sum(path.stat().st_size for path in files) / size.raw_bytes,
    }


def _compacted(folder: Path, size: Size) -> dict[str, Any]:
    from comgra_decl.store.compaction import compact

    start = time.perf_counter()
    made = compact(folder)
    return {
        "compacting": time.perf_counter() - start,
        "compacted_ratio": made.bytes_after / size.raw_bytes,
        "compacted_files": made.files_after,
        "compacted_read": reading.in_fresh_process(folder),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__)
    parser.add_argument(
        "--size", choices=SIZES, default="full", help="default: full, 10 GB of disk"
    )
    parser.add_argument("--no-save", dest="save", action="store_false")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="measure only these parts, and keep the other figures of the newest results",
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="state that nothing else runs, regardless of the last minute's load",
    )
    parser.add_argument("--only", help="measure only this run: RECORDSxSLOTS")
    parser.add_argument("--folder", help="keep runs here between the parts write, read, compact")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

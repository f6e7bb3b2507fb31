"""`python -m benchmarks.store`: size and speed of long runs, beside other containers."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine_facts
from benchmarks.store import handover, page, peers, reading
from benchmarks.store.data import Size, write

RESULTS = Path(__file__).parents[1] / "results"
SIZES = {
    "small": (Size(2_000, 100),),
    "full": (Size(10_000, 1_000), Size(100_000, 100)),
}
PEERS_SIZE = Size(1_024, 100, commit=1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what the command line asks for, and writes results and page."""
    options = _options(arguments)
    figures: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": machine_facts(),
        "runs": [],
        "peers": [],
    }
    with tempfile.TemporaryDirectory(prefix="benchmark-") as root:
        figures["handover"] = handover.measure(Path(root) / "handover")
        figures["peers_size"] = asdict(PEERS_SIZE)
        for name in peers.PEERS:
            print(name, file=sys.stderr)
            figures["peers"].append(peers.measure(name, Path(root) / name, PEERS_SIZE))
        for size in SIZES[options.size]:
            print(size.name, file=sys.stderr)
            figures["runs"].append(_run(Path(root) / "run", size))
            if options.save:  # the long ones take minutes
                _save(figures)
    print(page.tables(figures))
    return 0


def _save(figures: dict[str, Any]) -> None:
    path = RESULTS / f"store-{figures['date']}.json"
    path.write_text(json.dumps(figures, indent=1) + "\n")
    page.write(figures)
    print(f"written to {path}", file=sys.stderr)


def _run(folder: Path, size: Size) -> dict[str, Any]:
    """Writes, reads, compacts and reads again."""
    import shutil

    from comgra_decl.store.compaction import compact

    wrote = write(folder, size)
    times = wrote.pop("times")
    half = len(times) // 2
    files = [path for path in folder.rglob("*") if path.is_file()]
    result = {
        "name": size.name,
        **asdict(size),
        **wrote,
        "commit_ms": 1e3 * float(np.median(times)),
        "commit_ms_first_half": 1e3 * float(np.median(times[:half])),
        "commit_ms_second_half": 1e3 * float(np.median(times[half:])),
        "files": len(files),
        "ratio": sum(path.stat().st_size for path in files) / size.raw_bytes,
        "read": reading.in_fresh_process(folder),
    }
    made = compact(folder)
    result["compacted_ratio"] = made.bytes_after / size.raw_bytes
    result["compacted_files"] = made.files_after
    result["compacted_read"] = reading.in_fresh_process(folder)
    shutil.rmtree(folder)
    return result


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__)
    parser.add_argument(
        "--size", choices=SIZES, default="full", help="default: full, 10 GB of disk"
    )
    parser.add_argument("--no-save", dest="save", action="store_false")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

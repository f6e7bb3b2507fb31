"""`python -m benchmarks.viewer`: time from a click to the painted page, in a real browser."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.machine import machine_facts
from benchmarks.viewer import measures, page, rivals
from benchmarks.viewer.data import SHAPES, made
from benchmarks.viewer.screen import browser
from benchmarks.viewer.served import served

RESULTS = Path(__file__).parents[1] / "results"
_PACKAGES = ("panel", "bokeh", "numpy", "tensorstore")
MEASURES = {
    "everyday": ("nodes-300", measures.everyday),
    "large": ("nodes-1000", measures.large),
    "long": ("steps-100000", measures.long),
    "memory": ("nodes-300", measures.memory),
    "pictures": ("pictures", measures.pictures),
    "rivals": ("nodes-300", rivals.measured),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the measurements selected on the command line, and write the results and the page."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = Path(options.data or temporary)
        roots = {shape.name: made(folder, shape) for shape in _shapes(options.only)}
        if "rivals" in options.only:
            rivals.prepare(folder)
        if options.make:
            return 0
        now = {"date": date.today().isoformat(), "machine": machine_facts(_PACKAGES)}
        for name in options.only:
            shape, measure = MEASURES[name]
            load = machine_facts(_PACKAGES)["load_before"]
            taken = {**_measured(roots[shape], measure), "date": now["date"], "load": load}
            print(page.tables({**now, "measures": {name: taken}}))
            if options.save:
                _save(name, taken, now)
    return 0


def _save(name: str, taken: dict[str, Any], now: dict[str, Any]) -> None:
    """Add a measure to the newest results, and write the page."""
    figures = {**_latest(), **now}
    figures["measures"][name] = taken
    path = RESULTS / f"viewer-{now['date']}.json"
    path.write_text(json.dumps(figures, indent=1) + "\n")
    page.write(figures)


def _latest() -> dict[str, Any]:
    """Return the newest results, whose measures are kept unless they are taken again."""
    files = sorted(RESULTS.glob("viewer-*.json"))
    if not files:
        return {"measures": {}}
    figures: dict[str, Any] = json.loads(files[-1].read_text())
    for measured in figures["measures"].values():
        measured.setdefault("date", figures["date"])
        measured.setdefault("load", figures["machine"]["load_before"])
    return figures


def _measured(root: Path, measure: Any) -> dict[str, Any]:
    with browser() as chromium, served(root) as server:
        figures: dict[str, Any] = measure(chromium, server)
        figures["browser"] = chromium.version
    return figures


def _shapes(only: Sequence[str]) -> list[Any]:
    wanted = {MEASURES[name][0] for name in only}
    return [shape for shape in SHAPES if shape.name in wanted]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.viewer", description=__doc__)
    usual = [name for name in MEASURES if name != "rivals"]
    parser.add_argument(
        "--only",
        nargs="+",
        choices=MEASURES,
        default=usual,
        help="by default all but `rivals`, which installs other tools",
    )
    parser.add_argument("--data", help="keep the synthetic runs (4 GB) in this folder")
    parser.add_argument("--make", action="store_true", help="only create the runs")
    parser.add_argument("--no-save", dest="save", action="store_false")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

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
from benchmarks.viewer import measures, page
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
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the measurements selected on the command line, and write the results and the page."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = Path(options.data or temporary)
        roots = {shape.name: made(folder, shape) for shape in _shapes(options.only)}
        if options.make:
            return 0
        path = RESULTS / f"viewer-{date.today().isoformat()}.json"
        figures = _latest()
        figures |= {"date": date.today().isoformat(), "machine": machine_facts(_PACKAGES)}
        for name in options.only:
            shape, measure = MEASURES[name]
            figures["measures"][name] = {
                **_measured(roots[shape], measure),
                "date": figures["date"],
                "load": machine_facts(_PACKAGES)["load_before"],
            }
            print(page.tables({**figures, "measures": {name: figures["measures"][name]}}))
        if options.save:
            path.write_text(json.dumps(figures, indent=1) + "\n")
            page.write(figures)
    return 0


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
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--data", help="keep the synthetic runs (4 GB) in this folder")
    parser.add_argument("--make", action="store_true", help="only create the runs")
    parser.add_argument("--no-save", dest="save", action="store_false")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks.viewer`: time from a click to the painted page, in a real browser."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.machine import machine_facts
from benchmarks.viewer import measures, page, rivals
from benchmarks.viewer.data import PICTURED, SHAPES, made, made_pictures
from benchmarks.viewer.heads import made_heads
from benchmarks.viewer.screen import browser
from benchmarks.viewer.served import Served, served

RESULTS = Path(__file__).parents[1] / "results"
_PACKAGES = ("panel", "bokeh", "numpy", "tensorstore")
ROOTS: dict[str, Callable[[Path], Path]] = {
    **{shape.name: partial(made, shape=shape) for shape in SHAPES},
    PICTURED: made_pictures,
    "heads": made_heads,
}
"""What creates the folders of runs to view."""

MEASURES: dict[str, tuple[str, Callable[[Any, Served], dict[str, Any]]]] = {
    "everyday": ("nodes-300", measures.everyday),
    "previews": ("previews-300", measures.previews),
    "pictures": (PICTURED, measures.pictures),
    "heads": ("heads", measures.heads),
    "large": ("nodes-1000", measures.large),
    "long": ("steps-100000", measures.long),
    "memory": ("nodes-300", measures.memory),
    "rivals": ("nodes-300", rivals.measured),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the measurements selected on the command line, and write the results and the page."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = Path(options.data or temporary)
        roots = {MEASURES[name][0]: Path() for name in options.only}
        roots = {name: ROOTS[name](folder) for name in roots}
        if "rivals" in options.only:
            rivals.prepare(folder)
        if options.make:
            return 0
        path = RESULTS / f"viewer-{date.today().isoformat()}.json"
        figures = _latest()
        figures |= {"date": date.today().isoformat(), "machine": machine_facts(_PACKAGES)}
        for name in options.only:
            data, measure = MEASURES[name]
            load = machine_facts(_PACKAGES)["load_before"]
            taken = _measured(roots[data], measure)
            figures["measures"][name] = {**taken, "date": figures["date"], "load": load}
            print(f"{name} is measured", file=sys.stderr)
            if options.save:  # after each, in case a later one fails
                path.write_text(json.dumps(figures, indent=1) + "\n")
                page.write(figures)
    measured = {name: figures["measures"][name] for name in options.only}
    print(page.tables({**figures, "measures": measured}))
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


def _measured(root: Path, measure: Callable[[Any, Served], dict[str, Any]]) -> dict[str, Any]:
    with browser() as chromium, served(root) as server:
        figures = measure(chromium, server)
        figures["browser"] = chromium.version
    return figures


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.viewer", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--data", help="keep the runs (5 GB) in this folder")
    parser.add_argument("--make", action="store_true", help="only create the runs")
    parser.add_argument("--no-save", dest="save", action="store_false")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

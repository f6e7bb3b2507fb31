"""Write the figures into `docs/viewer.md`, between two markers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).parents[2] / "docs" / "viewer.md"
BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->\n"
_QUIET = 0.5  # load
_TITLES = {
    "everyday": "308 nodes, 1,000 steps",
    "large": "{boxes:,} boxes drawn",
    "long": "100,000 steps",
    "memory": "many changes, many sessions",
    "pictures": "pictures of 8 samples, heads",
    "rivals": "beside TensorBoard and comgra",
}
_TARGETS = {
    ("everyday", "usable"): 2000,
    ("everyday", "step"): 60,
    ("everyday", "node"): 60,
    ("everyday", "sample"): 60,
    ("everyday", "statistic"): 60,
    ("everyday", "painting"): 100,
    ("large", "first render, all open"): 3000,
    ("large", "highlight"): 100,
    ("large", "new colours"): 80,
    ("pictures", "step"): 60,
    ("pictures", "step, pictures drawn"): 60,
    ("pictures", "step back"): 60,
    ("pictures", "step back, pictures drawn"): 60,
    ("pictures", "last of ten quick steps"): 60,
    ("pictures", "sample"): 60,
    ("pictures", "144 heads, 128 tokens"): 1000,
}


def write(figures: dict[str, Any]) -> None:
    """Replace the figures on the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n" + tables(figures) + "\n" + END + after)


def tables(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    machine = figures["machine"]
    lines = ["| | | median | p95 | target | of |", "|---|---|---:|---:|---:|---:|"]
    taken = [(name, figures["measures"][name]) for name in _TITLES if name in figures["measures"]]
    for name, measured in taken:
        lines += _lines(name, measured)
    notes = _memory(figures["measures"].get("memory", {}))
    when = "; ".join(
        f"*{_TITLES[name].format(**measured)}* on {measured['date']} at a load of "
        f"{measured['load']}" for name, measured in taken
    )  # fmt: skip
    busy = any(measured["load"] > _QUIET for _, measured in taken)
    bounds = "**The machine was busy, so the times are upper bounds.** " * busy
    return f"""\
Measured with `python -m benchmarks.viewer`: {machine["processor"]}, {machine["cores"]} cores shared
by server and browser, no GPU (the browser renders in software), system load by measurement: {when}.
{bounds}Times in ms.

{chr(10).join(lines)}
{notes}"""


def _lines(name: str, measured: dict[str, Any]) -> list[str]:
    title, lines = _TITLES[name].format(**measured), []
    for what, values in measured.items():
        if not isinstance(values, list) or what.startswith("memory"):
            continue
        median, high = np.median(values), np.percentile(values, 95)
        target = _TARGETS.get((name, what))
        goal = f"{target:,}" if target else ""
        lines.append(f"| {title} | {what} | {median:,.0f} | {high:,.0f} | {goal} | {len(values)} |")
        title = ""
    return lines


def _memory(measured: dict[str, Any]) -> str:
    if not measured:
        return ""
    first, held = measured["memory at first"][0], measured["memory over 500 changes"]
    each = measured["memory per session"]
    return f"""
The server used {first:.0f} MB at first, {held[0]:.0f} MB after 450 step changes and
{held[-1]:.0f} MB after 500 more, all to records that it had not read before. Each additional
session took {np.median(each):.0f} MB.
"""

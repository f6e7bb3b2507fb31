"""Format verdicts for printing."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.verdicts import Table


def line(verdict: dict[str, Any]) -> str:
    """Return one verdict as a line."""
    parts = [f"{verdict['name']:48} {verdict['status']:14}"]
    if verdict.get("seconds"):
        parts.append(" + ".join(f"{v:.1f}" for v in verdict["seconds"].values()) + " s")
    remarks = ("error", "faults", "differences", "missing", "wrong")
    parts += [f"{key}: {str(verdict[key])[:160]}" for key in remarks if verdict.get(key)]
    return "  ".join(parts)


def summary(table: Table) -> str:
    """Return the counts of each status."""
    counts = Counter(v["status"] for v in table.verdicts.values())
    sound = sum(v["sound"] for v in table.verdicts.values())
    listed = ", ".join(f"{number} {status}" for status, number in counts.most_common())
    return f"{len(table.verdicts)} programs: {listed}; {sound} without remarks"

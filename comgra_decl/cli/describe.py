"""Describe runs as plain data for the JSON output of the command line."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from comgra_decl.query import Run, RunSummary


def describe_summary(summary: RunSummary) -> dict[str, Any]:
    """Return a row of `ls`; `started` is in Unix seconds, `error` says why a run is unreadable."""
    return {
        "path": str(summary.path),
        "group": summary.group,
        "name": summary.name,
        "state": summary.state,
        "records": summary.records,
        "last_step": summary.last_step,
        "started": summary.started,
        "error": summary.error,
    }


def describe_run(run: Run) -> dict[str, Any]:
    """Return everything that `show` prints about a run; tables are lists of rows."""
    steps = run.steps
    return {
        "path": str(run.path),
        "group": run.group,
        "name": run.name,
        "state": run.state,
        "started": run.started,
        "error": run.error,
        "ending": describe_ending(run),
        "records": len(run.records),
        "steps": {
            "count": len(steps),
            "first": int(steps[0]) if len(steps) else None,
            "last": int(steps[-1]) if len(steps) else None,
        },
        "ranks": run.ranks,
        "missing_ranks": run.missing_ranks,
        "first_stopped": run.first_stopped,
        "sessions": rows(run.sessions.astype(object)),
        "types": run.types,
        "statistics": run.statistics,
        "sample_count": run.sample_count,
        "nodes": run.nodes,
        "slots": rows(run.slots.reset_index()),
        "kpis": _latest_kpis(run.kpis()),
        "notes": rows(run.notes()),
        "findings": rows(run.findings()),
        "experiments": [vars(check) for check in run.experiments()],
        "damage": run.damage,
        "report": plain(run.report),
        "spec": run.spec.model_dump(mode="json"),
        "links": plain(run.document("links") or {}),
        "imported": plain(run.document("imported")),
        "config": plain(run.config),
        "facts": plain(run.facts),
    }


def describe_ending(run: Run) -> dict[str, Any] | None:
    """Return how the program ended, with the full post-mortem; None if it ended normally."""
    ending = run.ending
    if ending is None:
        return None
    return {
        "headline": ending.headline,
        "parts": [{"title": title, "lines": lines} for title, lines in ending.parts],
        "post_mortem": plain(ending.content) or None,
    }


def _latest_kpis(kpis: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the latest value of every KPI, for each type of execution."""
    if kpis.empty:
        return []
    return rows(kpis.sort_values("step", kind="stable").groupby(["type", "name"]).tail(1))


def rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table as plain JSON data; NaN becomes None."""
    return [plain(row) for row in table.to_dict(orient="records")]


def plain(value: Any) -> Any:
    """Return `value` as plain JSON data; non-finite numbers become None."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)

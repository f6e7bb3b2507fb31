"""The verdicts as they are stored and printed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "results"


@dataclass
class Table:
    """All verdicts of one day, by the name of the program."""

    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d"))
    machine: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)


def load(folder: Path | None) -> Table:
    """Returns today's table; an empty one if there is none."""
    table = Table()
    if folder is not None and (path := _path(folder, table)).exists():
        return Table(**json.loads(path.read_text()))
    return table


def save(table: Table, folder: Path) -> Path:
    """Writes the table and returns where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, table)
    path.write_text(json.dumps(asdict(table), indent=1, sort_keys=True) + "\n")
    return path


def line(verdict: dict[str, Any]) -> str:
    """Returns one verdict as a line."""
    parts = [f"{verdict['name']:48} {verdict['status']:14}"]
    if verdict.get("seconds"):
        parts.append(" + ".join(f"{v:.1f}" for v in verdict["seconds"].values()) + " s")
    remarks = ("error", "faults", "differences", "missing", "wrong")
    parts += [f"{key}: {str(verdict[key])[:160]}" for key in remarks if verdict.get(key)]
    return "  ".join(parts)


def summary(table: Table) -> str:
    """Returns the counts."""
    counts = Counter(v["status"] for v in table.verdicts.values())
    sound = sum(v["sound"] for v in table.verdicts.values())
    told = ", ".join(f"{number} {status}" for status, number in counts.most_common())
    return f"{len(table.verdicts)} programs: {told}; {sound} with nothing to remark"


def _path(folder: Path, table: Table) -> Path:
    return folder / f"neutrality-{table.date}.json"

"""Stored verdicts of one day, on the zoo or on public scripts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"


@dataclass
class Table:
    """All verdicts of one day, by program name."""

    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d"))
    machine: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)


def load(folder: Path | None, *, kind: str) -> Table:
    """Return today's table of a kind ("neutrality", "scripts"), or an empty one."""
    table = Table()
    if folder is not None and (path := _path(folder, table, kind)).exists():
        return Table(**json.loads(path.read_text()))
    return table


def save(table: Table, folder: Path, *, kind: str) -> Path:
    """Write the table and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, table, kind)
    path.write_text(json.dumps(asdict(table), indent=1, sort_keys=True) + "\n")
    return path


def _path(folder: Path, table: Table, kind: str) -> Path:
    return folder / f"{kind}-{table.date}.json"

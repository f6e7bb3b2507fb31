"""CSV: the same tables as Parquet. NaN is written as "nan", missing values as ""."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from .content import Content
from .plain import plain_columns


def write(content: Content, to: Path) -> None:
    """Write the folder `to` with `statistics.csv`, `samples.csv`, `records.csv`, ..."""
    to.mkdir()
    for name, table in content.tables().items():
        plain_columns(table).to_csv(to / f"{name}.csv", index=False)
    _write_pieces(content.statistics_tables(), to / "statistics.csv")
    _write_pieces(content.sample_tables(), to / "samples.csv")
    (to / "run.json").write_text(json.dumps(content.facts, indent=2, default=str) + "\n")


def _write_pieces(tables: Iterator[pd.DataFrame], path: Path) -> None:
    for number, table in enumerate(tables):
        # nine digits restore every float32 exactly
        table.to_csv(
            path,
            mode="a",
            header=number == 0,
            index=False,
            float_format="%.9g",
            na_rep="nan",
        )

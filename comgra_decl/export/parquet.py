"""Parquet: one file for each table of a run, including its statistics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from comgra_decl.errors import needed

from .content import Content
from .plain import plain_columns


def write(content: Content, to: Path) -> None:
    """Write the folder `to` with `statistics.parquet`, `samples.parquet` and others."""
    pyarrow = needed("pyarrow", "parquet")
    needed("pyarrow.parquet", "parquet")
    to.mkdir()
    for name, table in content.tables().items():
        frame = plain_columns(table)
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pandas(frame, preserve_index=False), to / f"{name}.parquet"
        )
    _write_pieces(pyarrow, content.statistics_tables(), to / "statistics.parquet")
    _write_pieces(pyarrow, content.sample_tables(), to / "samples.parquet")
    (to / "run.json").write_text(json.dumps(content.facts, indent=2, default=str) + "\n")


def _write_pieces(pyarrow: Any, tables: Iterator[pd.DataFrame], path: Path) -> None:
    """Write a table in pieces, one row group each."""
    first = next(tables, None)
    if first is None:
        return
    schema = pyarrow.Table.from_pandas(first, preserve_index=False).schema.remove_metadata()
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for table in chain([first], tables):
            writer.write_table(pyarrow.Table.from_pandas(table, schema, preserve_index=False))

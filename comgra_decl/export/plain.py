"""Convert tables to types that every format supports."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd


def plain_columns(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with tuples and other objects converted to JSON text."""
    plain = table.copy()
    for name in plain.columns:
        if plain[name].dtype == object:
            plain[name] = plain[name].map(_plain).astype("string")
    return plain


def _plain(value: Any) -> str | None:
    if value is None or value is pd.NA:
        return None
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)

"""Read tables of numbers without loss in every version of pandas."""

from __future__ import annotations

from typing import Any

import pandas as pd

_EXACT: dict[str, Any] = (
    {}
    if int(pd.__version__.partition(".")[0]) >= 3
    else {
        "float_precision": "round_trip"  # the default is off by one bit for some numbers
    }
)


def read_csv(source: Any, **options: Any) -> pd.DataFrame:
    """Read a CSV file into a table, with each number exactly as written."""
    table: pd.DataFrame = pd.read_csv(source, **_EXACT, **options)
    return table

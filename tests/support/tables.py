"""Reading tables of numbers without loss, whatever the version of pandas."""

from __future__ import annotations

from typing import Any

import pandas as pd

_EXACT: dict[str, Any] = (
    {}
    if int(pd.__version__.partition(".")[0]) >= 3
    else {
        "float_precision": "round_trip"  # the default reads some numbers a bit wrong
    }
)


def read_csv(source: Any, **options: Any) -> pd.DataFrame:
    """Returns a table from a CSV file, each number exactly as written."""
    table: pd.DataFrame = pd.read_csv(source, **_EXACT, **options)
    return table

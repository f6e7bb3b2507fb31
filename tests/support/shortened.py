"""Parametrised cases, of which the normal suite runs some and the long suite all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def shortened(cases: Iterable[Any], *, tried: int) -> list[ParameterSet]:
    """Return cases for `parametrize` with one name; all but the first ones are marked slow.

    Args:
        cases: the values, one per case.
        tried: number of cases that the normal suite runs.
    """
    return [
        pytest.param(case, marks=[] if number < tried else [pytest.mark.slow])
        for number, case in enumerate(cases)
    ]

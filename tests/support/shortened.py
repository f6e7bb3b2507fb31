"""Cases of which the ordinary suite tries some, and the long one all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def shortened(cases: Iterable[Any], *, tried: int) -> list[ParameterSet]:
    """Returns cases for `parametrize` of one name: the first ones are always tried.

    Args:
        cases: each of one value.
        tried: how many of them the ordinary suite tries.
    """
    return [
        pytest.param(case, marks=[] if number < tried else [pytest.mark.slow])
        for number, case in enumerate(cases)
    ]

"""Limits on the cost of recording."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from comgra_decl.spec.base import SpecModel

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*")
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


def _share_of(text: str) -> float:
    """Convert a percentage such as "3%" to a fraction, 0.03.

    Raises:
        ValueError: not a percentage between 0 and 100.
    """
    match = _SHARE.fullmatch(text)
    share = float(match[1]) / 100 if match else 0.0
    if not 0 < share < 1:
        raise ValueError(f'{text!r} is not a share of the time; write "3%", for example')
    return share


def _bytes_of(text: str) -> float:
    """Convert a size such as "5GB" to bytes, 5e9; units are powers of 1000, or KiB, MiB, GiB, TiB.

    Raises:
        ValueError: not a size above 0.
    """
    match = _SIZE.fullmatch(text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    factor = units.get(match[2].lower()) if match else None
    size = float(match[1]) * factor if match and factor else 0.0
    if size <= 0:
        units_text = ", ".join(_UNITS)
        raise ValueError(f"{text!r} is not a size; write 5GB, for example (units: {units_text})")
    return size


def _checked_share(text: str) -> str:
    _share_of(text)
    return text


def _checked_size(text: str) -> str:
    _bytes_of(text)
    return text


def _bytes_as_text(value: Any) -> Any:
    number = isinstance(value, int) and not isinstance(value, bool)
    return f"{value}B" if number else value


class BudgetSpec(SpecModel):
    """Limits on the cost of recording; the log and the run's report show the resulting intervals.

    `steps` and `windows` are recorded regardless of the time budget. Once the disk budget is used
    up, nothing more is recorded.
    """

    time: Annotated[str, AfterValidator(_checked_share)] | None = None
    """Maximum share of the training time that recording may take, such as "3%". After the first
    steps, records are spaced far enough apart to stay below this share. The writer's CPU time is
    included. On CUDA, device time is used, whether or not the program waits for the device."""

    disk: Annotated[str, BeforeValidator(_bytes_as_text), AfterValidator(_checked_size)] | None = (
        None
    )
    """Maximum size of the run's folder, such as 5GB. The gap between records quadruples whenever
    half of the remaining space is used, so that even a long training run is recorded until its
    end."""

    @property
    def share(self) -> float | None:
        """The time budget as a fraction."""
        return None if self.time is None else _share_of(self.time)

    @property
    def bytes(self) -> float | None:
        """The disk budget in bytes."""
        return None if self.disk is None else _bytes_of(self.disk)

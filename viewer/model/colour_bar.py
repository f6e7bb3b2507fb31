"""Ticks of a colour bar."""

from __future__ import annotations

import math

import numpy as np

from comgra_decl.viewer.model.graph import Scale
from comgra_decl.viewer.model.numbers import number
from comgra_decl.viewer.model.overview import places_of
from comgra_decl.viewer.model.ticks import log_ticks

_MOST = 6
_NICE = (1.0, 2.0, 2.5, 5.0, 10.0)


def bar_ticks(scale: Scale) -> dict[float, str]:
    """Return the labels of a colour bar by position on the scale, from 0 to 1."""
    if scale.logarithmic:
        powers = log_ticks(math.log10(scale.low), math.log10(scale.high), _MOST)
        values = [10.0**power for power in powers]
    else:
        values = _round_values(scale.low, scale.high)
    places = places_of(scale, np.array(values, float))
    return {place: tick_text(value) for place, value in zip(places.tolist(), values, strict=True)}


def tick_text(value: float) -> str:
    """Return a number formatted as on axes: like `number`, but without trailing zeros."""
    mantissa, e, power = number(value).partition("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}{e}{power}"


def _round_values(low: float, high: float) -> list[float]:
    """Return evenly spaced round numbers from `low` to `high`, at most `_MOST`."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [low] if math.isfinite(low) else []
    size = 10.0 ** math.floor(math.log10(span / (_MOST - 1)))
    step = next(nice * size for nice in _NICE if span / (nice * size) <= _MOST - 1)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [
        round(i * step, 12 - math.floor(math.log10(step))) + 0.0 for i in range(first, last + 1)
    ]

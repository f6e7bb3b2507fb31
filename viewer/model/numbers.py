"""Number formatting: four significant digits, with marks for missing and non-finite values."""

from __future__ import annotations

import math
from collections.abc import Sequence

MISSING = "\u2013"
"""Text for missing values, which are never shown as 0."""

_MOST_LISTED = 4  # steps

_MINUS = "\u2212"


def number(value: float, *, digits: int = 4) -> str:
    """Return `value` with `digits` significant digits. Outside 0.001 to 10,000, uses exponents.

    NaN and infinity become "NaN" and "∞". Only the caller knows whether a NaN means "missing" and
    should be shown as `MISSING`.
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "\u221e" if value > 0 else f"{_MINUS}\u221e"
    if value == 0:
        return "0"
    text = f"{value:.{digits - 1}e}"
    mantissa, exponent = text.split("e")
    power = int(exponent)
    if -3 <= power < 4:
        text = f"{value:.{max(digits - 1 - power, 0)}f}"
    else:
        text = f"{mantissa}e{power}"
    return text.replace("-", _MINUS)


def brief(value: float, *, digits: int = 6) -> str:
    """Return `value` with at most `digits` digits, as settings are written: 0.002, 1e-5, 1."""
    mantissa, e, power = number(value, digits=digits).partition("e")
    return (mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa) + e + power


def signed(value: float, *, digits: int = 3) -> str:
    """Return a change with its sign; "0" for no change."""
    text = number(value, digits=digits)
    return f"+{text}" if value > 0 else text


def in_bytes(size: float) -> str:
    """Return a number of bytes with three significant digits, in B, kB, MB, GB or TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{brief(size, digits=3)} {unit}"
        size /= 1000
    return f"{brief(size, digits=3)} TB"


def span(steps: Sequence[int]) -> str:
    """Return one or several steps, ascending: "step 4", "steps 4 to 6" or "steps 4, 6, 9"."""
    first, last = steps[0], steps[-1]
    if first == last:
        return f"step {count(first)}"
    if last - first == len(steps) - 1:
        return f"steps {count(first)} to {count(last)}"
    listed = [*steps] if len(steps) <= _MOST_LISTED else [*steps[: _MOST_LISTED - 1], last]
    texts = [count(step) for step in listed]
    gap = ["..."] * (len(listed) < len(steps))
    return f"steps {', '.join([*texts[:-1], *gap, texts[-1]])}"


def count(value: int) -> str:
    """Return an integer with thin spaces between thousands."""
    return f"{value:,}".replace(",", "\u202f")


def many(value: int, noun: str) -> str:
    """Return a number of things, such as "1 record" or "12 records"."""
    return f"{count(value)} {noun}{'s' * (value != 1)}"


def shape(dims: tuple[int, ...]) -> str:
    """Return a tensor shape such as 8 x 64 (with multiplication signs), or "scalar"."""
    return "\u00d7".join(str(d) for d in dims) if dims else "scalar"


def duration(seconds: float) -> str:
    """Return a duration in a readable unit: ms, s, min or h."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"

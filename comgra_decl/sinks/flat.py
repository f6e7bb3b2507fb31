"""Nested settings as one level of names, which is what other tools show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"model": {"dim": 8}}` as `{"model.dim": 8}`; lists and empty mappings remain."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= {f"{name}.{inner}": each for inner, each in flat(value).items()}
        else:
            found[str(name)] = value
    return found

"""Turn pydantic's errors into messages that refer to the user's YAML.

Every line has the form `comgra.<key path>: <problem; valid values; similar names>`, where the key
path is as the user wrote it.
"""

from __future__ import annotations

import re
import reprlib
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from comgra_decl.errors import did_you_mean, shown
from comgra_decl.spec.keypath import Place, follow

_KINDS = {
    "int_": "an integer",
    "float_": "a number",
    "finite_number": "a finite number",
    "bool_": "true or false",
    "string_type": "text",
    "list_": "a list",
    "dict_": "a mapping of names to entries",
    "model_": "a mapping of keys to values",
}
"""The expected type, by prefix of pydantic's error type."""

_LIMITS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
"""How each bound on a number is worded, and its key in pydantic's error context."""


def explain(error: ValidationError, model: type[BaseModel], data: Any) -> list[str]:
    """Return one line per place at which the user's `data` does not fit `model`.

    The errors of a union's members for the same value are joined into one line.
    """
    alone: list[tuple[str, str]] = []
    alternatives: dict[str, list[str]] = {}
    for details in error.errors(include_url=False):
        place = follow(model, details["loc"], data)
        where, sentence = _where(details, place), _sentence(details, place)
        if place.alternative:
            if where not in alternatives:
                alone.append((where, ""))
            alternatives.setdefault(where, []).append(sentence)
        else:
            alone.append((where, sentence))
    lines = [f"{where}: {s or '; or '.join(alternatives[where])}" for where, s in alone]
    return list(dict.fromkeys(lines))


def _where(details: ErrorDetails, place: Place) -> str:
    """Return the key path of the error; for an unknown key, the path of the enclosing mapping."""
    if details["type"] == "extra_forbidden" and place.owner is not None:
        place = place.owner
    return f"comgra.{place.path}" if place.path else "comgra"


def _sentence(details: ErrorDetails, place: Place) -> str:
    kind, context = details["type"], details.get("ctx", {})
    value = _short(details["input"])
    if kind == "extra_forbidden":
        return _unknown_key(place)
    if kind == "missing":
        return f"is required. {place.about}".rstrip()
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        if not place.choices:
            return f"{value} is not {context['expected']}"
        return _unknown_choice(details["input"], place.choices)
    if kind in _LIMITS:
        words, bound = _LIMITS[kind]
        return f"{value} must be {words} {context[bound]}"
    if kind in ("too_short", "string_too_short"):
        least = context["min_length"]
        return f"{value} must not be empty" if least == 1 else f"{value} must have {least} entries"
    if kind == "too_long":
        return f"{value} must have at most {context['max_length']} entries"
    return _wrong_kind(details, value)


def _short(value: Any) -> str:
    try:
        if isinstance(value, (list, dict)) and "password" in str(value):
            return "a list" if isinstance(value, list) else "a mapping"
        return reprlib.repr(value)
    except ValueError:  # an int with too many digits
        return shown(value)


def _unknown_key(place: Place) -> str:
    known = place.owner.keys if place.owner is not None else []
    near = did_you_mean(place.key, known)
    return f"unknown key {place.key!r}; valid keys: {', '.join(known)}{near}"


def _unknown_choice(value: Any, choices: list[Any]) -> str:
    names = [str(choice) for choice in choices]
    return f"{shown(value)} is not one of {', '.join(names)}{did_you_mean(value, names)}"


def _wrong_kind(details: ErrorDetails, value: str) -> str:
    for beginning, expected in _KINDS.items():
        if details["type"].startswith(beginning):
            return f"{value} is not {expected}"
    return re.sub(r"^(Value error|Input), ?", "", details["msg"])

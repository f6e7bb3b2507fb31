"""Makes what a program hands over as a spec into what a YAML file could have said."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from comgra_decl.errors import shown

_DEEPEST = 50
"""Levels that a spec may be nested; what holds itself has more."""


class Plain:
    """A mapping as YAML could hold it, and what of it could not be made so.

    Attributes:
        content: the mapping; None stands where there was something that YAML cannot hold.
        problems: what is wrong, by the key path at which it is.
    """

    def __init__(self, source: Mapping[Any, Any]) -> None:
        self.problems: dict[str, str] = {}
        self._open: set[int] = set()  # ids of what the place lies in
        self.content: dict[Any, Any] = self._mapping(source, "comgra", 0)

    def _value(self, value: Any, path: str, depth: int) -> Any:
        if depth > _DEEPEST or id(value) in self._open:
            self._refused(path, f"it is nested more than {_DEEPEST} deep, or holds itself")
            return None
        if isinstance(value, (DictConfig, ListConfig)):
            value = OmegaConf.to_container(value)
        if isinstance(value, Mapping):
            return self._mapping(value, path, depth)
        if isinstance(value, (list, tuple)):
            self._open.add(id(value))
            found = [self._value(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
            self._open.discard(id(value))
            return found
        if isinstance(value, (str, Path)):
            return self._text(str.__str__(value) if isinstance(value, str) else str(value), path)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, (int, float)):
            return int(value) if isinstance(value, int) else float(value)
        what = f"{shown(value)} ({type(value).__name__}) is nothing that YAML can hold"
        self._refused(
            path, f"{what}; write text, a number, true or false, null, a list or a mapping"
        )
        return None

    def _mapping(self, mapping: Mapping[Any, Any], path: str, depth: int) -> dict[Any, Any]:
        found = {}
        self._open.add(id(mapping))
        for key, value in mapping.items():
            if isinstance(key, (str, int, float)):
                known = key if isinstance(key, bool) else _own(key)
                found[known] = self._value(value, f"{path}.{known}", depth + 1)
            else:
                self._refused(path, f"the key {shown(key)} ({type(key).__name__}) is not text")
        self._open.discard(id(mapping))
        return found

    def _text(self, text: str, path: str) -> str | None:
        """Returns text as it is, unless it begins an interpolation that cannot be read."""
        if "${" in text:
            try:
                OmegaConf.create({"text": text})
            except OmegaConfBaseException as error:
                said = str(error).strip().splitlines()[0]
                self._refused(path, f"{shown(text)} cannot be read: {said}")
                return None
        return text

    def _refused(self, path: str, why: str) -> None:
        self.problems.setdefault(path, why)


def _own(key: Any) -> Any:
    """Returns a key as Python's own class, without what a program's has beside it."""
    kind = next(kind for kind in (str, int, float) if isinstance(key, kind))
    return str.__str__(key) if kind is str else kind(key)

"""Convert a spec passed from Python to values that a YAML file can contain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from comgra_decl.errors import shown

_DEEPEST = 50
"""Maximum nesting depth of a spec. A container that contains itself exceeds it."""


class Plain:
    """A mapping converted to plain YAML values, and the problems found on the way.

    Attributes:
        content: the mapping; None replaces whatever YAML cannot represent.
        problems: error messages, by key path.
    """

    def __init__(self, source: Mapping[Any, Any]) -> None:
        self.problems: dict[str, str] = {}
        self._open: set[int] = set()  # ids of the enclosing containers
        self.content: dict[Any, Any] = self._mapping(source, "comgra", 0)

    def _value(self, value: Any, path: str, depth: int) -> Any:
        if depth > _DEEPEST or id(value) in self._open:
            self._refused(path, f"nested more than {_DEEPEST} levels deep, or contains itself")
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
        what = f"{shown(value)} ({type(value).__name__}) cannot be represented in YAML"
        self._refused(path, f"{what}; use text, a number, true or false, null, a list or a mapping")
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
        """Return `text` unchanged; reject it if it contains an invalid interpolation."""
        if "${" in text:
            try:
                OmegaConf.create({"text": text})
            except OmegaConfBaseException as error:
                reason = str(error).strip().splitlines()[0]
                self._refused(path, f"{shown(text)} cannot be parsed: {reason}")
                return None
        return text

    def _refused(self, path: str, why: str) -> None:
        self.problems.setdefault(path, why)


def _own(key: Any) -> Any:
    """Convert a key whose type is a subclass of str, int or float to that plain type."""
    kind = next(kind for kind in (str, int, float) if isinstance(key, kind))
    return str.__str__(key) if kind is str else kind(key)

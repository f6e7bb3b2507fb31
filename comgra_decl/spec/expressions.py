"""Environment expressions in a spec, such as `${oc.env:TOKEN}`, which are stored unresolved."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError

from comgra_decl.spec.model import KeyPath, Spec

_VARIABLE = re.compile(r"oc\.env:\s*(\w+)")
_ENVIRONMENT = "oc.env:"


@dataclass(frozen=True)
class Written:
    """The texts of a config before they are resolved.

    Attributes:
        texts: all texts with interpolations, by key path.
        variables: names of the environment variables that the config reads anywhere.
    """

    texts: Mapping[KeyPath, str]
    variables: frozenset[str]

    @classmethod
    def of(cls, config: DictConfig) -> Written:
        """Read a config, which may be a part of a larger one whose variables it refers to."""
        raw = OmegaConf.to_container(config, resolve=False)
        whole = OmegaConf.to_container(config._get_root(), resolve=False)  # noqa: SLF001
        texts = {path: text for path, text in _texts(raw) if "${" in text}
        found = (name for _, text in _texts(whole) for name in _VARIABLE.findall(text))
        return cls(texts, frozenset(found))

    def expressions(self, content: Mapping[str, Any]) -> dict[KeyPath, tuple[str, Any]]:
        """Return each environment expression with its value in the resolved content, by path.

        A text that refers to another setting counts too if its value contains that of a variable.
        """
        found: dict[KeyPath, tuple[str, Any]] = {}
        for path, text in self.texts.items():
            value = _at(content, path)
            expression = text if _ENVIRONMENT in text else self._traced_back(value)
            if value is not None and expression is not None:
                found[path] = (expression, value)
        return found

    def _traced_back(self, value: Any) -> str | None:
        """Return a resolved text with the values of variables replaced by expressions."""
        if not isinstance(value, str):
            return None
        text = value
        for name in sorted(self.variables, key=lambda name: -len(os.environ.get(name, ""))):
            if os.environ.get(name):
                text = text.replace(os.environ[name], f"${{oc.env:{name}}}")
        return None if text == value else text


def recalled(config: DictConfig, known: Mapping[KeyPath, tuple[str, Any]]) -> DictConfig:
    """Return a config in which unchanged expressions have the values that they had before.

    A program may have removed a variable since it was read.
    """
    for path, text in Written.of(config).texts.items():
        if known.get(path, ("", None))[0] == text:
            parent = _at(config, path[:-1])
            parent[path[-1]] = _escaped(known[path][1])
    return config


def unresolved(spec: Spec) -> dict[str, Any]:
    """Return the content of a spec as JSON data, with its environment expressions.

    Numbers and choices remain values, because a stored spec must be valid without the variables.
    """
    content: dict[str, Any] = spec.model_dump(mode="json")
    for path, (expression, value) in spec.expressions.items():
        if not isinstance(value, str):
            continue
        at = path if _at(content, path) == value else None  # statistics, for example, are reordered
        changed = _replaced(content, expression, value, at=at)
        try:
            Spec.model_validate(changed)
        except ValidationError:
            continue
        content = changed
    return content


def _replaced(
    content: Any, expression: str, value: str, *, at: KeyPath | None, path: KeyPath = ()
) -> Any:
    """Return content with an expression at a path; without a path, in place of each such value."""
    if isinstance(content, dict):
        return {
            key: _replaced(each, expression, value, at=at, path=(*path, key))
            for key, each in content.items()
        }
    if isinstance(content, list):
        return [
            _replaced(each, expression, value, at=at, path=(*path, i))
            for i, each in enumerate(content)
        ]
    return expression if (path == at if at is not None else content == value) else content


def _texts(content: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield all texts in nested data with their paths; `on` is what YAML 1.1 reads as true."""
    if isinstance(content, dict):
        for key, each in content.items():
            yield from _texts(each, (*path, "on" if key is True else key))
    elif isinstance(content, list):
        for i, each in enumerate(content):
            yield from _texts(each, (*path, i))
    elif isinstance(content, str):
        yield path, content


def _at(content: Any, path: KeyPath) -> Any:
    """Return what a path leads to; None if it leads nowhere."""
    for key in path:
        try:
            content = content[key]
        except (KeyError, IndexError, TypeError):
            return None
    return content


def _escaped(value: Any) -> Any:
    return value.replace("${", r"\${") if isinstance(value, str) else value

"""Explain torch errors: what they mean, their usual causes, and which facts tell them apart.

The catalogue is data: the YAML files in `catalogue/`. Each entry has these keys.

- `name`: unique, in snake_case
- `pattern`: a regular expression that is searched for in the message; its named groups may be used
  as `{group}` in all texts
- `type`: the exception's class name, where the message alone would be too general
- `title`: the error in a few words
- `meaning`: what happened, in plain language
- `causes`: usual causes, most frequent first
- `look`: what to look at
- `decides`: the parts of the post-mortem that decide between the causes (`PARTS`)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from comgra_decl.errors import message_of

PARTS = ("inputs", "variables", "parameters", "batch", "needs", "memory", "stack", "unused")
"""Parts of a post-mortem that a lesson can refer to."""

_LONGEST = 20_000  # characters of a message that are searched


@dataclass(frozen=True)
class Lesson:
    """An entry of the catalogue."""

    name: str
    pattern: re.Pattern[str]
    title: str
    meaning: str
    causes: tuple[str, ...]
    look: tuple[str, ...]
    decides: tuple[str, ...]
    type: str = ""

    def about(self, error: BaseException) -> dict[str, Any] | None:
        """Return the explanation of an error as plain data; None for any other error."""
        if self.type and self.type not in [base.__name__ for base in type(error).__mro__]:
            return None
        found = self.pattern.search(message_of(error)[:_LONGEST])
        if found is None:
            return None
        groups = {name: value or "" for name, value in found.groupdict().items()}
        return {
            "name": self.name,
            "title": self.title.format(**groups),
            "meaning": self.meaning.format(**groups),
            "causes": [cause.format(**groups) for cause in self.causes],
            "look": [look.format(**groups) for look in self.look],
            "decides": list(self.decides),
        }


@cache
def lessons() -> tuple[Lesson, ...]:
    """Return the catalogue, in the order in which entries are tried."""
    return tuple(_read())


def lesson_about(errors: Iterator[BaseException]) -> dict[str, Any] | None:
    """Return the explanation of the first error in the catalogue; None if there is none."""
    for error in errors:
        for lesson in lessons():
            known = lesson.about(error)
            if known is not None:
                return known
    return None


def _read() -> Iterator[Lesson]:
    folder = files(__package__) / "catalogue"
    for file in sorted(folder.iterdir(), key=lambda each: each.name):
        if file.name.endswith(".yaml"):
            for entry in yaml.safe_load(file.read_text(encoding="utf-8")):
                yield _lesson(entry)


def _lesson(entry: dict[str, Any]) -> Lesson:
    assert set(entry["decides"]) <= set(PARTS), entry["name"]
    return Lesson(
        name=entry["name"],
        pattern=re.compile(entry["pattern"], re.DOTALL),
        title=entry["title"],
        meaning=entry["meaning"],
        causes=tuple(entry["causes"]),
        look=tuple(entry["look"]),
        decides=tuple(entry["decides"]),
        type=entry.get("type", ""),
    )

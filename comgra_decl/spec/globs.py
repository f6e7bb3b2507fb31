"""Globs over module paths.

`*` stands for one level (or a part of one name), `**` for any number of levels including none,
`?` for one character, `[...]` for one character of a set and `[!...]` for one outside it. The
root module's path is the empty string.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

Level = re.Pattern[str] | None
"""What one level of a glob matches; None stands for any number of levels."""


@lru_cache(maxsize=1024)
def compile_glob(pattern: str) -> tuple[Level, ...]:
    """Returns the levels of a glob over module paths.

    Raises:
        ValueError: the pattern is not a glob; the message says how to write it.
    """
    return tuple(_level(level, pattern) for level in split(pattern))


def matches(pattern: str, path: str) -> bool:
    """Returns whether `pattern` matches the whole of the module path `path`."""
    return _matches(compile_glob(pattern), split(path))


def split(path: str) -> list[str]:
    """Returns the names of a path or the levels of a glob; none for the empty text, the root."""
    return path.split(".") if path else []


@lru_cache(maxsize=256)
def compile_name(pattern: str) -> re.Pattern[str]:
    """Returns the regex of a glob over a single name, such as `*Attention`.

    Raises:
        ValueError: the pattern is not one name.
    """
    if "." in pattern or not pattern:
        raise ValueError(f"{pattern!r} is not a class name; write it without its module: 'Linear'")
    return re.compile(_name(pattern, pattern))


@lru_cache(maxsize=256)
def compile_text(pattern: str) -> re.Pattern[str]:
    """Returns the regex of a glob over any text, such as the name of an annotation.

    Raises:
        ValueError: the pattern is empty or holds a broken set of characters.
    """
    if not pattern:
        raise ValueError("an annotation has a name; write '*' for any of them")
    return re.compile(_name(pattern, pattern), re.DOTALL)


def _matches(levels: Sequence[Level], names: Sequence[str]) -> bool:
    """Lets the latest `**` take one more name whenever the levels behind it do not fit.

    No earlier `**` needs to be tried again, which keeps this quick for any pattern.
    """
    level = name = 0
    retry: tuple[int, int] | None = None
    while name < len(names):
        expected = levels[level] if level < len(levels) else _NOTHING
        if expected is None:
            level, retry = level + 1, (level + 1, name)
        elif expected.fullmatch(names[name]):
            level, name = level + 1, name + 1
        elif retry is not None:
            retry = (retry[0], retry[1] + 1)
            level, name = retry
        else:
            return False
    return all(rest is None for rest in levels[level:])


_NOTHING = re.compile(r"(?!)")


def _level(level: str, pattern: str) -> Level:
    if level == "**":
        return None
    if not level:
        raise ValueError(f"{pattern!r} has an empty name between its dots")
    if "**" in level:
        raise ValueError(f"in {pattern!r}, '**' must stand alone between dots, as in 'blocks.**'")
    return re.compile(_name(level, pattern))


def _name(level: str, pattern: str) -> str:
    parts = []
    for found in _TOKEN.finditer(level):
        token = found.group()
        if token == "[":
            raise ValueError(f"in {pattern!r}, '[' has no matching ']'")
        if token.startswith("["):
            parts.append(_character_set(token[1:-1], pattern))
        else:
            parts.append({"*": ".*", "?": "."}.get(token, re.escape(token)))
    return "".join(parts)


_TOKEN = re.compile(r"\[(?:!.|[^!])[^]]*\]|.", re.DOTALL)
"""A set of characters (in which a leading `]` is an ordinary one), or a single character."""


def _character_set(body: str, pattern: str) -> str:
    negated = body.startswith("!")
    characters = re.sub(r"([\\\[\]^&~|])", r"\\\1", body[negated:])
    regex = f"[^{characters}]" if negated else f"[{characters}]"
    try:
        re.compile(regex)
    except re.error:
        raise ValueError(f"in {pattern!r}, '[{body}]' is not a set of characters") from None
    return regex

"""Globs over module paths.

`*` matches one level (or a part of one name), `**` any number of levels including none, `?` one
character, `[...]` one character from a set and `[!...]` one character outside it. The path of the
root module is the empty string.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from comgra_decl.errors import PatternError, shown

Level = re.Pattern[str] | None
"""Pattern of one level of a glob; None matches any number of levels."""


@lru_cache(maxsize=1024)
def compile_glob(pattern: str) -> tuple[Level, ...]:
    """Compile a glob over module paths into its levels.

    Raises:
        PatternError: invalid glob; the message explains how to write it.
    """
    return tuple(_level(level, pattern) for level in split(pattern))


def matches(pattern: str, path: str) -> bool:
    """Return whether `pattern` matches the entire module path `path`.

    Raises:
        PatternError: invalid glob, or not a string.
    """
    if not isinstance(pattern, str):
        raise PatternError(f"a pattern of nodes must be a string, got {shown(pattern)}")
    return _matches(compile_glob(pattern), split(path))


def is_glob(pattern: str) -> bool:
    """Return whether `pattern` is a valid glob."""
    try:
        compile_glob(pattern)
    except PatternError:
        return False
    return True


def escaped(path: str) -> str:
    """Return the glob that matches only this path, provided that no name in it is empty."""
    return re.sub(r"[*?[]", r"[\g<0>]", path)


def split(path: str) -> list[str]:
    """Split a path or glob at its dots; the empty string (the root) gives an empty list."""
    return path.split(".") if path else []


@lru_cache(maxsize=256)
def compile_name(pattern: str) -> re.Pattern[str]:
    """Return the regex of a glob over a single name, such as `*Attention`.

    Raises:
        PatternError: the pattern is not a single name.
    """
    if "." in pattern or not pattern:
        raise PatternError(
            f"{pattern!r} is not a class name; write it without its module: 'Linear'"
        )
    return re.compile(_name(pattern, pattern))


@lru_cache(maxsize=256)
def compile_text(pattern: str) -> re.Pattern[str]:
    """Return the regex of a glob over arbitrary text, such as the name of an annotation.

    Raises:
        PatternError: the pattern is empty or contains an invalid character set.
    """
    if not pattern:
        raise PatternError(
            "the name of an annotation must not be empty; write '*' to match any name"
        )
    return re.compile(_name(pattern, pattern), re.DOTALL)


def _matches(levels: Sequence[Level], names: Sequence[str]) -> bool:
    """Match names against levels; on a mismatch, extend the latest `**` by one name and retry.

    Earlier `**` never need a retry, so matching is fast for any pattern.
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
        raise PatternError(f"{pattern!r} has an empty name between its dots")
    if "**" in level:
        raise PatternError(f"in {pattern!r}, '**' must stand alone between dots, as in 'blocks.**'")
    return re.compile(_name(level, pattern))


def _name(level: str, pattern: str) -> str:
    parts = []
    for found in _TOKEN.finditer(level):
        token = found.group()
        if token == "[":
            raise PatternError(f"in {pattern!r}, '[' has no matching ']'")
        if token.startswith("["):
            parts.append(_character_set(token[1:-1], pattern))
        else:
            parts.append({"*": ".*", "?": "."}.get(token, re.escape(token)))
    return "".join(parts)


_TOKEN = re.compile(r"\[(?:!.|[^!])[^]]*\]|.", re.DOTALL)
"""A character set (in which a leading `]` is literal), or a single character."""


def _character_set(body: str, pattern: str) -> str:
    negated = body.startswith("!")
    characters = re.sub(r"([\\\[\]^&~|])", r"\\\1", body[negated:])
    regex = f"[^{characters}]" if negated else f"[{characters}]"
    try:
        re.compile(regex)
    except re.error:
        raise PatternError(f"in {pattern!r}, '[{body}]' is not a set of characters") from None
    return regex

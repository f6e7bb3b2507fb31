"""Globs over module paths.

`*` stands for one level (or a part of one name), `**` for any number of levels including none,
`?` for one character, `[...]` for one character of a set and `[!...]` for one outside it. The
root module's path is the empty string.
"""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(maxsize=1024)
def compile_glob(pattern: str) -> re.Pattern[str]:
    """Returns the regex that matches a module path, each of whose names is followed by a dot.

    Raises:
        ValueError: the pattern is not a glob; the message says how to write it.
    """
    return re.compile("".join(_levels(split(pattern))))


def matches(pattern: str, path: str) -> bool:
    """Returns whether `pattern` matches the whole of the module path `path`."""
    return compile_glob(pattern).fullmatch(dotted(path)) is not None


@lru_cache(maxsize=256)
def compile_name(pattern: str) -> re.Pattern[str]:
    """Returns the regex of a glob over a single name, such as `*Attention`."""
    if "." in pattern or not pattern:
        raise ValueError(f"{pattern!r} is not a class name; write it without its module: 'Linear'")
    return re.compile(_level(pattern, pattern).removesuffix(r"\."))


def dotted(path: str) -> str:
    """Returns `path` with a dot behind every name: the form that `compile_glob` matches."""
    return f"{path}." if path else ""


def split(pattern: str) -> list[str]:
    """Returns the levels of a glob; none for the empty pattern, which means the root."""
    return pattern.split(".") if pattern else []


def _levels(levels: list[str]) -> list[str]:
    regexes: list[str] = []
    for level in levels:
        regex = _level(level, ".".join(levels))
        # Two `**` in a row mean the same as one, and would only make matching slow.
        if level != "**" or regexes[-1:] != [regex]:
            regexes.append(regex)
    return regexes


def _level(level: str, pattern: str) -> str:
    if level == "**":
        return r"(?:[^.]+\.)*"
    if not level:
        raise ValueError(f"{pattern!r} has an empty name between its dots")
    if "**" in level:
        raise ValueError(f"in {pattern!r}, '**' must stand alone between dots, as in 'blocks.**'")
    return _name(level, pattern) + r"\."


def _name(level: str, pattern: str) -> str:
    parts = []
    for found in _TOKEN.finditer(level):
        token = found.group()
        if token == "[":
            raise ValueError(f"in {pattern!r}, '[' has no matching ']'")
        if token.startswith("["):
            parts.append(_character_set(token[1:-1], pattern))
        else:
            parts.append({"*": "[^.]*", "?": "[^.]"}.get(token, re.escape(token)))
    return "".join(parts)


_TOKEN = re.compile(r"\[(?:!.|[^!])[^]]*\]|.", re.DOTALL)
"""A set of characters (in which a leading `]` is an ordinary one), or a single character."""


def _character_set(body: str, pattern: str) -> str:
    negated = body.startswith("!")
    characters = re.sub(r"([\\\[\]^&~|])", r"\\\1", body[negated:])
    regex = f"[^.{characters}]" if negated else f"[{characters}]"
    try:
        re.compile(regex)
    except re.error:
        raise ValueError(f"in {pattern!r}, '[{body}]' is not a set of characters") from None
    return regex

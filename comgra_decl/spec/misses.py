"""Explain why a pattern matches nothing, and suggest similar names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from comgra_decl.errors import did_you_mean
from comgra_decl.spec.globs import matches, split

_SHOWN = 8
"""Maximum number of names to show."""


def explain_path_miss(pattern: str, paths: Sequence[str]) -> str:
    """Explain in a sentence why a glob matches none of `paths`.

    The longest prefix of the pattern that matches something shows where the mistake is.
    """
    levels = split(pattern)
    for length in range(len(levels) - 1, -1, -1):
        names = _names_below(levels[:length], paths)
        if names:
            place = f"below {'.'.join(levels[:length])!r}" if length else "at the top"
            near = did_you_mean(levels[length], names)
            return f"{pattern!r} matches no module; modules {place}: {_listed(names)}{near}"
    return f"{pattern!r} matches no module"


def explain_regex_miss(pattern: str, paths: Sequence[str]) -> str:
    """Explain in a sentence why a regular expression matches none of `paths` as a whole."""
    names = [path for path in paths if path]
    regex = re.compile(pattern)
    found = next((path for path in names if regex.search(path)), None)
    if found is not None:
        return (
            f"the regex {pattern!r} matches only a part of {found!r}, but must match a whole "
            "module path; add '.*' to allow more text"
        )
    near = did_you_mean(pattern.replace("\\", ""), names)
    return f"the regex {pattern!r} matches no module path; paths: {_listed(names)}{near}"


def explain_annotation_miss(pattern: str, marks: Sequence[str]) -> str:
    """Explain why an annotation matches nothing; `marks` are the annotations of modules."""
    names = list(dict.fromkeys(marks))
    there = f"annotations: {_listed(names)}" if names else "no module is annotated"
    return f"nothing is annotated {pattern!r}; {there}{did_you_mean(pattern, names)}"


def explain_class_miss(name: str, globs: Sequence[str], classes: Iterable[tuple[str, ...]]) -> str:
    """Explain in a sentence why none of the modules at `globs` has the class `name`.

    `classes` are those modules' class names, most derived first.
    """
    names = list(dict.fromkeys(mro[0] for mro in classes if mro))
    place = f" at {', '.join(map(repr, globs))}" if globs else ""
    return f"no module{place} is a {name!r}; classes: {_listed(names)}{did_you_mean(name, names)}"


def _names_below(levels: list[str], paths: Sequence[str]) -> list[str]:
    """Return the names one level below the modules that `levels` match, in order."""
    parents = ".".join(levels)
    names: dict[str, None] = {}
    for path in paths:
        parent, _, name = path.rpartition(".")
        if name and matches(parents, parent):
            names[name] = None
    return list(names)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, ... ({len(names)} names)"

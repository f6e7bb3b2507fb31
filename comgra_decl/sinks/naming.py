"""Names of series in other tools, and their inverse.

`conv1/output/forward/std` is a tensor's statistic in training; `conv1 (eval)/output[2]/grad/l2.std`
is the spread over the batch of another one in evaluation, at the tensor's third call.
`metrics/loss` and `metrics (eval)/loss` are metrics, and `shown/sample` is an image, a figure or a
text that the program shows.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple
from urllib.parse import quote, unquote

from comgra_decl.records import AGGREGATES, SHOWN, SlotKey

METRICS = "metrics"
"""First part of the names of metrics."""

TRAIN = "train"
"""The type of execution that names leave out."""

_UNSAFE = re.compile(r"[%/()\[\]\x00-\x1f]")
_HEAD = re.compile(r"([^()]*)(?: \(([^()]*)\))?")
_ROLE = re.compile(r"([^\[\]]*)\[(\d+)\]")


class SeriesName(NamedTuple):
    """What a series shows; `str` returns its name, `parsed` the inverse."""

    key: SlotKey
    statistic: str
    over_batch: str = AGGREGATES[0]
    type: str = TRAIN

    def __str__(self) -> str:
        statistic = _part(self.statistic).replace(".", "%2E")
        suffix = "" if self.over_batch == AGGREGATES[0] else f".{self.over_batch}"
        return f"{of_tensor(self.key, self.type)}/{statistic}{suffix}"


def of_metric(name: str, type_: str) -> str:
    """Return the name of a metric's series; the metric's own slashes remain."""
    return f"{METRICS if type_ == TRAIN else f'{METRICS} ({_part(type_)})'}/{name}"


def of_shown(name: str) -> str:
    """Return the name of what the program shows; its own slashes remain."""
    return f"{SHOWN}/{name}"


def of_tensor(key: SlotKey, type_: str) -> str:
    """Return the name of a tensor's histogram or picture, with which its series' names begin."""
    node = _part(key.node)
    if node in (METRICS, SHOWN):  # a module may be called so
        node = f"%{ord(node[0]):X}{node[1:]}"
    head = node if type_ == TRAIN else f"{node} ({_part(type_)})"
    role = _part(key.role) + f"[{key.iteration}]" * (key.iteration > 0)
    return f"{head}/{role}/{_part(key.pass_)}"


def parsed(name: str) -> SeriesName | tuple[str, str]:
    """Return what a name shows: the inverse of `SeriesName` and, as (name, type), of `of_metric`.

    Raises:
        ValueError: it is not the name of a series.
    """
    head, _, rest = name.partition("/")
    found = _HEAD.fullmatch(head)
    if found is None:
        raise ValueError(f"{name!r} is not the name of a series")
    node, type_ = found[1], TRAIN if found[2] is None else unquote(found[2])
    if node == METRICS:
        return rest, type_
    parts = rest.split("/")
    if len(parts) != 3:
        raise ValueError(f"{name!r} is not the name of a series")
    role, number = parts[0], 0
    if called := _ROLE.fullmatch(role):
        role, number = called[1], int(called[2])
    statistic, _, how = parts[2].partition(".")
    key = SlotKey(unquote(node), unquote(role), number, unquote(parts[1]))
    return SeriesName(key, unquote(statistic), how or AGGREGATES[0], type_)


def _part(text: str) -> str:
    return _UNSAFE.sub(lambda found: quote(found[0], safe=""), text)


# -- tools that accept only some characters -------------------------------------------------------

_ESCAPE = re.compile(r"-x([0-9A-F]+)-")


def encoded(name: str, allowed: re.Pattern[str]) -> str:
    """Return a name in which every character outside `allowed` is written as `-x5B-` (its code).

    `allowed` matches one character; it must match "-", "x", digits and capital letters. Also
    encoded are a "-" before an "x", spaces at the ends, and whatever would make a path of the name
    that other names share: empty parts and parts of dots. `decoded` is the inverse.
    """
    parts = [
        "".join(_coded(part, i, allowed) for i in range(len(part))) for part in name.split("/")
    ]
    text = parts[0]
    for before, part in pairwise(parts):
        text += ("-x2F-" if not before or not part else "/") + part
    return text


def _coded(part: str, i: int, allowed: re.Pattern[str]) -> str:
    char = part[i]
    escapes = char == "-" and part[i + 1 : i + 2] == "x"
    at_end = char == " " and i in (0, len(part) - 1)
    if escapes or at_end or not part.strip(".") or not allowed.fullmatch(char):
        return f"-x{ord(char):X}-"
    return char


def decoded(name: str) -> str:
    """Return the name that `encoded` has encoded."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), name)

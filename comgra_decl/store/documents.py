"""Schemas for validating a run's documents, which is necessary because runs are untrusted."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any

from comgra_decl.records import SEVERITIES

Form = type | UnionType | list[Any] | dict[Any, Any]
"""A type; [form]; {str: form}; or {"name": form, "name?": form}, which permits further names."""

_PLACE: Form = {"node": str, "role": str, "iteration": int, "pass_": str}
_NUMBER = int | float
_FINDING: Form = {
    "rule": str,
    "severity": str,
    "first_step": int,
    "last_step": int,
    "message": str,
    "advice": str,
    "certainty?": _NUMBER,
    "place?": (None, _PLACE),
    "evidence?": {str: _NUMBER | str},
    "also?": int,
    "others?": [_PLACE],
    "chain?": [{"place": _PLACE, "first_step": int, "what": str}],
    "because?": str | None,
    "sample?": int | None,
    "after_step?": int | None,
    "outcome?": str | None,
}
_PARAMETER: Form = {
    "shape": [int],
    "count": int,
    "trainable": bool,
    "tied_to?": str | None,
}
_ENTRY: Form = {"matched?": int, "fired?": int, "written?": int, "never_called?": [str]}
_TIMES: Form = {"host": _NUMBER | None, "device": _NUMBER | None}

_LINE: Form = {"file": str, "line": int, "function": str, "text": str}
_TENSOR: Form = {
    "name": str,
    "shape": [int],
    "dtype": str,
    "device": str,
    "requires_grad": bool,
    "has_grad?": bool,
    "nonfinite?": int,
    "min?": _NUMBER,
    "max?": _NUMBER,
    "mean?": _NUMBER,
    "std?": _NUMBER,
    "read?": int,
}
_ERROR: Form = {"type": str, "message": str, "notes?": [str], "how?": str}
_POST_MORTEM: Form = {
    "error": _ERROR,
    "because": [_ERROR],
    "members?": [
        {
            "number": str,
            "type": str,
            "message": str,
            "notes?": [str],
            "place": (None, _LINE),
            "because": [_ERROR],
        }
    ],
    "more_members?": bool,
    "time": _NUMBER,
    "step": int,
    "recorded": bool,
    "phase": str,
    "module": str | None,
    "calls": [
        {
            "node": str,
            "class": str,
            "method": str,
            "training": bool,
            "inputs": [_TENSOR],
            "variables": [_TENSOR],
        }
    ],
    "place": (None, _LINE),
    "variables": [_TENSOR],
    "batch": [_TENSOR],
    "parameters": [_TENSOR],
    "needs": [
        {
            "operation": str,
            "value": str,
            "module": str | None,
            "parameters": [str],
            "after": str | None,
            "traceback": str,
        }
    ],
    "ended?": [
        {
            "operation": str,
            "node": str | None,
            "after": str | None,
            "output": (None, _TENSOR),
        }
    ],
    "unused": [str],
    "stack": [_LINE],
    "memory": {str: _NUMBER | None},
    "lesson": (
        None,
        {
            "name": str,
            "title": str,
            "meaning": str,
            "causes": [str],
            "look": [str],
            "decides": [str],
        },
    ),
}

_COUNT: Form = {"node": str, "pass": str, "name": str, "count": int}
_PROFILE: Form = {
    "rows": [
        {
            "node": str,
            "pass": str,
            "calls": int,
            "host": _NUMBER,
            "host_self": _NUMBER,
            "device": _NUMBER,
            "device_self": _NUMBER,
            "kernels": int,
            "operations": int,
            "bytes": int,
        }
    ],
    "steps": [
        {
            "step": int,
            "time": _NUMBER,
            "data": _NUMBER,
            "forward": _NUMBER,
            "backward": _NUMBER,
            "optimizer": _NUMBER,
            "other": _NUMBER,
            "total": _NUMBER,
            "busy": _NUMBER,
        }
    ],
    "device": str | None,
    "waits": [_COUNT],
    "copies": [_COUNT],
    "kernels": {"count": int, "median": _NUMBER, "total": _NUMBER},
}
_MODULE_TIMES: Form = {
    "steps": int,
    "rows": [{"node": str, "calls": int, "time": _NUMBER, "self": _NUMBER}],
}
_TIMELINE: Form = {
    "began": _NUMBER,
    "names": [str],
    "nodes": [str],
    "dropped": int,
    "name": [int],
    "node": [int],
    "pass": [str],
    "lane": [int],
    "start": [_NUMBER],
    "duration": [_NUMBER],
}
_MEMORY_NAMES = (
    "activations",
    "activations_self",
    "peak",
    "allocated",
    "inputs",
    "calls",
    "parameters",
    "gradients",
    "optimizer",
)
_MEMORY: Form = {
    "rows": [{"node": str, **dict.fromkeys(_MEMORY_NAMES, int)}],
    "steps": [int],
    "exact": bool,
    "device": int,
    "totals?": [
        {
            "step": int,
            "activations": int,
            "parameters": int,
            "gradients": int,
            "gradients_before": int,
            "optimizer": int,
            "other?": int,
        }
    ],
    "moments?": {"step": int | None, "nodes": [str], "changes": [[int]]},
}

_FORMS: Mapping[str, Form] = {
    "findings": {
        "findings": [_FINDING],
        "unchecked": {str: str},
        "readings?": {str: {"text": str, "verdict?": str, "deciding?": [str]}},
        "caveats?": [str],
    },
    "modules": [
        {"path?": str, "node": str, "class?": str, "parameters": {str: _PARAMETER}},
    ],
    "report": {
        "entries?": {str: _ENTRY},
        "unmatched?": [str],
        "never_called?": [str],
        "warnings?": [str],
        "refused?": {str: str},
        "choices?": dict,
        "price?": {"records": int, "plain": _TIMES, "added": _TIMES, "once?": float},
    },
    "post_mortem": _POST_MORTEM,
    "profile": _PROFILE,
    "timeline": _TIMELINE,
    "module_times": _MODULE_TIMES,
    "memory": _MEMORY,
    "perturbations": [
        {
            "model": str,
            "step": int,
            "batch?": int,
            "refused?": str,
            "output?": [int],
            "mixes?": _NUMBER,
            "ignored?": [str],
            "ahead?": {"ahead": _NUMBER, "own": _NUMBER, "argument": str, "positions": int},
            "order?": _NUMBER,
            "padding?": _NUMBER,
        }
    ],
    "ranks": {"rank": int, "world_size?": int, "recorded": [int], "run?": str},
    "mesh": {str: int},
    "keep": {"steps?": [list], "unseen?": [list]},
    "links": {str: {str: str}},
    "tokens": [str],
}

_EXACT = 1 << 53


def check_document(name: str, content: Any) -> Any:
    """Return a document if it matches the schema for its name.

    Raises:
        ValueError: the document does not match; the message says where.
    """
    if name in _FORMS:
        _check(content, _FORMS[name], name)
    if name == "keep":
        spans = [*content.get("steps", []), *content.get("unseen", [])]
        if not all(len(span) == 2 and all(map(_is_step, span)) for span in spans):
            raise ValueError("keep: invalid spans of steps")
    if name == "timeline":
        _check_timeline(content)
    if name == "findings":
        for finding in content["findings"]:
            if finding["severity"] not in SEVERITIES:
                raise ValueError(f"findings: unknown severity {finding['severity'][:40]!r}")
    return content


def _check_timeline(content: dict[str, Any]) -> None:
    columns = [content[key] for key in ("name", "node", "pass", "lane", "start", "duration")]
    names, nodes = len(content["names"]), len(content["nodes"])
    if len({len(column) for column in columns}) > 1:
        raise ValueError("timeline: the columns differ in length")
    if not all(0 <= i < names for i in content["name"]):
        raise ValueError("timeline: an event has no name")
    if not all(-1 <= i < nodes for i in content["node"]):
        raise ValueError("timeline: an event has no node")


def _is_step(number: Any) -> bool:
    return isinstance(number, int) and 0 <= number <= _EXACT


def _check(content: Any, form: Any, where: str) -> None:
    if isinstance(form, tuple):
        if content is not None:
            _check(content, form[1], where)
    elif isinstance(form, list):
        _check(content, list, where)
        for entry in content:
            _check(entry, form[0], where)
    elif isinstance(form, dict):
        _check(content, dict, where)
        _check_parts(content, form, where)
    elif not _is(content, form):
        name = "nothing" if form is NoneType else getattr(form, "__name__", str(form))
        raise ValueError(f"{where}: {str(content)[:40]!r} is not of type {name}")


def _check_parts(content: dict[Any, Any], form: dict[Any, Any], where: str) -> None:
    for name, inner in form.items():
        if name is str:
            for key, entry in content.items():
                _check(entry, inner, f"{where}.{key[:40]}")
        elif name.removesuffix("?") in content:
            plain = name.removesuffix("?")
            _check(content[plain], inner, f"{where}.{plain}")
        elif not name.endswith("?"):
            raise ValueError(f"{where}: {name!r} is missing")


def _is(content: Any, kind: Any) -> bool:
    if isinstance(content, bool):
        return kind is bool
    if isinstance(content, int) and abs(content) > _EXACT:
        return False
    return isinstance(content, kind)

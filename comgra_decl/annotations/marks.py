"""`comgra.node`, which names a tensor, the results of a function, or a module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

from comgra_decl.annotations import hub

T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., Any]")

KINDS = ("input", "parameter", "buffer", "computed", "target", "loss")
"""The kinds of tensors. The kind of a node determines its colour."""


class Mark(NamedTuple):
    """The arguments of a `@comgra.node` decorator, stored as `function.__comgra_node__`."""

    name: str
    role: str | None = None
    kind: str | None = None


@overload
def node(
    value: str, name: None = None, role: str | None = None, kind: str | None = None
) -> Callable[[F], F]: ...
@overload
def node(value: T, name: str, role: str | None = None, kind: str | None = None) -> T: ...


def node(
    value: Any, name: str | None = None, role: str | None = None, kind: str | None = None
) -> Any:
    """Name a tensor, or the results of a function or module, as a node in the graph.

    Inline, `x = comgra.node(x, "name")` returns `x` itself. As a decorator, `@comgra.node("name")`
    applies to

    - the `forward` of a module, or the module's class. Nothing is wrapped; each of these modules is
      shown under this name, and the spec can select it: `select: {annotation: name}`.
    - any other function or method. Its results are recorded as if they were named inline.

    Values may be nested (lists, dicts, named tuples, dataclasses); anything other than a tensor is
    ignored. If a name is used again within a step, the node gets another iteration. Values are read
    only in recorded steps, and are always returned unchanged.

    In code for `torch.jit.script`, use the decorator, because TorchScript does not support the
    inline form.

    Args:
        value: the value to name; for a decorator, the name.
        name: the node's name.
        role: the role of the tensor in its node; "output" by default.
        kind: input, parameter, buffer, computed, target or loss; "computed" by default.

    Returns:
        `value` itself, or the decorator.

    Raises:
        AnnotationError: the name is missing or empty, or the kind is unknown; raised whether or not
            a step is being recorded.
    """
    if _recording or kind is not None or type(name) is not str or not name:
        return _annotated(value, name, role, kind)
    return value


_recording = False
"""Whether a step is being recorded. In other steps, checking this flag is the only cost of
`node`."""


def _switch(value: bool) -> None:
    global _recording
    _recording = value


hub.switches.append(_switch)


def _annotated(value: Any, name: str | None, role: str | None, kind: str | None) -> Any:
    if name is None:
        if not isinstance(value, str):
            _refuse("a node needs a name: `comgra.node(x, 'name')` or `@comgra.node('name')`.")
        return functools.partial(_marked, Mark(_checked(value, kind), role, kind))
    given: object = name  # whatever its annotation says
    if isinstance(value, str) and not isinstance(given, str):
        _refuse(
            "the value comes first and its name second, as in `comgra.node(x, 'name')`; got a name "
            f"of the type {type(name).__name__!r}."
        )
    if not name:
        _refuse(_INVALID_NAME.format(name))
    _check(kind)
    if _recording and hub.listener is not None:
        # must be accepted here too, because steps that are not recorded accept any name
        hub.listener.node(value, str(name), role, kind)
    return value


_INVALID_NAME = "the name of a node must be a non-empty string, got {!r}."


def _checked(name: Any, kind: str | None) -> str:
    if not isinstance(name, str) or not name.strip():
        _refuse(_INVALID_NAME.format(name))
    _check(kind)
    return str(name)


def _check(kind: str | None) -> None:
    if kind is not None and kind not in KINDS:
        from comgra_decl.errors import did_you_mean

        near = did_you_mean(str(kind), KINDS) or "."
        _refuse(f"unknown node kind {kind!r}{near} Valid kinds: {', '.join(KINDS)}.")


def _marked(mark: Mark, what: Any) -> Any:
    """Mark or wrap the decorated object, and return it."""
    if isinstance(what, type):
        _mark(_own_forward(what), mark)
        return what
    if isinstance(what, (staticmethod, classmethod)):
        return type(what)(_marked(mark, what.__func__))
    if not callable(what):
        _refuse(f"@comgra.node({mark.name!r}) was applied to {what!r}, which is not callable.")
    if _is_forward(what):
        return _mark(what, mark)
    return _wrapped(mark, what)


def _mark(function: F, mark: Mark) -> F:
    function.__comgra_node__ = mark  # type: ignore[attr-defined]
    return function


def _is_forward(function: Any) -> bool:
    """Return whether a function was defined as `forward` in the body of a class."""
    inside = getattr(function, "__qualname__", "").rpartition(".")[0]
    return getattr(function, "__name__", "") == "forward" and bool(inside) and inside[-1] != ">"


def _own_forward(class_: type) -> Any:
    forward = vars(class_).get("forward")
    if not callable(forward):
        _refuse(
            f"@comgra.node was applied to the class {class_.__name__!r}, which does not define "
            f"`forward` itself; decorate the inherited `forward` instead."
        )
    return forward


def _wrapped(mark: Mark, function: Callable[..., Any]) -> Callable[..., Any]:
    name, role, kind = mark

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        if _recording:
            return _annotated(function(*args, **kwargs), name, role, kind)
        return function(*args, **kwargs)

    return _mark(named, mark)


def _refuse(message: str) -> None:
    from comgra_decl.errors import AnnotationError

    raise AnnotationError(message)

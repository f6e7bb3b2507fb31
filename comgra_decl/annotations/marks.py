"""`comgra.node`: a name for a tensor, for what a function returns, or for a module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

from comgra_decl.annotations import hub

T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., Any]")

KINDS = ("input", "parameter", "buffer", "computed", "target", "loss")
"""Kinds of tensors, which are the colours of nodes."""


class Mark(NamedTuple):
    """What a marked function says of itself, as `function.__comgra_node__`."""

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
    """Names a tensor, or everything that a function or module computes, as a node of the graph.

    Inline, `x = comgra.node(x, "name")` returns `x` itself. As a decorator, `@comgra.node("name")`
    stands above

    - `forward` of a module, or the module's class: nothing is wrapped. Every such module is shown
      under this name, and the spec can select it: `select: {annotation: name}`.
    - any other function or method: its results are seen as if named inline.

    Values may be nested (lists, dicts, named tuples, dataclasses); what is no tensor is passed by.
    A name that occurs again within a step is a further iteration of the same node. Nothing is read
    or kept except in steps that are recorded; then, too, the value is returned untouched.

    In code for `torch.jit.script` use a decorator: TorchScript does not know the inline form.

    Args:
        value: what to name; for a decorator, the name.
        name: the node's name.
        role: which of the node's tensors this is; otherwise "output".
        kind: input, parameter, buffer, computed, target or loss; otherwise "computed".

    Returns:
        `value` itself; as a decorator, the function that decorates.

    Raises:
        AnnotationError: there is no name, or no such kind. It is raised whether or not anything
            is recorded.
    """
    if _recording or kind is not None or not name:
        return _told(value, name, role, kind)
    return value


_recording = False
"""Whether a step is being recorded: all that is tested of a `node` nobody needs."""


def _switch(value: bool) -> None:
    global _recording
    _recording = value


hub.switches.append(_switch)


def _told(value: Any, name: str | None, role: str | None, kind: str | None) -> Any:
    if name is None:
        if not isinstance(value, str):
            _refuse("a node needs a name: `comgra.node(x, 'name')` or `@comgra.node('name')`.")
        return functools.partial(_marked, Mark(_checked(value, kind), role, kind))
    if not name:
        _refuse(_NO_TEXT.format(name))
    _check(kind)
    if _recording and hub.listener is not None:
        hub.listener.node(value, str(name), role, kind)  # what a quiet step takes, this one does
    return value


_NO_TEXT = "the name of a node must be a text that is not empty, not {!r}."


def _checked(name: Any, kind: str | None) -> str:
    if not isinstance(name, str) or not name.strip():
        _refuse(_NO_TEXT.format(name))
    _check(kind)
    return str(name)


def _check(kind: str | None) -> None:
    if kind is not None and kind not in KINDS:
        from comgra_decl.errors import did_you_mean

        near = did_you_mean(str(kind), KINDS) or "."
        _refuse(f"{kind!r} is no kind of a node{near} There are {', '.join(KINDS)}.")


def _marked(mark: Mark, what: Any) -> Any:
    """Marks or wraps what a decorator stands above."""
    if isinstance(what, type):
        _mark(_own_forward(what), mark)
        return what
    if isinstance(what, (staticmethod, classmethod)):
        return type(what)(_marked(mark, what.__func__))
    if not callable(what):
        _refuse(f"@comgra.node({mark.name!r}) stands above {what!r}, which cannot be called.")
    if _is_forward(what):
        return _mark(what, mark)
    return _wrapped(mark, what)


def _mark(function: F, mark: Mark) -> F:
    function.__comgra_node__ = mark  # type: ignore[attr-defined]
    return function


def _is_forward(function: Any) -> bool:
    """Whether this is written as a method called `forward` in the body of a class."""
    inside = getattr(function, "__qualname__", "").rpartition(".")[0]
    return getattr(function, "__name__", "") == "forward" and bool(inside) and inside[-1] != ">"


def _own_forward(class_: type) -> Any:
    forward = vars(class_).get("forward")
    if not callable(forward):
        _refuse(
            f"@comgra.node stands above the class {class_.__name__!r}, which has no `forward` of "
            f"its own to mark; put it above the `forward` that the class inherits."
        )
    return forward


def _wrapped(mark: Mark, function: Callable[..., Any]) -> Callable[..., Any]:
    name, role, kind = mark

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        if _recording:
            return _told(function(*args, **kwargs), name, role, kind)
        return function(*args, **kwargs)

    return _mark(named, mark)


def _refuse(message: str) -> None:
    from comgra_decl.errors import AnnotationError

    raise AnnotationError(message)

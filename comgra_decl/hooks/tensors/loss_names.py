"""Read the variable name of the loss in a `backward` call from the program's code.

Only code is read, that is, the current instruction of each function and the source text of its
call. The variables of a frame are never accessed. Before Python 3.13, `frame.f_locals` of a
function is the dict that `locals()` returned to the program, and reading it overwrites that dict.
Access to variables would also keep the tensors in a step alive for as long as the function runs.
"""

from __future__ import annotations

import ast
import linecache
import sys
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType

from comgra_decl.hooks.frames import OUR_FOLDER, TORCH_FOLDER

_MOST_FRAMES = 64
_HANDLERS = frozenset({"__torch_function__", "__torch_dispatch__"})
"""Handlers through which a call passes before it reaches torch, under a mode or for a tensor
subclass."""

_MOST_FILES = 1000
_foreign: dict[str, bool] = {}
"""Whether a file belongs to comgra_decl or torch, for the files seen so far."""

Place = tuple[CodeType, int]
"""A function and its current instruction."""


def calling_places() -> tuple[Place, ...]:
    """Return the current places of the program's functions, innermost first.

    Functions in comgra_decl and torch are skipped. Handlers of torch calls are skipped too, so that
    a loss has the same name with and without a mode.
    """
    places: list[Place] = []
    foreign = _foreign
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        if code.co_name in _HANDLERS:
            places.clear()  # the calls made by a handler are not in the program's code either
        elif not (foreign.get(code.co_filename) or _is_foreign(code.co_filename)):
            places.append((code, frame.f_lasti))
        frame = frame.f_back
    return tuple(places)


def _is_foreign(file: str) -> bool:
    known = _foreign.get(file)
    if known is None:
        known = file.startswith((OUR_FOLDER, TORCH_FOLDER))
        if len(_foreign) < _MOST_FILES:  # a notebook creates new files continually
            _foreign[file] = known
    return known


def loss_name(places: tuple[Place, ...]) -> str | None:
    """Return the name of the loss in a call to `backward`, as used by the outermost function.

    A helper may call a loss `loss` although the program that passed it calls it `loss_g`. If the
    name is a parameter, the caller's argument is therefore looked up, level by level.

    Args:
        places: the places of the program's functions; the innermost one calls `backward`.

    Returns:
        None if the loss has no name there, as in `model(x).sum().backward()`, or if the source is
        not available.
    """
    call = _call_at(*places[0]) if places else None
    return None if call is None else _named(_backwarded(call), places, 0)


def _backwarded(call: ast.Call) -> ast.expr | None:
    """Return the argument of a call: `x.backward()` or `torch.autograd.backward(x)`."""
    function = call.func
    if isinstance(function, ast.Attribute) and not ast.unparse(function.value).endswith("autograd"):
        return function.value
    given = [*call.args, *(k.value for k in call.keywords if k.arg == "tensors")]
    return given[0] if given else None


def _named(expression: ast.expr | None, places: tuple[Place, ...], depth: int) -> str | None:
    """Return the name of an expression in the function at `depth`, or its name in the callers."""
    match expression:
        case ast.Name(id=name):
            code = places[depth][0]
            parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if name not in parameters:
                return name
            position = parameters.index(name)
            wanted = _Wanted(position if position < code.co_argcount else None, name)
            return _given(wanted.past_self(code), places, depth + 1) or name
        case ast.Attribute(attr=name):
            return name
        case ast.List(elts=[first, *_]) | ast.Tuple(elts=[first, *_]):
            return _named(first, places, depth)
        case ast.Call(func=ast.Attribute(attr="scale"), args=[loss, *_]):  # of a gradient scaler
            return _named(loss, places, depth)
        case _:
            return None


@dataclass(frozen=True)
class _Wanted:
    """A parameter whose argument is searched for by position, by name, or both."""

    position: int | None
    name: str | None

    def past_self(self, callee: CodeType) -> _Wanted:
        """Return the same parameter, not counting the implicit argument of a bound method."""
        bound = self.position is not None and callee.co_varnames[:1] in (("self",), ("cls",))
        return _Wanted(self.position - 1, self.name) if bound and self.position else self


def _given(wanted: _Wanted, places: tuple[Place, ...], depth: int) -> str | None:
    """Return the name of the argument that the function at `depth` passes for a parameter."""
    call = _call_at(*places[depth]) if depth < len(places) else None
    if call is None:
        return None
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg == wanted.name:
            return _named(keyword.value, places, depth)
    position = wanted.position
    for at, argument in enumerate(call.args):
        if isinstance(argument, ast.Starred):
            found = _passed_on(argument.value, wanted, places, depth, skipped=at)
            if found is not None:
                return found
            break  # the number of these arguments is unknown
        if at == position:
            return _named(argument, places, depth)
    for keyword in call.keywords:
        if keyword.arg is None:
            return _passed_on(keyword.value, wanted, places, depth)
    return None


def _passed_on(
    rest: ast.expr,
    wanted: _Wanted,
    places: tuple[Place, ...],
    depth: int,
    *,
    skipped: int | None = None,
) -> str | None:
    """Follow a function's `*args` (after `skipped` arguments) or `**kwargs` to its caller."""
    code = places[depth][0]
    named = code.co_argcount + code.co_kwonlyargcount
    has_args = bool(code.co_flags & 0x04)  # CO_VARARGS; 0x08 is CO_VARKEYWORDS
    variadic = list(islice(code.co_varnames, named, named + has_args + bool(code.co_flags & 0x08)))
    if not isinstance(rest, ast.Name) or rest.id not in variadic:
        return None
    if skipped is None:
        further = _Wanted(None, wanted.name)
    elif wanted.position is None or wanted.position < skipped:
        return None
    else:
        further = _Wanted(code.co_argcount + wanted.position - skipped, None)
    return _given(further.past_self(code), places, depth + 1)


def _call_at(code: CodeType, instruction: int) -> ast.Call | None:
    """Return the current call to a function, parsed from its source; None if unavailable."""
    position = next(islice(code.co_positions(), instruction // 2, None), None)
    if position is None:
        return None
    line, last, column, end = position
    if line is None or last is None or column is None or end is None:  # -X no_debug_ranges
        return None
    lines = [text.encode() for text in linecache.getlines(code.co_filename)[line - 1 : last]]
    if len(lines) != last - line + 1:
        return None
    lines[-1] = lines[-1][:end]  # columns count bytes
    lines[0] = lines[0][column:]
    try:
        expression = ast.parse(b"(%b\n)" % b"".join(lines), mode="eval").body
    except (SyntaxError, ValueError):  # the file has changed since its import
        return None
    return expression if isinstance(expression, ast.Call) else None

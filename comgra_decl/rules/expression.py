"""Rules as expressions over statistics: `std < 0.01 * early(std) and step > 100`.

Expressions are parsed, never run as Python; they may contain only the elements listed here. They
are evaluated for all records and slots of a window in one pass.

| in an expression | is |
|---|---|
| `mean`, `std`, `l2`, ... | a recorded statistic, averaged over the batch |
| `mean.std`, `mean.abs_max` | the same statistic, aggregated over the batch by another function |
| `value` | in rules about a metric: the number |
| `step`, `elements` | the step; the number of elements per sample of the tensor |
| `early(x)` | the median of the first ten values of x; unknown until then |
| `previous(x)` | x in the previous record of the tensor |
| `largest(x)`, `smallest(x)` | the largest and smallest value of x so far |
| `abs`, `sqrt`, `log10`, `exp`, `isnan`, `min`, `max` | as in mathematics |
| `+ - * / **`, `< <= > >= == !=`, `and or not`, numbers | as in Python |

Comparisons with unknown values are false.
"""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import did_you_mean
from comgra_decl.records import AGGREGATES
from comgra_decl.rules.memory import Early, Largest, Previous, Slots

Read = Callable[[str, str], NDArray[Any]]
"""Returns a quantity [records, slots] by its name and its aggregation over the batch."""

Term = Callable[[Read, Slots], NDArray[Any]]

_DEEPEST, _LONGEST, _SHOWN = 40, 1000, 60
_EARLY = 10


class ExpressionError(ValueError):
    """Raised for an invalid expression; the message names the part and the valid alternatives."""


class Expression(NamedTuple):
    """A parsed expression, and the names of the quantities that it uses."""

    term: Term
    names: tuple[str, ...]


_BINARY: Mapping[type[ast.operator], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: np.divide,
    ast.Pow: np.float_power,
}
_COMPARED: Mapping[type[ast.cmpop], Callable[..., Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": np.abs,
    "sqrt": np.sqrt,
    "log10": np.log10,
    "exp": np.exp,
    "isnan": np.isnan,
}
_PAIRS: Mapping[str, Callable[..., Any]] = {"min": np.minimum, "max": np.maximum}
_MEMORIES: Mapping[str, Callable[[], Any]] = {
    "early": lambda: Early(_EARLY),
    "previous": Previous,
    "largest": Largest,
    "smallest": lambda: Largest(smallest=True),
}


def parse(text: str) -> Expression:
    """Return a parsed expression, with empty memories.

    Raises:
        ExpressionError: the expression is invalid.
    """
    if len(text) > _LONGEST:
        raise ExpressionError(f"an expression may have at most {_LONGEST} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "msg", None) or "it is nested too deeply"
        raise ExpressionError(f"{text!r} is not an expression: {reason}") from None
    reader = _Reader(text)
    return Expression(reader.read(tree.body, 0), tuple(dict.fromkeys(reader.names)))


class _Reader:
    """Converts each part of an expression to a term."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.names: list[str] = []

    def read(self, node: ast.expr, depth: int) -> Term:
        """Return the term for a part."""
        if depth > _DEEPEST:
            raise ExpressionError(f"{self._text!r} is nested too deeply")
        below = depth + 1
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            number = self._number(value)
            return lambda _read, _at: np.asarray(number)
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._quantity(node)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            a, b = self.read(node.left, below), self.read(node.right, below)
            return _joined(_BINARY[type(node.op)], _numeric(a), _numeric(b))
        if isinstance(node, ast.UnaryOp):
            return self._signed(node, below)
        if isinstance(node, ast.BoolOp):
            how = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            return self._chained([self.read(part, below) for part in node.values], how)
        if isinstance(node, ast.Compare):
            return self._compared(node, below)
        if isinstance(node, ast.Call):
            return self._call(node, below)
        raise ExpressionError(
            f"{_shown(node)} is not allowed in a rule; use statistics, numbers, comparisons, "
            f"and/or/not and {', '.join(_known_functions())}"
        )

    def _number(self, value: float) -> np.float64:
        try:
            return np.float64(value)
        except OverflowError:
            reason = f"numbers must be at most {sys.float_info.max:.2g}"
            raise ExpressionError(f"{self._text[:60]!r}: {reason}") from None

    def _quantity(self, node: ast.Name | ast.Attribute) -> Term:
        over = "mean"
        if isinstance(node, ast.Attribute):
            if not isinstance(node.value, ast.Name) or node.attr not in AGGREGATES:
                raise ExpressionError(
                    f"{_shown(node)} is not allowed; a statistic may be followed by its "
                    f"aggregation over the batch: {', '.join(AGGREGATES)}"
                )
            over, node = node.attr, node.value
        name = node.id
        self.names.append(name)
        return lambda read, _at: read(name, over)

    def _signed(self, node: ast.UnaryOp, depth: int) -> Term:
        term = self.read(node.operand, depth)
        if isinstance(node.op, ast.Not):
            return lambda read, at: np.logical_not(_true(term(read, at)))
        if isinstance(node.op, ast.USub):
            number = _numeric(term)
            return lambda read, at: -number(read, at)
        raise ExpressionError(f"{_shown(node)} is not allowed in a rule")

    def _compared(self, node: ast.Compare, depth: int) -> Term:
        terms = [self.read(part, depth) for part in (node.left, *node.comparators)]
        parts = []
        for a, b, how in zip(terms[:-1], terms[1:], node.ops, strict=True):
            if type(how) not in _COMPARED:
                raise ExpressionError(f"{_shown(node)} uses an unknown comparison")
            parts.append(_joined(_COMPARED[type(how)], a, b))
        return self._chained(parts, np.logical_and)

    def _chained(self, terms: list[Term], how: Callable[..., Any]) -> Term:
        def chained(read: Read, at: Slots) -> NDArray[Any]:
            result: NDArray[Any] = _true(terms[0](read, at))
            for term in terms[1:]:
                result = how(result, _true(term(read, at)))
            return result

        return chained if len(terms) > 1 else terms[0]

    def _call(self, node: ast.Call, depth: int) -> Term:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in _known_functions():
            near = did_you_mean(name, _known_functions())
            known = ", ".join(_known_functions())
            raise ExpressionError(
                f"{_shown(node.func)} is not a function that rules can call{near}; "
                f"the functions are {known}"
            )
        wanted = 2 if name in _PAIRS else 1
        if len(node.args) != wanted or node.keywords:
            raise ExpressionError(f"{name} takes {wanted} argument{'s' * (wanted - 1)}")
        terms = [self.read(argument, depth) for argument in node.args]
        if name in _PAIRS:
            return _joined(_PAIRS[name], *terms)
        if name in _FUNCTIONS:
            function, term = _FUNCTIONS[name], _numeric(terms[0])
            return lambda read, at: function(term(read, at))
        return _remembered(_MEMORIES[name](), terms[0])


def _known_functions() -> list[str]:
    return [*_FUNCTIONS, *_PAIRS, *_MEMORIES]


def _joined(how: Callable[..., Any], a: Term, b: Term) -> Term:
    return lambda read, at: np.asarray(how(a(read, at), b(read, at)))


def _numeric(term: Term) -> Term:
    """Return a term that yields 0 and 1 for booleans, which numpy cannot subtract."""

    def numeric(read: Read, at: Slots) -> NDArray[Any]:
        values = term(read, at)
        return values.astype(np.float64) if values.dtype == np.bool_ else values

    return numeric


def _shown(node: ast.expr) -> str:
    """Return the source text of a part, shortened for a message."""
    try:
        text = ast.unparse(node)
    except RecursionError:
        return "a part that is nested too deeply"
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def _remembered(memory: Any, term: Term) -> Term:
    def remembered(read: Read, at: Slots) -> NDArray[Any]:
        values = np.asarray(term(read, at), np.float64)
        return np.asarray(memory.look(at, np.broadcast_to(values, read("step", "mean").shape)))

    return remembered


def _true(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return values as booleans; unknown values are false."""
    if values.dtype == np.bool_:
        return values.astype(np.bool_, copy=False)
    return np.asarray(~np.isnan(values) & (values != 0), np.bool_)

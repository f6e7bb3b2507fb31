"""What the docstring below a key says of it, read from the source when somebody asks.

pydantic can do that as well (`use_attribute_docstrings`), but for every model when it is made: a
third of a second at the start of each traced program, which has no use for them.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic import BaseModel


@cache
def descriptions(model: type[BaseModel]) -> Mapping[str, str]:
    """Returns the docstrings of a model's keys, those it inherits too, by the field's name."""
    line = [cls for cls in reversed(model.__mro__) if hasattr(cls, "model_fields")]
    found = dict(pair for cls in line[1:] for pair in _docstrings(cls))  # the first is BaseModel
    return {name: text for name, text in found.items() if name in model.model_fields}


def _docstrings(cls: type) -> Iterator[tuple[str, str]]:
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):  # made by a program, or typed at a prompt
        return
    assert isinstance(definition, ast.ClassDef)
    for field, text in pairwise(definition.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            yield field.target.id, inspect.cleandoc(text.value.value)

"""Read the docstrings of a model's keys from the source, on demand.

pydantic's `use_attribute_docstrings` option reads them when each model is created, which would
delay the start of each traced program by a third of a second. Programs do not need these
docstrings.
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
    """Return the docstrings of a model's keys, including inherited ones, by field name."""
    line = [cls for cls in reversed(model.__mro__) if hasattr(cls, "model_fields")]
    found = dict(pair for cls in line[1:] for pair in _docstrings(cls))  # the first is BaseModel
    return {name: text for name, text in found.items() if name in model.model_fields}


def _docstrings(cls: type) -> Iterator[tuple[str, str]]:
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):  # no source: created dynamically or interactively
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

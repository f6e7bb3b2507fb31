"""Texts: placeholders are filled in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.house import sources

PLACEHOLDER = re.compile(r"\{[a-z_]+(\[['\"]?\w+['\"]?\]|\.\w+|\([^)]*\))+(:[^}]*)?\}")
EXAMPLES = {"{oc.env:NAME}"}  # of OmegaConf, in text


def texts(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the strings that are neither docstrings, nor f-strings, nor formatted later."""
    formatted = {
        node.func.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    documentation = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        apart = node in formatted or node in documentation
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not apart:
            yield node


def test_no_placeholder_is_outside_an_f_string() -> None:
    found = [
        (path, node.lineno, match[0])
        for path, tree in sources()
        for node in texts(tree)
        for match in [PLACEHOLDER.search(str(node.value))]
        if match is not None and match[0] not in EXAMPLES and "return" not in str(node.value)
    ]
    assert found == []

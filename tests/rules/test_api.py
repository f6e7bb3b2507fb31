"""Rules, including custom ones, import only the module `comgra_decl.rules.api`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from comgra_decl.rules import api
from comgra_decl.rules.catalogue import FAMILIES, known
from tests.house import sources


def test_a_rule_imports_nothing_of_the_package_but_its_api() -> None:
    rules = {
        name: tree
        for name, tree in sources("rules")
        if name.split("/")[1] in FAMILIES and Path(name).name != "__init__.py"
    }
    assert len(rules) > 80
    for name, tree in rules.items():
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        ours = [node.module for node in imports if (node.module or "").startswith("comgra_decl")]
        assert ours == ["comgra_decl.rules.api"], name
        whole = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
        assert "comgra_decl" not in "".join(a.name for node in whole for a in node.names), name


def test_every_name_of_the_api_exists_and_is_listed_once() -> None:
    assert len(set(api.__all__)) == len(api.__all__)
    assert all(hasattr(api, name) for name in api.__all__)


def test_no_name_of_the_api_is_unused() -> None:
    used = {
        alias.name
        for _, tree in sources("rules")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "comgra_decl.rules.api"
        for alias in node.names
    }
    assert set(api.__all__) == used


def test_every_rule_is_named_in_a_test_of_the_normal_suite() -> None:
    """Marking the last such test slow would leave a rule untested between two releases."""
    named: set[str] = set()
    for path in Path(__file__).parents[1].rglob("test_*.py"):
        if path.name not in ("test_api.py", "test_health.py"):  # a table with all of them
            named.update(_quick(ast.parse(path.read_text(encoding="utf-8"))))
    missing = [name for name, kind in known().items() if not {name, kind.__name__} & named]
    assert missing == []


def _quick(node: ast.AST) -> Iterator[str]:
    """Yields the names and strings of a file, without tests and cases that are marked slow."""
    if _is_slow(node):
        return
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    quick = _tried(node) if isinstance(node, ast.Call) else None
    for child in ast.iter_child_nodes(node) if quick is None else quick:
        yield from _quick(child)


def _is_slow(node: ast.AST) -> bool:
    marks: list[ast.expr] = []
    if isinstance(node, ast.FunctionDef):
        marks = node.decorator_list
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.param":
        marks = [word.value for word in node.keywords if word.arg == "marks"]
    return any(ast.unparse(mark) == "pytest.mark.slow" for mark in marks)


def _tried(call: ast.Call) -> list[ast.expr] | None:
    """Returns the cases of `shortened` that the normal suite tries."""
    if ast.unparse(call.func) != "shortened" or not isinstance(call.args[0], ast.List):
        return None
    (tried,) = [word.value for word in call.keywords if word.arg == "tried"]
    many = tried.value if isinstance(tried, ast.Constant) else None
    return call.args[0].elts[:many] if isinstance(many, int) else None

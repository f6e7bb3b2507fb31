"""Rules, including custom ones, import only the module `comgra_decl.rules.api`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from comgra_decl.rules import api
from comgra_decl.rules.catalogue import FAMILIES
from tests.house import sources

RULES = {
    name: tree
    for name, tree in sources("rules")
    if name.split("/")[1] in FAMILIES and Path(name).name != "__init__.py"
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_imports_nothing_of_the_package_but_its_api(name: str) -> None:
    imports = [node for node in ast.walk(RULES[name]) if isinstance(node, ast.ImportFrom)]
    ours = [node.module for node in imports if (node.module or "").startswith("comgra_decl")]
    assert ours == ["comgra_decl.rules.api"]
    assert not [node for node in ast.walk(RULES[name]) if isinstance(node, ast.Import)
                and any(alias.name.startswith("comgra_decl") for alias in node.names)]  # fmt: skip


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

"""Read the source of the package, for tests that apply coding rules to all of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support import freezing

ROOT = Path(__file__).parents[1] / "comgra_decl"


def sources(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the relative path and syntax tree of every file, optionally only of some folders."""
    for name, tree in _parsed().items():
        if not folders or name.split("/")[0] in folders:
            yield name, tree


@cache
def _parsed() -> dict[str, ast.Module]:
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"), str(path))
        for path in sorted(_files(ROOT))
    }
    freezing.set_aside()  # more than a million objects, which later tests would look through
    return trees


def _files(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.is_dir():  # `viewer` and `configs` are links, which `rglob` would not follow
            yield from _files(entry)
        elif entry.suffix == ".py":
            yield entry


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Yield every call in a file with the source text of the called object, as in `path.open`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            yield text(node.func), node


def text(expression: ast.expr) -> str:
    """Return the source text of an expression; for names with dots, much faster than `ast`."""
    names: list[str] = []
    node = expression
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        return ".".join([node.id, *reversed(names)])
    return ast.unparse(expression)

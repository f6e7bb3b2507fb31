"""Imports are layered: each layer may import from those below it, but not above."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house import sources

LAYERS = [
    "configs",
    "errors",
    "bins",
    "records",
    "visible",
    "terminal",
    "torch_private",
    "annotations",
    "spec",
    "stats",
    "store",
    "keep",
    "hooks",
    "pictures",
    "sinks",
    "query",
    "export",
    "rules",
    "record",
    "importing",
    "experiments",
    "doors",
    "integrations",
    "viewer",
    "cli",
]
"""Layers from bottom to top. The package itself (`__init__`) may import from all of them."""

APART = {
    "annotations": {"torch_private"},
    "spec": {"annotations", "torch_private"},
    "stats": {"spec", "annotations"},
    "store": {"spec", "annotations", "stats", "torch_private"},
    "hooks": {"store", "keep"},
    "keep": {"store", "stats", "annotations"},
    "pictures": {"spec", "annotations", "stats", "store", "keep", "hooks", "torch_private"},
    "sinks": {"annotations", "stats", "keep", "hooks", "torch_private"},
    "query": {"hooks", "stats", "keep", "annotations"},
    "export": {"hooks", "stats", "keep", "annotations"},
    "rules": {"hooks", "stats", "annotations"},
    "importing": {"hooks", "stats", "annotations", "keep", "rules", "torch_private"},
    "viewer": {"hooks", "stats", "annotations", "record", "experiments", "doors", "integrations"},
}
"""Lower layers from which a layer must not import."""


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_from_layers_below_it(layer: str) -> None:
    allowed = {*LAYERS[: LAYERS.index(layer) + 1]} - APART.get(layer, set())
    wrong = {
        (file, other)
        for file, tree in sources()
        if _layer(file) == layer
        for other in _imported(tree)
        if other not in allowed
    }
    assert wrong == set()


def test_every_file_is_in_a_layer() -> None:
    assert {_layer(file) for file, _ in sources()} == {*LAYERS, "__init__", "__main__"}


def _layer(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py")


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the layers that a file imports from, including lazy and type-checking imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            package, _, below = (node.module or "").partition(".")
            names = [below] if below else [alias.name for alias in node.names]
            if package == "comgra_decl":
                yield from (name.partition(".")[0] for name in names if name != "__version__")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("comgra_decl."):
                    yield alias.name.split(".")[1]

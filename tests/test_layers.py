"""Imports go one way: each room knows those below it, and none above."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house import sources

ROOMS = [
    "configs",
    "errors",
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
    "query",
    "export",
    "rules",
    "record",
    "experiments",
    "doors",
    "integrations",
    "viewer",
    "cli",
]
"""From the ground to the roof. What lies in the package itself (`__init__`) is the door to all."""

APART = {
    "annotations": {"torch_private"},
    "spec": {"annotations", "torch_private"},
    "stats": {"spec", "annotations"},
    "store": {"spec", "annotations", "stats", "torch_private"},
    "hooks": {"store", "keep"},
    "keep": {"store", "stats", "annotations"},
    "query": {"hooks", "stats", "keep", "annotations"},
    "export": {"hooks", "stats", "keep", "annotations"},
    "rules": {"hooks", "stats", "annotations"},
    "viewer": {"hooks", "stats", "annotations", "record", "experiments", "doors", "integrations"},
}
"""Rooms below which a room has nothing to do with all the same."""


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_rooms_below_it(room: str) -> None:
    allowed = {*ROOMS[: ROOMS.index(room) + 1]} - APART.get(room, set())
    wrong = {
        (file, other)
        for file, tree in sources()
        if _room(file) == room
        for other in _imported(tree)
        if other not in allowed
    }
    assert wrong == set()


def test_every_file_is_in_a_room() -> None:
    assert {_room(file) for file, _ in sources()} == {*ROOMS, "__init__", "__main__"}


def _room(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py")


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yields the rooms that a file imports from, lazily and for annotations as well."""
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

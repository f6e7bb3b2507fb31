"""Private names of Panel and Bokeh are used in one file, which can do without most of them."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from importlib.metadata import version

import panel as pn
import pytest

import comgra_decl.viewer as viewer
from comgra_decl.viewer import panel_private
from comgra_decl.viewer.panel_private import PRIVATE, PRIVATE_ATTRIBUTES
from tests.house import sources

FOREIGN = ("panel.", "bokeh.", "param.", "holoviews.", "tornado.")
HERE = "comgra_decl.viewer.panel_private"


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def classes() -> Iterator[type]:
    """Yields every class of the viewer."""
    for module in pkgutil.walk_packages(viewer.__path__, "comgra_decl.viewer."):
        if module.name.endswith("__main__"):
            continue
        loaded = importlib.import_module(module.name)
        for _, found in inspect.getmembers(loaded, inspect.isclass):
            if found.__module__ == module.name:
                yield found


def foreign_names(owner: type) -> set[str]:
    bases = [base for base in owner.__mro__ if base.__module__.startswith(FOREIGN)]
    return {name for base in bases for name in vars(base) if private(name)}


def test_only_the_one_file_overrides_what_is_private() -> None:
    overridden = {
        f"{owner.__module__}.{owner.__name__}.{name}"
        for owner in classes()
        if owner.__module__ != HERE
        for name in foreign_names(owner) & set(vars(owner))
        # created by the metaclasses of param and Panel for each class
        if not name.startswith(("_param__", "_abc")) and inspect.isfunction(vars(owner)[name])
    }
    assert overridden == set()


def test_only_the_one_file_reads_what_is_private_in_another_object() -> None:
    found = {
        f"{name}:{node.lineno} {node.attr}"
        for name, tree in sources("viewer")
        if not name.endswith("panel_private.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and private(node.attr)
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        if not (name.endswith("__main__.py") or node.attr == "_asdict")
    }
    assert found == set()


def test_no_class_calls_what_is_private_in_its_foreign_bases() -> None:
    overridden = {name.partition(".")[2] for name in PRIVATE}
    found = set()
    for owner in classes():
        if owner.__module__ == HERE:
            continue
        theirs = foreign_names(owner) - {name for c in owner.__mro__ for name in ours(c)}
        for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(owner)))):  # type: ignore[arg-type]
            if isinstance(node, ast.Attribute) and node.attr in theirs | overridden:
                found.add(f"{owner.__module__}.{owner.__name__} {node.attr}")
    assert found == set()


def ours(owner: type) -> set[str]:
    if owner.__module__.startswith("comgra_decl.") and owner.__module__ != HERE:
        return set(vars(owner))
    return set()


@pytest.mark.parametrize("name", PRIVATE)
def test_this_panel_has_what_is_listed(name: str) -> None:
    assert panel_private.unchanged(name)


def test_the_list_is_what_is_used() -> None:
    tree = ast.parse(inspect.getsource(panel_private))
    methods = {name.partition(".")[2] for name in PRIVATE}
    theirs = {
        name
        for owner in (panel_private.MessagingComponent, panel_private.LoginHandler, pn.Column)
        for name in foreign_names(owner)
    } | set(PRIVATE_ATTRIBUTES)
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    used |= {
        argument.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr"
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }
    assert used & theirs == methods | set(PRIVATE_ATTRIBUTES)


def test_a_changed_signature_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pn.Column, "_preprocess", pn.Column.clone)
    assert not panel_private.unchanged("Column._preprocess")
    monkeypatch.delattr(pn.Column, "_preprocess")
    monkeypatch.setattr(pn.viewable.Renderable, "_preprocess", None)
    assert not panel_private.unchanged("Column._preprocess")


@pytest.mark.parametrize("library", panel_private.SEEN)
def test_the_version_installed_is_one_that_was_seen(library: str) -> None:
    first, _, last = panel_private.SEEN[library].partition(" to ")
    numbers = [tuple(map(int, text.split("."))) for text in (first, version(library), last)]
    assert numbers == sorted(numbers)

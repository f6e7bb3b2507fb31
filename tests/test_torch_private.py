"""All private torch names in use are on one list, and this torch has all of them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from comgra_decl import torch_private
from comgra_decl.torch_private import ATTRIBUTES, SEEN, WITHOUT_A_DEVICE
from tests.house import sources, text

THE_LIST = "torch_private.py"

ELSEWHERE = "annotations/step_annotations.py"
"""Imports nothing, and hides the program's modes from one comparison."""

OF_OTHERS = {
    "_getframe": "sys",
    "_current_frames": "sys",
    "_replace": "named tuples",
    "_asdict": "named tuples",
    "_fields": "named tuples",
    "_get_full_key": "omegaconf",
    "_get_root": "omegaconf",
    "_http": "tornado, used by panel",
    "_tornado": "panel",
    "_login_template": "panel",
    "_in_process__events": "panel",
    "_process_param_change": "panel",
    "_send_msg": "panel",
    "_set_on_model": "panel",
}
"""Private names of other packages, and public Python names that look private."""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _written(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names in expressions of a file, and strings that may be names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield text(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value if node.value.isprintable() and " " not in node.value else ""


def test_no_private_name_of_torch_is_used_without_being_on_the_list() -> None:
    found = {
        (file, name)
        for file, tree in sources()
        for name in (*_imported(tree), *_written(tree))
        if name.startswith("torch.") and any(map(_is_private, name.split(".")))
        if file != THE_LIST
    }
    assert {(file, name) for file, name in found if file != ELSEWHERE} == set()


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and text(node.value) in ("self", "cls"):
            yield from [node.attr] if isinstance(node.ctx, ast.Store) else []


def test_no_private_attribute_of_torch_is_used_without_being_on_the_list() -> None:
    trees = dict(sources())
    ours = {name for tree in trees.values() for name in _defined(tree)}
    found = {
        (node.attr, file)
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in ours
    }
    wrong = {(n, file) for n, file in found if n not in ATTRIBUTES and n not in OF_OTHERS}
    assert {(n, file) for n, file in wrong if file != ELSEWHERE} == set()


@pytest.mark.parametrize("name", SEEN)
def test_this_torch_has_all_that_is_on_the_list(name: str) -> None:
    _, versions = SEEN[name]
    if versions == torch_private.SINCE_2_6 or torch_private.available("graph_compile"):
        assert getattr(torch_private, name) is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a torch without CUDA lacks them")
@pytest.mark.parametrize("name", WITHOUT_A_DEVICE)
def test_a_torch_with_cuda_has_the_rest(name: str) -> None:
    assert getattr(torch_private, name) is not None


OWNERS = {
    "torch.nn.Module": nn.Linear(1, 1),
    "torch.Tensor": torch.ones(1),
    "torch.UntypedStorage": torch.ones(1).untyped_storage(),
    "nested tensors with the jagged layout": torch.nested.nested_tensor(
        [torch.ones(1), torch.ones(2)], layout=torch.jagged
    ),
    "torch.amp.GradScaler": torch.amp.GradScaler("cpu"),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_this_torch_has_the_attributes_on_the_list(name: str) -> None:
    owner = ATTRIBUTES[name]
    if owner in OWNERS:
        assert hasattr(OWNERS[owner], name)
    elif owner.startswith("torch.") and "fsdp" not in owner and "," not in owner:
        assert hasattr(sys.modules.get(owner) or torch_private._named(owner), name)


def test_each_attribute_on_the_list_is_used() -> None:
    written = {name for file, tree in sources() if file != THE_LIST for name in _words(tree)}
    assert set(ATTRIBUTES) - written == set()


def _words(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_each_name_on_the_list_is_used() -> None:
    used = {name for file, tree in sources() if file != THE_LIST for name in _of_list(tree)}
    assert {*SEEN, *WITHOUT_A_DEVICE} - used == set()


def _of_list(tree: ast.Module) -> Iterator[str]:
    for name in _imported(tree):
        if name.startswith("comgra_decl.torch_private."):
            yield name.rpartition(".")[2]
    for name in _written(tree):
        yield name.removeprefix("torch_private.")


def test_a_name_that_is_not_on_the_list_is_an_error_and_not_available() -> None:
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
        _ = torch_private.no_such_thing
    assert not torch_private.available("no_such_thing")
    assert torch_private.available("graph_task")

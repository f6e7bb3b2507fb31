"""A container is named by the path that leads to it, which Python itself can follow."""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from comgra_decl.hooks.scalars.whereabouts import places_of


class Slots:
    """An object without a dict."""

    __slots__ = ("kept", "unassigned")

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def keep(self) -> None:
        """Is bound to its object."""


class Counted(dict[str, Any]):
    """Its own methods must not run."""

    def items(self) -> Any:
        raise AssertionError("code of the program")

    __getitem__ = __len__ = __iter__ = items  # type: ignore[assignment]


HERE = "in found_at (test_whereabouts.py)"


def layer(kept: Any) -> nn.Module:
    inner: Any = nn.Tanh()
    inner.seen = {"h": kept}
    return nn.Sequential(nn.Linear(1, 1), nn.Sequential(inner))


def closure(kept: Any) -> Callable[[], Any]:
    return lambda: kept


def hooked(kept: Any) -> nn.Module:
    model = nn.Linear(1, 1)
    model.register_forward_hook(lambda *_: kept)
    return model


def default(kept: Any) -> Callable[[], Any]:
    def keep(store: Any = kept) -> Any:
        return store

    return keep


def keyword(kept: Any) -> Callable[[], Any]:
    def keep(*, store: Any = kept) -> Any:
        return store

    return keep


def waiting(kept: Any) -> Any:
    def batches() -> Any:
        buffer = kept
        yield
        yield buffer

    made = batches()
    next(made)
    return made


PLACES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dict in dict": (lambda kept: {"deep": {"er": kept}}, f'place["deep"]["er"] {HERE}'),
    "list of dicts": (lambda kept: [0, {7: kept}], f"place[1][7] {HERE}"),
    "tuple": (lambda kept: (1, (2, kept)), f"place[1][1] {HERE}"),
    "deque": (lambda kept: deque([1, [kept]]), f"place[1][0] {HERE}"),
    "ordered": (lambda kept: OrderedDict(a=OrderedDict(b=kept)), f'place["a"]["b"] {HERE}'),
    "late in a long list": (lambda kept: [*range(10_000), [kept]], f"place[10000][0] {HERE}"),
    "other keys": (lambda kept: {(1, 2): kept}, f"place[tuple] {HERE}"),
    "own dict": (lambda kept: Counted(a=kept), f'place["a"] {HERE}'),
    "objects": (
        lambda kept: SimpleNamespace(log=SimpleNamespace(by={"train": kept})),
        f'place.log.by["train"] {HERE}',
    ),
    "slots": (lambda kept: [Slots({"a": kept})], f'place[0].kept["a"] {HERE}'),
    "module": (layer, f'place.1.0.seen["h"] {HERE}'),
    "partial": (lambda kept: partial(print, [kept]), f"place.args[0][0] {HERE}"),
    "method": (lambda kept: SimpleNamespace(of=Slots([kept]).keep), f"place.of.kept[0] {HERE}"),
    "closure": (closure, "kept in function closure.<locals>.<lambda>"),
    "closure of a hook": (hooked, "kept in function hooked.<locals>.<lambda>"),
    "default": (default, "store in function default.<locals>.keep"),
    "keyword default": (keyword, "store in function keyword.<locals>.keep"),
    "generator": (waiting, "buffer in generator waiting.<locals>.batches"),
}


def found_at(made: Callable[[Any], Any]) -> tuple[list[str], int, Any]:
    """Return the names of a list to which only the made place leads, the list's id, and the place.

    Not part of a test, because pytest rewrites functions with assertions to call `locals`.
    """
    kept = [1, 2]
    place, number = made(kept), id(kept)
    del kept
    things = places_of([each for each in gc.get_objects() if id(each) == number], set())
    return [name for _, name in things], number, place


@pytest.mark.parametrize("case", PLACES)
def test_the_path_from_a_variable_is_the_name(case: str) -> None:
    made, expected = PLACES[case]
    assert found_at(made)[0] == [expected]


def in_dict(key: str | int | bool | None) -> Callable[[Any], Any]:
    return lambda kept: {"": 0, key: kept}


def in_list(before: int) -> Callable[[Any], Any]:
    return lambda kept: [*range(before), kept]


def in_tuple(before: int) -> Callable[[Any], Any]:
    return lambda kept: (*range(before), kept)


def in_attribute(name: str) -> Callable[[Any], Any]:
    return lambda kept: SimpleNamespace(**{name: kept})


KEYS = st.text(max_size=39) | st.integers() | st.booleans() | st.none()
WRAPPERS = (
    st.builds(in_dict, KEYS)
    | st.builds(in_list, st.integers(0, 200))
    | st.builds(in_tuple, st.integers(0, 50))
    | st.builds(in_attribute, st.sampled_from(["a", "log", "été"]))
    | st.just(Slots)
)


@given(st.lists(WRAPPERS, min_size=1, max_size=6))
def test_python_follows_the_path_to_the_container(wrappers: list[Callable[[Any], Any]]) -> None:
    def made(kept: Any) -> Any:
        for wrap in wrappers:
            kept = wrap(kept)
        return kept

    (name,), number, place = found_at(made)
    path = name.removesuffix(f" {HERE}")
    assert id(eval(path, {"place": place})) == number


def test_what_only_a_class_or_a_module_holds_is_named_by_it() -> None:
    """Both are made here, because the collector does not list what tests import."""
    made: list[Any] = [type("Holder", (), {"kept": {}}), ModuleType("helpers")]

    def in_class(kept: Any) -> None:
        made[0].kept["runs"] = [{1: kept}]

    def in_module(kept: Any) -> None:
        made[1].kept = {"a": kept}

    assert found_at(in_class)[0] == ['Holder.kept["runs"][0][1]']
    assert found_at(in_module)[0] == ['kept["a"] in helpers']


def test_what_nothing_known_holds_is_named_by_its_entries() -> None:
    def nowhere(kept: Any) -> Any:
        kept[:] = torch.ones(2, 3), torch.ones(2, 3)
        return iter(kept)  # whose list no attribute shows

    assert found_at(nowhere)[0] == ["a list of tensors [2, 3]"]

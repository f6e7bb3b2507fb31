"""The viewer's caches are limited in bytes, whatever is requested."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.query import open_run
from comgra_decl.viewer.model import runview
from comgra_decl.viewer.model.cache import _ENTRY, Cache, size_of
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.runview import RunView, Slot
from tests.support.fake_run import FakeRun


@given(
    st.integers(1, 4000),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 900)), max_size=60),
)
def test_it_holds_the_newest_within_its_limit(limit: int, asked: list[tuple[int, int]]) -> None:
    cache = Cache(limit)
    model: dict[int, int] = {}  # key: bytes, in order of use
    for key, size in asked:
        known = model.pop(key, None)
        value = cache.get(key, lambda size=size: np.zeros(size, np.uint8))  # type: ignore[misc]
        assert len(value) == (size if known is None else known)
        model[key] = len(value)
        while len(model) > 1 and sum(model.values()) + _ENTRY * len(model) > limit:
            del model[next(iter(model))]
        assert cache.size == sum(model.values()) + _ENTRY * len(model)
    for key in reversed(model):
        assert cache.get(key, lambda: np.zeros(1000)).nbytes == model[key]


def test_none_is_a_result_like_others() -> None:
    calls: list[int] = []
    cache = Cache(1 << 20)
    for _ in range(2):
        assert cache.get("none", lambda: calls.append(1)) is None
    assert calls == [1]


@pytest.mark.parametrize(
    "value",
    [
        np.zeros((30, 40)),
        pd.Series(np.zeros(1200)),
        pd.DataFrame(np.zeros((300, 4))),
        (np.zeros(600), [np.zeros(300), {"a": np.zeros(300)}]),
    ],
)
def test_sizes_are_those_of_the_numbers(value: object) -> None:
    assert 9600 <= size_of(value) <= 9600 * 1.4


def test_a_dataclass_counts_what_it_holds(view: RunView) -> None:
    slot = next(iter(view.slots.values()))
    assert isinstance(slot, Slot)
    assert size_of(slot) >= sys.getsizeof(slot) + sys.getsizeof(slot.shape)


def test_a_run_that_is_walked_through_holds_no_more_than_it_may(
    fake: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runview, "LASTING", 20_000)
    monkeypatch.setattr(runview, "PASSING", 20_000)
    view = RunView(open_run(fake.path))
    slots = [slot for slot in view.slots.values() if slot.pass_ == "forward"]
    for step in view.steps("").tolist():
        view.row(step, "", "mean")
        for slot in slots:
            view.sample_row(slot, step, "")
            view.series(slot, "mean", "mean", "")
    assert 20_000 < view.held <= 40_000


def test_open_runs_leave_when_they_hold_too_much(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = Catalogue(root)
    catalogue.refresh()
    (name,) = catalogue._paths
    catalogue._paths["again"] = catalogue._paths[name]
    first = catalogue.open(name)
    first.now("large", lambda: np.zeros(10_000))
    monkeypatch.setattr("comgra_decl.viewer.model.catalogue.HELD", 100_000)
    catalogue.open("again")
    assert catalogue.open(name) is first  # both fit
    first.now("larger", lambda: np.zeros(10_000))
    catalogue._paths["third"] = catalogue._paths[name]
    catalogue.open("third")
    assert catalogue.open("third").held < 100_000
    assert catalogue.open(name) is not first

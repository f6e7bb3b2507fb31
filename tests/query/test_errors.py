"""A query that cannot be answered names the queries that can."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comgra_decl.errors import PatternError, RunNotFoundError, UnknownNameError
from comgra_decl.export import export_run
from comgra_decl.export.content import Content
from comgra_decl.query import Run, compare, open_group, open_run
from comgra_decl.sinks import Selection
from comgra_decl.store import RunWriter
from tests.store.truth import Truth, meta_of
from tests.support.shortened import examples

Question = Callable[[Run], Any]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (lambda run: run.series("haed"), r"no node is called 'haed'; did you mean 'head'\?"),
        (lambda run: run.series("zzz"), r"no node is called 'zzz'\. This run has 9 nodes"),
        (lambda run: run.series("head", "men"), r"'men' was not recorded; did you mean 'mean'"),
        (
            lambda run: run.slot("head", role="wieght"),
            r"no role 'wieght'; did you mean 'weight'",
        ),
        (lambda run: run.slot("head", of="gard").series(), r"no pass 'gard'; did you mean 'grad'"),
        (lambda run: run.slot("cell", iteration=3).series(), r"no iteration 3\. It has 0, 1, 2\."),
        (lambda run: run.series("head", over_batch="max"), r"over_batch='max'.*'abs_max'"),
        (lambda run: run.series("head", type="evl"), r"type 'evl'; did you mean 'eval'\?"),
        (lambda run: run.row(99), r"step 99 was not recorded; nearest: 21, 22, 23"),
        (lambda run: run.row(9, type="eval"), r"step 9 .* type 'eval'; nearest: 10, 20"),
        (lambda run: run.heat("meen"), r"did you mean 'mean'"),
        (
            lambda run: run.slot("head", role="weight").value(3),
            r"no values of 'head' \(weight.*values",
        ),
        (lambda run: run.value("aux", 3), r"no values of 'aux'"),
        (lambda run: run.value("head", 3, sample=7), r"no sample 7"),
        (lambda run: run.slot("aux").histogram(3), r"'aux'.*was not recorded at step 3"),
        (lambda run: run.structure(99), r"step 99 was not recorded"),
    ],
)
def test_unknown_names_are_told_with_near_ones(run: Run, question: Question, answer: str) -> None:
    with pytest.raises(UnknownNameError, match=answer) as caught:
        question(run)
    assert isinstance(caught.value, KeyError)


def test_a_run_without_histograms_or_samples_says_so(tmp_path: Path) -> None:
    truth = Truth(meta=meta_of(bins=None, sample_count=0))
    RunWriter.create(tmp_path / "run", truth.meta).commit([truth.batch(2, [0])])
    run = open_run(tmp_path / "run")
    with pytest.raises(UnknownNameError, match="no histograms"):
        run.slot("node 0").histograms()
    assert run.slot("node 0").samples("mean").shape == (2, 0)
    assert run.slot("node 0").row(0).shape == (0, 3)
    assert run.series("node 0").shape == (2,)


def test_there_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(RunNotFoundError, match=r"no run in .*Pass a run's folder"):
        open_run(tmp_path / "runs")
    with pytest.raises(RunNotFoundError, match=r"does not exist; did you mean 'runs'\?"):
        open_run(tmp_path / "run")
    with pytest.raises(RunNotFoundError):
        open_group(tmp_path / "run")


class Odd:
    """Equal to nothing, and not hashable."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise TypeError("not comparable")


NO_NAMES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(min_value=1000) | st.integers(max_value=-1000) | st.just(10**400),
    st.floats(),
    st.binary(),
    st.text(),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.builds(Odd),
    st.builds(object),
    st.builds(lambda: np.array(["head", "cell"])),
    st.builds(lambda: np.array([3, 4])),
)
ASKED: dict[str, Callable[[Run, Any], Any]] = {
    "a node": lambda run, x: run.series(x),
    "a statistic": lambda run, x: run.series("head", x),
    "a role": lambda run, x: run.slot("head", role=x).series(),
    "a pass": lambda run, x: run.slot("head", of=x).series(),
    "an iteration": lambda run, x: run.slot("cell", iteration=x).series(),
    "an aggregate": lambda run, x: run.series("head", over_batch=x),
    "a type": lambda run, x: run.series("head", type=x),
    "a node in brackets": lambda run, x: run[x],
    "another pass": lambda run, x: run.slot("head").of(x),
    "a statistic of a sample": lambda run, x: run.slot("head").samples(x),
    "a step": lambda run, x: run.row(x),
    "a step's type": lambda run, x: run.row(3, type=x),
    "a step's samples": lambda run, x: run.samples(x),
    "the samples of a type": lambda run, x: run.samples_frame("mean", type=x),
    "a step's sample row": lambda run, x: run.slot("head").row(x),
    "a step's shape": lambda run, x: run.slot("head").shape(x),
    "a node's shape": lambda run, x: run.slot(x).shape(3),
    "a node's shapes": lambda run, x: run.slot(x).shapes(),
    "all shapes": lambda run, x: run.shapes(x),
    "a statistic of all": lambda run, x: run.heat(x),
    "a pass of all": lambda run, x: run.heat("mean", of=x),
    "an aggregate of all": lambda run, x: run.heat("mean", over_batch=x),
    "a step's value": lambda run, x: run.value("head", x),
    "a value's node": lambda run, x: run.value(x, 3),
    "a value's sample": lambda run, x: run.slot("head", role="weight").value(3, sample=x),
    "a histogram": lambda run, x: run.slot("head").histogram(x),
    "a node's histograms": lambda run, x: run.slot(x).histograms(),
    "a structure": lambda run, x: run.structure(x),
    "edges": lambda run, x: run.edges(x),
    "cuts": lambda run, x: run.cuts(x),
    "a rank": lambda run, x: run.rank(x),
    "a document": lambda run, x: run.document(x),
    "a comparison": lambda run, x: compare([run], x),
    "a run of a group": lambda run, x: open_group(run.path.absolute().parent)[x],
    "an export's nodes": lambda run, x: Content(run, selection=Selection(x)),
    "an export's format": lambda run, x: export_run(run, "never", x),
}


@pytest.mark.parametrize("asked", ASKED)
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(x=NO_NAMES)
def test_whatever_stands_in_the_place_of_a_name_only_ever_is_unknown(
    run: Run, asked: str, x: Any
) -> None:
    expected: tuple[type[Exception], ...] = (UnknownNameError,)
    if asked == "a run of a group" and isinstance(x, int):
        expected = (IndexError,)
    elif asked == "an export's nodes":
        expected = (UnknownNameError, PatternError)
    with suppress(*expected):
        ASKED[asked](run, x)


def test_a_number_in_the_place_of_a_name_is_said(run: Run) -> None:
    with pytest.raises(UnknownNameError, match=r"no node is called 3\. This run has 9 nodes"):
        run.series(3)  # type: ignore[arg-type]

"""A question that cannot be answered is answered with what can be asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comgra_decl.errors import RunNotFoundError, UnknownNameError
from comgra_decl.query import Run, open_group, open_run
from comgra_decl.store import RunWriter
from tests.store.truth import Truth, meta_of

Question = Callable[[Run], Any]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (lambda run: run.series("haed"), r"no node is called 'haed'; did you mean 'head'\?"),
        (lambda run: run.series("zzz"), r"no node is called 'zzz'\. This run has 9 nodes"),
        (lambda run: run.series("head", "men"), r"'men' was not recorded; did you mean 'mean'"),
        (lambda run: run.series("head", role="wieght"), r"no role 'wieght'; did you mean 'weight'"),
        (lambda run: run.series("head", pass_="gard"), r"no pass 'gard'; did you mean 'grad'"),
        (lambda run: run.series("cell", iteration=3), r"no iteration 3\. It has 0, 1, 2\."),
        (lambda run: run.series("head", over_batch="max"), r"over_batch='max'.*'abs_max'"),
        (lambda run: run.series("head", type_="evl"), r"type 'evl'; did you mean 'eval'\?"),
        (lambda run: run.sample_series("head", "mean", 4), r"no sample 4: 4 samples"),
        (lambda run: run.sample_series("head", "mean", -1), r"no sample -1"),
        (lambda run: run.row(99), r"step 99 was not recorded; nearest: 21, 22, 23"),
        (lambda run: run.row(9, type_="eval"), r"step 9 .* type 'eval'; nearest: 10, 20"),
        (lambda run: run.heat("meen"), r"did you mean 'mean'"),
        (lambda run: run.value("head", 3, role="weight"), r"no values of 'head' \(weight.*values"),
        (lambda run: run.value("aux", 3), r"no values of 'aux'"),
        (lambda run: run.value("head", 3, sample=7), r"no sample 7"),
        (lambda run: run.histogram("aux", 3), r"'aux'.*was not recorded at step 3"),
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
        run.histograms("node 0")
    with pytest.raises(UnknownNameError, match="0 samples"):
        run.sample_series("node 0", "mean", 0)
    assert run.sample_row("node 0", 0).shape == (0, 3)
    assert run.series("node 0").shape == (2,)


def test_there_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(RunNotFoundError, match=r"no run in .*Pass a run's folder"):
        open_run(tmp_path / "runs")
    with pytest.raises(RunNotFoundError, match=r"does not exist; did you mean 'runs'\?"):
        open_run(tmp_path / "run")
    with pytest.raises(RunNotFoundError):
        open_group(tmp_path / "run")

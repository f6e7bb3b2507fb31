"""Networks that behave differently in evaluation, and training in evaluation mode, by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch.nn.functional as F
from torch import nn

from comgra_decl.records import MODES
from comgra_decl.rules.data.evaluation import EvaluationGap, OwnStatistics
from comgra_decl.rules.structure.evaluation_mode import TrainingInEvaluationMode
from tests.rules.tape import Tape
from tests.rules.trainings import fit, found, regression

RNG = np.random.default_rng(5)
WAVE = RNG.normal(size=(4, 10))


def phases(
    sizes: Sequence[tuple[str, float]], *, class_: str = "BatchNorm1d", kind: str = "computed"
) -> Tape:
    """One tensor with these magnitudes in these modes."""
    tape = Tape()
    slot = tape.slot("bn", (4, 10), kind=kind)
    tape.documents["modules"] = [{"path": "", "node": "bn", "class": class_, "parameters": {}}]
    for step, (mode, size) in enumerate(sizes):
        tape.record({slot: size * WAVE}, step=step, mode=mode)
    return tape


@pytest.mark.parametrize("window", [1, 2, 3, 100])
def test_an_evaluation_is_compared_with_its_neighbours_wherever_windows_end(window: int) -> None:
    growing = [pair for k in range(6) for pair in (("train", 2.0**k), ("eval", 2.0**k))]
    assert not phases(growing).findings(EvaluationGap(), window=window)
    apart = [pair for k in range(6) for pair in (("train", 2.0**k), ("eval", 8 * 2.0**k))]
    (found,) = phases(apart).findings(EvaluationGap(), window=window)
    assert found.first_step == 1
    assert found.evidence["factor"] == pytest.approx(4, rel=1e-5)  # the next step is twice as far


@pytest.mark.parametrize("window", [1, 100])
def test_a_training_that_goes_on_between_rare_records_is_no_gap(window: int) -> None:
    rare = [pair for k in range(4) for pair in (("train", 10.0**k), ("eval", 5 * 10.0**k))]
    assert not phases(rare).findings(EvaluationGap(), window=window)


@pytest.mark.parametrize(("factor", "found"), [(2.9, 0), (3.1, 1), (1 / 2.9, 0), (1 / 3.1, 1)])
def test_three_times_or_a_third_is_another_one(factor: float, found: int) -> None:
    steady = [("train", 1.0), ("eval", factor)] * 3 + [("train", 1.0)]
    assert len(phases(steady).findings(EvaluationGap())) == found


@pytest.mark.parametrize(
    ("class_", "kind", "factor", "found"),
    [
        ("Linear", "computed", 1 / 5, 0),
        ("Linear", "computed", 5, 1),
        ("Linear", "input", 1 / 5, 1),
        ("SyncBatchNorm", "computed", 1 / 5, 1),
    ],
)
def test_dropout_may_be_missing_in_evaluation(
    class_: str, kind: str, factor: float, found: int
) -> None:
    steady = [("train", 1.0), ("eval", factor)] * 3 + [("train", 1.0)]
    assert len(phases(steady, class_=class_, kind=kind).findings(EvaluationGap())) == found


def test_an_evaluation_counts_when_the_training_goes_on() -> None:
    short = [("train", 1.0), ("eval", 9.0), ("train", 1.0), ("eval", 9.0)]
    (unchecked,) = phases(short).play(EvaluationGap()).unchecked()
    assert "the run has 1" in unchecked.reason
    assert len(phases([*short, ("train", 1.0)]).findings(EvaluationGap())) == 1


def test_evaluations_without_end_cost_no_memory_without_end() -> None:
    tape = phases([("train", 1.0)] + [("eval", 1.0)] * 200)
    rule = EvaluationGap()
    tape.play(rule)
    assert len(rule._waiting) == 64


def modes(calls: str, *, class_: str = "Dropout", optimized: bool = True) -> Tape:
    """A model that each record calls in training (t) or evaluation mode (e), or not at all (-)."""
    tape = Tape()
    weight = {"weight": {"shape": [3], "trainable": True, "optimized": optimized}}
    tape.documents["modules"] = [
        {"path": "", "node": "Net", "class": "Net", "parameters": {}},
        {"path": "a", "node": "a", "class": "Linear", "parameters": weight},
        {"path": "b", "node": "b", "class": class_, "parameters": {}},
    ]
    for step, mode in enumerate(calls):
        tape.record({}, step=step, facts={} if mode == "-" else {MODES: {"Net": mode == "t"}})
    return tape


@pytest.mark.parametrize("window", [1, 3, 100])
@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ("tteeeee", [(2, "error")]),
        ("tteee-ee", [(2, "error")]),  # a step that did not call it provides no evidence
        ("tteeee", []),
        ("eeeee", [(0, "warning")]),  # from the start: a model may be loaded in this mode
        ("eeee", []),
        ("tteeeeet", []),  # it was ended
        ("tetetetetet", []),
    ],
)
def test_a_training_that_goes_on_in_evaluation_mode(
    calls: str, found: list[tuple[int, str]], window: int
) -> None:
    findings = modes(calls).findings(TrainingInEvaluationMode(), window=window)
    assert [(finding.first_step, finding.severity) for finding in findings] == found


@pytest.mark.parametrize(
    ("class_", "optimized", "found"),
    [
        ("BatchNorm2d", True, 1),
        ("StochasticDepth", True, 1),
        ("LayerNorm", True, 0),  # the same in both modes
        ("Dropout", False, 0),  # a teacher
    ],
)
def test_evaluation_mode_counts_where_something_is_trained_and_differs(
    class_: str, optimized: bool, found: int
) -> None:
    tape = modes("tteeeee", class_=class_, optimized=optimized)
    assert len(tape.findings(TrainingInEvaluationMode())) == found


def normalized() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize(
    ("left_at", "severity"),
    [pytest.param(0, "warning", marks=pytest.mark.slow), (6, "error"), (None, None)],
)
def test_a_real_training_in_evaluation_mode(
    left_at: int | None, severity: str | None, tmp_path: Path
) -> None:
    """From the start, from some step on, or only a single frozen BatchNorm, which is common."""

    def training() -> None:
        model, done = normalized(), itertools.count(1)
        if left_at == 0:
            model.eval()
        if left_at is None:
            model[1].eval()
        loss_of = regression(lambda p, y: F.mse_loss(p[:, 0], y))
        fit(model, loss_of, steps=14, after=lambda: next(done) == left_at and model.eval())

    found_ = found(tmp_path, training)
    expected = [] if severity is None else [("training_in_evaluation_mode", severity, left_at)]
    assert [(f.rule, f.severity, f.first_step) for f in found_] == expected


# -- evaluation data that is standardized by itself ------------------------------------------------


def standardized(x: np.ndarray, axis: int = 0) -> np.ndarray:
    return (x - x.mean(axis, keepdims=True)) / x.std(axis, keepdims=True)


TRAIN, TEST = RNG.gamma(2, size=(300, 6)), RNG.gamma(2, size=(64, 6)) + 0.4
SCALED = (TEST - TRAIN.mean(0)) / TRAIN.std(0)


@pytest.mark.parametrize(
    ("train", "evaluations", "severity"),
    [
        (standardized(TRAIN)[:48], [standardized(TEST)], "hint"),
        (standardized(TRAIN)[:48], [standardized(TEST), standardized(TRAIN)], "warning"),
        (standardized(TRAIN), [standardized(TEST)], "warning"),
        (standardized(TRAIN)[:48], [SCALED], None),
        (standardized(TRAIN), [standardized(TRAIN), SCALED], None),
        (standardized(TRAIN[:48], 1), [standardized(TEST, 1)], None),
        (TRAIN[:48], [TEST], None),
    ],
    ids=["batches", "both", "full batch", "right", "right, full batch", "by sample", "raw"],
)
def test_evaluation_data_with_statistics_of_its_own(
    train: np.ndarray, evaluations: list[np.ndarray], severity: str | None
) -> None:
    tape = Tape()
    slot = tape.slot("input", (48, 6), role="input", kind="input", class_="")
    for step in range(4):
        tape.record({slot: train}, step=step)
        for x in evaluations:
            tape.record({slot: x}, step=step, mode="eval")
    findings = tape.findings(OwnStatistics())
    assert [finding.severity for finding in findings] == ([severity] if severity else [])

"""A training run traced with `keep`, compared with the same run recorded at every step."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from torch import nn

import comgra_decl as comgra
from comgra_decl.keep import StepView
from comgra_decl.query import Run
from comgra_decl.records import SlotKey
from tests.support.forked import Program

BASE: dict[str, Any] = {
    "nodes": {
        "all": {"select": "**", "capture": ["output", "output_grad"]},
        "weights": {"select": "**", "capture": ["parameter", "parameter_grad"]},
    },
    "samples": {"count": 2},
    "store": {"commit_interval": 0.01},
}
EVERY = {"first": 1, "every": 1}
RARELY = {"first": 3, "every": 50}
NOTHING: Mapping[int, float] = {}


def train(steps: int, wild: Mapping[int, float]) -> list[float]:
    """Trains a small network; at the steps in `wild`, the target is multiplied.

    These targets do not affect the network.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        x = torch.randn(4, 6, generator=generator)
        target = torch.randn(4, 1, generator=generator) * wild.get(step, 1.0)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        comgra.kpi("error", loss.detach().sqrt())
        if step in wild:
            optimizer.zero_grad()
        optimizer.step()
        losses.append(loss.item())
    return losses


def record(
    folder: Path, steps: int = 200, *, wild: Mapping[int, float] = NOTHING, **spec: Any
) -> tuple[Run, list[float]]:
    with comgra.trace({**BASE, **spec}, root=folder, group="g") as session:
        losses = train(steps, wild)
    assert session.path is not None
    return comgra.open_run(session.path), losses


def keys(run: Run) -> list[SlotKey]:
    columns = run.slots[["node", "role", "iteration", "pass"]]
    return [SlotKey(*row) for row in columns.itertuples(index=False)]


def reasons(run: Run) -> dict[int, str]:
    table = run.records.dropna(subset="kept")
    return dict(zip(table["step"].tolist(), table["kept"].tolist(), strict=True))


def test_the_steps_before_a_spike_are_stored_as_if_all_were(tmp_path: Path) -> None:
    wild = {120: 1000.0}
    full, losses = record(tmp_path, wild=wild, schedule=EVERY)
    keep = {"ring": 7, "after": 2}
    kept, same = record(tmp_path, wild=wild, schedule=RARELY, keep=keep)
    assert same == losses
    assert kept.steps.tolist() == sorted({0, 1, 2, 50, 100, 150} | {*range(113, 123)})
    for key in keys(full):
        every, few = (
            run.slot(key.node, role=key.role, of=key.pass_, iteration=key.iteration)
            for run in (full, kept)
        )
        for statistic in full.statistics:
            assert_array_equal(few.series(statistic), every.series(statistic)[kept.steps])
        for step in (119, 120):
            if np.isnan(every.series("nonfinite")[step]):
                continue
            counts, edges = every.histogram(step)
            assert_array_equal(few.histogram(step)[0], counts)
            assert_array_equal(few.histogram(step)[1], edges)
    assert kept.edges() == full.edges()
    assert kept.modules == full.modules


def test_the_run_says_why(tmp_path: Path) -> None:
    keep = {"ring": 2, "after": 1, "when": "loss_spike"}
    run, _ = record(tmp_path, wild={120: 1000.0}, schedule=RARELY, keep=keep)
    assert reasons(run) == {
        118: "before loss_spike at 120",
        119: "before loss_spike at 120",
        120: "loss_spike",
        121: "after loss_spike at 120",
    }
    notes = run.notes()
    kept = notes[notes["text"].str.startswith("kept for")]  # rules write notes, too
    assert kept[["step", "text"]].values.tolist() == [[120, "kept for loss_spike"]]


def test_nan_is_kept_where_it_begins_and_named(tmp_path: Path) -> None:
    keep = {"ring": 3, "when": ["nonfinite"]}
    run, _ = record(tmp_path, wild={90: float("nan")}, schedule={"steps": [0]}, keep=keep)
    assert run.steps.tolist() == [0, 87, 88, 89, 90]
    assert reasons(run)[90].startswith("nonfinite: target ")  # it arrived with the data


@pytest.mark.slow
def test_a_scheduled_step_within_the_ring_is_stored_once_and_in_its_place(tmp_path: Path) -> None:
    keep = {"ring": 30, "when": ["nonfinite"]}
    run, _ = record(tmp_path, wild={110: float("nan")}, schedule=RARELY, keep=keep)
    assert run.records["step"].tolist() == [0, 1, 2, 50, *range(80, 111), 150]
    assert reasons(run)[100] == "before nonfinite at 110"


@pytest.mark.slow
def test_quantiles_of_gradients_agree_with_a_full_recording(tmp_path: Path) -> None:
    of = {"node": "*", "statistic": "l2", "pass": "grad", "role": "weight"}
    full, _ = record(tmp_path, schedule=EVERY)
    keep = {"ring": 0, "when": [{"quantile": 0.95, "of": of, "window": 40}]}
    kept, _ = record(tmp_path, schedule={"steps": [0]}, keep=keep)
    norms = [
        full.slot(key.node, role="weight", of="grad").series("l2")
        for key in keys(full)
        if (key.role, key.pass_) == ("weight", "grad")
    ]
    assert len(norms) == 2
    largest = np.max([norm.to_numpy() for norm in norms], axis=0)
    expected = [
        step
        for step in range(20, 200)
        if largest[step]
        > np.quantile(largest[max(0, step - 40) : step], 0.95, method="inverted_cdf")
    ]
    assert kept.steps.tolist() == [0, *expected]


def unusual(view: StepView, limit: float) -> str | None:
    mean = view.lookup("0", "abs_max", over_batch="abs_max")
    return f"{view.kpis['loss']:.3f}" if mean > limit else None


def test_a_function_of_the_user_decides(tmp_path: Path) -> None:
    full, losses = record(tmp_path, schedule=EVERY)
    series = full.series("0", "abs_max", over_batch="abs_max")
    limit = float(np.sort(series)[-6])
    keep = {"ring": 0, "when": [{"_target_": f"{__name__}.unusual", "limit": limit}]}
    run, _ = record(tmp_path, schedule={"steps": [0]}, keep=keep)
    chosen = series.index[series > limit].tolist()
    assert run.steps.tolist() == sorted({0, *chosen})
    assert reasons(run) == {step: f"{__name__}.unusual: {losses[step]:.3f}" for step in chosen}


@pytest.mark.slow
def test_values_of_all_tensors_are_stored_of_kept_steps_only(tmp_path: Path) -> None:
    spec: dict[str, Any] = {"nodes": {**BASE["nodes"], "first": {"select": "0", "values": True}}}
    wild = {120: 1000.0}
    all_values: dict[str, Any] = {"nodes": {"all": {**BASE["nodes"]["all"], "values": True}}}
    full, _ = record(tmp_path, wild=wild, schedule=EVERY, **all_values)
    keep = {"ring": 2, "values": True, "when": ["loss_spike"]}
    kept, _ = record(tmp_path, wild=wild, schedule=RARELY, keep=keep, **spec)
    for step in (118, 120):
        assert_array_equal(kept.value("2", step), full.value("2", step))
        grad = kept.slot("2", of="grad").value(step)
        assert_array_equal(grad, full.slot("2", of="grad").value(step))
        assert kept.slot("0", role="weight").value(step).shape == (1, 8, 6)
    assert_array_equal(kept.value("0", 50), full.value("0", 50))
    with pytest.raises(KeyError, match="value"):
        kept.value("2", 50)


def test_no_more_than_at_most_and_the_run_says_what_became_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wild = dict.fromkeys(range(100, 200, 20), float("nan"))
    keep = {"ring": 4, "at_most": 12, "when": ["nonfinite"]}
    with caplog.at_level(logging.WARNING):
        run, _ = record(tmp_path, wild=wild, schedule={"steps": [0, 199]}, keep=keep)
    assert run.steps[0] == 0
    assert run.steps[-1] == 199
    assert run.steps[1:-1].tolist() == [*range(96, 101), *range(116, 121), 139, 140]
    assert sum("at_most" in record.getMessage() for record in caplog.records) == 1
    kept = run.report["keep"]
    assert kept["kept"] == 12
    assert kept["exhausted_at"] is not None
    assert kept["triggers"][0]["first"] == 100


@pytest.mark.slow
def test_every_loss_stays_whatever_is_dropped(tmp_path: Path) -> None:
    run, losses = record(tmp_path, schedule={"steps": [0]}, keep={"when": "nonfinite"})
    assert run.steps.tolist() == [0]
    kpis = run.kpis()
    loss = kpis[kpis["name"] == "loss"].drop_duplicates("step")
    assert loss["value"].tolist() == losses


def test_a_ring_that_takes_too_much_memory_is_shorter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec: dict[str, Any] = {
        "histogram": {"bins": 4096, "elements": 65535},
        "keep": {"ring": 150, "memory_mb": 1, "when": ["nonfinite"]},
        "schedule": {"steps": [0]},
    }
    with caplog.at_level(logging.WARNING):
        run, _ = record(tmp_path, wild={190: float("nan")}, **spec)
    steps = run.steps.tolist()
    assert steps[-1] == 190
    assert 2 < len(steps) < 120
    assert steps[1:] == list(range(steps[1], 191))
    assert sum("memory_mb" in record.getMessage() for record in caplog.records) == 1
    assert run.report["keep"]["given_up"] > 0


def test_the_training_is_that_without_tracing(tmp_path: Path) -> None:
    wild = {60: float("nan"), 120: 1000.0}
    plain = train(200, wild)
    keep = {"ring": 5, "values": True, "when": ["nonfinite", "loss_spike"]}
    _, traced = record(tmp_path, wild=wild, schedule=RARELY, keep=keep)
    np.testing.assert_array_equal(traced, plain)
    generator = torch.get_rng_state()
    record(tmp_path, wild=wild, schedule=EVERY)
    assert torch.equal(generator, torch.get_rng_state())


ENDLESS = """
import sys
import comgra_decl as comgra
from tests.keep.test_end_to_end import BASE, train

keep = {"ring": 3, "when": ["nonfinite"], "at_most": None}
spec = {**BASE, "schedule": {"steps": [0]}, "keep": keep}
with comgra.trace(spec, root=sys.argv[1]):
    train(10**9, dict.fromkeys(range(50, 10**6, 50), float("nan")))
"""


def test_a_number_that_the_program_says_can_be_a_trigger(tmp_path: Path) -> None:
    keep = {"ring": 1, "when": [{"spike": 5.0, "of": {"kpi": "error"}}]}
    run, _ = record(tmp_path, wild={120: 1000.0}, schedule={"steps": [0]}, keep=keep)
    assert reasons(run) == {119: "before spike of error at 120", 120: "spike of error"}


def test_a_trigger_that_looks_at_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep = {"when": ["nonfinite", {"quantile": 0.9, "of": {"node": "blocks.*"}}]}
    with caplog.at_level(logging.WARNING):
        run, _ = record(tmp_path, 20, schedule={"steps": [0]}, keep=keep)
    assert "blocks.*" in caplog.text
    assert "blocks.*" in run.report["keep"]["triggers"][1]["trouble"]
    (warning,) = [line for line in run.report["warnings"] if line.startswith("keep.when: ")]
    assert "never fired: " in warning
    assert "blocks.*" in warning


@pytest.mark.slow
def test_a_killed_training_keeps_what_was_committed(tmp_path: Path) -> None:
    program = Program(tmp_path, "-c", ENDLESS, tmp_path)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and _stored(tmp_path) <= 20:
        time.sleep(0.1)
    program.kill()
    run = comgra.open_run(tmp_path)
    steps = run.steps.tolist()
    assert run.state == "stopped"
    assert len(steps) > 20
    assert steps == sorted(steps)
    events = range(50, max(steps) + 1, 50)
    expected = [0, *(event - back for event in events for back in (3, 2, 1, 0))]
    assert steps == expected[: len(steps)]
    assert set(reasons(run)) == set(steps) - {0}


def _stored(path: Path) -> int:
    try:
        return len(comgra.open_run(path).steps)
    except comgra.ComgraError:
        return 0


@pytest.mark.slow
def test_a_statistic_that_was_opted_for_can_be_a_trigger(tmp_path: Path) -> None:
    stats = ["mean", "singular_value"]
    of = {"node": "2", "role": "weight", "statistic": "singular_value"}
    full, _ = record(tmp_path, schedule=EVERY, stats=stats)
    keep = {"ring": 0, "when": [{"quantile": 0.9, "of": of, "window": 30}]}
    kept, _ = record(tmp_path, schedule={"steps": [0]}, keep=keep, stats=stats)
    series = full.slot("2", role="weight").series("singular_value").to_numpy()
    expected = [
        step
        for step in range(10, 200)
        if series[step] > np.quantile(series[max(0, step - 30) : step], 0.9, method="inverted_cdf")
    ]
    assert len(expected) > 3
    assert kept.steps.tolist() == [0, *expected]

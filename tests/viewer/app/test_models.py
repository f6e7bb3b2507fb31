"""The panes show what numpy computes from the same tensors."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import comgra_decl
from comgra_decl.query import open_run
from comgra_decl.records import ScalarBatch
from comgra_decl.viewer.model.flags import nonfinite_marks
from comgra_decl.viewer.model.kpis import charts
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve, slots_of
from comgra_decl.viewer.model.series import bounds, curve
from comgra_decl.viewer.model.statistics import sample_table, statistics_table
from comgra_decl.viewer.model.values import values_picture
from tests.support.fake_run import FakeRun
from tests.viewer.app.conftest import BROKEN_FROM


def at(view: RunView, **fields: object) -> Selection:
    return resolve(view, Selection(**fields), {})  # type: ignore[arg-type]


def tensor(
    fake: FakeRun, node: str, step: int, *, role: str = "output", pass_: str = "forward",
    kind: str = "train",
) -> NDArray[np.float32]:  # fmt: skip
    slot = next(s for s in fake.slots if s.key == (node, role, 0, pass_))
    return fake.tensor(slot, step, kind)


def per_sample(values: NDArray[np.float32]) -> NDArray[np.float64]:
    return values.reshape(len(values), -1).astype(np.float64)


def test_forward_and_gradient_stand_side_by_side(fake: FakeRun, view: RunView) -> None:
    table = statistics_table(view, at(view, node="embed", step=4))
    assert table.columns == ("forward", "gradient")
    assert table.before == 3
    cells = dict(table.rows)["std"]
    for cell, pass_ in zip(cells, ("forward", "grad"), strict=True):
        now, before = (
            per_sample(tensor(fake, "embed", step, pass_=pass_)).std(1).mean() for step in (4, 3)
        )
        assert cell.value == pytest.approx(now, rel=1e-5)
        assert cell.change == pytest.approx(now - before, rel=1e-3)


@pytest.mark.parametrize(("batch", "reduce"), [("std", np.std), ("abs_max", np.max)])
def test_batch_comes_after_values(fake: FakeRun, view: RunView, batch: str, reduce: object) -> None:
    table = statistics_table(view, at(view, node="embed", step=4, batch=batch))
    expected = reduce(per_sample(tensor(fake, "embed", 4)).std(1))  # type: ignore[operator]
    assert dict(table.rows)["std"][0].value == pytest.approx(expected, rel=1e-5)


def test_one_sample_alone(fake: FakeRun, view: RunView) -> None:
    selection = at(view, node="embed", step=4, batch="2", statistic="l2")
    expected = np.linalg.norm(per_sample(tensor(fake, "embed", 4))[8])  # sample 2 of 4 of 16
    assert dict(statistics_table(view, selection).rows)["l2"][0].value == pytest.approx(expected)
    line = dict(sample_table(view, selection).rows)[2]
    assert line[0].value == pytest.approx(expected, rel=1e-5)


def test_a_parameter_has_no_samples(fake: FakeRun, view: RunView) -> None:
    selection = at(view, node="head", role="weight", step=4, batch="2", statistic="mean")
    table = sample_table(view, selection)
    assert table.rows == ()
    assert "no batch dimension" in table.missing
    expected = tensor(fake, "head", 4, role="weight").mean()
    cell = dict(statistics_table(view, selection).rows)["mean"][0]
    assert cell.value == pytest.approx(expected, rel=1e-4)


def test_missing_is_not_zero_and_not_broken(view: RunView) -> None:
    table = statistics_table(view, at(view, node="aux", step=2))  # aux begins at step 5
    cells = [cell for _, row in table.rows for cell in row]
    assert all(math.isnan(cell.value) and not cell.recorded and not cell.broken for cell in cells)


def test_a_first_record_has_nothing_to_compare_with(view: RunView) -> None:
    table = statistics_table(view, at(view, node="aux", step=5))
    assert all(math.isnan(cell.change) for cell in dict(table.rows)["mean"])


def test_the_count_of_what_is_not_finite_is_shown(view: RunView) -> None:
    selection = at(view, node="blocks.0.mlp.fc2", step=BROKEN_FROM, batch="abs_max")
    assert dict(statistics_table(view, selection).rows)["nonfinite"][0].value == 1


def test_steps_with_nan_are_flagged(view: RunView) -> None:
    marks = nonfinite_marks(view, "")
    assert [mark.index for mark in marks] == [9, 10, 11]
    assert "step 9" in marks[0].title
    assert "blocks.0.mlp.fc2" in marks[0].title


def test_a_series_has_a_band_of_one_deviation(fake: FakeRun, view: RunView) -> None:
    selection = at(view, node="embed", statistic="mean")
    line = curve(view, slots_of(view, selection)[0], selection)
    each = np.stack([per_sample(tensor(fake, "embed", step)).mean(1) for step in range(12)])
    np.testing.assert_array_equal(line.steps, np.arange(12))
    np.testing.assert_allclose(line.values, each.mean(1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(line.high - line.low, 2 * each.std(1), rtol=1e-4)
    assert line.bounds[0] < line.low.min()
    assert line.high.max() < line.bounds[1]


def test_a_band_of_what_is_never_negative_stays_above_zero(view: RunView) -> None:
    selection = at(view, node="embed", statistic="zero_fraction")
    line = curve(view, slots_of(view, selection)[0], selection)
    assert (line.low >= 0).all()


def test_a_sample_is_drawn_before_the_batch_mean(fake: FakeRun, view: RunView) -> None:
    selection = at(view, node="embed", statistic="mean", batch="1")
    line = curve(view, slots_of(view, selection)[0], selection)
    each = np.stack([per_sample(tensor(fake, "embed", step)).mean(1) for step in range(12)])
    np.testing.assert_allclose(line.values, each[:, 4], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(line.context, each.mean(1), rtol=1e-4, atol=1e-6)


def test_a_series_leaves_a_gap_where_nothing_was_recorded(view: RunView) -> None:
    selection = at(view, node="aux", statistic="mean")
    line = curve(view, slots_of(view, selection)[0], selection)
    assert np.isnan(line.values[:5]).all()
    assert np.isfinite(line.values[5:]).all()
    assert len(line.broken) == 0


def test_values_are_the_recorded_samples(fake: FakeRun, view: RunView) -> None:
    selection = at(view, node="embed", step=4)
    picture = values_picture(view, slots_of(view, selection)[0], selection)
    expected = tensor(fake, "embed", 4)[[0, 4, 8, 12]]
    for tile, each in zip(picture.drawing.tiles, expected, strict=True):
        rows = picture.drawing.image[tile.top : tile.top + tile.height]
        np.testing.assert_array_equal(rows[:, tile.left : tile.left + tile.width], each)
    assert picture.drawing.facts == "4 samples \u00b7 6\u00d78"


def test_one_sample_keeps_its_shape(fake: FakeRun, view: RunView) -> None:
    selection = at(view, node="embed", step=4, batch="3")
    picture = values_picture(view, slots_of(view, selection)[0], selection)
    np.testing.assert_array_equal(picture.drawing.image, tensor(fake, "embed", 4)[12])


def test_values_that_are_not_finite_are_counted(view: RunView) -> None:
    selection = at(view, node="blocks.0.mlp.fc2", step=BROKEN_FROM)
    picture = values_picture(view, slots_of(view, selection)[0], selection)
    assert picture.broken == 1
    assert math.isfinite(picture.limit)


def test_the_colours_mean_the_same_at_all_steps(view: RunView) -> None:
    found = []
    for step in (1, 4, 7):
        selection = at(view, node="embed", step=step)
        found.append(values_picture(view, slots_of(view, selection)[0], selection).limit)
    assert len(set(found)) == 1


def test_missing_values_say_why(view: RunView) -> None:
    selection = at(view, node="embed", step=4)
    assert "values: true" in values_picture(view, slots_of(view, selection)[1], selection).missing
    assert values_picture(view, None, selection).missing


def test_the_loss_is_one_chart_with_a_line_per_type(fake: FakeRun, view: RunView) -> None:
    known = {chart.title: chart for chart in charts(view)}
    assert list(known) == ["loss", "lr"]
    assert [line.label for line in known["loss"].lines] == ["train", "eval"]
    train = known["loss"].lines[0]
    expected = [float(tensor(fake, "loss", step)) for step in range(12)]
    np.testing.assert_allclose(train.values, expected, rtol=1e-5)


def test_the_curve_of_every_step_is_drawn_thinned_with_its_extremes(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "run", nodes=("embed",))
    fake.write(3)
    values = np.random.default_rng(0).normal(size=20_000)
    values[12_345], values[777] = 50.0, -50.0
    steps, names = np.arange(20_000), ["loss"] * 20_000
    fake.writer.commit([], [ScalarBatch(steps, values, names, ["train"] * 20_000)])
    chart = charts(RunView(open_run(fake.path)))[0]
    line = chart.lines[0]
    assert (chart.title, line.label) == ("loss", "train")
    assert len(line.steps) < 5000
    assert {0, 777, 12_345, 19_999} <= set(line.steps.tolist())
    assert np.array_equal(line.values, values[line.steps])


@pytest.mark.parametrize(
    ("name", "recorded", "heading", "drawn"),
    [
        ("memory/host", [6.4e8, 7.6e8], "memory/host (MB)", [640, 760]),
        ("memory/device", [2e9, 12e9], "memory/device (GB)", [2, 12]),
        ("time/step", [0.25, 0.5], "time/step (ms)", [250, 500]),
        ("time/data", [0.25, 2.0], "time/data (s)", [0.25, 2]),
        ("accuracy", [0.25, 0.5], "accuracy", [0.25, 0.5]),
    ],
)
def test_automatic_metrics_are_drawn_in_a_unit_that_is_named(
    tmp_path: Path, name: str, recorded: list[float], heading: str, drawn: list[float]
) -> None:
    fake = FakeRun(tmp_path / "run", nodes=("embed",))
    fake.write(3)
    batch = ScalarBatch(np.arange(2), np.array(recorded), [name] * 2, ["train"] * 2)
    fake.writer.commit([], [batch])
    found = {chart.title: chart for chart in charts(RunView(open_run(fake.path)))}
    assert found[name].heading == heading
    assert found[name].lines[0].values == pytest.approx(drawn)
    assert found[name].logarithmic().heading == heading


def test_rounding_is_not_magnified_to_the_height_of_a_figure() -> None:
    flat = 1 / 64 + np.array([0, 1e-9, -1e-9])
    low, high = bounds(flat)
    assert low < 0.9 * flat.min()
    assert high > 1.1 * flat.max()
    low, high = bounds(np.array([0.0, 1.0, np.nan, np.inf]))
    assert (low, high) == pytest.approx((-0.06, 1.06))


def test_a_statistic_that_does_not_apply_is_missing_and_not_broken(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    spec = {
        "nodes": {"all": {"select": "**", "capture": ["output", "parameter"]}},
        "stats": ["mean", "singular_value"],
    }
    with comgra_decl.trace(spec, root=tmp_path) as session:
        for _ in range(3):
            net(torch.ones(4, 3)).sum().backward()
            optimizer.step()
    assert session.path is not None
    traced = RunView(comgra_decl.open_run(session.path))
    for role, applies in (("weight", True), ("bias", False)):
        where = at(traced, node="Linear", role=role, statistic="singular_value")
        assert (where.node, where.role) == ("Linear", role)
        cell = dict(statistics_table(traced, where).rows)["singular_value"][0]
        assert (cell.recorded, cell.broken) == (applies, False)
        drawn = curve(traced, slots_of(traced, where)[0], where)
        assert len(drawn.broken) == 0
        assert bool(drawn.missing) != applies


def test_tags_can_be_chosen_like_types(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "run", nodes=("embed",))
    batches = fake.batches([(step, "train") for step in range(4)])
    batches[1].steps[0].extra["tags"] = batches[3].steps[0].extra["tags"] = ["long"]
    fake.writer.commit(batches)
    view = RunView(open_run(fake.path))
    assert view.types() == ["", "long"]
    assert view.steps("long").tolist() == [1, 3]
    assert view.steps("").tolist() == [0, 1, 2, 3]

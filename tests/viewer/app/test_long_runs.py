"""Overviews of a long run show the extremes of every 256 records, and read no record for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from comgra_decl.query import Run, open_run
from comgra_decl.store import levels
from comgra_decl.store.view import View
from comgra_decl.viewer.model.flags import nonfinite_marks
from comgra_decl.viewer.model.overview import overview
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.series import POINTS, curve
from comgra_decl.viewer.plotting import plotted
from tests.store.test_levels import write

LONG = 16 * levels.SPAN
RECORDS = 2 * LONG + 100
AT = Selection(statistic="l2", node="n0", role="output")


@pytest.fixture(scope="module", autouse=True)
def _long() -> Iterator[None]:
    """Runs are long from fewer records on, so that they are written quickly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(levels, "LONG", LONG)
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("long") / "run", RECORDS)


@pytest.fixture
def run(path: Path) -> Run:
    return open_run(path)


@pytest.fixture
def no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if statistics of records are read."""
    for name in ("tile", "heat", "series", "rows"):
        monkeypatch.setattr(View, name, _refuse)


def _refuse(*arguments: object, **_: object) -> None:
    raise AssertionError(f"records were read: {arguments[1:]}")


def test_a_curve_has_the_exact_extremes_of_each_stretch(run: Run) -> None:
    truth = run.series("n0", "l2")
    view = RunView(run)
    line = curve(view, view.first_slot("n0", "output"), AT)
    assert len(line.steps) <= POINTS + 2
    np.testing.assert_array_equal(line.values, truth[line.steps].to_numpy())
    assert np.nanmin(line.values) == np.nanmin(truth)
    assert np.nanmax(line.values) == np.nanmax(truth)
    spread = run.series("n0", "l2", over_batch="std")[line.steps].to_numpy()
    inside = np.isfinite(spread) & np.isfinite(line.values)
    assert (line.high[inside] >= (line.values + spread)[inside]).all()


def test_zooming_in_shows_every_record(run: Run) -> None:
    truth = run.series("n0", "l2")
    view = RunView(run)
    line = curve(view, view.first_slot("n0", "output"), AT, within=(4_000.0, 4_200.0))
    inside = (line.steps >= 4_000) & (line.steps <= 4_200)
    np.testing.assert_array_equal(line.steps[inside], np.arange(4_000, 4_201))
    np.testing.assert_array_equal(line.values[inside], truth.loc[4_000:4_200])


def test_a_heat_map_shows_the_largest_magnitude_of_each_column(run: Run) -> None:
    truth = run.heat("l2").to_numpy(float).T
    picture = overview(RunView(run), AT, "forward")
    assert picture is not None
    assert len(picture.slots) == 2
    shown = truth[np.arange(2)[:, None], picture.steps]
    intact = np.isnan(picture.broken)  # others have the step of the NaN or infinity
    np.testing.assert_array_equal(picture.values[intact], shown[intact])
    span = levels.SPAN
    for line, column in zip(*np.nonzero(intact), strict=True):
        first = picture.steps[line, column] // span * span
        same = np.abs(truth[line, first : first + span])
        assert abs(picture.values[line, column]) == np.nanmax(same)


@pytest.mark.usefixtures("no_records")
def test_overviews_read_no_records(run: Run) -> None:
    view = RunView(run)
    assert curve(view, view.first_slot("n0", "output"), AT).missing == ""
    assert overview(view, AT, "forward") is not None
    plots = plotted(run)
    assert len(plots.series("n0", "l2").dframe()) >= RECORDS // levels.SPAN
    assert plots.heat("l2").dframe()["slot"].nunique() == 2


def test_plots_contain_values_that_were_recorded(run: Run) -> None:
    truth = run.series("n0", "l2")
    table = plotted(run).series("n0", "l2").dframe()
    np.testing.assert_array_equal(table["l2"], truth[table["step"]].to_numpy())
    assert table["l2"].max() == truth.max()


def test_the_first_step_with_nan_is_marked(run: Run) -> None:
    counts = run.heat("nonfinite", over_batch="abs_max")
    first = counts.index[(counts > 0).any(axis=1)][0]
    marks = nonfinite_marks(RunView(run), "")
    assert marks[0].index == first

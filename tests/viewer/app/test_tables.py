"""Exported tables contain the run's own numbers: all of them, to the last digit."""

from __future__ import annotations

import io
import math

import numpy as np
import pandas as pd
import pytest

from comgra_decl.query import open_run
from comgra_decl.viewer.model.comparison_target import Other
from comgra_decl.viewer.model.graph import graph_of
from comgra_decl.viewer.model.runview import RunView, Slot
from comgra_decl.viewer.model.selection import Selection, resolve, slots_of
from comgra_decl.viewer.model.series import POINTS
from comgra_decl.viewer.model.sheet import tensor_of
from comgra_decl.viewer.model.tables import (
    distribution_csv,
    findings_csv,
    graph_csv,
    kpi_csv,
    modules_csv,
    notes_csv,
    overlay_csv,
    overview_csv,
    series_csv,
    statistics_csv,
    values_csv,
)
from comgra_decl.viewer.model.verdicts import found, look
from tests.support.fake_run import FakeRun
from tests.support.tables import read_csv


def at(view: RunView, **fields: object) -> Selection:
    return resolve(view, Selection(**fields), {})  # type: ignore[arg-type]


def chosen(view: RunView, where: Selection) -> Slot:
    slot = slots_of(view, where)[0]
    assert slot is not None
    return slot


def table(content: bytes) -> pd.DataFrame:
    return read_csv(io.BytesIO(content))


def test_a_series_is_the_whole_series_with_its_band(view: RunView) -> None:
    where = at(view, node="embed", statistic="std")
    got = table(series_csv(view, chosen(view, where), where)).set_index("step")
    mean = view.run.series("embed", "std").astype(float)
    spread = view.run.series("embed", "std", over_batch="std").astype(float)
    np.testing.assert_array_equal(got["std"], mean)
    np.testing.assert_array_equal(got["high"], mean + spread)
    np.testing.assert_array_equal(got["low"], np.maximum(mean - spread, 0))
    assert got.index.tolist() == mean.index.tolist()


def test_what_is_nan_is_told_from_what_is_missing(view: RunView) -> None:
    numbers = {
        "std": pd.Series([0.1, math.nan, math.inf, math.nan]),
        "nonfinite": pd.Series([0.0, 4.0, 4.0, math.nan]),  # the last one has no record
    }
    view.series = lambda _, name, *__: numbers[name]  # type: ignore[method-assign]
    where = at(view, node="head", statistic="std", batch="abs_max")
    lines = series_csv(view, chosen(view, where), where).decode().splitlines()
    assert lines == ["step,std", "0,0.1", "1,nan", "2,inf", "3,"]


def test_nothing_is_thinned(fake: FakeRun) -> None:
    view = RunView(open_run(fake.path))
    many = pd.Series(np.random.default_rng(0).normal(size=3 * POINTS))
    view.series = lambda *_: many  # type: ignore[method-assign]
    where = at(view, node="head", statistic="l2", batch="abs_max")
    got = table(series_csv(view, chosen(view, where), where))
    np.testing.assert_array_equal(got["l2"], many)


def test_one_sample_comes_with_the_mean_of_its_batch(view: RunView) -> None:
    where = at(view, node="cell", statistic="l2", batch="2")
    got = table(series_csv(view, chosen(view, where), where))
    np.testing.assert_array_equal(got["l2"], view.run.slot("cell").samples("l2")[2])
    np.testing.assert_array_equal(got["batch mean"], view.run.series("cell", "l2"))


def test_a_distribution_is_the_recorded_counts(view: RunView) -> None:
    where = at(view, node="embed")
    got = table(distribution_csv(view, chosen(view, where), where))
    steps, counts, edges = view.run.slot("embed").histograms()
    bins = counts.shape[1]
    assert got["step"].tolist() == np.repeat(steps, bins).tolist()
    np.testing.assert_array_equal(got["count"], counts.ravel())
    np.testing.assert_array_equal(got["low"], edges[:, :-1].ravel())
    np.testing.assert_array_equal(got["high"], edges[:, 1:].ravel())


@pytest.mark.parametrize("sample", [None, 1])
def test_values_are_told_by_their_places(view: RunView, sample: int | None) -> None:
    batch = "mean" if sample is None else str(sample)
    got = table(values_csv(tensor_of(view, at(view, node="embed", step=3, batch=batch), "forward")))
    values = view.run.value("embed", 3, sample=sample)
    assert len(got.columns) == values.ndim + 1
    back = np.full(values.shape, np.nan, np.float32)
    back[tuple(got.iloc[:, :-1].to_numpy().T)] = got["value"]
    np.testing.assert_array_equal(back, values)


def test_an_overview_is_a_line_per_tensor(view: RunView) -> None:
    got = table(overview_csv(view, at(view, statistic="l2"), "grad"))
    heat = view.run.heat("l2", of="grad")
    line = got[(got["node"] == "embed") & (got["role"] == "output")]
    known = heat["embed", "output", 0, "grad"]
    np.testing.assert_array_equal(line.iloc[:, 3:].to_numpy(float), [known])


def test_a_kpi_holds_every_type(view: RunView) -> None:
    got = table(kpi_csv(view, "lr"))
    known = view.run.kpis().query("name == 'lr'")
    for type_, part in known.groupby("type"):
        mine = got[got["type"] == type_]
        assert mine["step"].tolist() == part["step"].tolist()
        np.testing.assert_array_equal(mine["lr"], part["value"])


def test_a_comparison_holds_both_sides(view: RunView, fake: FakeRun) -> None:
    other = RunView(open_run(fake.path))
    where = at(view, node="head", statistic="std")
    got = table(overlay_csv(view, chosen(view, where), Other("other", other, 3), where))
    for side in ("this", "other"):
        np.testing.assert_array_equal(
            got[got["side"] == side]["std"], view.run.series("head", "std")
        )


def test_tables_hold_what_the_pane_shows(view: RunView) -> None:
    where = at(view, node="embed", step=4, statistic="std")
    got = table(statistics_csv(view, where))
    whole = got[got["of"] == "batch"].set_index("statistic")["forward"]
    row = view.run.row(4).xs(("embed", "output", 0, "forward"))
    np.testing.assert_array_equal(whole, row[whole.index].to_numpy(float))
    assert (got["of"].str.startswith("sample")).sum() == view.run.sample_count
    modules = table(modules_csv(view, where)).set_index("module")
    (described,) = (m for m in view.run.modules if m["path"] == "embed")
    own = sum(p["count"] for p in described["parameters"].values())
    assert modules.loc["embed", "parameters"] == own
    assert notes_csv(view).startswith(b"step,time,note\n")
    assert look(view).wait(60)
    diagnosis = found(view).diagnosis
    assert diagnosis is not None
    assert table(findings_csv(view))["rule"].tolist() == [f.rule for f in diagnosis.findings]


def test_the_graph_is_a_line_per_node(view: RunView) -> None:
    where = at(view, step=4, statistic="l2")
    got = table(graph_csv(view, where, graph_of(view, where), "grad")).set_index("node")
    known = view.run.row(4)["l2"]
    assert got["grad l2"]["embed"] == known["embed", "output", 0, "grad"]
    assert got["kind"]["embed"] == "computed"

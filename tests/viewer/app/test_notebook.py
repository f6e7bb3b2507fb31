"""`run.view()`: the viewer and its panes outside the viewer's own page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import holoviews as hv
import panel as pn
import pytest
from bokeh.core.json_encoder import serialize_json
from bokeh.document import Document
from bokeh.document.models import DocumentModelManager
from bokeh.events import RangesUpdate
from bokeh.models import Plot
from pyviz_comms import Comm  # type: ignore[import-untyped]

from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Run, open_run
from comgra_decl.viewer import notebook
from comgra_decl.viewer.components.base import Component
from comgra_decl.viewer.components.htmlview import HtmlView
from comgra_decl.viewer.panes.base import Pane
from comgra_decl.viewer.panes.series import SeriesPane
from comgra_decl.viewer.screen import resolving_once
from comgra_decl.viewer.state import SECTIONS
from tests.support.fake_run import FakeRun
from tests.support.shortened import shortened
from tests.viewer.conftest import LOCAL

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


@pytest.mark.parametrize(
    "pane",
    shortened([None, *PANES, *sorted(set(SECTIONS) - {"views"})], tried=3 + len(PANES)),
)
def test_every_pane_becomes_one_model_that_bokeh_can_send(run: Run, pane: str | None) -> None:
    document = Document()
    document.add_root(run.view(pane, node="head", statistic="mean").get_root(document))
    text = serialize_json(document.to_json())
    assert len(json.loads(text)["roots"]) == 1
    assert "Cannot show" not in text


@pytest.mark.parametrize(
    ("pane", "at", "says"),
    shortened(
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
        tried=4,
        several=True,
    ),
)
def test_what_the_run_does_not_have_is_an_error_that_names_near_ones(
    run: Run, pane: str, at: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnknownNameError, match=says):
        run.view(pane, **at)


@pytest.mark.slow
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


def test_zooming_in_a_notebook_redraws_the_pane(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    redrawn: list[Pane] = []
    monkeypatch.setattr(Pane, "again", lambda pane: redrawn.append(pane))
    shown: Any = run.view("series", node="head")
    document = Document()
    document.add_root(shown.get_root(document, Comm()))  # as a cell does
    plot: Any = document.select_one({"type": Plot})
    plot._trigger_event(RangesUpdate(plot, x0=2.5, x1=5.5, y0=0, y1=1))
    assert [type(pane) for pane in redrawn] == [SeriesPane]


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Document]:
    """The searches of a whole document for its models, which take 0.3 s for a page."""
    made: list[Document] = []
    search = DocumentModelManager.recompute

    def counted(models: DocumentModelManager) -> None:
        document = models._document()
        assert document is not None
        made.append(document)
        search(models)

    monkeypatch.setattr(DocumentModelManager, "recompute", counted)
    return made


@pytest.mark.slow
def test_a_section_that_is_opened_is_searched_for_models_once(
    run: Run, searches: list[Document]
) -> None:
    shown: Any = run.view(node="head")
    document = Document()
    document.add_root(shown.get_root(document))
    searches.clear()
    tabs = next(part for part in shown.select(HtmlView) if "kpis" in part.tokens)
    tabs.on_browser_message({"send": "kpis"})
    plots: list[Any] = [*document.select({"type": Plot})]
    drawn = [plot for plot in plots if plot.title.text == "loss"]
    lengths = [len(line.data_source.data["x"]) for line in drawn[-1].renderers]
    kpis = run.kpis()
    assert kpis[(kpis["name"] == "loss") & (kpis["type"] == "train")].shape[0] in lengths
    assert len(searches) == 1


def test_a_section_that_fails_leaves_no_document_frozen(searches: list[Document]) -> None:
    document = Document()
    with pytest.raises(ZeroDivisionError), resolving_once(document):
        raise ZeroDivisionError
    searches.clear()
    document.models.invalidate()
    assert searches == [document]


@pytest.mark.browser
@pytest.mark.slow
def test_a_click_in_a_pane_of_its_own_answers(
    run: Run, serve: Callable[..., str], page: Any
) -> None:
    from playwright.sync_api import expect

    page.goto(serve(lambda: run.view("statistics", node="head", statistic="mean")))
    line = page.locator('tr[data-send="statistic:std"]')
    expect(line).to_be_visible(timeout=PATIENCE)
    line.click()
    expect(line).to_have_class("chosen", timeout=PATIENCE)


@pytest.mark.slow
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


@pytest.mark.browser
@pytest.mark.slow
def test_a_graph_of_its_own_fills_its_cell_after_a_click(
    run: Run, serve: Callable[..., str], page: Any
) -> None:
    page.goto(serve(lambda: run.view("graph", node="head", height=500)))
    page.locator('.node[data-id="embed"]').click()
    page.locator('.node[data-id="embed"].selected').wait_for()
    page.wait_for_function("""() => [...Bokeh.documents[0]._all_models.values()]
        .some((model) => (model.data?.attributes?.ack ?? 0) > 1)""")  # its size, and the click
    assert page.locator(".graph").bounding_box()["height"] > 450


@pytest.mark.slow
@pytest.mark.browser
def test_the_layout_fits_the_cell_of_a_notebook_rather_than_the_window(
    run: Run, serve: Callable[..., str], page: Any
) -> None:
    page.set_viewport_size({"width": 1600, "height": 1000})
    page.goto(serve(lambda: pn.Column(run.view("inspect", node="head"), width=760)))
    table, figure = page.locator("table.stats"), page.locator(".bk-Figure").first
    table.wait_for(timeout=PATIENCE)
    page.wait_for_function("() => Bokeh.documents[0].is_idle")
    below, above = figure.bounding_box(), table.bounding_box()
    assert below["y"] >= above["y"] + above["height"] > above["y"] + 100
    assert below["width"] > 300


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


@pytest.fixture(scope="module")
def cells(fake: FakeRun) -> list[list[dict[str, Any]]]:
    """The outputs of each cell of a notebook that opens a run, then plots, then views."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    sources = [
        f"import comgra_decl as comgra\nrun = comgra.open_run({str(fake.path)!r})\nrun",
        "run.plot.series('head', 'mean')",  # without any extension
        "run.plot.heat('l2') + run.plot.kpis()",
        "run.view('graph', node='head')",
        "run.view()",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in sources])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "python3"}
    nbclient.NotebookClient(book, timeout=120).execute()
    return [[*cell.outputs] for cell in book.cells]


@pytest.mark.slow
def test_a_notebook_shows_plots_and_the_viewer_as_the_last_line_of_a_cell(
    cells: list[list[dict[str, Any]]],
) -> None:
    facts, *shown = cells
    assert "Run group/small" in facts[-1]["data"]["text/html"]
    for outputs in shown:
        assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
        assert "Bokeh" in outputs[-1]["data"]["text/html"]


def test_a_notebook_loads_the_scripts_once(cells: list[list[dict[str, Any]]]) -> None:
    sizes = [sum(len(str(output.get("data", ""))) for output in outputs) for outputs in cells]
    assert [size > 2_000_000 for size in sizes] == [False, True, False, False, False]


def test_a_page_that_was_loaded_again_gets_the_scripts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown_in: list[str] = []
    loaded: list[str] = []

    def extension(*_names: str, **_options: Any) -> None:
        loaded.append(shown_in[-1])
        extension._loaded = True  # type: ignore[attr-defined]

    kernel = SimpleNamespace(get_parent=lambda: {"header": {"session": shown_in[-1]}})
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=kernel))
    extension._loaded = False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setattr(hv, "extension", extension)
    monkeypatch.setattr(notebook, "_PAGES", set())
    monkeypatch.setattr(pn.viewable.Viewable, "_preprocessing_hooks", [])
    for page in ("first", "first", "second", "second", "first"):
        shown_in.append(page)
        notebook.load_in_notebook(elements=True)
    assert loaded == ["first", "second"]


def written(cells: list[list[dict[str, Any]]], folder: Path) -> str:
    """Writes outputs of cells into a page, and returns its address."""
    parts = ["<!doctype html><meta charset=utf-8>"]
    for data in (output.get("data", {}) for outputs in cells for output in outputs):
        if "application/javascript" in data:
            parts.append(f"<script>{data['application/javascript']}</script>")
        else:
            parts.append(data.get("text/html", ""))
    file = folder / "notebook.html"
    file.write_text("\n".join(parts), encoding="utf-8")
    return file.as_uri()


@pytest.mark.browser
@pytest.mark.slow
def test_a_notebook_needs_no_network(
    cells: list[list[dict[str, Any]]], tmp_path: Path, page: Any
) -> None:
    page.route(lambda url: not LOCAL.match(url), lambda route: route.abort())
    page.goto(written(cells, tmp_path))  # a request beyond this machine fails the test
    page.locator('.node[data-id="head"]').nth(1).wait_for()
    figures = 1 + 2 + 3  # two heat maps and the loss in the overview
    page.locator(".bk-Figure canvas").nth(figures - 1).wait_for()


@pytest.mark.browser
@pytest.mark.slow
def test_a_click_that_no_kernel_can_hear_is_answered_with_the_reason(
    cells: list[list[dict[str, Any]]], tmp_path: Path, page: Any
) -> None:
    page.goto(written([cells[1], cells[3]], tmp_path))  # the scripts, and a graph
    node = page.locator('.node[data-id="embed"]')
    node.wait_for()
    assert not page.get_by_text("install pyviz_comms").is_visible()
    node.click()
    page.get_by_text("install pyviz_comms").click()
    assert not page.get_by_text("install pyviz_comms").is_visible()


FRONT_END = """window.sent = [];
window.comm_manager = {
  register_target() {},
  new_comm() {
    const comm = {
      on_msg(answer) { comm.answer = answer; },
      send(message) {
        sent.push(...message.content.events);
        setTimeout(() => comm.answer({ metadata: { msg_type: "Ready" } }));
      },
    };
    return comm;
  },
};"""


@pytest.mark.browser
@pytest.mark.slow
def test_what_python_has_changed_is_not_sent_back_to_it(
    cells: list[list[dict[str, Any]]], tmp_path: Path, page: Any
) -> None:
    page.add_init_script(FRONT_END)
    page.goto(written([cells[1], cells[3]], tmp_path))
    page.wait_for_function("() => JSON.stringify(sent).includes('room')")
    page.evaluate("""() => {
      const [model] = Bokeh.documents.flatMap((document) => [...document._all_models.values()])
        .filter((model) => model.data?.attributes?.scene);
      const { id } = model.data;
      model.document.apply_json_patch({ events: [
        { kind: "ModelChanged", model: { id }, attr: "info", new: "from Python" },
        { kind: "ModelChanged", model: { id }, attr: "ack", new: 1 }] }); // of its size
    }""")
    page.locator(".info", has_text="from Python").wait_for()
    page.locator('.node[data-id="embed"]').click()
    page.wait_for_function("() => JSON.stringify(sent).includes('select')")
    assert "from Python" not in page.evaluate("JSON.stringify(sent)")

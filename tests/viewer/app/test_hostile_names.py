"""Names that look like HTML, TeX, code or direction marks are plain text in every section."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from comgra_decl.query import open_run
from comgra_decl.viewer.escaping import bokeh_text, html_text, html_token
from comgra_decl.viewer.plotting import plotted, save
from comgra_decl.viewer.state import SECTIONS
from tests.support.hostile import HTML, RAW, TEX, TEX_TOO, record
from tests.support.shortened import shortened
from tests.viewer.app.served import Viewed, turn_to
from tests.viewer.conftest import PATIENCE

#: All text on the page, including shadow roots and the attributes that users perceive.
TEXTS = """() => {
    const texts = [document.title], elements = [];
    const walk = (root) => {
        for (const node of root.childNodes) {
            if (node.nodeType === Node.TEXT_NODE) texts.push(node.data);
            if (node.nodeType !== Node.ELEMENT_NODE) continue;
            if (["STYLE", "SCRIPT"].includes(node.tagName)) continue;
            elements.push(node.tagName);
            for (const name of ["title", "aria-label", "placeholder", "alt"])
                if (node.getAttribute(name)) texts.push(node.getAttribute(name));
            for (const { name, value } of node.attributes)
                if (/^on/i.test(name) || /^\\s*javascript:/i.test(value)) elements.push(name);
            walk(node);
            if (node.shadowRoot) walk(node.shadowRoot);
        }
    };
    walk(document.body);
    return [texts, [...new Set(elements)]];
}"""

#: Every text that Bokeh would interpret as TeX.
TEX_OF_BOKEH = """() => {
    const found = [];
    const look = (text) => {
        if (typeof text === "string" && /\\$\\$|\\\\\\(|\\\\\\[/.test(text)) found.push(text);
    };
    for (const doc of Bokeh.documents)
        for (const model of doc._all_models.values()) {
            if (model.type === "PlainText") continue;
            if (/Axis$/.test(model.type)) {
                look(model.axis_label);
                for (const label of model.major_label_overrides.values()) look(label);
            }
            if (["Title", "Label"].includes(model.type)) look(model.text);
            if (/Bar$/.test(model.type)) look(model.title);
        }
    return found;
}"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs in which every name is hostile."""
    folder = tmp_path_factory.mktemp("hostile") / "runs"
    record(folder, name="old", steps=6)
    record(folder)
    return folder


@pytest.fixture(scope="module")
def hostile(runs: Path) -> Iterator[Viewed]:
    """A viewer of these runs."""
    viewed = Viewed(runs)
    yield viewed
    viewed.stop()


SHORT = ("overview", "inspect", "modules")
"""Sections that show names in every way: figures, the graph, tables, chips."""

OFFERED = tuple(name for name in SECTIONS if name not in ("attention", "views"))
"""Sections of a page without custom views, of a network without attention."""


@pytest.mark.browser
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(SHORT, id="some"),
        pytest.param(OFFERED, id="all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_every_section_shows_names_as_text(
    hostile: Viewed, sections: tuple[str, ...], page: Any
) -> None:
    page.goto(f"{hostile.url}?section={sections[0]}", timeout=PATIENCE)
    page.locator('[role="tab"][aria-selected="true"]').wait_for(timeout=PATIENCE)
    for section in sections:
        turn_to(page, section)
        shows_names_as_text(page)


def shows_names_as_text(page: Any) -> None:
    page.keyboard.press("/")
    page.keyboard.press("Control+a")
    page.keyboard.type("img")
    page.wait_for_timeout(400)  # a tooltip that should not appear
    for box in [b for f in page.locator(".bk-Figure").all() if (b := f.bounding_box())][:4]:
        for share in (0.3, 0.6):
            page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] * share)
            page.wait_for_timeout(60)
    texts, elements = page.evaluate(TEXTS)
    raw = [ascii(text) for text in texts if re.search(RAW, text)]
    assert not raw
    assert page.evaluate(TEX_OF_BOKEH) == []
    assert page.evaluate("window.pwned === undefined")
    assert not [name for name in elements if name.lower().startswith(("on", "img", "mjx"))]
    assert any(HTML in text for text in texts)


def test_there_is_one_way_into_html() -> None:
    """Escaping by hand misses what `html_text` escapes in addition."""
    folder = Path(__file__).parents[3] / "viewer"
    ways = ("html.escape(", ".axis_label = ", "major_label_overrides = ", "_title.text = ")
    for file in folder.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if file.name == "escaping.py":
            continue
        for line in text.splitlines():
            if "bokeh_text(" not in line:
                assert not any(way in line for way in ways), f"{file.name}: {line}"
    for file in (folder / "components").glob("*.js"):
        for line in file.read_text(encoding="utf-8").splitlines():
            assert "innerHTML" not in line or file.name == "htmlview.js", f"{file.name}: {line}"


def test_the_ways_onto_the_page() -> None:
    assert html_text("<\u202e>") == "&lt;\\u202e&gt;"
    assert html_token("<\u202e>") == "&lt;\u202e&gt;"
    assert bokeh_text("a $5 b") == "a $5 b"
    for text in (TEX, TEX_TOO):
        assert bokeh_text(text).text == text  # type: ignore[union-attr]


@pytest.mark.browser
@pytest.mark.parametrize("suffix", shortened([".svg", ".html"], tried=1))
@pytest.mark.slow
def test_saved_plots_show_names_as_text(runs: Path, page: Any, tmp_path: Path, suffix: str) -> None:
    """Other texts would be formulas, elements, or characters that XML does not allow."""
    run = open_run(runs)
    plots = plotted(run)
    elements = {
        "graph": plots.graph(),
        "heat": plots.heat("std"),
        "kpis": plots.kpis(),
        "tex": plotted(run.slot(TEX)).series("std"),
    }
    for name, element in elements.items():
        path = save(element, tmp_path / f"{name}{suffix}")
        if suffix == ".svg":
            ET.parse(path)
            continue
        page.goto(path.as_uri())
        page.wait_for_function("window.Bokeh && Bokeh.documents.length > 0", timeout=PATIENCE)
        assert page.evaluate(TEX_OF_BOKEH) == []
        assert page.evaluate("window.pwned") is None

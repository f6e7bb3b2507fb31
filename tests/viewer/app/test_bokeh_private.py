"""What the page's scripts use of BokehJS and Panel's JavaScript, beyond their documentation.

Without these names the page would draw slowly or print badly, and only the console would say so.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import panel as pn
import pytest
from bokeh.plotting import figure

from tests.house import ROOT

USED = {
    "VisualProperties._get_css_value": "typeof visual._get_css_value === 'function'",
    "VisualProperties.obj": "visuals.every((part) => part.obj.el instanceof Element)",
    "InlineStyleSheet._update": "typeof sheet._update === 'function'",
    "InlineStyleSheet.el": "new dom.InlineStyleSheet('a { }').el instanceof HTMLStyleElement",
    "PlotView.base_font_size": "!!Object.getOwnPropertyDescriptor(plot, 'base_font_size')?.get",
    "PlotView.request_repaint": "typeof plot.request_repaint === 'function'",
    "PlotView.repaint": "typeof plot.repaint === 'function'",
    "PlotView.after_resize": "typeof plot.after_resize === 'function'",
    "PlotView.is_displayed": "shown.is_displayed === true",
    "PlotView.canvas_view": "shown.canvas_view.primary.ctx.canvas instanceof HTMLCanvasElement",
    "CanvasView.overlays": "shown.canvas_view.overlays.canvas instanceof HTMLCanvasElement",
    "PlotView._invalidate_all": "typeof shown._invalidate_all === 'boolean'",
    "PlotView._invalidated_painters": "typeof shown._invalidated_painters.size === 'number'",
    "PlotView.computed_renderer_views": "glyphs.length === 1",
    "GlyphRendererView.update_position": "typeof glyphs[0].update_position === 'function'",
    "Document._all_models": "Bokeh.documents[0]._all_models.get(shown.model.id) === shown.model",
    "Document.is_idle": "typeof Bokeh.documents[0].is_idle === 'boolean'",
    "CommManager._document_changed": "typeof manager._document_changed === 'function'",
    "CommManager._client_comm": "/\\b_client_comm\\b/.test(String(manager.initialize))",
}
"""An expression for each name, true if the name is there and is what the scripts take it for."""

MISSING = """() => {
  const { VisualProperties } = Bokeh.require("core/visuals/visual");
  const dom = Bokeh.require("core/dom");
  const visual = VisualProperties.prototype, sheet = dom.InlineStyleSheet.prototype;
  const plot = Bokeh.require("models/plots/plot_canvas").PlotView.prototype;
  const [shown] = [...Bokeh.index.query((view) => "request_repaint" in view)];
  const visuals = [...shown.visuals].filter((part) => part instanceof VisualProperties);
  const glyphs = shown.computed_renderer_views
    .filter(({ model }) => model.type === "GlyphRenderer");
  const manager = Bokeh.Models.get("panel.models.comm_manager.CommManager").prototype;
  const holds = (test) => { try { return test(); } catch { return false; } };
  return Object.entries(%s).filter(([, test]) => !holds(test)).map(([name]) => name);
}"""


@pytest.mark.browser
def test_all_that_is_used_of_bokeh_exists(
    page: Any, serve: Callable[[Callable[[], Any]], str]
) -> None:
    def one_line() -> Any:
        plot = figure(width=300, height=200)
        plot.line([0, 1], [1, 0])
        return pn.pane.Bokeh(plot)  # type: ignore[no-untyped-call]

    page.goto(serve(one_line))  # a page of Panel's own, in which nothing is replaced
    page.locator(".bk-Figure canvas").first.wait_for()
    page.wait_for_function("() => Bokeh.documents[0].is_idle")
    tests = ", ".join(f"'{name}': () => {test}" for name, test in USED.items())
    assert page.evaluate(MISSING % f"{{ {tests} }}") == []


def test_no_other_private_name_is_used_in_the_scripts() -> None:
    scripts = [*(ROOT / "viewer").rglob("*.js")]
    assert len(scripts) > 10
    private = {name for script in scripts for name in private_names(script)}
    assert private == {name.split(".")[1] for name in USED if "._" in name}


def private_names(script: Path) -> list[str]:
    """Returns the names of properties that begin with an underscore."""
    return re.findall(r"\.(_[a-z]\w*)", script.read_text(encoding="utf-8"))


@pytest.mark.browser
@pytest.mark.slow
def test_the_page_replaces_what_is_slow(viewer: Callable[..., Any]) -> None:
    replaced = viewer().evaluate(
        """() => [
          Bokeh.require("core/visuals/visual").VisualProperties.prototype._get_css_value,
          Bokeh.require("core/dom").InlineStyleSheet.prototype._update,
        ].map(String)"""
    )
    assert ["remembered" in replaced[0], "write.call" in replaced[1]] == [True, True]

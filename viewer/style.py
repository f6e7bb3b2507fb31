"""Style sheet of all HTML in the viewer.

Panel's theme variables define the colours, so light and dark themes need no extra rules.
"""

from __future__ import annotations

from pathlib import Path

PRINTED = """
@media print {
  :host { display: block !important; height: auto !important; overflow: visible !important; }
  .pane { flex: none !important; height: auto !important; max-height: none !important; }
}
"""
"""Style sheet of the page's columns, which do not scroll when printed."""

UNCUT = """
@media print {
  :host { flex: none !important; height: auto !important; min-height: 0 !important; }
  .choices, .cells, .table, .facts, .statistics-cell {
    contain: none; flex: none !important; height: auto !important; max-height: none !important;
    min-height: auto; overflow: visible;
  }
}
"""
"""Style sheet of grids with cells that scroll on a screen, but not on paper."""

FITTED = ":host { container-type: inline-size; }"
"""Style sheet of what fits its layout to its own width, which in a notebook is not the window's."""

LEGEND = ".bk-item .bk-label { color: var(--panel-on-surface-color, #444444) !important; }"
"""CSS for legends. They are HTML, and Bokeh sets their colour before the page has a theme."""

CSS = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")

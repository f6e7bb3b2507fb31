"""Every section by keyboard and screen reader: names, focus, contrast, in light and dark mode.

The conditions are those of WCAG 2.1, A and AA, that a program can check. They are checked in the
page itself, so no rule set has to be downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from comgra_decl.viewer.state import SECTIONS
from tests.viewer.app.served import turn_to

pytestmark = pytest.mark.browser

WALK = """
const all = [];
const walk = (root) => { for (const e of root.querySelectorAll("*")) {
  if (e.shadowRoot) walk(e.shadowRoot);
  if (e.getClientRects().length && getComputedStyle(e).visibility !== "hidden") all.push(e);
} };
walk(document);
const said = (e) => e.outerHTML.slice(0, 160);
const up = (e) => e.assignedSlot ?? e.parentElement ?? e.getRootNode().host ?? null;
"""

FAULTS = f"""() => {{
  {WALK}
  const found = [];
  const ids = new Map();
  for (const e of all) {{
    const control = e.matches("button, select, input, textarea, a[href], [role=button]");
    const name = e.getAttribute("aria-label") || e.textContent.trim() || e.title;
    if (control && !name) found.push("no name: " + said(e));
    if (e.matches("svg[role], [role=group], [role=region], [role=menu]") && !name) {{
      found.push("no name: " + said(e));
    }}
    const acts = e.matches("[data-send]") && !e.disabled;
    if (acts && e.tabIndex < 0) found.push("out of reach: " + said(e));
    const scrolls = /auto|scroll/.test(getComputedStyle(e).overflowY)
      && e.scrollHeight > e.clientHeight + 1;
    const inside = (part) => {{ for (let p = part; p; p = up(p)) if (p === e) return true; }};
    if (scrolls && !all.some((part) => part.tabIndex >= 0 && inside(part))) {{
      found.push("cannot be scrolled by keyboard: " + said(e));
    }}
    if (e.id && e.getRootNode() === document) {{
      if (ids.has(e.id)) found.push("id twice: " + said(e));
      ids.set(e.id, e);
    }}
  }}
  return found;
}}"""

FAINT = f"""() => {{
  {WALK}
  const numbers = (colour) => {{
    const parts = colour.match(/-?[\\d.]+(?:e-?\\d+)?/g)?.map(Number) ?? [0, 0, 0, 0];
    const scale = colour.startsWith("color(") ? 1 : 255;
    return [...parts.slice(0, 3).map((c) => c / scale), parts[3] ?? 1];
  }};
  const over = (above, below) => below.map((b, i) => above[i] * above[3] + b * (1 - above[3]));
  const light = (rgb) => rgb.map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {{
    const layers = [];
    for (let p = e; p; p = up(p)) {{
      const style = getComputedStyle(p);
      if (style.backgroundImage !== "none" || style.opacity !== "1") return null; // cannot be told
      layers.push(numbers(style.backgroundColor));
      if (layers.at(-1)[3] === 1) break;
    }}
    return layers.reverse().reduce((below, above) => over(above, below), [1, 1, 1]);
  }};
  const found = [];
  for (const e of all) {{
    const own = [...e.childNodes].filter((part) => part.nodeType === 3);
    if (!own.some((part) => part.data.trim())) continue;
    if (e.closest("svg, :disabled, style, script, option")) continue;
    const below = ground(e);
    if (!below) continue;
    const style = getComputedStyle(e);
    const above = over(numbers(style.color), below);
    const [high, low] = [light(above), light(below)].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < (large ? 3 : 4.5)) found.push(ratio.toFixed(2) + ": " + said(e));
  }}
  return found;
}}"""

FOCUSED = """() => {
  let e = document.activeElement;
  while (e?.shadowRoot?.activeElement) e = e.shadowRoot.activeElement;
  const name = e.getAttribute("aria-label") || e.textContent.trim().slice(0, 40) || e.tagName;
  const marked = (part) => {
    const { outlineStyle, boxShadow } = getComputedStyle(part);
    return outlineStyle !== "none" || boxShadow !== "none";
  };
  const seen = [e, ...e.children].some(marked) || !!e.closest(".node");
  return [name, e === document.body || seen, e.outerHTML.slice(0, 160)];
}"""

STOPS = 90


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_section_can_be_read_and_worked_without_a_mouse(
    viewer: Callable[..., Any], theme: str
) -> None:
    page = viewer("?node=head&step=9&colour=forward", color_scheme=theme)
    for section in [name for name in SECTIONS if name != "views"]:
        turn_to(page, section)
        faults = page.evaluate(FAULTS) if theme == "light" else []
        assert faults + page.evaluate(FAINT) == [], section


def test_the_tab_key_leads_through_everything_and_is_seen(viewer: Callable[..., Any]) -> None:
    page = viewer("?node=head&step=9")
    page.get_by_role("button", name="Save forward series").wait_for()
    names, unseen = set(), []
    page.evaluate("() => document.body.focus()")
    for _ in range(STOPS):
        page.keyboard.press("Tab")
        name, seen, element = page.evaluate(FOCUSED)
        names.add(name)
        unseen += [] if seen else [element]
    assert unseen == []
    wanted = {"Run", "Statistic", "Find a node", "Save the graph", "Inspect", "Save forward series"}
    wanted |= {"Toggle theme", "Save these statistics as CSV", "Save gradient values"}
    assert wanted <= names

"""A walk as one HTML file that needs no network: text and inline drawings, no scripts."""

from __future__ import annotations

import numpy as np

from comgra_decl import __version__
from comgra_decl.rules import Finding
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.model.findings import rule_label
from comgra_decl.viewer.model.fitting import fitting
from comgra_decl.viewer.model.headline import Headline
from comgra_decl.viewer.model.kpis import charts
from comgra_decl.viewer.model.labels import order_of_operations, pass_label
from comgra_decl.viewer.model.numbers import count, many, number
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.series import Curve, curve
from comgra_decl.viewer.model.walk import ADVICE, Stop, slot_at

_WIDTH, _HEIGHT, _LEFT, _BELOW = 680, 150, 74, 20  # of a drawing, in CSS pixels
_POINTS = 400

_CSS = """
:root { color-scheme: light dark; --text: #1c2333; --soft: #5b6272; --paper: #fff; --line: #d9dce4; --data: #3f6fd8; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e9f2; --soft: #a6adbd; --paper: #171b24; --line: #363c49; --data: #7ea2f5; }
}
body { background: var(--paper); color: var(--text); font: 15px/1.55 system-ui, sans-serif; margin: 32px auto; max-width: 740px; padding: 0 20px; }
h1 { font-size: 22px; line-height: 1.3; margin: 4px 0 8px; }
h2 { font-size: 16px; margin: 0 0 4px; overflow-wrap: anywhere; }
p { margin: 4px 0; overflow-wrap: anywhere; }
.soft, figcaption, footer { color: var(--soft); font-size: 13px; }
ol { list-style: none; padding: 0; }
li { border-left: 3px solid var(--line); break-inside: avoid; margin: 0 0 22px; padding: 2px 0 2px 16px; }
li.error { border-color: #d6334a; } li.warning { border-color: #d99a1f; } li.hint { border-color: #3f6fd8; }
figure { margin: 10px 0 0; }
svg { display: block; height: auto; max-width: 100%; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
.axis { fill: none; stroke: var(--line); } .data { fill: none; stroke: var(--data); stroke-width: 1.6; }
.dot { fill: var(--data); } .now { stroke: #d6334a; stroke-width: 1.5; }
footer { border-top: 1px solid var(--line); margin-top: 28px; padding-top: 8px; }
"""  # noqa: E501  (a style sheet)


def story_of(
    view: RunView, stops: tuple[Stop, ...], finding: Finding, *, run: str, said: Headline
) -> bytes:
    """Return a walk as an HTML page in UTF-8.

    Args:
        view: The run.
        stops: The stops of the walk.
        finding: The finding that the walk explains.
        run: The run's name for display.
        said: The verdict on the run.
    """
    title = f"{rule_label(finding.rule)} in {run}"
    lines = "".join(_stop(view, stop, finding) for stop in stops)
    numbers = f" \u00b7 {_e(said.numbers)}" if said.numbers else ""
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_e(title)}</title><style>{_CSS}</style></head><body><main>"
        f'<p class="soft">{_e(run)} \u00b7 {many(len(view.run.records), "record")}{numbers}</p>'
        f"<h1>{_e(finding.severity)}: {_e(title)}</h1>"
        f"<ol>{lines}</ol></main><footer>Created by comgra_decl {__version__}. "
        f"Verdict on the run: {_e(said.lead)}.</footer></body></html>"
    )
    return page.encode()


def _stop(view: RunView, stop: Stop, finding: Finding) -> str:
    first, second = map(_e, stop.sentences)
    tone = f' class="{finding.severity}"' if stop.place == finding.place else ""
    drawing = "" if stop.title == ADVICE else _drawing(view, stop)
    return f"<li{tone}><h2>{_e(stop.title)}</h2><p>{first}</p><p>{second}</p>{drawing}</li>"


def _drawing(view: RunView, stop: Stop) -> str:
    """Return a drawing of the tensor's series, or of the loss, with a caption."""
    if stop.place is None:
        line, caption = _loss(view)
    else:
        place = stop.place
        slot = slot_at(view, place)
        fit = fitting(view, slot)
        statistic = stop.statistic or fit.statistic
        batch = "mean" if stop.statistic else fit.batch
        at = Selection(node=place.node, role=place.role, iteration=place.iteration,
                       batch=batch, statistic=statistic)  # fmt: skip
        line = curve(view, slot, at, points=_POINTS)
        how = order_of_operations(statistic, batch)
        caption = f"{place}, {pass_label(place.pass_)}: {how}"
    if line.missing or not len(line.steps):
        return ""
    return (
        f"<figure>{svg_of(line, stop.step, label=caption)}"
        f"<figcaption>{_e(caption)}. The red line marks step {count(stop.step)}.</figcaption>"
        "</figure>"
    )


def _loss(view: RunView) -> tuple[Curve, str]:
    known = charts(view, points=_POINTS)
    if not known or not known[0].lines:
        return Curve(missing="no loss"), ""
    chart = known[0]
    line = chart.lines[0]
    shown = Curve(line.steps, line.values, bounds=chart.bounds)
    return shown, f"{chart.title}, {line.label}"


def svg_of(line: Curve, step: int, *, label: str) -> str:
    """Return a line over steps as inline SVG, with its range, a mark at `step`, and gaps."""
    low, high = line.bounds
    first, last = float(line.steps[0]), float(line.steps[-1])
    right, bottom = _WIDTH - 8, _HEIGHT - _BELOW
    x = _LEFT + (np.asarray(line.steps, float) - first) / ((last - first) or 1.0) * (right - _LEFT)
    y = bottom - (line.values - low) / ((high - low) or 1.0) * (bottom - 10)
    mark = _LEFT + (min(max(step, first), last) - first) / ((last - first) or 1.0) * (right - _LEFT)
    parts, pen = [], "M"
    for px, py in zip(x.tolist(), y.tolist(), strict=True):
        known = np.isfinite(py)
        if known:
            parts.append(f"{pen}{px:.1f} {py:.1f}h0")  # h0: a lone point is drawn, too
        pen = "L" if known else "M"
    texts = (
        f'<text x="{_LEFT - 6}" y="14" text-anchor="end">{number(high, digits=3)}</text>'
        f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">{number(low, digits=3)}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 4}">{count(int(first))}</text>'
        f'<text x="{right}" y="{_HEIGHT - 4}" text-anchor="end">{count(int(last))}</text>'
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" '
        f'aria-label="{_e(label)}"><path class="axis" d="M{_LEFT} 6V{bottom}H{right}"/>'
        f'<path class="data" stroke-linecap="round" d="{"".join(parts)}"/>'
        f'<path class="now" d="M{mark:.1f} 6V{bottom}"/>{texts}</svg>'
    )

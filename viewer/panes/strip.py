"""The verdict on the run at the top of the page, and the walk through a finding's evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import panel as pn

from comgra_decl.rules import Finding
from comgra_decl.viewer.components.base import Message
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.model.findings import rule_label
from comgra_decl.viewer.model.headline import Headline, headline
from comgra_decl.viewer.model.ranks import spoken
from comgra_decl.viewer.model.story import story_of
from comgra_decl.viewer.model.takeaway import clean_name
from comgra_decl.viewer.model.verdicts import look, may_be_behind
from comgra_decl.viewer.model.walk import Stop, finding_at, moves_to, walk_of, walk_place
from comgra_decl.viewer.panes.base import Pane, Shown, html_view

_SHOW, _NEXT, _BACK, _CLOSE, _EXPORT, _LOOK = "show", "next", "back", "close", "export", "look"
_ALL = "all"
_TOKENS = [_SHOW, _NEXT, _BACK, _CLOSE, _EXPORT, _LOOK, _ALL]
_WIDTH, _HEIGHT = 72, 18  # of the loss curve, in pixels
_HTML = "text/html;charset=utf-8"
_CSS = Path(__file__).with_name("strip.css").read_text(encoding="utf-8")


class StripPane(Pane):
    """The verdict in one line; during a walk, the current stop with its two sentences.

    The state parameter `walk` names the finding and the stop, see `model.walk`; "" outside a walk.
    """

    reads: ClassVar = frozenset({"run", "revision", "looked", "walk", "colour"})
    sizing: ClassVar = "stretch_width"

    def __init__(self, act: Any) -> None:
        self._stops: tuple[Stop, ...] = ()
        self._finding: Finding | None = None
        self._number = -1
        self._colour = "kind"
        super().__init__(act)

    def build(self) -> Any:
        """Create the HTML view."""
        self.view = html_view(_CSS)
        self.view.tokens = _TOKENS
        self.view.on_message(self._on_message)
        return self.view

    def components(self) -> list[Any]:
        """Return the HTML view, which handles clicks."""
        return [self.view]

    def update(self, shown: Shown) -> None:
        """Rewrite the line, and the stop of a walk."""
        number, stop = walk_place(shown.walk)
        if not shown.walk:
            self._colour = shown.colour  # comes back after a walk
        if number != self._number:  # a walk keeps its stops while new findings arrive
            self._number = number
            self._finding = finding_at(shown.view, number)
            self._stops = () if self._finding is None else walk_of(shown.view, self._finding)
        if pn.state.curdoc is not None and may_be_behind(shown.view):
            look(shown.view)  # polling shows its result
        said = headline(shown.view)
        line = _line(said, walking=bool(self._stops))
        inside = _walk(self._stops, stop, self._finding) if self._stops else ""
        self.view.put(html=f'<div class="strip tone-{said.tone}">{line}{inside}</div>')

    def _on_message(self, message: Message) -> None:
        shown, sent = self._shown, message["send"]
        if shown is None:
            return
        number, stop = walk_place(shown.walk)
        if sent == _LOOK:
            over = look(shown.view)
            if pn.state.curdoc is None:  # a notebook has no polling
                over.wait()
            self.update(shown)
        elif sent == _ALL:
            self.act(section="findings")
        elif sent == _EXPORT:
            self._export(shown)
        elif sent == _CLOSE or (sent == _NEXT and stop + 1 >= len(self._stops)):
            self.act(walk="", colour=self._colour)
        elif sent == _SHOW:
            self._go(shown, 0, 0)
        else:
            self._go(shown, number, max(0, stop + (1 if sent == _NEXT else -1)))

    def _go(self, shown: Shown, number: int, stop: int) -> None:
        """Move to a stop of a walk and select its tensor and step."""
        finding = finding_at(shown.view, number) if number != self._number else self._finding
        if finding is None:
            return
        stops = walk_of(shown.view, finding) if number != self._number else self._stops
        stop = min(stop, len(stops) - 1)
        self.act(**moves_to(shown.view, shown.at, finding, (number, stop), stops[stop]))

    def _export(self, shown: Shown) -> None:
        if self._finding is None:
            return
        said, run = headline(shown.view), spoken(shown.run)
        page = story_of(shown.view, self._stops, self._finding, run=run, said=said)
        name = clean_name(run, self._finding.rule, ending=".html")
        self.view.hand_over(name, page, kind=_HTML)


def _line(said: Headline, *, walking: bool) -> str:
    buttons = ""
    if said.worst is not None and not walking:
        buttons = _button(_SHOW, "Show me", "main", "Walk through the evidence, step by step")
    elif said.unasked:
        buttons = _button(_LOOK, "Check now", "main", "Run the rules on all records")
    elif said.worst is None and not walking:
        buttons = _button(_ALL, "Show checks", "", "What was checked and what could not be")
    averaged = f"First and last value. The checks compare means: {said.averaged}."
    tip = f' title="{_e(averaged)}"' if said.averaged else ""
    numbers = f'<span class="numbers"{tip}>{_e(said.numbers)}</span>' if said.numbers else ""
    return (
        '<p class="line" role="status"><span class="lamp" aria-hidden="true"></span>'
        f'<b>{_e(said.lead)}</b> <span class="what" title="{_e(said.text)}">{_e(said.text)}</span>'
        f"{buttons}{numbers}{_curve(said.curve)}</p>"
    )


def _curve(points: tuple[tuple[float, float], ...]) -> str:
    """Return a small drawing of the loss over the steps; "" for fewer than two values."""
    if len(points) < 2:
        return ""
    steps, losses = zip(*points, strict=True)
    low, high = min(losses), max(losses)
    across = _WIDTH / (steps[-1] - steps[0])
    down = _HEIGHT / (high - low) if high > low else 0.0
    line = " ".join(
        f"{(step - steps[0]) * across:.1f},{(high - loss) * down:.1f}" for step, loss in points
    )
    return (
        f'<svg class="curve" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="Training loss over steps"><polyline points="{line}"/></svg>'
    )


def _walk(stops: tuple[Stop, ...], at: int, finding: Finding | None) -> str:
    stop = stops[min(at, len(stops) - 1)]
    rule = "" if finding is None else rule_label(finding.rule)
    last = at + 1 >= len(stops)
    first, second = map(_e, stop.sentences)
    back = _button(_BACK, "Back", "", "Previous stop", disabled=at == 0)
    buttons = (
        back
        + _button(_NEXT, "Done" if last else "Next", "main", "End" if last else "Next stop")
        + _button(_EXPORT, "Export", "", "Save this walk as one HTML file that needs no network")
        + _button(_CLOSE, "Close", "", "End the walk")
    )
    return (
        f'<section class="walk" aria-label="Evidence of {_e(rule)}" data-stop="{at}">'
        f'<div class="told" aria-live="polite"><h2><span class="place">{at + 1} of {len(stops)}'
        f"</span> {_e(stop.title)}</h2><p>{first}</p><p>{second}</p></div>"
        f'<div class="moves">{buttons}</div></section>'
    )


def _button(send: str, text: str, class_: str, title: str, *, disabled: bool = False) -> str:
    off = " disabled" if disabled else f' data-send="{send}"'
    return f'<button type="button" class="{class_}" title="{title}"{off}>{text}</button>'

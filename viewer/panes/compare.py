"""Two runs, or two steps or types of one run: series, statistics, tensors that differ, settings."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import panel as pn

from comgra_decl.viewer.components.base import Message
from comgra_decl.viewer.components.chooser import Chooser
from comgra_decl.viewer.model.catalogue import RunEntry
from comgra_decl.viewer.model.choices import Field, Groups, Option, type_label
from comgra_decl.viewer.model.compare import (
    DIFFERENCE,
    counterpart,
    overlay_of,
    ranking_of,
    settings_of,
    shape_note,
    statistics_of,
)
from comgra_decl.viewer.model.comparison_target import ALL_TRAINING, Other
from comgra_decl.viewer.model.partings import search, search_of
from comgra_decl.viewer.model.ranks import with_rank
from comgra_decl.viewer.model.runview import RunView, Slot
from comgra_decl.viewer.model.selection import nearest
from comgra_decl.viewer.model.sheet import slot_of
from comgra_decl.viewer.model.sheet_choices import pass_field
from comgra_decl.viewer.model.tables import overlay_csv, pairs_csv, ranking_csv
from comgra_decl.viewer.panes.base import (
    SAVE,
    TENSOR,
    Act,
    Exhibit,
    Pane,
    Shown,
    hand_table,
    html_view,
)
from comgra_decl.viewer.panes.compare_figure import OverlayFigure
from comgra_decl.viewer.panes.compare_html import (
    PART,
    parting_html,
    parting_tokens,
    ranking_html,
    settings_html,
    statistics_html,
)
from comgra_decl.viewer.panes.selectors import offer
from comgra_decl.viewer.panes.sheet import ACROSS, NARROW
from comgra_decl.viewer.style import UNCUT

_GRID = """
:host {
  box-sizing: border-box; display: var(--stacked, grid) !important; gap: 0 14px; padding: 8px 14px;
  grid-template-columns: 190px minmax(220px, 3fr) minmax(280px, 3fr) minmax(260px, 3fr);
  grid-template-rows: minmax(0, 1fr);
}
.choices, .table { contain: size; min-height: 0; min-width: 0; overflow: auto; }
@container (max-width: 1210px) {
  :host {
    grid-template-columns: 170px minmax(0, 1fr) minmax(0, 1fr);
    grid-template-rows: minmax(300px, 1fr) minmax(240px, 1fr); min-height: 570px; row-gap: 12px;
  }
  .choices { grid-row: 1 / span 2; }
  .nodes { grid-column: 2 / span 2; }
}
@container (max-width: 900px) {
  :host {
    grid-template-columns: minmax(0, 1fr);
    grid-template-rows: max-content minmax(300px, 1fr) 320px 320px; min-height: 1200px;
  }
  .choices { contain: none; grid-row: 1; }
  .table { grid-column: 1; }
}
.choices { display: var(--screen-only, block) !important; }
.scroll-button { display: none !important; }
@media print { :host { min-height: 0 !important; } }
"""
_RANKS = "ranks of this run"
_SAME = "="  # a choice needs a name
_AXES = (Option("recorded", "recorded"), Option("relative", "\u00f7 start"))


class ComparePane(Pane):
    """Compares the displayed run, type and step with another run, type or step."""

    reads: ClassVar = TENSOR | {
        "step", "batch", "statistic", "pass_", "scale", "axis", "other", "other_step",
        "other_type", "other_revision", "section", "looked",
    }  # fmt: skip

    def __init__(self, act: Act, runs: Any) -> None:
        self._runs = runs
        super().__init__(act)

    def build(self) -> Any:
        """Create the choices, the figure and both tables."""
        self.choices = Chooser(sizing_mode="stretch_both", margin=0, stylesheets=[NARROW, ACROSS])
        self.choices.css_classes = ["choices"]
        self.choices.on_message(self._choose)
        self.figure = OverlayFigure(self._jump)
        self.figure.frame.on_zoom(self.again)
        self.table = html_view(sizing_mode="stretch_both", css_classes=["table"])
        self.table.on_message(self._select)
        self.nodes = html_view(sizing_mode="stretch_both", css_classes=["table", "nodes"])
        self.nodes.on_message(self._on_ranking)
        return pn.Column(
            self.choices, self.figure.panel, self.table, self.nodes, sizing_mode="stretch_both",
            margin=0, stylesheets=[_GRID, UNCUT],
        )  # fmt: skip

    def components(self) -> list[Any]:
        """Return choices and tables, which handle clicks."""
        return [self.choices, self.table, self.nodes]

    def exhibits(self) -> list[Exhibit]:
        """Return the figure; its CSV contains every record of both sides."""
        return [Exhibit(self.figure.frame.figure, "comparison", self._csv)]

    def _csv(self) -> bytes:
        shown = self._shown
        assert shown is not None
        assert shown.other is not None
        slot = slot_of(shown.view, shown.at, shown.pass_)
        return overlay_csv(shown.view, slot, shown.other, shown.at)

    def update(self, shown: Shown) -> None:
        """Update the comparison; sends only what has changed."""
        other = shown.other
        if other is None:
            return  # another section is visible
        at, view = shown.at, shown.view
        slot = slot_of(view, at, shown.pass_)
        self._offer(shown, other)
        self._compare_tensor(shown, other, slot)
        pass_ = shown.pass_ if slot is None else slot.pass_
        ranking = ranking_of(view, other, at, pass_)
        settings = settings_of(view, other)
        same = other.view is view or other.view is None
        content, tokens = ranking_html(ranking, at)
        parting = "" if same else parting_html(search_of(view, other.view))
        tokens = [*tokens, PART, *parting_tokens(search_of(view, other.view))]
        self.nodes.param.update(
            html=parting + content + settings_html(settings, same=same), tokens=tokens
        )

    def _compare_tensor(self, shown: Shown, other: Other, slot: Slot | None) -> None:
        at, view = shown.at, shown.view
        within = self.figure.frame.window
        relative = shown.axis == "relative"
        overlay = overlay_of(view, slot, other, at, relative=relative, within=within)
        self.figure.draw(overlay, other, at=at, log=shown.scale == "log", axis=shown.axis)
        match = None if other.view is None else counterpart(other.view, slot)
        rows = statistics_of(view, slot, other, at)
        note = other.problem or shape_note(view, slot, match, other=other, at=at)
        if other.view is not None and match is None and not note:
            note = "The other run does not have this tensor."
        content, tokens = statistics_html(rows, at, other, slot=slot, note=note)
        self.table.param.update(html=content, tokens=tokens)

    def _offer(self, shown: Shown, other: Other) -> None:
        groups = _choices(shown, other, self._runs())
        offer(self.choices, groups)

    def _choose(self, message: Message) -> None:
        ((name, value),) = message.items()
        if name == "other":
            self.act(other=value, other_step=None)
        elif name == "other_step":
            self.act(other_step=int(value))
        elif name == "other_type":
            self.act(other_type="" if value == _SAME else value, other_step=None)
        elif name == "pin":
            self._pin(value)
        elif name == "paint":
            self.act(colour=DIFFERENCE)
        else:
            self.act(**{name: value})

    def _pin(self, what: str) -> None:
        assert self._shown is not None
        self.act(other_step=None if what == "free" else self._shown.at.step)

    def _jump(self, x: float) -> None:
        if self._shown is not None:
            steps = self._shown.view.steps(self._shown.at.type)
            self.act(step=nearest(steps, round(x)), follow=False)

    def _save_statistics(self) -> None:
        shown = self._shown
        if shown is not None and shown.other is not None:
            slot = slot_of(shown.view, shown.at, shown.pass_)
            rows = statistics_of(shown.view, slot, shown.other, shown.at)
            hand_table(self.table, shown.at, "compared", pairs_csv(rows))

    def _on_ranking(self, message: Message) -> None:
        shown = self._shown
        kind, _, rest = message["send"].partition(":")
        if message["send"] == PART:
            self._search()
        elif kind == "part":
            self._show_difference(int(rest))
        elif message["send"] != SAVE:
            self._select(message)
        elif shown is not None and shown.other is not None:
            slot = slot_of(shown.view, shown.at, shown.pass_)
            pass_ = shown.pass_ if slot is None else slot.pass_
            ranking = ranking_of(shown.view, shown.other, shown.at, pass_, most=sys.maxsize)
            hand_table(self.nodes, shown.at, "differences", ranking_csv(ranking))

    def _search(self) -> None:
        shown = self._shown
        if shown is not None and shown.other is not None and shown.other.view is not None:
            search(shown.view, shown.other.view)
            self.again()

    def _show_difference(self, number: int) -> None:
        """Select the tensor and step of a difference, on both sides."""
        shown = self._shown
        if shown is None or shown.other is None:
            return
        known = search_of(shown.view, shown.other.view)
        if known is None or known.found is None:
            return
        one = known.found.differences[number]
        self.act(
            node=one.node, role=one.role, iteration=one.iteration, step=one.step, pass_=one.pass_,
            other_step=None, follow=False,
        )  # fmt: skip

    def _select(self, message: Message) -> None:
        kind, _, rest = message["send"].partition(":")
        if message["send"] == SAVE:
            self._save_statistics()
        elif kind == "statistic":
            self.act(statistic=rest)
        elif self._shown is not None:
            slot = self._shown.view.slots[int(rest)]
            self.act(node=slot.node, role=slot.role, iteration=slot.iteration)


def _choices(shown: Shown, other: Other, runs: tuple[RunEntry, ...]) -> Groups:
    own = Option("", "this run")
    others = [
        Option(run.name, run.label, run.group)
        for run in runs
        if run.readable or run.name == other.run
    ]
    others[:0] = [
        Option(with_rank(shown.run, rank), "all ranks" if rank is None else f"rank {rank}", _RANKS)
        for rank in (None, *shown.view.ranks)
        if len(shown.view.ranks) > 1 and rank != shown.view.number
    ]
    with_ = Field(
        "other",
        "Compare with",
        other.run,
        (own, *others),
        "Another run, or another step of this run",
    )
    fields = [with_]
    if other.view is not None and len(other.view.types()) > 1:
        fields.append(_type_field(other.view, other))
    if other.view is not None and other.step is not None:
        steps = other.view.steps(other.type_beside(shown.at.type))
        fields.append(Field("other_step", "Step", str(other.step), (), "Step of the other run",
                            "number", int(steps[0]), int(steps[-1])))  # fmt: skip
    free = "same step" if other.is_apart(shown.view, shown.at) else "first step"
    pins = (Option("pin", "this step"), Option("free", free))
    fields.append(Field("pin", "Set to", "", pins, "Keeps the other side at this step; click again "
                                                   "to release it", "actions"))  # fmt: skip
    axis = Field(
        "axis", "Series", shown.axis, _AXES, "As recorded, or divided by the first value", "buttons"
    )
    paint = (Option("paint", "Show in graph"),)
    drawn = (
        pass_field(shown.view, shown.at, shown.pass_),
        axis,
        Field("paint", "Difference", "", paint, "Colours nodes by the difference", "actions"),
    )
    return (("Other side", tuple(fields)), ("Shown", drawn))


def _type_field(there: RunView, other: Other) -> Field:
    """Return the choice of the other side's type of execution."""
    types = [Option(t or ALL_TRAINING, type_label(there, t)) for t in there.types()]
    now = _SAME if other.type is None else other.type or ALL_TRAINING
    return Field(
        "other_type", "Type", now, (Option(_SAME, "same type"), *types),
        "Type of execution of the other side, such as the unchanged samples of a probe",
    )  # fmt: skip

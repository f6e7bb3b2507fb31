"""The other side of a comparison: another run, or another step or type of the same run."""

from __future__ import annotations

from dataclasses import dataclass

from comgra_decl.errors import ComgraError
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, nearest

ALL_TRAINING = "*"
"""Name of the type of execution that contains all training steps, where "" means the same type."""


@dataclass(frozen=True, slots=True)
class Other:
    """The other side of a comparison.

    `run` is its name, or "" for the displayed run. If there is nothing to compare with, `view` and
    `step` are None, and `problem` contains the reason. `pinned` is True if the user chose the step.
    `type` is its type of execution; None means that of the displayed side.
    """

    run: str = ""
    view: RunView | None = None
    step: int | None = None
    problem: str = ""
    pinned: bool = False
    type: str | None = None

    def type_beside(self, type_: str) -> str:
        """Return this side's type of execution if the displayed one is `type_`."""
        wanted = type_ if self.type is None else self.type
        return wanted if self.view is not None and wanted in self.view.types() else ""

    def is_apart(self, view: RunView, at: Selection) -> bool:
        """Return whether this side has other records than the displayed one, not another step."""
        return self.view is not None and (
            self.view is not view or self.type_beside(at.type) != at.type
        )


def other_of(
    catalogue: Catalogue,
    view: RunView,
    at: Selection,
    *,
    run: str,
    step: int | None,
    type_: str = "",
) -> Other:
    """Return the other side for the current selection.

    Args:
        catalogue: Available runs.
        view: Displayed run.
        at: Current selection.
        run: Name of the other run. "" or an unknown name selects the displayed run.
        step: Step to compare with, rounded to the nearest recorded step. None selects the step of
            `at`, or the first step if records of a run are compared with others of the same type.
        type_: Type of execution to compare with; "" or an unknown name selects that of `at`, and
            `ALL_TRAINING` all training steps.
    """
    known = catalogue.entry(run) is not None
    try:
        there = catalogue.look(run) if known else view
    except ComgraError as error:
        return Other(run, problem=f"Cannot compare with {run}: {error}")
    chosen = "" if type_ == ALL_TRAINING else type_
    kind = chosen if type_ and chosen in there.types() else None
    name = "" if there is view else run
    other = Other(name, there, None, "", step is not None, kind)
    steps = there.steps(other.type_beside(at.type))
    if step is None and not other.is_apart(view, at):
        found = int(steps[0]) if len(steps) else None
    else:
        found = nearest(steps, at.step if step is None else step)
    problem = "" if found is not None or there is view else f"{run} has no records yet."
    return Other(name, there, found, problem, step is not None, kind)

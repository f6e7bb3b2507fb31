"""The other side of a comparison: another run, or another step of the same run."""

from __future__ import annotations

from dataclasses import dataclass

from comgra_decl.errors import ComgraError
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, nearest


@dataclass(frozen=True, slots=True)
class Other:
    """The other side of a comparison.

    `run` is its name, or "" for the displayed run. If there is nothing to compare with, `view` and
    `step` are None, and `problem` contains the reason. `pinned` is True if the user chose the step.
    """

    run: str = ""
    view: RunView | None = None
    step: int | None = None
    problem: str = ""
    pinned: bool = False


def other_of(
    catalogue: Catalogue, view: RunView, at: Selection, *, run: str, step: int | None
) -> Other:
    """Return the other side for the current selection.

    Args:
        catalogue: Available runs.
        view: Displayed run.
        at: Current selection.
        run: Name of the other run. "" or an unknown name selects the displayed run.
        step: Step to compare with, rounded to the nearest recorded step. None selects the step of
            `at`, or the first step if a run is compared with itself.
    """
    known = catalogue.entry(run) is not None
    try:
        there = catalogue.look(run) if known else view
    except ComgraError as error:
        return Other(run, problem=f"Cannot compare with {run}: {error}")
    if there is view:
        steps = view.steps(at.type)
        first = int(steps[0]) if len(steps) else None
        return Other(
            "", view, first if step is None else nearest(steps, step), "", step is not None
        )
    type_ = at.type if at.type in there.types() else ""
    found = nearest(there.steps(type_), at.step if step is None else step)
    problem = "" if found is not None else f"{run} has no records yet."
    return Other(run, there, found, problem, step is not None)

"""What a run at a step is compared with: another run, or another step of the same."""

from __future__ import annotations

from dataclasses import dataclass

from comgra_decl.errors import ComgraError
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, nearest


@dataclass(frozen=True, slots=True)
class Other:
    """The other side of a comparison.

    `run` is its name, "" where it is the shown run itself. `view` and `step` are None where there
    is nothing to compare with; `problem` says why. `pinned` tells a step that someone chose.
    """

    run: str = ""
    view: RunView | None = None
    step: int | None = None
    problem: str = ""
    pinned: bool = False


def other_of(
    catalogue: Catalogue, view: RunView, at: Selection, *, run: str, step: int | None
) -> Other:
    """Returns what the selection is compared with.

    Args:
        catalogue: The runs there are.
        view: The run that is shown.
        at: What of it is shown.
        run: Name of the other run; "" or an unknown one: the shown run itself.
        step: The step to compare with; the nearest recorded one is taken. None: that of `at`, or
            the first one where a run is compared with itself.
    """
    known = catalogue.entry(run) is not None
    try:
        there = catalogue.look(run) if known else view
    except ComgraError as error:
        return Other(run, problem=f"{run} cannot be compared with: {error}")
    if there is view:
        steps = view.steps(at.type)
        first = int(steps[0]) if len(steps) else None
        return Other(
            "", view, first if step is None else nearest(steps, step), "", step is not None
        )
    type_ = at.type if at.type in there.types() else ""
    found = nearest(there.steps(type_), at.step if step is None else step)
    problem = "" if found is not None else f"{run} has no record yet."
    return Other(run, there, found, problem, step is not None)

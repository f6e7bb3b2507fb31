"""The selection of a page whose URL names none: the worst finding, else the loss."""

from __future__ import annotations

from typing import Any

from comgra_decl.viewer.model.findings import findings_of
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import nearest


def opening(view: RunView, *, step: int | None = None) -> dict[str, Any]:
    """Returns the first selection, by parameter of `ViewState`.

    It is the tensor of the most important finding about a tensor, at the step where it begins; in a
    run without findings, the loss at the last step; empty if the run has neither.

    Args:
        view: The run.
        step: A step that is already chosen; None lets the finding choose.
    """
    placed = (finding for finding in findings_of(view) if finding.place is not None)
    for finding in placed:
        place = finding.place
        assert place is not None
        if place.role not in view.roles(place.node):
            continue
        begin = nearest(view.steps(""), finding.first_step)
        at = {"node": place.node, "role": place.role, "iteration": place.iteration}
        return {**at, "step": begin if step is None else step}
    for slot in view.slots.values():
        if slot.kind == "loss" and slot.pass_ == "forward":
            return {"node": slot.node, "role": slot.role, "iteration": slot.iteration}
    return {}

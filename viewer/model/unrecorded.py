"""The reason why a tensor has no values at a step, and spec lines that would record them."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan, nan, prod

from comgra_decl.viewer.model.numbers import count
from comgra_decl.viewer.model.runview import RunView, Slot
from comgra_decl.viewer.model.selection import Selection


@dataclass(frozen=True, slots=True)
class Unrecorded:
    """The reason, and the spec lines to add; "" if no lines would help."""

    reason: str
    spec: str = ""


def why_unrecorded(view: RunView, slot: Slot | None, at: Selection) -> Unrecorded:
    """Return the reason why `slot` has no values at the selected step."""
    if at.step is None:
        return Unrecorded("No records yet.")
    if slot is None:
        return Unrecorded("This tensor was not recorded.")
    dims = [n for i, n in enumerate(view.shape(slot, at)) if i != slot.batch_dim]
    elements, limit = prod(dims), view.spec.values.max_elements
    if elements > limit:
        each = "" if slot.batch_dim is None else " per sample"
        return Unrecorded(
            f"{count(elements)} values{each} exceed the spec's limit of {count(limit)}.",
            f"values: {{max_elements: {elements}}}",
        )
    known = view.row(at.step, at.type, "mean").line(slot.id).get("nonfinite", nan)
    if isnan(known):
        return Unrecorded(f"This tensor was not recorded at step {at.step}.")
    return Unrecorded("The spec does not record values of this tensor.", asking(view, slot))


def asking(view: RunView, slot: Slot) -> str:
    """Return the spec entry that records the values of a slot."""
    paths = [m.get("path") for m in view.run.modules if m.get("node") == slot.node]
    capture = _capture(slot)
    if paths and paths[0]:
        select, name = f'"{paths[0]}"', str(paths[0]).rpartition(".")[2]
    else:
        select, name = "...", "mine"  # the user copies the selector of the existing entry
    return f"nodes:\n  {name}_values: {{select: {select}, capture: [{capture}], values: true}}"


def _capture(slot: Slot) -> str:
    if slot.kind == "parameter":
        forward = "parameter"
    else:
        forward = "input" if slot.role.startswith("input") else "output"
    if slot.pass_ == "forward":
        return forward
    return f"{forward}_grad" if slot.pass_.startswith("grad") else slot.pass_

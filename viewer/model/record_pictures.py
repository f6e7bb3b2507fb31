"""Pictures that a run's records suffice for, and the lines of the spec that fill an empty one."""

from __future__ import annotations

import json
from dataclasses import dataclass

from comgra_decl.errors import ComgraError
from comgra_decl.query import Picture
from comgra_decl.records import PROBE_PREFIX
from comgra_decl.viewer.model.runview import RunView

_MOST_NAMES = 32
"""Most nodes of a table that compares all of them."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A picture computed from the records, or the reason why there is none.

    Attributes:
        name: the name of the picture, as in `run.pictures`.
        picture: the picture; None if there is none.
        why: why there is none.
        lines: YAML of the spec that would fill it; "" if no spec would.
    """

    name: str
    picture: Picture | None = None
    why: str = ""
    lines: str = ""


def of_step(view: RunView, name: str, type_: str, step: int) -> Computed:
    """Return a picture of all nodes, or of the model's predictions, at a step of a probe."""

    def compute() -> Computed:
        try:
            found = view.run.picture(name, step, type=type_)
        except ComgraError as error:
            return Computed(name, None, str(error), _of_predictions(view, name, type_, step))
        if name == "likeness":
            return _checked_likeness(view, found, type_)
        return Computed(name, found)

    return view.ever((name, type_, step), compute)


def _checked_likeness(view: RunView, found: Picture, type_: str) -> Computed:
    if len(found.values) > _MOST_NAMES:
        why = f"{len(found.values)} nodes are too many to show; select fewer in the spec."
        few = probe_lines(view, type_, nodes='{few: {select: "*"}}')
        return Computed(found.name, None, why, few)
    if (found.values == found.values).any():  # not NaN
        return Computed(found.name, found)
    why = "CKA needs at least four samples; declare more with the probe's `samples`."
    return Computed(found.name, None, why, probe_lines(view, type_))


def _of_predictions(view: RunView, name: str, type_: str, step: int) -> str:
    """Return the lines that lack for a picture of all layers or of the predictions."""
    if name == "likeness":
        return probe_lines(view, type_)
    if name != "linear_probe" and not _may_be_classes(view):
        return ""  # no spec makes classes of the outputs of another model
    labels = view.run.samples(step, type=type_)["label"]
    if labels.isna().all() and _is_given(view, type_):
        some = ", ".join(str(i % 2) for i in range(len(labels)))
        return f"probes:\n  {_name(type_)}:\n    labels: [{some}]  # the class of each sample"
    if labels.isna().all() and not _has_classes(view):
        batch = "batch: {_target_: my_project.probe}  # returns arguments and labels"
        return f"probes:\n  {_name(type_)}:\n    {batch}"
    return probe_lines(view, type_, samples="{count: 8, by: target}")


def _has_classes(view: RunView) -> bool:
    """Return whether a target can be one class per sample; True if none was recorded."""
    targets = [s for s in view.slots.values() if s.kind == "target"]
    return not targets or any("int" in s.dtype and len(s.shape) == 1 for s in targets)


def _may_be_classes(view: RunView) -> bool:
    """Return whether the model's outputs, if they were recorded, can be [samples, classes]."""
    described = view.run.document("modules") or []
    roots = {entry["node"] for entry in described if entry["path"] == ""}
    outputs = [s for s in view.slots.values() if s.node in roots and s.pass_ == "forward"]
    return not outputs or any(len(s.shape) == 2 and s.shape[1] > 1 for s in outputs)


def _is_given(view: RunView, type_: str) -> bool:
    declared = view.run.spec.probes.get(_name(type_))
    return declared is not None and declared.batch is not None


def _name(type_: str) -> str:
    return type_.removeprefix(PROBE_PREFIX) or "eyes"


def probe_lines(
    view: RunView, type_: str, *, nodes: str = '{all: {select: "**"}}', samples: str = "{count: 8}"
) -> str:
    """Return the lines that make a probe keep the values of nodes."""
    declared = view.run.spec.probes.get(_name(type_))
    keys = []
    if not _is_given(view, type_):  # a probe with a batch of its own takes no samples
        keys.append(f"samples: {samples}")
    if not keys or (declared is not None and not declared.values):
        keys.append("values: true")
    return f"nodes: {nodes}\nprobes:\n  {_name(type_)}: {{{', '.join(keys)}}}"


def selected(node: str) -> str:
    """Return a node as a value of `select`."""
    return json.dumps(node, ensure_ascii=False)


def without_values(view: RunView, name: str, type_: str, node: str, why: str) -> Computed:
    """Return an empty picture of a node whose values a probe would have to keep."""
    if _is_of_samples(view, node):
        kept = f"{{all: {{select: {selected(node)}}}}}"
        return Computed(name, None, why, probe_lines(view, type_, nodes=kept))
    other = next((n for n in view.nodes if _is_of_samples(view, n)), "")
    if not other:
        return Computed(name, None, why, probe_lines(view, type_))
    return Computed(name, None, f"{why} Select a node with outputs for samples, such as {other}.")


def _is_of_samples(view: RunView, node: str) -> bool:
    """Return whether a node has outputs for the samples of a batch."""
    lead = view.lead(node) if node in view.nodes else None
    roles = () if lead is None else view.roles(node)
    slots = [view.first_slot(node, role) for role in roles]
    return any(s.kind == "computed" and s.batch_dim is not None for s in slots)

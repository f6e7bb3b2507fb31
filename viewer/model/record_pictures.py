"""Pictures that a run's records suffice for, and the lines of the spec that fill an empty one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from comgra_decl.errors import ComgraError
from comgra_decl.query import Picture
from comgra_decl.records import PROBE_PREFIX
from comgra_decl.viewer.model.attention import layers
from comgra_decl.viewer.model.images import largest_magnitude
from comgra_decl.viewer.model.runview import RunView, Slot
from comgra_decl.viewer.model.selection import nearest

_MOST_NAMES = 32
"""Most nodes of a table that compares all of them."""

MOST_VALUES = 20_000_000
"""Most values of all steps that are read while one waits."""

_MOST_WORK = 2_000_000_000
"""Most multiplications while one waits, for the singular values of a weight."""

_MOST_CURVES = 8
"""Most attention heads whose scores are drawn."""

_ATTENTION = """\
nodes:
  all: {select: "**", capture: [input, output], values: true}
  fused: {select: {function: F.scaled_dot_product_attention}, attention: {recompute: true},
    values: true, optional: true}
  softmax: {select: {function: torch.softmax}, values: true, optional: true}"""
"""The lines that record attention weights and tokens."""

OF_NODE = ("dead_units", "likeness_over_steps")
"""Pictures of one node at all steps."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A picture computed from the records, or the reason why there is none.

    Attributes:
        name: the name of the picture, as in `run.pictures`.
        picture: the picture; None if there is none.
        why: why there is none.
        lines: YAML of the spec that would fill it; "" if no spec would.
        node: the node that it shows; "" if it shows several, or the whole model.
        step: the step to mark in a picture of several steps.
        high: the largest magnitude at any step, if it has one colour scale for all steps.
        sample: the sample that it shows.
        beside: the same picture at another step.
    """

    name: str
    picture: Picture | None = None
    why: str = ""
    lines: str = ""
    node: str = ""
    step: int = -1
    high: float = 0.0
    sample: int = 0
    beside: Picture | None = None


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
    described = view.described
    roots = {entry["node"] for entry in described if entry["path"] == ""}
    outputs = [s for s in view.slots.values() if s.node in roots and s.pass_ == "forward"]
    return not outputs or any(len(s.shape) == 2 and s.shape[1] > 1 for s in outputs)


def _is_given(view: RunView, type_: str) -> bool:
    declared = view.spec.probes.get(_name(type_))
    return declared is not None and declared.batch is not None


def _name(type_: str) -> str:
    return type_.removeprefix(PROBE_PREFIX) or "eyes"


def probe_lines(
    view: RunView, type_: str, *, nodes: str = '{all: {select: "**"}}', samples: str = "{count: 8}"
) -> str:
    """Return the lines that make a probe keep the values of nodes."""
    declared = view.spec.probes.get(_name(type_))
    keys = []
    if not _is_given(view, type_):  # a probe with a batch of its own takes no samples
        keys.append(f"samples: {samples}")
    if not keys or (declared is not None and not declared.values):
        keys.append("values: true")
    return f"nodes: {nodes}\nprobes:\n  {_name(type_)}: {{{', '.join(keys)}}}"


def selected(node: str) -> str:
    """Return a node as a value of `select`."""
    return json.dumps(node, ensure_ascii=False)


# -- of one node -------------------------------------------------------------------------------


def of_node(view: RunView, type_: str, step: int, node: str, sample: int) -> tuple[Computed, ...]:
    """Return the pictures of the selected node in the records of a probe."""
    maps = replace(_feature_maps(view, type_, step, node), sample=sample)
    return (maps, *(_over_steps(view, name, type_, step, node) for name in OF_NODE))


def _feature_maps(view: RunView, type_: str, step: int, node: str) -> Computed:
    maps = [s.node for s in view.slots.values() if _has_places(s)]
    if node not in maps:
        why = _without(node, "output with channels and places", dict.fromkeys(maps))
        return Computed("feature_maps", None, why)

    def compute(at: int) -> Computed:
        try:
            return Computed("feature_maps", view.run.picture("feature_maps", at, node, type=type_))
        except ComgraError as error:
            return without_values(view, "feature_maps", type_, node, str(error))

    def at_step(at: int) -> Computed:
        return view.ever(("feature_maps", type_, node, at), lambda: compute(at))

    found = replace(at_step(step), node=node, step=step)
    if found.picture is None:
        return found
    return replace(found, high=_largest(view, node, type_, step, at_step))


def _largest(
    view: RunView, node: str, type_: str, step: int, at_step: Callable[[int], Computed]
) -> float:
    """Return the largest magnitude at any step, or at `step` if all would take too long."""
    steps = view.steps(type_).tolist()
    shared = size_of(view, node) * len(steps) <= MOST_VALUES

    def largest() -> float:
        pictures = [at_step(each).picture for each in (steps if shared else [step])]
        return max(largest_magnitude(p.values) for p in pictures if p is not None)

    name = at_step(step).name
    return view.now(("largest", name, type_, node, -1 if shared else step), largest)


def _over_steps(view: RunView, name: str, type_: str, step: int, node: str) -> Computed:
    def compute() -> Computed:
        steps = len(view.steps(type_))
        if size_of(view, node) * steps > MOST_VALUES:
            why = f"{steps} steps of {node} take too long to read here; call run.picture({name!r})."
            return Computed(name, None, why)
        try:
            found = view.run.picture(name, node=node, type=type_)
        except ComgraError as error:
            return without_values(view, name, type_, node, str(error))
        if name == "likeness_over_steps" and not np.isfinite(found.values).any():
            why = "CKA needs at least four samples whose values differ."
            return Computed(name, None, why, probe_lines(view, type_))
        return Computed(name, found)

    return replace(view.now((name, type_, node), compute), node=node, step=step)


def size_of(view: RunView, node: str) -> int:
    """Return the number of values of a node's first output."""
    slots = [s for s in view.slots.values() if s.node == node and s.role.startswith("output")]
    return int(np.prod(slots[0].shape)) if slots else 0


# -- of attention heads ------------------------------------------------------------------------


def of_heads(view: RunView, step: int | None) -> tuple[Computed, ...]:
    """Return the induction scores of the heads with the highest ones, over the steps of training.

    Args:
        view: the run.
        step: the step to mark; None for the last.

    Returns:
        Nothing for a run without attention to tokens.
    """
    heads, steps = layers(view), view.steps("").tolist()
    if not heads or not any(map(_is_tokens, view.slots.values())):
        return ()
    if len(steps) * sum(_kept_of(view, slot) for slot in heads) > MOST_VALUES:
        why = f"{len(steps)} steps take too long to read here; call run.induction()."
        return (Computed("induction", None, why),)
    known = [found for at in steps if (found := _induction(view, at)) is not None]
    if known:
        return (_strongest(pd.concat(known, axis=1), step),)
    why = "No record contains the values of attention weights and of the tokens."
    return (Computed("induction", None, why, _ATTENTION),)


def _kept_of(view: RunView, slot: Slot) -> int:
    """Return the number of values of a tensor that a record keeps."""
    return min(slot.shape[0], view.spec.samples.count) * int(np.prod(slot.shape[1:]))


def _induction(view: RunView, step: int) -> pd.Series[float] | None:
    """Return the scores of one step by node, iteration and head; None without values at it."""

    def compute() -> pd.Series[float] | None:
        try:
            found = view.run.induction(step)["score"]
        except ComgraError:
            return None
        return found.droplevel("step").rename(step)

    return view.ever(("induction", step), compute)


def _strongest(scores: pd.DataFrame, step: int | None) -> Computed:
    """Return the curves of the heads whose scores are the highest at any step.

    Args:
        scores: a row for each head, a column for each step.
        step: the step to mark.
    """
    order = scores.max(axis=1).dropna().sort_values(ascending=False, kind="stable").index
    if not len(order):
        return Computed("induction", None, "No recorded sequence repeats a token.")
    several = scores.index.get_level_values("iteration").max() > 0
    chosen = scores.loc[order[:_MOST_CURVES]]
    names = [
        f"{node}, head {head}" + (f", iteration {call}" if several else "")
        for node, call, head in chosen.index
    ]
    steps = chosen.columns.to_numpy(np.int64)
    picture = Picture(
        "induction",
        chosen.to_numpy(np.float64),
        ("head", "step"),
        labels={"head": names, "step": steps.tolist()},
        facts={"nodes": [str(node) for node, _, _ in chosen.index], "heads": len(scores)},
    )
    high = float(np.nanmax(picture.values))
    return Computed("induction", picture, step=nearest(steps, step) or 0, high=high)


def _is_tokens(slot: Slot) -> bool:
    return slot.kind == "input" and "int" in slot.dtype and len(slot.shape) == 2


# -- of training -------------------------------------------------------------------------------


def of_training(view: RunView, step: int | None, node: str) -> tuple[Computed, ...]:
    """Return the pictures that the records of training suffice for, at the nearest step."""
    at = nearest(view.steps(""), step)
    if at is None:
        return ()
    makers = (_filters, _spectrum, _loss_cam)
    found = (_flow(view, at), *(make(view, at, node) for make in makers))
    return tuple(replace(each, step=at) for each in found)


def _flow(view: RunView, step: int) -> Computed:
    def compute() -> Computed:
        try:
            picture = view.run.picture("flow", step)
            own = [_node_of(view, name) for name in picture.labels["node"]]
            return Computed("flow", replace(picture, facts={"nodes": own}))
        except ComgraError as error:
            lines = 'nodes:\n  all: {select: "**", capture: [output, output_grad]}'
            known = [str(entry) for entry in view.spec.stats if isinstance(entry, str)]
            more = "" if "l2" in known else f"\nstats: [{', '.join([*known, 'l2'])}]"
            return Computed("flow", None, str(error), lines + more)

    found = view.ever(("flow", step), compute)
    if found.picture is None or not len(found.picture.values):
        return replace(found, picture=None, why=found.why or "no gradients were recorded.")
    return found


def _node_of(view: RunView, name: str) -> str:
    """Return the node of a tensor that is named after its node and, if need be, its role."""
    while name and name not in view.nodes:
        name = name.rpartition(".")[0]
    return name


def _spectrum(view: RunView, step: int, node: str) -> Computed:
    weight = view.passes(node, "weight", 0).get("forward")
    shape = _weights(view).get(node, ())
    if len(shape) < 2:
        return Computed("spectrum", None, _without(node, "weight that is a matrix", _weights(view)))
    if weight is None:
        return Computed(
            "spectrum", None, "Its weight was not recorded.", _kept_weight(view, node), node
        )
    rows, columns = shape[0], int(np.prod(shape[1:]))
    steps = view.steps("")
    work = rows * columns * min(rows, columns)
    if work > _MOST_WORK:
        why = f"a weight of {rows} x {columns} takes too long here; call run.picture('spectrum')."
        return Computed("spectrum", None, why, node=node)
    every = work * len(steps) <= _MOST_WORK

    def compute() -> Computed:
        try:
            found = view.run.picture("spectrum", None if every else step, node)
        except ComgraError as error:
            return Computed("spectrum", None, str(error), _kept_weight(view, node))
        return Computed("spectrum", found)

    key = ("spectrum", node, None if every else step)
    return replace((view.now if every else view.ever)(key, compute), node=node)


def _filters(view: RunView, step: int, node: str) -> Computed:
    shapes = {name: shape for name, shape in _weights(view).items() if len(shape) > 2}
    if node not in shapes:
        return Computed("filters", None, _without(node, "weight that consists of kernels", shapes))

    def compute(at: int) -> Computed:
        try:
            return Computed("filters", view.run.picture("filters", at, node))
        except ComgraError as error:
            return Computed("filters", None, str(error), _kept_weight(view, node))

    now, first = (
        view.ever(("filters", node, at), lambda at=at: compute(at))  # type: ignore[misc]
        for at in (step, int(view.steps("")[0]))
    )
    return replace(now, node=node, beside=first.picture)


def _weights(view: RunView) -> dict[str, tuple[int, ...]]:
    """Return the shape of the weight of each node that has one with rows and columns."""
    described = view.described
    shapes = {
        entry["node"]: tuple(entry["parameters"].get("weight", {}).get("shape", ()))
        for entry in described
    }
    return {node: shape for node, shape in shapes.items() if len(shape) > 1}


def _without(node: str, what: str, others: Iterable[str]) -> str:
    """Return the sentence that a node lacks something, and which node has it."""
    other = next(iter(others), "")
    more = f"; select one that does, such as {other}" if other else ""
    return f"{node} has no {what}{more}."


def _kept_weight(view: RunView, node: str) -> str:
    entry = f"{{select: {selected(node)}, capture: [parameter], values: true}}"
    return f"nodes:\n  weights: {entry}" + _room(view, _weights(view)[node])


def _room(view: RunView, shape: Iterable[int]) -> str:
    """Return the line that lets values of a tensor this large be recorded; "" if they may be."""
    elements = math.prod(shape)
    if elements <= view.spec.values.max_elements:
        return ""
    return f"\nvalues: {{max_elements: {elements}}}"


def _loss_cam(view: RunView, step: int, node: str) -> Computed:
    maps = {s.node: s.shape for s in view.slots.values() if _has_places(s)}
    if node not in maps:
        return Computed("loss_cam", None, _without(node, "output with channels and places", maps))

    def compute(at: int) -> Computed:
        try:
            return Computed("loss_cam", view.run.picture("loss_cam", at, node))
        except ComgraError as error:
            entry = f"{{select: {selected(node)}, capture: [output, output_grad], values: true}}"
            lines = f"nodes:\n  maps: {entry}" + _room(view, maps[node][1:])
            return Computed("loss_cam", None, str(error), lines)

    def at_step(at: int) -> Computed:
        return view.ever(("loss_cam", node, at), lambda: compute(at))

    found = at_step(step)
    if found.picture is None:
        return replace(found, node=node)
    return replace(found, node=node, high=_largest(view, node, "", step, at_step))


def _has_places(slot: Slot) -> bool:
    """Return whether a tensor is an output [samples, channels, places ...]."""
    own = (slot.role, slot.pass_, slot.kind) == ("output", "forward", "computed")
    dims = (
        3 if "Conv" in slot.module_class else 4
    )  # others with 3 may be [samples, places, features]
    return own and slot.batch_dim == 0 and len(slot.shape) >= dims


# -- the lines that fill an empty one ----------------------------------------------------------


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

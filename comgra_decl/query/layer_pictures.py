"""Pictures of single layers: their maps, weights and gradients."""

from __future__ import annotations

import numpy as np

from comgra_decl.errors import UnknownNameError, shown
from comgra_decl.pictures import units
from comgra_decl.records import SAMPLE
from comgra_decl.spec.axes import unit_axis

from .picture import Picture
from .recorded_values import PLACES, RecordedValues


def feature_maps(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return the output of a layer with channels and positions; see `Run.picture`."""
    wanted, at = read.wanted("feature_maps", node), read.step(step, read.type)
    values = read.value(wanted, at)
    if values.ndim < 3:
        raise UnknownNameError(f"{wanted!r} has no maps; its output is {[*values.shape]}.")
    names = read.axes(read.slot(wanted), values.shape[1:])
    return Picture("feature_maps", values, (SAMPLE, *names), wanted, at, {SAMPLE: read.labels(at)})


def filters(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return the kernels of a convolution at a training step; see `Run.picture`."""
    wanted, at = read.wanted("filters", node), read.step(step, read.given)
    values = read.run.slot(wanted, role="weight").value(at, type=read.given)[0]
    if values.ndim < 3:
        raise UnknownNameError(f"{wanted!r} has no kernels; its weight is {[*values.shape]}.")
    places = PLACES[2 - values.ndim :] if values.ndim > 3 else ("length",)
    return Picture("filters", values, ("filter", "channel", *places), wanted, at)


def loss_cam(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return Grad-CAM of the loss at a training step; see `Run.picture`."""
    wanted = read.wanted("loss_cam", node)
    slot, at, type_ = read.run.slot(wanted), read.step(step, read.given), read.given
    output, gradient = slot.value(at, type=type_), slot.grad.value(at, type=type_)
    if output.ndim < 3:
        raise UnknownNameError(f"{wanted!r} has no places to map.")
    names = read.axes(read.slot(wanted), output.shape[1:])
    channels = unit_axis(names)
    cam = units.loss_cam(output, gradient, 1 + channels)
    names = (*names[:channels], *names[channels + 1 :])
    labels = {SAMPLE: read.run.samples(at, type=type_)["label"].tolist()}
    return Picture("loss_cam", cam, (SAMPLE, *names), wanted, at, labels)


def spectrum(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return the singular values of a weight, by step; see `Run.picture`."""
    wanted = read.wanted("spectrum", node)
    weight = read.run.slot(wanted, role="weight")
    found = {}
    for at in read.steps_of(read.given) if step is None else [step]:
        try:
            found[at] = units.spectrum(weight.value(at, type=read.given)[0])
        except UnknownNameError:
            continue
    if not found:
        raise UnknownNameError(
            f"no values of the weight of {wanted!r} were recorded; set `capture: parameter` "
            "and `values: true` for it in the spec, and see `values.max_elements`."
        )
    labels = {"step": [*found]}
    axes = ("step", "singular value")
    return Picture("spectrum", np.stack([*found.values()]), axes, wanted, step, labels)


def flow(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return the gradient norms of all nodes at a step; see `Run.picture`."""
    del node  # all of them
    at = read.step(step, read.given)
    row = read.run.row(at, type=read.given)
    passes = row.index.get_level_values("pass")
    if "l2" not in row:
        raise UnknownNameError("the statistic 'l2' was not recorded; add it to `stats`.")
    norms = row["l2"][passes == "grad"].dropna()
    if read.given is not None and norms.empty:
        raise UnknownNameError(
            f"no gradients were recorded with type {shown(read.given)}; omit `type` for those "
            "of training."
        )
    names = norms.index.get_level_values("node").tolist()
    order = {name: i for i, name in enumerate(read.nodes())}
    ranked = sorted(range(len(names)), key=lambda i: order[names[i]])
    values = norms.to_numpy(np.float64)[ranked]
    roles = norms.index.get_level_values("role").tolist()
    own = [n if r == "output" else f"{n}.{r}" for n, r in zip(names, roles, strict=True)]
    return Picture("flow", values, ("node",), None, at, {"node": [own[i] for i in ranked]})

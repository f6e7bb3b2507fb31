"""Pictures of a run: those that its probes recorded, and those computed from its records."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from comgra_decl.errors import SelectionError, UnknownNameError, did_you_mean, shown
from comgra_decl.pictures import cloud, layouts, likeness, predictions, units
from comgra_decl.pictures.cloud import Basis
from comgra_decl.records import (
    EIGENVALUES,
    LENS_TOKENS,
    PICTURE_PREFIX,
    PICTURES,
    PROBE_PREFIX,
    SAMPLE,
    SLICE,
    SlotInfo,
)
from comgra_decl.spec.pictures import HessianSpec

from .preview import axis_names

if TYPE_CHECKING:
    from .run import Run
    from .snapshot import Snapshot

_OUTPUT = re.compile(r"output(?:[.\[].*)?")
"""Roles of what a module returns: one tensor, or a part of a tuple, a dict or an object."""

_UNITS = ("channel", "feature", "unit")
"""Possible names of the axis whose entries are the units of a layer."""

_MAPS = ("grad_cam", "occlusion")
"""Methods whose pictures have one number for each position, and no channels."""

_PLACES = ("depth", "height", "width")

_RIDGE = 1.0
"""Penalty of the linear model that predicts classes from a layer; scikit-learn's default."""


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture of a run; converts to a numpy array.

        >>> run.picture("cam", 400, "conv2")
        <Picture 'cam' of 'conv2' at step 400: sample 8, height 6, width 6>

    Attributes:
        name: its name.
        values: the numbers; NaN where something is missing.
        axes: the name of each axis of `values`.
        node: the node that it shows; None if it shows several nodes.
        step: the step that it shows; None if it shows several steps.
        labels: the names of the entries of an axis, such as nodes or steps, by axis.
        facts: additional facts, such as the "gap" of integrated gradients: see `records.PICTURES`.
        basis: the axes of a cloud.
    """

    name: str
    values: NDArray[Any]
    axes: tuple[str, ...]
    node: str | None = None
    step: int | None = None
    labels: dict[str, list[Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    basis: Basis | None = None

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the values."""
        return np.array(self.values, dtype) if copy else np.asarray(self.values, dtype)

    def __repr__(self) -> str:
        of = "" if self.node is None else f" of {self.node!r}"
        at = "" if self.step is None else f" at step {self.step}"
        sizes = (f"{n} {size}" for n, size in zip(self.axes, self.values.shape, strict=True))
        return f"<Picture {self.name!r}{of}{at}: {', '.join(sizes)}>"


class Pictures:
    """The pictures of one run.

    The records of the first probe are used, because it has the same samples at every step. Without
    a probe, the records of training steps are used, whose samples differ.
    """

    def __init__(self, run: Run, snapshot: Snapshot, type_: str | None) -> None:
        self._run = run
        self._snapshot = snapshot
        probes = [t for t in run.types if t.startswith(PROBE_PREFIX)]
        self._given = type_
        self._type = type_ if type_ is not None else probes[0] if probes else None

    # -- names

    @property
    def names(self) -> list[str]:
        """The recorded pictures, followed by those that can be computed from the records."""
        return [*self._recorded, *self._COMPUTED]

    @property
    def _recorded(self) -> dict[str, list[SlotInfo]]:
        """The slots of each recorded picture."""
        found: dict[str, list[SlotInfo]] = {}
        for slot in self._snapshot.view.slots:
            if slot.key.pass_.startswith(PICTURE_PREFIX):
                found.setdefault(slot.key.pass_.removeprefix(PICTURE_PREFIX), []).append(slot)
        return found

    def facts(self, step: int) -> dict[str, dict[str, Any]]:
        """Return the facts about the pictures of a step; see `Run.picture_facts`."""
        record = self._snapshot.record(step, self._type)
        return dict(self._snapshot.view.extra(record).get(PICTURES, {}))

    def named(self, name: str, step: int | None, node: str | None) -> Picture:
        """Return a picture; see `Run.picture`."""
        recorded = self._recorded
        if name in recorded:
            return self._of_record(name, recorded[name], step, node)
        if name not in self._COMPUTED:
            known = self.names
            self._check_refusal(name, step)
            raise UnknownNameError(
                f"there is no picture {shown(name)}{did_you_mean(name, known) or '.'} "
                f"This run has {', '.join(map(repr, known))}."
            )
        return self._COMPUTED[name](self, step, node)

    def _check_refusal(self, name: str, step: int | None) -> None:
        """Raise the reason why a declared picture could not be made, if it is known."""
        declared = self._run.spec.pictures.get(name)
        type_ = None if declared is None else f"{PROBE_PREFIX}{declared.of}"
        if type_ not in self._run.types:
            return
        records = self._snapshot.records(type_).tolist()
        for record in reversed(records):
            at = int(self._snapshot.steps[record])
            fact = self._snapshot.view.extra(record).get(PICTURES, {}).get(name, {})
            if step in (None, at) and "refused" in fact:
                raise UnknownNameError(
                    f"the picture {name!r} could not be made at step {at}: {fact['refused']}."
                )

    def _of_record(
        self, name: str, slots: list[SlotInfo], step: int | None, node: str | None
    ) -> Picture:
        if slots[0].key.role.partition(".")[0] in (EIGENVALUES, SLICE):
            return self._landscape(name, slots, step, node)
        beside = {slot.key: slot for slot in slots if slot.key.role.endswith(LENS_TOKENS)}
        slots = [slot for slot in slots if slot.key not in beside]
        nodes = [slot.key.node for slot in slots]
        if node is None and len(slots) > 1:
            raise UnknownNameError(
                f"the picture {name!r} shows several nodes; pass node, one of "
                f"{', '.join(map(repr, nodes))}."
            )
        slot = next((s for s in slots if node in (None, s.key.node)), None)
        if slot is None:
            raise UnknownNameError(
                f"the picture {name!r} does not show {shown(node)}{did_you_mean(node, nodes)}; it "
                f"shows {', '.join(map(repr, nodes))}."
            )
        type_ = self._type_of(slot)
        if self._given not in (None, type_):
            raise UnknownNameError(
                f"the picture {name!r} belongs to {type_!r}, not {shown(self._given)}; omit `type`."
            )
        at = self._step(step, type_)
        values = self._run.slot(
            slot.key.node, role=slot.key.role, of=slot.key.pass_, iteration=slot.key.iteration
        ).value(at, type=type_)
        record = self._snapshot.record(at, type_)
        facts = dict(self._snapshot.view.extra(record).get(PICTURES, {}).get(name, {}))
        tokens = beside.get(slot.key._replace(role=slot.key.role + LENS_TOKENS))
        if tokens is not None:
            facts["tokens"] = self._snapshot.view.value(record, tokens.id)
        dims = axis_names(slot, values.shape[1:], whole_numbers=False)
        if facts.get("method") in _MAPS and len(dims) <= len(_PLACES):
            dims = _PLACES[-len(dims) :] if len(dims) > 1 else ("length",)
        if facts.get("method") == "logit_lens" and dims:
            dims = (*dims[:-1], "position")
        if "position" in facts and dims:
            dims = ("position", *dims[1:])
        labels = {SAMPLE: self._run.samples(at, type=type_)["label"].tolist()}
        return Picture(name, values, (SAMPLE, *dims), slot.key.node, at, labels, facts)

    def _type_of(self, slot: SlotInfo) -> str:
        """Return the probe on which a picture is based, according to the run's spec."""
        name = slot.key.pass_.removeprefix(PICTURE_PREFIX)
        declared = self._run.spec.pictures.get(name)
        return f"{PROBE_PREFIX}{declared.of}" if declared is not None else str(self._type)

    def _landscape(
        self, name: str, slots: list[SlotInfo], step: int | None, node: str | None
    ) -> Picture:
        """Return a recorded picture of a whole model, by step."""
        main, own = slots[0], slots[0].key.node
        if node not in (None, own):
            raise UnknownNameError(f"the picture {name!r} shows {own!r}, not {shown(node)}.")
        type_ = self._type_of(main)
        view, found = self._snapshot.view, {}
        for at in self._steps_of(type_) if step is None else [step]:
            value = view.value(self._snapshot.record(at, type_), main.id)
            if value is not None:
                found[at] = value[0]
        if not found:
            raise UnknownNameError(f"the picture {name!r} was not made at step {step}.")
        last = [*found][-1]
        record = self._snapshot.record(last, type_)
        facts = dict(view.extra(record).get(PICTURES, {}).get(name, {}))
        for slot in slots[1:]:
            part = view.value(record, slot.id)
            if part is not None:
                facts[slot.key.role.rpartition(".")[2]] = part[0]
        # A resumed run may declare another size; those steps have no place in the same array.
        found = {at: value for at, value in found.items() if value.shape == found[last].shape}
        labels: dict[str, list[Any]] = {"step": [*found]}
        if main.key.role == SLICE:
            names = ("first direction", "second direction")[: found[last].ndim]
            labels.update((each, facts.get("coordinates", [])) for each in names)
        else:
            names, labels["eigenvalue"] = ("eigenvalue",), self._ranks(name, len(found[last]))
        return Picture(
            name, np.stack([*found.values()]), ("step", *names), own, step, labels, facts
        )

    def _ranks(self, name: str, count: int) -> list[str]:
        """Return the rank of each eigenvalue, from "1" for the largest to "-1" for the smallest."""
        declared = self._run.spec.pictures.get(name)
        lowest = declared.lowest if isinstance(declared, HessianSpec) else 0
        top = count - lowest
        return [str(i + 1 if i < top else i - count) for i in range(count)]

    # -- computed from records

    def layout(self, node: str, method: str) -> Picture:
        """Return a layout of a node's values by t-SNE or UMAP; see `Run.embedding`."""
        values = self._over_steps(self._slot(node), self._steps(), node)
        points = np.stack([v.reshape(len(v), -1) for v in values.values()]).astype(np.float64)
        try:
            placed = layouts.layout(points, method)
        except ValueError as error:
            raise UnknownNameError(f"{node!r} has no cloud: {error}.") from None
        labels = {"step": [*values], SAMPLE: self._labels([*values][-1])}
        facts = {"method": method, "trustworthiness": layouts.trustworthiness(points, placed)}
        axes = ("step", SAMPLE, "component")
        return Picture("cloud", placed, axes, node, None, labels, facts)

    def embedding(self, node: str, basis: str | Basis = "all") -> Picture:
        """Return a cloud of a node's values; see `Run.embedding`."""
        slot, steps = self._slot(node), self._steps()
        values = self._over_steps(slot, steps, node)
        points = np.stack([v.reshape(len(v), -1) for v in values.values()])
        if isinstance(basis, Basis):
            used = basis
            if len(basis.mean) != points.shape[-1]:
                raise SelectionError(
                    f"the basis has {len(basis.mean)} features, but {node!r} has "
                    f"{points.shape[-1]}; pass a basis of this node."
                )
        elif basis in ("all", "last"):
            try:
                used = cloud.fitted(points if basis == "all" else points[-1:])
            except ValueError as error:
                raise UnknownNameError(f"{node!r} has no cloud: {error}.") from None
        else:
            raise UnknownNameError(f"basis={shown(basis)} is not 'all', 'last' or a basis.")
        labels = {"step": [*values], SAMPLE: self._labels([*values][-1])}
        axes = ("step", SAMPLE, "component")
        return Picture("cloud", used.project(points), axes, node, None, labels, basis=used)

    def similarity(self, first: str, second: str, step: int | None) -> float:
        """Return the CKA of two nodes at a step; see `Run.similarity`."""
        at = self._step(step, self._type)
        return likeness.cka(self._value(first, at), self._value(second, at))

    def _layers(self, step: int | None, node: str | None) -> Picture:
        at = self._step(step, self._type)
        values = self._all_values(at)
        matrix = likeness.cka_matrix([*values.values()])
        names = [*values]
        labels = {"node": names, "other node": names}
        return Picture("likeness", matrix, ("node", "other node"), None, at, labels)

    def _over_time(self, step: int | None, node: str | None) -> Picture:
        wanted = self._wanted("likeness_over_steps", node)
        values = self._over_steps(self._slot(wanted), self._steps(), wanted)
        matrix = likeness.cka_matrix([*values.values()])
        labels = {"step": [*values], "other step": [*values]}
        axes = ("step", "other step")
        return Picture("likeness_over_steps", matrix, axes, wanted, None, labels)

    def _confusion(self, step: int | None, node: str | None) -> Picture:
        output = node or self._output()
        steps = self._steps() if step is None else [self._step(step, self._type)]
        counts = [predictions.confusion(*self._scored(output, at)) for at in steps]
        labels = {"step": steps}
        axes = ("step", "class", "predicted class")
        return Picture("confusion", np.stack(counts), axes, output, step, labels)

    def _reliability(self, step: int | None, node: str | None) -> Picture:
        output, at = node or self._output(), self._step(step, self._type)
        values = predictions.reliability(*self._scored(output, at))
        labels = {"quantity": ["confidence", "accuracy", "samples"]}
        return Picture("reliability", values, ("bin", "quantity"), output, at, labels)

    def _linear(self, step: int | None, node: str | None) -> Picture:
        steps = self._steps() if step is None else [self._step(step, self._type)]
        names = [*self._all_values(steps[-1])] if node is None else [node]
        found = np.full((len(steps), len(names)), np.nan)
        facts: dict[str, Any] = {"fitted": [], "tested": []}
        usable = False
        for i, at in enumerate(steps):
            classes = self._classes(at)
            held_out = predictions.every_other(classes)
            facts["fitted"].append(int((~held_out).sum()))
            facts["tested"].append(int(held_out.sum()))
            usable = usable or (any(held_out) and len({*classes.tolist()}) > 1)
            for j, name in enumerate(names):
                value = self._value(name, at)[: len(classes)]
                found[i, j] = predictions.linear_accuracy(
                    value, classes, held_out=held_out, ridge=_RIDGE
                )
        if not usable:
            raise UnknownNameError(
                "a linear probe needs samples of two classes, at least one of them with two "
                f"samples; those of step {steps[-1]} have the classes {classes.tolist()}. Raise "
                "`samples.count`, or set `samples.by` to have the same number of each class."
            )
        labels: dict[str, list[Any]] = {"step": steps, "node": names}
        return Picture("linear_probe", found, ("step", "node"), node, step, labels, facts)

    def _dead(self, step: int | None, node: str | None) -> Picture:
        wanted = self._wanted("dead_units", node)
        slot = self._slot(wanted)
        values = self._over_steps(slot, self._steps(), wanted)
        newest = [*values.values()][-1]
        names = axis_names(slot, newest.shape[1:], whole_numbers=False)
        axis = 1 + next((i for i, name in enumerate(names) if name in _UNITS), len(names) - 1)
        dead = np.stack([units.dead_units(value, axis) for value in values.values()], 1)
        labels = {"step": [*values]}
        return Picture("dead_units", dead, ("unit", "step"), wanted, None, labels)

    def _spectrum(self, step: int | None, node: str | None) -> Picture:
        wanted = self._wanted("spectrum", node)
        weight = self._run.slot(wanted, role="weight")
        found = {}
        for at in self._steps_of(self._given) if step is None else [step]:
            try:
                found[at] = units.spectrum(weight.value(at, type=self._given)[0])
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

    def _flow(self, step: int | None, node: str | None) -> Picture:
        at = self._step(step, self._given)
        row = self._run.row(at, type=self._given)
        passes = row.index.get_level_values("pass")
        if "l2" not in row:
            raise UnknownNameError("the statistic 'l2' was not recorded; add it to `stats`.")
        norms = row["l2"][passes == "grad"].dropna()
        if self._given is not None and norms.empty:
            raise UnknownNameError(
                f"no gradients were recorded with type {shown(self._given)}; omit `type` for those "
                "of training."
            )
        names = norms.index.get_level_values("node").tolist()
        tensors = (s for s in self._snapshot.view.slots if s.kind not in ("parameter", "buffer"))
        order = {name: i for i, name in enumerate(dict.fromkeys(s.key.node for s in tensors))}
        ranked = sorted(range(len(names)), key=lambda i: order[names[i]])
        values = norms.to_numpy(np.float64)[ranked]
        roles = norms.index.get_level_values("role").tolist()
        own = [n if r == "output" else f"{n}.{r}" for n, r in zip(names, roles, strict=True)]
        return Picture("flow", values, ("node",), None, at, {"node": [own[i] for i in ranked]})

    def _loss_cam(self, step: int | None, node: str | None) -> Picture:
        wanted = self._wanted("loss_cam", node)
        slot, at, type_ = self._run.slot(wanted), self._step(step, self._given), self._given
        output, gradient = slot.value(at, type=type_), slot.grad.value(at, type=type_)
        if output.ndim < 3:
            raise UnknownNameError(f"{wanted!r} has no places to map.")
        cam = units.loss_cam(output, gradient)
        names = axis_names(self._slot(wanted), output.shape[1:], whole_numbers=False)
        labels = {SAMPLE: self._run.samples(at, type=type_)["label"].tolist()}
        return Picture("loss_cam", cam, (SAMPLE, *names[1:]), wanted, at, labels)

    def _feature_maps(self, step: int | None, node: str | None) -> Picture:
        wanted, at = self._wanted("feature_maps", node), self._step(step, self._type)
        values = self._value(wanted, at)
        if values.ndim < 3:
            raise UnknownNameError(f"{wanted!r} has no maps; its output is {[*values.shape]}.")
        names = axis_names(self._slot(wanted), values.shape[1:], whole_numbers=False)
        return Picture(
            "feature_maps", values, (SAMPLE, *names), wanted, at, {SAMPLE: self._labels(at)}
        )

    def _filters(self, step: int | None, node: str | None) -> Picture:
        wanted, at = self._wanted("filters", node), self._step(step, self._given)
        values = self._run.slot(wanted, role="weight").value(at, type=self._given)[0]
        if values.ndim < 3:
            raise UnknownNameError(f"{wanted!r} has no kernels; its weight is {[*values.shape]}.")
        places = _PLACES[2 - values.ndim :] if values.ndim > 3 else ("length",)
        return Picture("filters", values, ("filter", "channel", *places), wanted, at)

    # -- reading

    def _wanted(self, name: str, node: str | None) -> str:
        if node is None:
            raise UnknownNameError(f"the picture {name!r} shows one node; pass node.")
        return node

    def _slot(self, node: str) -> SlotInfo:
        """Return the output of a node, or the first one if it returns several."""
        keys = (slot.key for slot in self._snapshot.view.slots)
        roles = [k.role for k in keys if (k.node, k.iteration, k.pass_) == (node, 0, "forward")]
        outputs = [role for role in roles if _OUTPUT.match(role)]
        first = outputs[0] if outputs and "output" not in outputs else "output"
        return self._snapshot.slot(node, first, 0, "forward")

    def _steps(self) -> list[int]:
        return self._steps_of(self._type)

    def _steps_of(self, type_: str | None) -> list[int]:
        records = self._snapshot.records(type_)
        return sorted({*self._snapshot.steps[records].tolist()})

    def _step(self, step: int | None, type_: str | None) -> int:
        if step is not None:
            return step
        records = self._snapshot.records(type_)
        if not len(records):
            raise UnknownNameError("this run has no records.")
        return int(self._snapshot.steps[records].max())

    def _value(self, node: str, step: int) -> NDArray[Any]:
        return self._run.slot(node, role=self._slot(node).key.role).value(step, type=self._type)

    def _over_steps(self, slot: SlotInfo, steps: list[int], node: str) -> dict[int, NDArray[Any]]:
        """Return the values of a node at the steps that have as many samples as the last step."""
        view = self._snapshot.view
        found = {}
        for step in steps:
            value = view.value(self._snapshot.record(step, self._type), slot.id)
            if value is not None:
                found[step] = value
        if not found:
            self._value(node, steps[-1])  # raises an error that says what to declare
        size = [*found.values()][-1].shape
        return {step: value for step, value in found.items() if value.shape == size}

    def _all_values(self, step: int) -> dict[str, NDArray[Any]]:
        """Return the values of all outputs with samples at a step, by node."""
        record = self._snapshot.record(step, self._type)
        found = {}
        for slot in self._snapshot.view.slots:
            key = slot.key
            usual = (key.role, key.iteration, key.pass_) == ("output", 0, "forward")
            if not (usual and slot.kind == "computed" and slot.batch_dim is not None):
                continue
            value = self._snapshot.view.value(record, slot.id)
            if value is not None and value.dtype.kind not in "iub":
                found[key.node] = value
        if not found:
            raise UnknownNameError(
                f"no output values were recorded at step {step}; declare a probe, or set "
                "`values: true` in the spec."
            )
        return found

    def _labels(self, step: int) -> list[Any]:
        return list(self._run.samples(step, type=self._type)["label"])

    def _classes(self, step: int) -> NDArray[np.int64]:
        labels = self._labels(step)
        try:
            return np.array([int(label) for label in labels], np.int64)
        except (TypeError, ValueError):
            raise UnknownNameError(
                f"the samples of step {step} have no classes. They are known if a loss receives "
                "one integer per sample, or if a probe is given `labels`."
            ) from None

    def _output(self) -> str:
        """Return the node of the whole model."""
        described = self._run.document("modules") or []
        roots = [entry["node"] for entry in described if entry["path"] == ""]
        recorded = [node for node in roots if node in self._run.nodes]
        if not recorded:
            raise UnknownNameError(
                "the output of the model was not recorded; pass the node whose output is meant, or "
                "select the model itself in the spec."
            )
        return str(recorded[0])

    def _scored(self, node: str, step: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return the class of each sample, and the outputs [samples, classes]."""
        classes, scores = self._classes(step), self._value(node, step)
        if scores.ndim != 2 or len(scores) < len(classes):
            raise UnknownNameError(
                f"the output of {node!r} has the shape {scores.shape}, not [samples, classes]."
            )
        return classes, scores[: len(classes)]

    _COMPUTED: ClassVar[dict[str, Callable[[Pictures, int | None, str | None], Picture]]] = {
        "likeness": _layers,
        "likeness_over_steps": _over_time,
        "confusion": _confusion,
        "reliability": _reliability,
        "linear_probe": _linear,
        "dead_units": _dead,
        "spectrum": _spectrum,
        "flow": _flow,
        "loss_cam": _loss_cam,
        "feature_maps": _feature_maps,
        "filters": _filters,
    }
    """The pictures that can be computed from records alone, by name."""

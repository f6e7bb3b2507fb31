"""Pictures of a run: those that its probes recorded, and those computed from its records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import SelectionError, UnknownNameError, did_you_mean, shown
from comgra_decl.pictures import cloud, layouts, likeness
from comgra_decl.pictures.cloud import Basis
from comgra_decl.records import (
    EIGENVALUES,
    LENS_RANKS,
    LENS_TOKENS,
    MAXIMISED,
    PICTURE_PREFIX,
    PICTURES,
    PROBE_PREFIX,
    SAMPLE,
    SLICE,
    SlotInfo,
)
from comgra_decl.spec.axes import name_axes
from comgra_decl.spec.pictures import HessianSpec

from .attributions import EXPLAINED
from .categories import concept_derivatives, concept_vectors, separability
from .judgements import confident_errors, confusion, foreign_auroc, linear_probe, reliability
from .layer_pictures import feature_maps, filters, flow, loss_cam, spectrum
from .picture import Picture
from .recorded_lens import lens_from_records
from .recorded_values import PLACES, RecordedValues
from .similarities import layers_alike, steps_alike
from .unit_pictures import (
    coactivation,
    dead_units,
    top_samples,
    unit_effects,
    unit_effects_of_types,
)

if TYPE_CHECKING:
    from .run import Run
    from .snapshot import Snapshot

_MAPS = ("grad_cam", "occlusion")
"""Methods whose pictures have one number for each position, and no channels."""

_COMPUTED: dict[str, Callable[[RecordedValues, int | None, str | None], Picture]] = {
    "likeness": layers_alike,
    "likeness_over_steps": steps_alike,
    "confusion": confusion,
    "reliability": reliability,
    "linear_probe": linear_probe,
    "spectrum": spectrum,
    "flow": flow,
    "loss_cam": loss_cam,
    "feature_maps": feature_maps,
    "filters": filters,
    "dead_units": dead_units,
    "confident_errors": confident_errors,
    "foreign_auroc": foreign_auroc,
    "top_samples": top_samples,
    "unit_effects": unit_effects,
    "unit_effects_of_types": unit_effects_of_types,
    "coactivation": coactivation,
    "concept_vectors": concept_vectors,
    "concept_derivatives": concept_derivatives,
    "separability": separability,
    "lens_from_records": lens_from_records,
}
"""The pictures that can be computed from records alone, by name."""


class Pictures:
    """The pictures of one run.

    The records of the first probe are used, because it has the same samples at every step. Without
    a probe, the records of training steps are used, whose samples differ.
    """

    def __init__(self, run: Run, snapshot: Snapshot, type_: str | None) -> None:
        self._run = run
        self._snapshot = snapshot
        self._given = type_
        self._read = RecordedValues(run, snapshot, type_)

    # -- names

    @property
    def names(self) -> list[str]:
        """The recorded pictures, followed by those that can be computed from the records."""
        return [*self._recorded, *_COMPUTED]

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
        record = self._snapshot.record(step, self._read.type)
        return dict(self._snapshot.view.extra(record).get(PICTURES, {}))

    def named(self, name: str, step: int | None, node: str | None) -> Picture:
        """Return a picture; see `Run.picture`."""
        recorded = self._recorded
        if name in recorded:
            return self._of_record(name, recorded[name], step, node)
        if name not in _COMPUTED:
            known = self.names
            self._check_refusal(name, step)
            raise UnknownNameError(
                f"there is no picture {shown(name)}{did_you_mean(name, known) or '.'} "
                f"This run has {', '.join(map(repr, known))}."
            )
        return _COMPUTED[name](self._read, step, node)

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
        beside = {
            slot.key: slot
            for slot in slots
            if slot.key.role.endswith((LENS_TOKENS, LENS_RANKS))
            or slot.key.role.startswith(f"{MAXIMISED}.")
        }
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
        at = self._read.step(step, type_)
        values = self._run.slot(
            slot.key.node, role=slot.key.role, of=slot.key.pass_, iteration=slot.key.iteration
        ).value(at, type=type_)
        record = self._snapshot.record(at, type_)
        facts = dict(self._snapshot.view.extra(record).get(PICTURES, {}).get(name, {}))
        if slot.key.role == MAXIMISED:
            return self._maximised(name, slot, at, facts)
        for fact, end in (("tokens", LENS_TOKENS), ("ranks", LENS_RANKS)):
            part = beside.get(slot.key._replace(role=slot.key.role + end))
            if part is not None:
                facts[fact] = self._snapshot.view.value(record, part.id)
        dims = _dims_of(self._read.axes(slot, values.shape[1:]), facts)
        labels: dict[str, list[Any]] = {SAMPLE: self._run.samples(at, type=type_)["label"].tolist()}
        if EXPLAINED in dims:
            labels[EXPLAINED] = facts["positions"]
        return Picture(name, values, (SAMPLE, *dims), slot.key.node, at, labels, facts)

    def _maximised(self, name: str, slot: SlotInfo, at: int, facts: dict[str, Any]) -> Picture:
        """Return the inputs that maximise units of a layer, [units, ...]."""
        view, record = self._snapshot.view, self._snapshot.record(at, self._type_of(slot))
        keys = {other.key: other.id for other in view.slots}
        for end in ("value", "start"):
            place = keys[slot.key._replace(role=f"{MAXIMISED}.{end}")]
            facts[end] = np.asarray(view.value(record, place))[0].tolist()
        values = np.asarray(view.value(record, slot.id))[0]
        facts["units"] = facts["units"] or [*range(len(values))]
        dims = name_axes(
            values.shape[1:], kind="input", node="input", role=facts["input"], module_class=""
        )
        labels = {"unit": facts["units"]}
        return Picture(name, values, ("unit", *dims), slot.key.node, at, labels, facts)

    def _type_of(self, slot: SlotInfo) -> str:
        """Return the probe on which a picture is based, according to the run's spec."""
        name = slot.key.pass_.removeprefix(PICTURE_PREFIX)
        declared = self._run.spec.pictures.get(name)
        return f"{PROBE_PREFIX}{declared.of}" if declared is not None else str(self._read.type)

    def _landscape(
        self, name: str, slots: list[SlotInfo], step: int | None, node: str | None
    ) -> Picture:
        """Return a recorded picture of a whole model, by step."""
        main, own = slots[0], slots[0].key.node
        if node not in (None, own):
            raise UnknownNameError(f"the picture {name!r} shows {own!r}, not {shown(node)}.")
        type_ = self._type_of(main)
        view, found = self._snapshot.view, {}
        for at in self._read.steps_of(type_) if step is None else [step]:
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
        values = self._read.over_steps(self._read.slot(node), self._read.steps(), node)
        points = _finite_points(node, values).astype(np.float64)
        try:
            placed = layouts.layout(points, method)
        except ValueError as error:
            raise UnknownNameError(f"{node!r} has no cloud: {error}.") from None
        labels = {"step": [*values], SAMPLE: self._read.labels([*values][-1])}
        facts = {"method": method, "trustworthiness": layouts.trustworthiness(points, placed)}
        axes = ("step", SAMPLE, "component")
        return Picture("cloud", placed, axes, node, None, labels, facts)

    def embedding(self, node: str, basis: str | Basis = "all") -> Picture:
        """Return a cloud of a node's values; see `Run.embedding`."""
        slot, steps = self._read.slot(node), self._read.steps()
        values = self._read.over_steps(slot, steps, node)
        points = _finite_points(node, values)
        if isinstance(basis, Basis):
            used = basis
            if basis.node not in ("", node):
                raise SelectionError(
                    f"the basis is that of {basis.node!r}, whose features are others than those of "
                    f"{node!r}; pass a basis of this node, or "
                    'dataclasses.replace(basis, node="") if both have the same features.'
                )
            if len(basis.mean) != points.shape[-1]:
                raise SelectionError(
                    f"the basis has {len(basis.mean)} features, but {node!r} has "
                    f"{points.shape[-1]}; pass a basis of this node."
                )
        elif basis in ("all", "last"):
            try:
                fitted = cloud.fitted(points if basis == "all" else points[-1:])
            except ValueError as error:
                raise UnknownNameError(f"{node!r} has no cloud: {error}.") from None
            used = replace(fitted, node=node)
        else:
            raise UnknownNameError(f"basis={shown(basis)} is not 'all', 'last' or a basis.")
        labels = {"step": [*values], SAMPLE: self._read.labels([*values][-1])}
        axes = ("step", SAMPLE, "component")
        return Picture("cloud", used.project(points), axes, node, None, labels, basis=used)

    def similarity(self, first: str, second: str, step: int | None) -> float:
        """Return the CKA of two nodes at a step; see `Run.similarity`."""
        at = self._read.step(step, self._read.type)
        return likeness.cka(self._read.value(first, at), self._read.value(second, at))


def _dims_of(dims: tuple[str, ...], facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a recorded picture's value dims, by those of its tensor."""
    if facts.get("method") in _MAPS and len(dims) <= len(PLACES):
        dims = PLACES[-len(dims) :] if len(dims) > 1 else ("length",)
    if facts.get("method") == "logit_lens" and dims:
        dims = (*dims[:-1], "position")
    if "position" in facts and dims:
        dims = ("position", *dims[1:])
    if isinstance(facts.get("positions"), list) and len(dims) > 1:
        dims = (EXPLAINED, "position", *dims[2:])
    return dims


def _finite_points(node: str, values: Mapping[int, NDArray[Any]]) -> NDArray[Any]:
    """Return the values of all steps as points, [steps, samples, features].

    Raises:
        UnknownNameError: some are NaN or infinite.
    """
    for step, found in values.items():
        wild = int(np.count_nonzero(~np.isfinite(found)))
        if wild:
            raise UnknownNameError(
                f"{node!r} has no cloud: {wild} of {found.size} values at step {step} are NaN or "
                "infinite."
            )
    return np.stack([found.reshape(len(found), -1) for found in values.values()])

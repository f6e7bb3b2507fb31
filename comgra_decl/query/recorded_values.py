"""The recorded values from which pictures are computed, and the classes of their samples."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import UnknownNameError
from comgra_decl.records import PROBE_PREFIX, SlotInfo

from .preview import axis_names

if TYPE_CHECKING:
    from .run import Run
    from .snapshot import Snapshot

_OUTPUT = re.compile(r"output(?:[.\[].*)?")
"""Roles of what a module returns: one tensor, or a part of a tuple, a dict or an object."""

PLACES = ("depth", "height", "width")
"""The names of the axes of positions."""


class RecordedValues:
    """The values in the records of one type of execution.

    Args:
        run: the run.
        snapshot: its records.
        type_: the type of execution; None for the first probe, because it has the same samples at
            every step, or training without a probe.

    Attributes:
        run: the run.
        given: the type of execution that was passed.
        type: the type of execution; None for training.
    """

    def __init__(self, run: Run, snapshot: Snapshot, type_: str | None) -> None:
        self.run = run
        self.given = type_
        self._snapshot = snapshot
        probes = [t for t in run.types if t.startswith(PROBE_PREFIX)]
        self.type = type_ if type_ is not None else probes[0] if probes else None

    @property
    def training(self) -> str | None:
        """The type of execution of the training records that belong to these; None for all."""
        return None if (self.type or "").startswith(PROBE_PREFIX) else self.type

    def wanted(self, name: str, node: str | None) -> str:
        """Return the node of a picture that shows one.

        Raises:
            UnknownNameError: none was passed.
        """
        if node is None:
            raise UnknownNameError(f"the picture {name!r} shows one node; pass node.")
        return node

    def nodes(self) -> list[str]:
        """Return the nodes of all but parameters and buffers, in the order of their calls."""
        tensors = (s for s in self._snapshot.view.slots if s.kind not in ("parameter", "buffer"))
        return [*dict.fromkeys(slot.key.node for slot in tensors)]

    def slot(self, node: str) -> SlotInfo:
        """Return the output of a node, or the first one if it returns several."""
        keys = (slot.key for slot in self._snapshot.view.slots)
        roles = [k.role for k in keys if (k.node, k.iteration, k.pass_) == (node, 0, "forward")]
        outputs = [role for role in roles if _OUTPUT.match(role)]
        first = outputs[0] if outputs and "output" not in outputs else "output"
        return self._snapshot.slot(node, first, 0, "forward")

    def axes(self, slot: SlotInfo, dims: tuple[int, ...]) -> tuple[str, ...]:
        """Return the names of the value dims of a tensor of numbers."""
        return axis_names(self._snapshot, slot, dims, whole_numbers=False)

    def steps(self) -> list[int]:
        """Return the steps of the records, ascending."""
        return self.steps_of(self.type)

    def steps_of(self, type_: str | None) -> list[int]:
        """Return the steps of a type of execution, ascending."""
        records = self._snapshot.records(type_)
        return sorted({*self._snapshot.steps[records].tolist()})

    def step(self, step: int | None, type_: str | None) -> int:
        """Return a step, or the last one of a type of execution for None."""
        if step is not None:
            return step
        records = self._snapshot.records(type_)
        if not len(records):
            raise UnknownNameError("this run has no records.")
        return int(self._snapshot.steps[records].max())

    def value(self, node: str, step: int) -> NDArray[Any]:
        """Return the output of a node at a step, [samples, ...]."""
        return self.run.slot(node, role=self.slot(node).key.role).value(step, type=self.type)

    def over_steps(self, slot: SlotInfo, steps: list[int], node: str) -> dict[int, NDArray[Any]]:
        """Return the values of a node at the steps that have as many samples as the last step."""
        view = self._snapshot.view
        found = {}
        for step in steps:
            value = view.value(self._snapshot.record(step, self.type), slot.id)
            if value is not None:
                found[step] = value
        if not found:
            self.value(node, steps[-1])  # raises an error that says what to declare
        size = [*found.values()][-1].shape
        return {step: value for step, value in found.items() if value.shape == size}

    def all_values(self, step: int) -> dict[str, NDArray[Any]]:
        """Return the values of all outputs with samples at a step, by node."""
        record = self._snapshot.record(step, self.type)
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

    def labels(self, step: int) -> list[Any]:
        """Return the category of each sample at a step; None where there is none."""
        return list(self.run.samples(step, type=self.type)["label"])

    @property
    def foreign(self) -> frozenset[str]:
        """The categories that the probe declares as foreign."""
        name = (self.type or "").removeprefix(PROBE_PREFIX)
        probe = self.run.spec.probes.get(name) if name != self.type else None
        return frozenset(map(str, probe.foreign)) if probe is not None else frozenset()

    def grouped(self, node: str, step: int) -> tuple[NDArray[Any], NDArray[np.int64], list[str]]:
        """Return the output of a node for the samples with a category, foreign ones included.

        Returns:
            The output [samples, ...], the number of the category of each sample, and the names of
            the categories.
        """
        value = self.value(node, step)
        labels = self.labels(step)[: len(value)]
        places = [i for i, label in enumerate(labels) if label is not None]
        names = sorted({str(labels[i]) for i in places})
        groups = np.array([names.index(str(labels[i])) for i in places], np.int64)
        return value[places], groups, names

    def classes(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the numbers of the samples that are not foreign, and their classes.

        Raises:
            UnknownNameError: there are no classes.
        """
        labels, foreign = self.labels(step), self.foreign
        places = [i for i, label in enumerate(labels) if label is None or label not in foreign]
        try:
            classes = [int(labels[i] or "") for i in places]
        except ValueError:
            raise UnknownNameError(
                f"the samples of step {step} have no classes. They are known if a loss receives "
                "one integer per sample, or if a probe is given `labels`."
            ) from None
        return np.array(places, np.int64), np.array(classes, np.int64)

    def output(self) -> str:
        """Return the node of the whole model."""
        described = self.run.document("modules") or []
        roots = [entry["node"] for entry in described if entry["path"] == ""]
        recorded = [node for node in roots if node in self.run.nodes]
        if not recorded:
            raise UnknownNameError(
                "the output of the model was not recorded; pass the node whose output is meant, or "
                "select the model itself in the spec."
            )
        return str(recorded[0])

    def scored(self, node: str, step: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return the class of each sample, and the outputs [samples, classes].

        Without foreign samples, and without those of a negative class, which losses ignore.
        """
        _, classes, scores = self.judged(node, step)
        return classes, scores

    def judged(
        self, node: str, step: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
        """Return what `scored` returns, and before it the number of each sample."""
        (places, classes), scores = self.classes(step), self.scores(node, step)
        kept = classes >= 0
        return places[kept], classes[kept], scores[places[kept]]

    def scores(self, node: str, step: int) -> NDArray[Any]:
        """Return the outputs of a node, [samples, classes].

        Raises:
            UnknownNameError: its outputs have another shape.
        """
        scores = self.value(node, step)
        if scores.ndim != 2 or len(scores) < len(self.labels(step)):
            raise UnknownNameError(
                f"the output of {node!r} has the shape {scores.shape}, not [samples, classes]."
            )
        return scores

"""Inputs and targets that are not normalized."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    ELEMENTWISE,
    Count,
    Factor,
    Finding,
    Fraction,
    Mask,
    Measured,
    Patient,
    Scene,
    Severity,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    per_run,
    prediction_of,
    target_of,
)


class TargetParameters(Patient):
    """Options of `target_scale`."""

    patience: Count = 3

    largest: Factor = 100.0
    """Largest allowed mean magnitude."""

    reached: Fraction = 0.1
    """Predictions are far from the targets if their magnitude is below this share of the targets'
    magnitude.
    """


class TargetScale(SlotRule):
    """Regression targets that are not normalized."""

    name = "target_scale"
    severity = "hint"
    certainty = 0.6
    definition = (
        "For `patience` records in a row, a floating-point target that a loss compares element "
        "by element (`mse_loss`, `l1_loss`, ...) has a mean magnitude above `largest`. The "
        "finding is a warning if, in the latest record, the magnitude of the predictions is "
        "below `reached` times the magnitude of the targets. With common learning rates, a model "
        "then takes very long to reach the scale of the targets."
    )
    source = "Our own definition; models are initialized for outputs of about unit magnitude."
    advice = (
        "Subtract the mean of the training targets and divide by their standard deviation, or "
        "predict the logarithm. Apply the inverse transformation to predictions."
    )
    explained_by = ("nonfinite",)
    Parameters = TargetParameters
    statistics = ("abs_mean",)
    evidence, of_calls, of_graph = "mean magnitude", True, True
    needs = "regression targets, recorded where a loss compares them with predictions"

    _latest: dict[int, float] = per_run(dict)  # latest magnitude by slot

    def wants(self, table: SlotTable) -> Mask:
        """Return the targets of element-wise losses."""
        mask = np.zeros(len(table), np.bool_)
        for call in self.scene.calls:
            slot = target_of(self.scene, call)
            if slot is not None and call.function in ELEMENTWISE and call.target.is_floating:
                mask[slot] = True
        return mask

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return where targets exceed the limit; stores the latest magnitudes of all tensors."""
        size = window.read("abs_mean", at).astype(np.float64)
        every = np.arange(len(window.table))
        known = window.read("abs_mean", every)
        for slot in np.flatnonzero(~np.isnan(known).all(0)).tolist():
            column = known[:, slot]
            self._latest[slot] = float(column[~np.isnan(column)][-1])
        return size > self.parameters.largest, size

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding, which is a warning if predictions are far from the targets' scale."""
        found = super().findings(scene)
        for call in scene.calls if found else ():
            target, prediction = target_of(scene, call), prediction_of(scene, call)
            if target in self.streak.fired and prediction is not None and target is not None:
                size = self._latest.get(prediction, np.inf)
                if size < self.parameters.reached * self._latest[target]:
                    severity: Severity = self.parameters.severity or "warning"
                    return [replace(found[0], severity=severity)]
        return found

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} is not normalized: the mean magnitude of the targets is "
            f"{self.streak.worst[slot]:.3g}."
        )


_LOW, _HIGH = 1e-2, 10.0  # magnitudes of layers that work properly
_MANY = 8  # numbers in a batch required to estimate their deviation


class InputParameters(Patient):
    """Options of `input_scale`."""

    patience: Count = 3

    largest: Factor = 30.0
    """Largest allowed mean magnitude."""

    smallest: Fraction = 1e-3
    """Smallest allowed mean magnitude."""

    offset: Factor = 10.0
    """Largest allowed mean, in standard deviations."""


class InputScale(SlotRule):
    """Inputs that are not normalized."""

    name = "input_scale"
    certainty = 0.6
    definition = (
        "For `patience` records in a row, a floating-point input has a mean magnitude above "
        "`largest`, or the mean magnitude of its nonzero elements is below `smallest`, or the "
        "magnitude of its mean exceeds `offset` standard deviations (in batches of at least "
        f"{_MANY} numbers). This must hold in every iteration of the module. The finding is "
        "only a hint if the input is normalized before or in the first layers: all outputs of "
        "modules with parameters that the graph connects directly to it have a mean magnitude "
        f"between {_LOW:g} and {_HIGH:g} in the latest record."
    )
    source = (
        "SageMaker Debugger, which reports |mean| > 0.2 for images. This rule is more tolerant "
        "because models train well on pixels in 0 to 1, but it reports pixels in 0 to 255."
    )
    advice = "Subtract the mean and divide by the standard deviation of the training data."
    explained_by = ("nonfinite", "uneven_columns", "placeholder_values")
    Parameters = InputParameters
    hints_explain = False
    statistics = ("abs_mean", "mean", "std")
    evidence = "mean magnitude"
    needs = "inputs of the model, which are recorded if `nodes` selects its root"

    def wants(self, table: SlotTable) -> Mask:
        """Return inputs of the model."""
        return table.floating & table.where(
            lambda i: i.kind == "input" and i.key.pass_ == "forward" and i.batch_dim is not None
        )

    _sizes: NDArray[np.float64] = np.zeros(0)  # of all tensors, in the latest record with a hit

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return where the magnitude or the offset exceeds the limits, and the magnitude."""
        size = window.read("abs_mean", at).astype(np.float64)
        mean = np.abs(window.read("mean", at).astype(np.float64))
        # over all elements: variance within samples plus variance between their means
        spread = np.hypot(window.read("std", at), window.read("mean", at, "std"))
        parameters = self.parameters
        filled = size
        if window.has("zero_fraction"):  # words encoded as zeros and ones are not small
            filled = size / np.maximum(1 - window.read("zero_fraction", at), 1e-9)
        hit = (size > parameters.largest) | ((filled < parameters.smallest) & (size > 0))
        many = window.elements(at) * window.samples(at) >= _MANY
        hit |= (mean > parameters.offset * spread) & (spread > 0) & many
        rows = np.flatnonzero(hit.any(1))
        if len(rows):
            every = np.arange(len(window.table))
            self._sizes = window.read("abs_mean", every)[rows[-1]].astype(np.float64)
        return hit, size

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leave out inputs that are normalized in other iterations."""
        return self.in_every_iteration(scene, fired)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding, which is a hint if the first layers normalize the inputs."""
        found = super().findings(scene)
        if not found or not all(self._harmless(scene, s) for s in self.streak.fired.tolist()):
            return found
        return [replace(found[0], severity=self.parameters.severity or "hint")]

    def _harmless(self, scene: Scene, slot: int) -> bool:
        """Return whether all layers that receive an input have outputs of normal magnitude."""
        weighted = {node for node, _ in scene.parameters}
        after = {
            graph.keys[b]
            for graph in scene.structures.values()
            for a, b, _ in graph.edges
            if graph.keys[a] == scene.table.infos[slot].key
            and graph.kinds[b] == "computed"
            and graph.keys[b].node in weighted
        }
        slots = [scene.table.by_key.get(key, -1) for key in after]
        known = [self._sizes[s] for s in slots if 0 <= s < len(self._sizes)]
        return bool(known) and all(_LOW < size < _HIGH for size in known)

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} is not normalized: its mean magnitude is "
            f"{self.streak.worst[slot]:.3g}."
        )

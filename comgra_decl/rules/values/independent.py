"""Outputs that do not depend on the input."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from comgra_decl.rules.api import (
    PREDICTION,
    VARYING,
    Bools,
    Finding,
    Fraction,
    Largest,
    Mask,
    Measured,
    Patient,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    per_run,
    predictions,
    sources_of,
    target_pairs,
)

_IDENTICAL = "records with identical samples"
_ROUNDING = 1e-6  # relative variation of identical samples
_VARIED = 0.01  # relative variation over the batch


class IndependentParameters(Patient):
    """Options of `input_independence`."""

    variation: Fraction = 1e-3
    """Samples are considered equal if their relative variation is below this limit."""


class InputIndependence(SlotRule):
    """Outputs that do not depend on the input."""

    name = "input_independence"
    severity = "error"
    certainty = 0.7
    definition = (
        "For `patience` records in a row, every recorded statistic of the samples (mean, std, "
        "min, max, ...) varies across the batch by at most `variation` times its magnitude, in "
        "every call within a step. The "
        "rule checks the model's predictions, and other tensors that previously varied by more "
        f"than {_VARIED:g}. It ignores tensors that the newest graph connects only with "
        "parameters, as long as others depend on the input (log-determinants of scalings in "
        "flows, a learned number that a loss compares with rewards). The finding is only a hint "
        "if these tensors are compared with no target and their models return another output that "
        "depends on the input."
    )
    source = (
        "comgra's README, which announces a check for a falling variance across the batch; "
        "TheDeepChecker's test of whether outputs depend on the input."
    )
    advice = (
        "Follow the values from the input to the tensor where all samples become equal. Common "
        "causes are dead units, saturation, a learning rate that is too high, a bug that mixes the "
        "samples in a batch, and an input that is not used."
    )
    explained_by = (
        "nonfinite",
        "dead_units",
        "saturated",
        "large_update",
        "growing_weight",
        "policy_sign",
        "attached_ratio",
        "entropy_weight",
        "zero_derivative",
        "divergence_weight",
        "bounded_answer",
        "wrong_log_scale",
    )
    explained_by_earlier = ("shrinking_weight",)
    Parameters = IndependentParameters
    of_state = True
    any_statistic, lowest = VARYING, True
    needs = "outputs with a batch dimension, {select: '**', capture: [output]}"
    fewest_samples = 2
    evidence, of_graph = "relative variation across the batch", True

    _most = per_run(Largest)
    _inputs: set[tuple[float, ...]] = per_run(set)  # means of the inputs of a record
    _same = 0  # records in a row in which the samples of all inputs are identical
    _final: Bools = np.zeros(0, np.bool_)

    def wants(self, table: SlotTable) -> Mask:
        """Return outputs with a batch dimension, and store which of them are predictions."""
        self._final = np.isin(np.arange(len(table)), list(predictions(self.scene)))
        return table.outputs & table.where(lambda i: i.batch_dim is not None)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the largest relative variation of all statistics."""
        most = window.variation(at)
        most = np.where(window.samples(at) >= self.fewest_samples, most, np.nan)
        varied = self._most.look(at, most) > _VARIED
        return (most < self.parameters.variation) & (varied | self._final[at]), most

    def look(self, window: Window) -> None:
        """Process the next training records, and compare the samples of the inputs."""
        super().look(window)
        inputs = np.array(
            [
                info.id
                for info in window.table.infos
                if info.kind == "input" and info.key.pass_ == "forward" and info.batch_dim == 0
            ],
            np.int64,
        )
        if not len(inputs) or not window.has("mean", "std"):
            return
        with np.errstate(all="ignore"):
            varied = np.fmax.reduce(window.variation(inputs), axis=1)
        if len(self._inputs) < 2:
            means = np.nan_to_num(window.read("mean", inputs).astype(np.float64))
            self._inputs |= {tuple(row) for row in means.tolist()}
        for row in range(len(window)):
            known = window.present[row, inputs].any() and window.samples(inputs)[row].max() > 1
            if known:
                self._same = self._same + 1 if varied[row] < _ROUNDING else 0

    def follows(self, finding: Finding, other: Finding) -> bool:
        """Return whether another finding explains this one; nothing explains identical inputs."""
        if finding.evidence.get(_IDENTICAL):
            return other.rule == "nonfinite"
        return super().follows(finding, other)

    def facts(self, scene: Scene, slot: int) -> dict[str, float | int | str]:
        """Return the evidence about a slot, and whether all inputs are identical."""
        same = {_IDENTICAL: self._same} if self._same >= self.patience else {}
        return {**super().facts(scene, slot), **same}

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leave out tensors that are computed from parameters only, unless all of them are."""
        fired = self.in_every_iteration(scene, fired)
        graph = scene.structure  # the newest, because a first step may set parameters from data
        sources = {} if graph is None else sources_of(replace(scene, structures={"": graph}))
        only = [s for s in fired.tolist() if _of_parameters(scene.table, sources, s)]
        rest = np.flatnonzero(self._final[: len(scene.table)])
        if not np.setdiff1d(rest, fired).size:
            return fired
        return fired[~np.isin(fired, only)]

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding, which is a hint if it concerns only additional outputs."""
        found = super().findings(scene)
        if not found or self.parameters.severity is not None:
            return found
        if self._same >= self.patience and len(self._inputs) == 1:  # a task without any input
            return [replace(found[0], severity="hint")]
        keys = [info.key for info in scene.table.infos]
        fired = set(self.streak.lasting.tolist())
        others = (keys[at] for at in self.columns(scene.table).tolist() if at not in fired)
        varied = {(key.node, key.iteration) for key in others if key.pass_ == "forward"}
        compared = {prediction.id for prediction, _ in target_pairs(scene)}
        if all(
            (keys[at].node, keys[at].iteration) in varied and at not in compared
            for at in self.chosen(scene, self.streak.lasting).tolist()
        ):
            return [replace(found[0], severity="hint")]
        return found

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        same = (
            f"{scene.table.place(slot)} is the same for every sample in the batch (relative "
            f"variation {self.streak.worst[slot]:.1e})"
        )
        if self._same >= self.patience:
            return (
                f"{same}, because the inputs of all samples are identical: the program probably "
                "stores the same array for each of them, which is changed in place (copy it), or "
                "repeats one sample."
            )
        return f"{same}, so it does not depend on the input."


def _of_parameters(table: SlotTable, sources: dict[int, list[int]], slot: int) -> bool:
    """Return whether all tensors from which a slot is computed are parameters or buffers."""
    held = {i.id for i in table.infos if i.kind in ("parameter", "buffer")}  # whoever wrote them
    waiting, seen = [slot], {slot}
    for at in waiting:
        for source in sources.get(at, []) if at not in held else ():
            if source not in seen:
                seen.add(source)
                waiting.append(source)
    first = [at for at in waiting if at in held or not sources.get(at)]
    if first == [slot]:  # what a loss compares, made by no module: of a parameter in none
        return table.infos[slot].key.node == PREDICTION
    return held.issuperset(first)

"""NaN and infinity, and their origin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    AUTOMATIC,
    EVALUATION_TYPES,
    Bools,
    Count,
    Finding,
    Mask,
    Measured,
    Numbers,
    Patient,
    Scene,
    Severity,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    is_gradient,
    is_validation,
    per_run,
    sources_of,
)

_MOST_STRETCHES = 64  # maximum number of non-finite stretches stored per metric


_REPLACED = (
    "The model or the loss seems to replace these values. Check that this is intended and that "
    "replaced values can be distinguished from real ones, for example through an additional input."
)


class NonfiniteParameters(Patient):
    """Options of `nonfinite`."""

    patience: Count = 1


class Nonfinite(SlotRule):
    """NaN or infinity in a tensor, and its origin."""

    name = "nonfinite"
    severity = "error"
    certainty = 1.0
    definition = (
        "A tensor contains NaN or infinity. Masks, which contain -inf and otherwise only finite "
        "numbers, are ignored unless a NaN is computed from them. The finding names the first "
        "non-finite tensor of the first affected step, in the order of computation (forward "
        "before backward). Everything recorded before this tensor is finite. If the values "
        "become non-finite between two records, the loss and other metrics narrow the interval. "
        "The rule looks for a metric that stays non-finite for the rest of the interval. The "
        "interval then starts after the last finite value of this metric and ends at its first "
        "non-finite value. The finding is only a hint if only inputs and targets are not finite, "
        "while all other tensors and the losses are. The model or the loss then replaces such "
        "values, as is common for missing values in tables."
    )
    source = (
        "SageMaker Debugger's check for exploding tensors; DebugUnderflowOverflow from "
        "transformers, which searches for the first affected module."
    )
    advice = (
        "Check this tensor and its inputs one step earlier. Look for a logarithm or square root "
        "of 0, a division by 0, the exponential of a large number, an overflow in half "
        "precision, or a learning rate that is too high. Add an epsilon, clamp values, clip "
        "gradients, or lower the learning rate."
    )
    explained_by = ("root_of_zero",)
    explained_by_earlier = ("negative_loss",)
    Parameters = NonfiniteParameters
    hints_explain = False
    statistics = ("nonfinite",)
    evidence = "NaN or infinite elements"
    needs = "any tensor"

    _samples: dict[int, int] = per_run(dict)
    _metrics: dict[tuple[str, str], Stretches] = per_run(dict)

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Process the next losses and other training metrics."""
        if numbers.type not in EVALUATION_TYPES and not is_validation(numbers):
            known = self._metrics.setdefault((numbers.name, numbers.type), Stretches())
            known.add(numbers.steps, ~np.isfinite(numbers.values))

    def wants(self, table: SlotTable) -> Mask:
        """Return all slots of floating-point tensors."""
        return table.floating

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the number of non-finite elements."""
        count = window.read("nonfinite", at, "abs_max")
        hit = count > 0
        if hit.any() and window.has("min", "max"):
            low, high = window.read("min", at), window.read("max", at)
            mask = hit & np.isneginf(low) & (np.isfinite(high) | np.isneginf(high))
            hit &= ~mask
            self._add_causes(at, hit, mask)
        for column in np.flatnonzero(hit.any(0)):
            self._find_sample(window, int(at[column]), int(hit[:, column].argmax()))
        return hit, count

    def _add_causes(self, at: Slots, hit: Bools, mask: Bools) -> None:
        """Report masks as non-finite if a NaN is computed from them."""
        rows = np.flatnonzero(hit.any(1) & mask.any(1))
        if not len(rows):
            return
        sources, column = sources_of(self.scene), {int(s): i for i, s in enumerate(at.tolist())}
        for row in rows.tolist():
            waiting = at[hit[row]].tolist()
            for slot in waiting:
                for source in sources.get(slot, []):
                    if source in column and mask[row, column[source]]:
                        mask[row, column[source]] = False
                        hit[row, column[source]] = True
                        waiting.append(source)

    def _find_sample(self, window: Window, slot: int, row: int) -> None:
        if slot in self._samples:
            return
        self._samples[slot] = -1
        samples = window.details.samples(slot)
        if window.table.infos[slot].batch_dim is not None and samples is not None:
            bad = np.nan_to_num(samples[row, :, window.statistics.index("nonfinite")]) > 0
            if bad.any():
                self._samples[slot] = int(bad.argmax())

    def ordered(self, scene: Scene, fired: Slots) -> Slots:
        """Return the slots in the order in which a step computes them."""
        infos = [scene.table.infos[slot] for slot in fired.tolist()]
        backward = np.array([is_gradient(i.key.pass_) for i in infos])
        update = np.array([i.key.pass_ == "update" for i in infos])
        computed = np.array([i.kind not in ("parameter", "input", "buffer") for i in infos])
        order = scene.table.order[fired] * np.where(backward, -1, 1)
        # a parameter is used before the layer's output exists; its gradient follows the output's
        own = computed ^ backward
        first = self.streak.first[fired]
        return fired[np.lexsort((own, order, backward, update, first))]

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        sample = self._samples.get(slot, -1)
        which = "" if sample < 0 else f", first in recorded sample {sample}"
        first, after = int(self.streak.first[slot]), self.streak.after_step(slot)
        when = f"from step {first} on"
        if after is not None and after < first - 1:
            when = f"at step {first}, but not in the previous record, step {after}"
        info = scene.table.infos[slot]
        so = "everything recorded before it in that step is finite"
        if info.kind == "parameter" and info.key.pass_ == "forward":
            # parameters are recorded before the computations of a step
            of = "of an earlier step" if after != first - 1 else f"of step {after}"
            so = f"this happened before the forward pass, in the backward pass or update {of}"
        return f"{scene.table.place(slot)} contains NaN or infinity {when}{which}; {so}."

    def findings(self, scene: Scene) -> list[Finding]:
        """Return one finding, located at the origin of the non-finite values."""
        found = super().findings(scene)
        if not found or found[0].place is None:
            return found
        infos = scene.table.infos
        data = all(infos[slot].kind in ("input", "target") for slot in self.streak.fired.tolist())
        if data and not any(known.any for known in self._metrics.values()):
            severity: Severity = self.parameters.severity or "hint"
            found = [replace(found[0], severity=severity, advice=_REPLACED)]
        place = found[0].place
        slot = next(s for s in self.streak.fired.tolist() if scene.table.place(s) == place)
        sample = self._samples.get(slot, -1)
        return [replace(found[0], sample=None if sample < 0 else sample)]

    def narrowed(self, finding: Finding) -> Finding:
        """Return the finding with its interval narrowed by the metrics logged at every step."""
        if finding.is_exact and finding.after_step is not None:
            return finding
        recorded, after = finding.first_step, finding.after_step
        turns = [
            (first, name, before)
            for (name, _), known in self._metrics.items()
            for before, first in known.until(recorded)
            if first > (-1 if after is None else after)
        ]
        if not turns:
            return finding
        first, metric, before = min(turns, key=lambda turn: turn[0])
        name = metric.removeprefix(AUTOMATIC)
        told = f"{name} is not finite from step {first} on"
        if before is not None:
            # values damaged by that step's backward pass appear only in the next metric
            after = max(before - 1, -1 if after is None else after)
            told = f"{name} is finite at step {before} but not at step {first}"
            if before == first - 1:
                told += (
                    f": the backward pass or the update of step {before}, or the forward pass of "
                    f"step {first}, produced the first non-finite values"
                )
        return replace(
            finding,
            first_step=first,
            after_step=None if after is None or after < 0 else after,
            message=f"{finding.message} {told[0].upper()}{told[1:]}.",
            evidence={**finding.evidence, "first recorded at": recorded},
        )


class Stretches:
    """Stretches of steps with non-finite values of a metric, with the finite step before each."""

    def __init__(self) -> None:
        self._all: list[tuple[int | None, int, int | None]] = []  # finite, first, finite again
        self._finite: int | None = None

    @property
    def any(self) -> bool:
        """Whether any value was not finite."""
        return bool(self._all)

    def add(self, steps: NDArray[np.int64], bad: Bools) -> None:
        """Process the next values: their steps, and a mask of the non-finite ones."""
        inside = bool(self._all) and self._all[-1][2] is None
        for row in np.flatnonzero(np.diff(bad, prepend=inside)).tolist():
            step = int(steps[row])
            if not bad[row]:
                if not self._all or self._all[-1][2] is not None:
                    continue  # ends a stretch that exceeded the limit and was not stored
                self._all[-1] = (*self._all[-1][:2], step)
            elif len(self._all) < _MOST_STRETCHES:
                before = int(steps[row - 1]) if row else self._finite
                self._all.append((before, step, None))
        good = steps[~bad]
        self._finite = int(good[-1]) if len(good) else self._finite

    def until(self, step: int) -> list[tuple[int | None, int]]:
        """Return (last finite step before, first step) for stretches that last until `step`."""
        return [
            (before, first)
            for before, first, end in self._all
            if first <= step and (end is None or end > step)
        ]

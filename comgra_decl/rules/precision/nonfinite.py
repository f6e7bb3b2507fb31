"""NaN and infinities, and where they came from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from comgra_decl.rules.api import (
    Bools,
    Count,
    Finding,
    Mask,
    Measured,
    Patient,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    is_gradient,
    per_run,
    sources_of,
)


class NonfiniteParameters(Patient):
    """The options of `nonfinite`."""

    patience: Count = 1


class Nonfinite(SlotRule):
    """NaN or infinity in a tensor, and where it came from."""

    name = "nonfinite"
    severity = "error"
    certainty = 1.0
    definition = (
        "A tensor contains NaN or infinity. A mask, which holds -inf and otherwise finite numbers, "
        "does not count unless a NaN is computed from it. The finding names the tensor that the "
        "step computed first, forward before backward, at the first step where this happens; "
        "everything recorded before it is finite."
    )
    source = (
        "SageMaker Debugger (exploding tensor); DebugUnderflowOverflow of transformers, which "
        "looks for the first module."
    )
    advice = (
        "Look at this tensor and its inputs one step earlier: a logarithm or square root of 0, a "
        "division by 0, exp of a large number, an overflow in half precision, or a learning rate "
        "that is too high. Add an epsilon, clamp, clip gradients, or lower the learning rate."
    )
    Parameters = NonfiniteParameters
    statistics = ("nonfinite",)
    evidence = "elements"
    needs = "any tensor"

    _samples: dict[int, int] = per_run(dict)

    def wants(self, table: SlotTable) -> Mask:
        """Returns all slots of floating-point tensors."""
        return table.floating

    def measure(self, window: Window, at: Slots) -> Measured:
        """Counts the non-finite elements."""
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
        """Marks the masks from which a NaN is computed as non-finite after all."""
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
        """Returns the slots in the order in which a step computes them."""
        infos = [scene.table.infos[slot] for slot in fired.tolist()]
        backward = np.array([is_gradient(i.key.pass_) for i in infos])
        update = np.array([i.key.pass_ == "update" for i in infos])
        computed = np.array([i.kind not in ("parameter", "input", "buffer") for i in infos])
        order = scene.table.order[fired] * np.where(backward, -1, 1)
        # a parameter is read before the layer's output; its gradient after the output's
        own = computed ^ backward
        first = self.streak.first[fired]
        return fired[np.lexsort((own, order, backward, update, first))]

    def sentence(self, scene: Scene, slot: int) -> str:
        """Returns the message about a slot."""
        sample = self._samples.get(slot, -1)
        which = "" if sample < 0 else f", first in recorded sample {sample}"
        return (
            f"{scene.table.place(slot)} contains NaN or infinity from step "
            f"{self.streak.first[slot]} on{which}; everything recorded before it in that step is "
            "finite."
        )

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns one finding, placed where the non-finite values came from."""
        found = super().findings(scene)
        if not found or found[0].place is None:
            return found
        place = found[0].place
        slot = next(s for s in self.streak.fired.tolist() if scene.table.place(s) == place)
        sample = self._samples.get(slot, -1)
        return [replace(found[0], sample=None if sample < 0 else sample)]

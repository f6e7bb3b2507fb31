"""Half-precision numbers close to what their format can hold."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    Count,
    Mask,
    Measured,
    Patient,
    Scene,
    Share,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    is_gradient,
    per_run,
    same_shape_edges,
)

LARGEST = 65504.0
"""The largest float16."""

SMALLEST_NORMAL = 2.0**-14
"""The smallest float16 that has all its digits."""


class OverflowParameters(Patient):
    """What can be said of `half_overflow`."""

    patience: Count = 1
    """For so many records in a row it must be so."""

    share: Share = 0.5
    """Of the largest float16, 65504, that is too much."""


class HalfOverflow(SlotRule):
    """Values that are about to overflow in half precision."""

    name = "half_overflow"
    certainty = 0.7
    definition = (
        "The largest magnitude in a float16 tensor of the forward pass, of any sample, is above "
        "`share` of the largest float16, 65504, or infinite."
    )
    source = "IEEE 754; the debugging chapter's section on mixed precision."
    advice = (
        "Use bfloat16, run this module in float32 (`torch.autocast(..., enabled=False)`), or scale "
        "its input down: logits and residual sums grow most."
    )
    Parameters = OverflowParameters
    statistics = ("abs_max",)
    evidence = "largest magnitude"
    needs = "float16 tensors; there is none in this run"

    def wants(self, table: SlotTable) -> Mask:
        """Returns float16 values of the forward pass."""
        return table.where(lambda i: i.dtype == "float16" and i.key.pass_ == "forward")

    def measure(self, window: Window, at: Slots) -> Measured:
        """Looks at the largest magnitude of all samples; a mask is not about to overflow."""
        size = window.read("abs_max", at, "abs_max")
        hit = size > self.parameters.share * LARGEST
        if window.has("min"):
            hit &= ~np.isneginf(window.read("min", at))
        return hit, size

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how large it is."""
        return (
            f"{scene.table.place(slot)} reaches {self.streak.worst[slot]:.4g} in float16, whose "
            f"largest number is {LARGEST:.0f}."
        )


_HOPS = 3  # modules without weights that may follow a layer: a norm, dropout, a rectifier


class UnderflowParameters(Patient):
    """What can be said of `half_underflow`."""

    share: Share = 0.5
    """So much of a gradient is exactly zero."""


class HalfUnderflow(SlotRule):
    """Gradients that are too small for half precision."""

    name = "half_underflow"
    certainty = 0.6
    definition = (
        "A float16 gradient is zero in more than `share` of its elements although the same tensor "
        "is not in the forward pass, nor what modules without weights make of it in the same shape "
        "(a ReLU lets through as many gradients as values); or its largest element is below "
        "2^-14, where float16 begins to lose digits; for `patience` records."
    )
    source = "IEEE 754; Micikevicius et al., Mixed Precision Training (2018), on loss scaling."
    advice = "Scale the loss (`torch.amp.GradScaler`), or use bfloat16, which has float32's range."
    explained_by = ("vanishing_gradient", "dead_units")
    Parameters = UnderflowParameters
    statistics = ("zero_fraction", "abs_max")
    evidence, of_graph = "share of zeros", True
    needs = "float16 gradients; there is none in this run"

    _after: list[Slots] = per_run(list)  # what each slot becomes, and what that becomes, ...

    def wants(self, table: SlotTable) -> Mask:
        """Returns float16 gradients; learns what follows each tensor."""
        self._after = self._followed(table)
        return table.where(lambda i: i.dtype == "float16" and is_gradient(i.key.pass_))

    def _followed(self, table: SlotTable) -> list[Slots]:
        weighted = {node for node, _ in self.scene.parameters}
        after = np.full(len(table), -1, np.int64)
        for source, sink in same_shape_edges(self.scene):
            if table.infos[sink].key.node not in weighted:
                after[source] = sink
        found = [after]
        for _ in range(_HOPS - 1):
            found.append(np.where(found[-1] < 0, -1, after[found[-1]]))
        return found

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares zeros with those of the forward pass."""
        zeros = window.read("zero_fraction", at).astype(np.float64)
        lost = zeros > self.parameters.share
        forward = window.table.forward[at]
        for tensor in (forward, *(np.where(forward < 0, -1, a[forward]) for a in self._after)):
            own = window.read("zero_fraction", np.maximum(tensor, 0))
            lost &= (tensor < 0) | ~(own > self.parameters.share / 2)
        largest = window.read("abs_max", at, "abs_max")
        tiny = (largest < SMALLEST_NORMAL) & (largest > 0)
        return (lost & (zeros < 1)) | tiny, zeros

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how much is lost."""
        return (
            f"{scene.table.place(slot)} is too small for float16: {self.streak.worst[slot]:.0%} of "
            "it is exactly zero or about to be."
        )

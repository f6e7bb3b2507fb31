"""Float16 values close to the limits of their format."""

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
"""Largest float16 number."""

SMALLEST_NORMAL = 2.0**-14
"""Smallest float16 number with full precision."""


class OverflowParameters(Patient):
    """Options of `half_overflow`."""

    patience: Count = 1

    share: Share = 0.5
    """Largest allowed magnitude, as a share of the largest float16 number, 65504."""


class HalfOverflow(SlotRule):
    """Values that are about to overflow in half precision."""

    name = "half_overflow"
    certainty = 0.7
    definition = (
        "In a float16 tensor from the forward pass, the largest magnitude over all samples is "
        f"infinite, or above `share` times the largest float16 number ({LARGEST:.0f})."
    )
    source = (
        "IEEE 754; the mixed-precision section of the book chapter 'Debugging: Visualizing "
        "Activation Maps & Gradients'."
    )
    advice = (
        "Use bfloat16, run this module in float32 (`torch.autocast(..., enabled=False)`), or scale "
        "down its input. Logits and sums of residual branches are most likely to overflow."
    )
    Parameters = OverflowParameters
    statistics = ("abs_max",)
    evidence = "largest magnitude"
    needs = "float16 tensors"

    def wants(self, table: SlotTable) -> Mask:
        """Return the float16 tensors of the forward pass."""
        return table.where(lambda i: i.dtype == "float16" and i.key.pass_ == "forward")

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the largest magnitude over all samples; ignores masks (-inf)."""
        size = window.read("abs_max", at, "abs_max")
        hit = size > self.parameters.share * LARGEST
        if window.has("min"):
            hit &= ~np.isneginf(window.read("min", at))
        return hit, size

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} reaches {self.streak.worst[slot]:.4g} in float16, whose "
            f"largest number is {LARGEST:.0f}."
        )


_HOPS = (
    3  # maximum number of modules without weights that follow a layer: norm, dropout, activation
)


class UnderflowParameters(Patient):
    """Options of `half_underflow`."""

    share: Share = 0.5
    """Largest allowed share of elements that are exactly zero."""


class HalfUnderflow(SlotRule):
    """Gradients that are too small for half precision."""

    name = "half_underflow"
    certainty = 0.6
    definition = (
        "For `patience` records in a row, more than `share` of the elements of a float16 "
        "gradient are exactly zero, but the corresponding values in the forward pass are not. "
        "These are the values of the tensor itself and of all tensors of the same shape that "
        "modules without weights compute from it, because a ReLU produces as many zero gradients "
        "as it does zero values. Alternatively, the largest magnitude in "
        "the gradient is below 2^-14, where float16 starts to lose precision."
    )
    source = "IEEE 754; Micikevicius et al., Mixed Precision Training (2018), on loss scaling."
    advice = (
        "Scale the loss (`torch.amp.GradScaler`), or use bfloat16, which has the range of float32."
    )
    explained_by = ("vanishing_gradient", "dead_units")
    Parameters = UnderflowParameters
    statistics = ("zero_fraction", "abs_max")
    evidence, of_graph = "share of zeros", True
    needs = "float16 gradients"

    _after: list[Slots] = per_run(list)  # the slot computed from each slot, one entry per hop

    def wants(self, table: SlotTable) -> Mask:
        """Return the float16 gradients, and store which slots are computed from each tensor."""
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
        """Compare the share of zeros with the share in the forward pass."""
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
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} is too small for float16: {self.streak.worst[slot]:.0%} of "
            "its elements are exactly zero or close to it."
        )

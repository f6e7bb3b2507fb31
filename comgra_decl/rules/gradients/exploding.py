"""Gradients that grow towards the first layers or during training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from comgra_decl.rules.api import (
    Count,
    Early,
    Factor,
    Finding,
    Mask,
    Measured,
    Patient,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    lower_rate,
    per_run,
    predictions,
    row_quantile,
)

_FIRST = 5  # records whose median is the initial value


class ExplodingParameters(Patient):
    """Options of `exploding_gradient`."""

    patience: Count = 2

    growth: Factor = 100.0
    """Largest allowed growth of this gradient, and of all gradients together, as a factor."""

    ratio: Factor = 1000.0
    """Largest allowed gradient, as a multiple of the largest gradient near the loss."""


class ExplodingGradient(SlotRule):
    """Gradients that grow towards the first layers or during training."""

    name = "exploding_gradient"
    severity = "error"
    certainty = 0.6
    definition = (
        "For `patience` records in a row, the l2 norm of a gradient exceeds `ratio` times the "
        "largest norm near the loss (at predictions and in the last quarter of the model). "
        "Alternatively, both this norm and the norm of all gradients together exceed `growth` "
        f"times their initial values (the medians over the first {_FIRST} records). The finding is "
        "only a hint if the loss has fallen by half and is still near its minimum: gradients grow "
        "with the weights that follow, for example towards the scale of large targets. It is only "
        "a warning if the gradients are clipped and the loss is falling, because clipping limits "
        "what such a gradient can do to the parameters."
    )
    source = (
        "TheDeepChecker, which requires gradients to double at each of five checks. AutoTrainer, "
        "which requires the norm of the first layer to be 70 times the norm of the last layer. "
        "The limits here are looser and relative to the run itself, because gradients in "
        "healthy runs can start small. For example, they are small in layers that precede layers "
        "initialized to zero."
    )
    advice = (
        "Lower the learning rate or use a warmup, clip the gradient norm (to about 1), and check "
        "the initialization of this layer. In recurrent models, use gates or shorter sequences."
    )
    explained_by = (
        "nonfinite",
        "poor_initialisation",
        "accumulated_gradient",
        "summed_loss",
        "unmasked_target",
        "unusual_momentum",
        "unscaled_attention",
    )
    Parameters = ExplodingParameters
    statistics = ("l2",)
    backwards, evidence = True, "times too large"
    of_graph, harmless = True, True
    needs = "gradients, such as {select: '**', capture: [output_grad]}"

    _early = per_run(Early, _FIRST)
    _early_total = per_run(Early, _FIRST)
    _near = np.zeros(0, np.bool_)

    def advise(self, scene: Scene) -> str:
        """Return advice adapted to the optimizer settings."""
        further = (
            "Check the initialization of this layer. In recurrent models, use gates or shorter "
            "sequences."
        )
        return lower_rate(scene, self.advice, further=further)

    def wants(self, table: SlotTable) -> Mask:
        """Return the gradients of outputs, or of weights if output gradients are not recorded.

        Also determines which of them are near the loss. These include all predictions, in any
        order, because a model may run several times in a step for several parts of the loss, some
        of which have little weight.
        """
        wanted = table.layer_gradients
        self._near = wanted & np.isin(table.forward, list(predictions(self.scene)))
        order = table.order[wanted]
        if len(order):
            last = row_quantile(order[None].astype(np.float64), 0.75)[0]
            self._near |= wanted & (table.order >= last)
        return wanted

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compare each gradient with others in the same step, and with the first records."""
        size = window.read("l2", at).astype(np.float64)
        known = np.where(np.isfinite(size) & (size > 0), size, np.nan)
        there = (~np.isnan(known)).sum(1)
        total = np.sqrt(np.nansum(known**2, axis=1, keepdims=True))
        total[there == 0] = np.nan
        all_grew = total / self._early_total.look(np.zeros(1, np.int64), total)
        grew = np.fmin(known / self._early.look(at, known), all_grew) / self.parameters.growth
        near = self._near[at]
        away = known / np.fmax.reduce(np.where(near, known, np.nan), axis=1, keepdims=True)
        away = np.where(there[:, None] >= 4, away, np.nan)
        excess = np.fmax(np.nan_to_num(grew), np.nan_to_num(away) / self.parameters.ratio)
        return excess > 1, excess

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding, which is less severe if clipping limits the effect."""
        found = super().findings(scene)
        stated = self.parameters.severity is not None
        if stated or not found or scene.clipping.norm is None or not scene.falls:
            return found
        return [replace(f, severity="warning") if f.severity == "error" else f for f in found]

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"The gradient explodes: {scene.table.place(slot)} is "
            f"{self.streak.worst[slot]:.3g} times the limit at step "
            f"{self.streak.worst_step[slot]}."
        )

"""Predictions and targets whose shapes broadcast against each other."""

from __future__ import annotations

from comgra_decl.rules.api import Finding, Rule, Scene, SlotInfo, target_pairs


class SilentBroadcasting(Rule):
    """Predictions and targets whose shapes broadcast, so that each meets every other."""

    name = "silent_broadcasting"
    severity = "error"
    certainty = 0.95
    definition = (
        "A floating-point prediction and its floating-point target differ in shape, such as [64, "
        "1] and [64]: their difference has the shape [64, 64], so every prediction is compared "
        "with every target. Shapes that align as intended (one target for all samples) and batches "
        "of one sample are left out."
    )
    source = (
        "The first bug in the book chapter 'Debugging: Visualizing Activation Maps & Gradients'."
    )
    advice = "Give both the same shape: `prediction.squeeze(-1)` or `target.unsqueeze(-1)`."

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns a finding about the first pair that does not match."""
        for prediction, target in target_pairs(scene):
            if _misfit(prediction, target):
                shapes = f"{list(prediction.shape)} and {list(target.shape)}"
                return [
                    self.finding(
                        scene,
                        place=scene.table.place(prediction.id),
                        first_step=0,
                        message=f"{prediction.key.node} and its target have shapes {shapes}: every "
                        "prediction is compared with every target.",
                        evidence={"answer": str(prediction.shape), "target": str(target.shape)},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Returns why the rule could not check the run."""
        if scene.structure is None:
            return "no dependency graph is recorded; set `graph: true`"
        if not any(target_pairs(scene)):
            return "no call compares an output with a target"
        return None


def _misfit(prediction: SlotInfo, target: SlotInfo) -> bool:
    if "float" not in prediction.dtype or "float" not in target.dtype:
        return False
    a, b = prediction.shape, target.shape
    if a == b or not a or not b or len(a) == len(b):
        return False
    short, long = sorted((a, b), key=len)
    if long[len(long) - len(short) :] == short:
        return False  # one target for all samples, aligned as numpy does
    return short[0] > 1 and 1 in long

"""Answers and targets whose shapes do not fit, silently."""

from __future__ import annotations

from comgra_decl.rules.api import Finding, Rule, Scene, SlotInfo, target_pairs


class SilentBroadcasting(Rule):
    """Answers and targets whose shapes do not fit, so that each meets all others."""

    name = "silent_broadcasting"
    severity = "error"
    certainty = 0.95
    definition = (
        "A floating-point answer and its floating-point target differ in shape, such as [64, 1] "
        "and [64]: their difference has the shape [64, 64], every answer is compared with every "
        "target. Shapes that differ in a dimension of 1 that the other lacks in the same place, or "
        "in a batch of 1, are left out."
    )
    source = "The debugging chapter, first of its bugs."
    advice = "Bring both to one shape: `answer.squeeze(-1)` or `target.unsqueeze(-1)`."

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns one finding for the first pair that does not fit."""
        for answer, target in target_pairs(scene):
            if _misfit(answer, target):
                shapes = f"{list(answer.shape)} and {list(target.shape)}"
                return [
                    self.finding(
                        scene,
                        place=scene.table.place(answer.id),
                        first_step=0,
                        message=f"{answer.key.node} and its target have the shapes {shapes}: every "
                        "answer is compared with every target.",
                        evidence={"answer": str(answer.shape), "target": str(target.shape)},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Returns why it could not look."""
        if scene.structure is None:
            return "no dependency graph is recorded; set `graph: true`"
        if not any(target_pairs(scene)):
            return "no call was seen in which an output meets a target"
        return None


def _misfit(answer: SlotInfo, target: SlotInfo) -> bool:
    if "float" not in answer.dtype or "float" not in target.dtype:
        return False
    a, b = answer.shape, target.shape
    if a == b or not a or not b or len(a) == len(b):
        return False
    short, long = sorted((a, b), key=len)
    if long[len(long) - len(short) :] == short:
        return False  # one target for all samples, as numpy would align it
    return short[0] > 1 and 1 in long

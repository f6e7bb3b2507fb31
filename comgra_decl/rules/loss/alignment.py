"""Losses of alignments whose targets contain the blank."""

from __future__ import annotations

from comgra_decl.rules.api import Finding, Place, Rule, Scene, calls_missing


class BlankInTargets(Rule):
    """CTC losses whose targets contain the blank."""

    name = "blank_in_targets"
    severity = "error"
    certainty = 0.95
    definition = (
        "The targets of `ctc_loss`, within the target lengths, contain the index of the blank. "
        "Padding after the target lengths does not count."
    )
    source = "PyTorch's documentation of CTCLoss: the target index cannot be blank (default 0)."
    advice = (
        "Number the labels from 1 and keep 0 for the blank, or pass `blank=` an index that no "
        "label has, and use the same index for decoding."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such loss."""
        for fact in scene.told("blank target"):
            return [
                self.finding(
                    scene,
                    place=Place(str(fact.get("where") or "ctc_loss")),
                    first_step=0,
                    message=f"{100 * float(fact['share']):.3g}% of the targets of ctc_loss are "
                    f"{fact['blank']}, which is also the index of the blank, so these labels "
                    "cannot be predicted.",
                    evidence={"share": float(fact["share"]), "blank": int(fact["blank"])},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return calls_missing(scene)

"""Sequence models that read their result from padding."""

from __future__ import annotations

from typing import Annotated, Any

from comgra_decl.rules.api import (
    Field,
    Finding,
    Fraction,
    Place,
    Rule,
    RuleParameters,
    Scene,
    calls_missing,
)


class LastStepParameters(RuleParameters):
    """Options of `padded_last_step`."""

    share: Annotated[Fraction, Field(ge=0.01)] = 0.25
    """Smallest share of samples that end with padding."""


class PaddedLastStep(Rule):
    """Sequence models that read their result from padding."""

    name = "padded_last_step"
    certainty = 0.8
    definition = (
        "The model's input consists of tokens [batch, positions]. On average over the first "
        "records, at least `share` of the samples end with padding. The model reads the last "
        "position of a tensor [batch, positions, features] or [positions, batch, features], such "
        "as `out[:, -1]`. The finding is only a hint if the model instead uses the final state of "
        "a recurrent module that received the padded sequences without packing them, or if the "
        "program stacks the positions itself, because its loop may keep the state on padding. A "
        "token counts as padding if it ends several samples, in runs of different lengths, and "
        "occurs nowhere else."
    )
    source = (
        "PyTorch's documentation of `pack_padded_sequence`: without packing, a recurrent module "
        "continues through the padding. Our own definition."
    )
    advice = (
        "Read the output at the last token of each sample, `out[torch.arange(len(out)), lengths - "
        "1]`, use `pack_padded_sequence(..., enforce_sorted=False)`, or pad on the left."
    )
    Parameters = LastStepParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first tensor that is read at a padded position."""
        for kind in ("last step", "final state"):
            found: dict[str, list[dict[str, Any]]] = {}
            for fact in scene.told(kind):
                found.setdefault(str(fact["where"]), []).append(fact)
            for where, facts in found.items():
                share = sum(float(fact["padded"]) for fact in facts) / len(facts)
                if share >= self.parameters.share:
                    unsure = kind == "final state" or any(fact.get("stacked") for fact in facts)
                    return [self._report(scene, where, share, kind=kind, unsure=unsure)]
        return []

    def _report(
        self, scene: Scene, where: str, share: float, *, kind: str, unsure: bool
    ) -> Finding:
        read = (
            "The final state of a recurrent module"
            if kind == "final state"
            else "The last position of a sequence"
        )
        return self.finding(
            scene,
            place=Place(where or "sequence"),
            first_step=0,
            message=f"{read} is used in {where}, but {100 * share:.3g}% of the samples end with "
            "padding: for them, the result is read after the padding instead of at the last "
            "token.",
            severity="hint" if unsure else self.severity,
            certainty=0.6 if unsure else self.certainty,
            evidence={"padded samples": share},
        )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return calls_missing(scene)

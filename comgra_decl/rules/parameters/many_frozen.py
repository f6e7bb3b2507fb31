"""Networks that are mostly frozen."""

from __future__ import annotations

from math import prod

from comgra_decl.rules.api import MOST_OTHERS, Finding, Place, Rule, RuleParameters, Scene, Share


class ManyFrozenParameters(RuleParameters):
    """The options of `frozen_parameters`."""

    share: Share = 0.5
    """The largest allowed share of frozen elements."""


class ManyFrozen(Rule):
    """Networks that are mostly frozen."""

    name = "frozen_parameters"
    severity = "hint"
    certainty = 0.6
    definition = (
        "More than `share` of all elements of parameters had requires_grad=False when their "
        "modules were first seen. Only you know whether that is intended."
    )
    source = (
        "The frozen network in the book chapter 'Debugging: Visualizing Activation Maps & "
        "Gradients', whose list of trainable parameters is short."
    )
    advice = (
        "If it is intended (fine-tuning a pretrained network), switch this rule off. Otherwise "
        "look for requires_grad_(False) and for a module that was loaded frozen."
    )
    Parameters = ManyFrozenParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns one finding for all frozen parameters."""
        sizes = {Place(*key): prod(facts["shape"]) for key, facts in scene.parameters.items()}
        frozen = [
            Place(*key) for key, facts in scene.parameters.items() if facts["trainable"] is False
        ]
        total, still = sum(sizes.values()), sum(sizes[place] for place in frozen)
        if scene.records < 2 or not total or still / total <= self.parameters.share:
            return []
        return [
            self.finding(
                scene,
                place=frozen[0],
                first_step=0,
                message=f"{still / total:.0%} of all parameters ({still} of {total}) are frozen, "
                f"for example {frozen[0]}.",
                evidence={"frozen": still, "all": total},
                also=len(frozen) - 1,
                others=tuple(frozen[1 : MOST_OTHERS + 1]),
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Returns why the rule could not check the run."""
        return None if scene.parameters else "no module with parameters was seen"

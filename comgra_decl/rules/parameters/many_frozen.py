"""Networks of which most is frozen."""

from __future__ import annotations

from math import prod

from comgra_decl.rules.api import MOST_OTHERS, Finding, Place, Rule, RuleParameters, Scene, Share


class ManyFrozenParameters(RuleParameters):
    """What can be said of `frozen_parameters`."""

    share: Share = 0.5
    """So many of all elements of parameters cannot be trained."""


class ManyFrozen(Rule):
    """Networks of which most is frozen."""

    name = "frozen_parameters"
    severity = "hint"
    certainty = 0.6
    definition = (
        "More than `share` of all elements of parameters have requires_grad=False, when their "
        "modules were first seen. Nobody but you can tell whether that is on purpose."
    )
    source = "The debugging chapter's frozen network, whose list of trainable parameters is short."
    advice = (
        "If it is meant (fine-tuning a pretrained network), switch the rule off; else look for "
        "requires_grad_(False) and for a module that was loaded frozen."
    )
    Parameters = ManyFrozenParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns one finding for all that is frozen."""
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
                f"{frozen[0]} for one.",
                evidence={"frozen": still, "all": total},
                also=len(frozen) - 1,
                others=tuple(frozen[1 : MOST_OTHERS + 1]),
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Returns why it could not look."""
        return None if scene.parameters else "no module with parameters was seen"

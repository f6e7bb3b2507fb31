"""Models that are mostly frozen."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from comgra_decl.rules.api import MOST_OTHERS, Finding, Place, Rule, RuleParameters, Scene, Share


class ManyFrozenParameters(RuleParameters):
    """Options of `frozen_parameters`."""

    share: Share = 0.1
    """Largest allowed share of frozen parameter elements."""


class ManyFrozen(Rule):
    """Models that are mostly frozen."""

    name = "frozen_parameters"
    severity = "hint"
    certainty = 0.6
    definition = (
        "In models with at least one trainable parameter, more than `share` of all parameter "
        "elements have requires_grad=False. Models without trainable parameters are ignored "
        "(teachers, moving averages of weights). The rule cannot determine whether freezing is "
        "intended."
    )
    source = (
        "The frozen network in the book chapter 'Debugging: Visualizing Activation Maps & "
        "Gradients', which has only a few trainable parameters."
    )
    advice = (
        "If freezing is intended, as when fine-tuning a pretrained model, disable this rule. "
        "Otherwise look for requires_grad_(False), or for a module that was frozen when it was "
        "loaded."
    )
    Parameters = ManyFrozenParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Return one finding for all frozen parameters."""
        parameters = _trained_models(scene)
        sizes = {Place(*key): prod(facts["shape"]) for key, facts in parameters.items()}
        frozen = [Place(*key) for key, facts in parameters.items() if facts["trainable"] is False]
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
        """Return the reason why the run could not be checked, or None."""
        return None if scene.parameters else "the run contains no module with parameters"


def _trained_models(scene: Scene) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Return facts about the parameters of partly trainable models."""
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    model: dict[tuple[str, str], Mapping[str, Any]] = {}
    for module in [*(scene.documents.get("modules") or []), None]:
        if module is None or not module["path"]:  # the root module comes first in each model
            if any(facts["trainable"] for facts in model.values()):
                found |= model
            model = {}
        if module is not None:
            model |= {(module["node"], name): f for name, f in module["parameters"].items()}
    return found

"""Networks that are mostly frozen."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from comgra_decl.rules.api import MOST_OTHERS, Finding, Place, Rule, RuleParameters, Scene, Share


class ManyFrozenParameters(RuleParameters):
    """The options of `frozen_parameters`."""

    share: Share = 0.1
    """The largest allowed share of frozen elements."""


class ManyFrozen(Rule):
    """Networks that are mostly frozen."""

    name = "frozen_parameters"
    severity = "hint"
    certainty = 0.6
    definition = (
        "In models with trainable parameters, more than `share` of all parameter elements have "
        "requires_grad=False. Models without a trainable parameter are ignored (teachers, averages "
        "of weights). The rule cannot tell whether freezing is intended."
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
        """Returns why the rule could not check the run."""
        return None if scene.parameters else "no module with parameters was seen"


def _trained_models(scene: Scene) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Returns the facts about the parameters of models of which some are trainable."""
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    model: dict[tuple[str, str], Mapping[str, Any]] = {}
    for module in [*(scene.documents.get("modules") or []), None]:
        if module is None or not module["path"]:  # a model begins with its root
            if any(facts["trainable"] for facts in model.values()):
                found |= model
            model = {}
        if module is not None:
            model |= {(module["node"], name): f for name, f in module["parameters"].items()}
    return found

"""Settings of modules that contradict the usual meaning of their arguments."""

from __future__ import annotations

from comgra_decl.rules.api import (
    Finding,
    Fraction,
    Place,
    Rule,
    RuleParameters,
    Scene,
    keeps_statistics,
)


class MomentumParameters(RuleParameters):
    """Options of `batch_norm_momentum`."""

    largest: Fraction = 0.5
    """Largest allowed momentum."""


class BatchNormMomentum(Rule):
    """BatchNorm modules whose running statistics mostly reflect the newest batch."""

    name = "batch_norm_momentum"
    certainty = 0.8
    definition = (
        "The `momentum` of a BatchNorm module that keeps running statistics is above `largest`. "
        "In PyTorch, `momentum` is the weight of the newest batch, so with a large value, "
        "evaluation uses only the statistics of the last few batches. In TensorFlow, it is the "
        "weight of the past, usually 0.99."
    )
    source = "The BatchNorm documentation of PyTorch (default 0.1) and of Keras (default 0.99)."
    advice = "Use the default of 0.1. A TensorFlow momentum of m corresponds to 1 - m in PyTorch."
    Parameters = MomentumParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns a finding about the first such module."""
        found = []
        for module in scene.documents.get("modules") or []:
            settings = module.get("settings") or {}
            momentum = settings.get("momentum")
            if (
                not keeps_statistics(module)
                or isinstance(momentum, bool)
                or not isinstance(momentum, (int, float))
            ):
                continue
            if settings.get("track_running_stats") and momentum > self.parameters.largest:
                found.append((str(module["node"]), float(momentum)))
        if not found:
            return []
        node, momentum = found[0]
        return [
            self.finding(
                scene,
                place=Place(node),
                first_step=0,
                message=f"The momentum of {node} is {momentum:.3g}: the last batch determines "
                f"{100 * momentum:.3g}% of the running statistics that are used in evaluation.",
                evidence={"momentum": momentum},
                also=len(found) - 1,
                others=tuple(Place(name) for name, _ in found[1:9]),
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Returns why the rule could not check the run."""
        return None if scene.documents.get("modules") else "the run has no list of modules"

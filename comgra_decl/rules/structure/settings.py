"""Settings of modules that contradict the usual meaning of their arguments."""

from __future__ import annotations

from comgra_decl.rules.api import Finding, Fraction, Place, Rule, RuleParameters, Scene

_STATISTICS = "BatchNorm", "InstanceNorm"


class MomentumParameters(RuleParameters):
    """The options of `batch_norm_momentum`."""

    largest: Fraction = 0.5
    """The largest momentum allowed."""


class BatchNormMomentum(Rule):
    """Running statistics of a BatchNorm that follow the newest batch."""

    name = "batch_norm_momentum"
    certainty = 0.8
    definition = (
        "The `momentum` of a BatchNorm module that keeps running statistics is above `largest`. In "
        "PyTorch, it is the weight of the newest batch, so that evaluation uses the statistics of "
        "the last few batches. In TensorFlow, it is the weight of the past (usually 0.99)."
    )
    source = "PyTorch's documentation of BatchNorm (0.1 by default) and Keras' (0.99)."
    advice = "Use the default of 0.1; a momentum m of TensorFlow is 1 - m in PyTorch."
    Parameters = MomentumParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns a finding about the first such module."""
        found = []
        for module in scene.documents.get("modules") or []:
            settings = module.get("settings") or {}
            momentum = settings.get("momentum")
            is_norm = any(name in str(module.get("class")) for name in _STATISTICS)
            if not is_norm or isinstance(momentum, bool) or not isinstance(momentum, (int, float)):
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
                message=f"The momentum of {node} is {momentum:.3g}: its running statistics, which "
                f"evaluation uses, are {100 * momentum:.3g}% those of the last batch.",
                evidence={"momentum": momentum},
                also=len(found) - 1,
                others=tuple(Place(name) for name, _ in found[1:9]),
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Returns why the rule could not check the run."""
        return None if scene.documents.get("modules") else "the run has no list of modules"

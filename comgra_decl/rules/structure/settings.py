"""Settings of modules that contradict the usual meaning of their arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from comgra_decl.rules.api import (
    Finding,
    Fraction,
    Place,
    Rule,
    RuleParameters,
    Scene,
    calls_missing,
    keeps_statistics,
    trained_models,
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
        """Return a finding about the first such module."""
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
        """Return why the rule could not check the run."""
        return None if scene.documents.get("modules") else "the run has no list of modules"


class FrozenBatchNorm(Rule):
    """Frozen BatchNorm modules that still update their running statistics."""

    name = "frozen_batch_norm"
    severity = "hint"
    certainty = 0.7
    definition = (
        "In a model with trained parameters, the weight of a BatchNorm module is frozen, but the "
        "module is in training mode: it normalizes with the statistics of the batch and updates "
        "its running statistics. Models that are entirely frozen (target networks) and runs with "
        "several optimizers, in which models are frozen in turn, are ignored. This is only a hint, "
        "because with large batches of similar data it does little harm."
    )
    source = (
        "The Keras guide to transfer learning: keep BatchNorm in inference mode when unfreezing a "
        "model. In PyTorch, requires_grad_(False) does not affect running statistics."
    )
    advice = "After every call to model.train(), call eval() on the frozen part."

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such module."""
        facts = scene.told("frozen batch norm")
        sizes = {int(fact["channels"]) for fact in facts}
        found = [] if len(scene.optimizers) > 1 else [*_frozen_norms(scene, sizes)]
        if not found:
            return []
        return [
            self.finding(
                scene,
                place=Place(found[0]),
                first_step=0,
                message=f"{found[0]} is frozen but in training mode: it normalizes with the "
                "statistics of each batch, and its running statistics move away from those of the "
                "pretrained model.",
                evidence={"modules": len(found), "values": min(int(f["values"]) for f in facts)},
                also=len(found) - 1,
                others=tuple(Place(name) for name in found[1:9]),
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return calls_missing(scene)


def _frozen_norms(scene: Scene, sizes: set[int]) -> Iterator[str]:
    """Yield frozen BatchNorm modules of these sizes in models that are trained."""
    models: dict[str, list[Mapping[str, Any]]] = {}
    model = ""
    for module in scene.documents.get("modules") or []:
        model = str(module["node"]) if not module["path"] else model
        models.setdefault(model, []).append(module)
    for name in trained_models(scene):
        if any(f.get("trainable") for m in models[name] for f in m["parameters"].values()):
            for module in filter(keeps_statistics, models[name]):
                weight = module["parameters"].get("weight", {"trainable": True})
                if not weight["trainable"] and weight["shape"][0] in sizes:
                    yield str(module["node"])

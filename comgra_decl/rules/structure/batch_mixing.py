"""Samples of a batch that influence each other through a softmax over the wrong dimension."""

from __future__ import annotations

from comgra_decl.rules.api import (
    CLASSIFICATION,
    LOGITS_OF_CLASSES,
    Finding,
    LossCall,
    Rule,
    Scene,
    place_of,
)


class BatchMixing(Rule):
    """A softmax over the wrong dimension, which mixes the samples of a batch."""

    name = "batch_mixing"
    severity = "error"
    certainty = 0.9
    definition = (
        "The prediction that `nll_loss` gets was computed by a log-softmax over another dimension "
        "than that of the classes (the second, or the only one). Or (a warning) a softmax in the "
        "backward graph of the loss runs over the batch: over dimension 0 of a tensor with the "
        "batch's size there, whose next dimension has another size, while targets have the batch's "
        "size, too."
    )
    source = (
        "Karpathy, A Recipe for Training Neural Networks (use backprop to chart dependencies: "
        "information mixes across the batch dimension); own definition."
    )
    advice = (
        "Compute the softmax over the classes (dim=1, or dim=-1 where classes come last). "
        "`comgra-decl batch-mixing` shows where samples meet."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns a finding about the first softmax over a wrong dimension."""
        for call, seen in scene.calls.items():
            if _is_wrong(call):
                shape = list(call.prediction.shape)
                return [
                    self.finding(
                        scene,
                        place=place_of(scene, call),
                        first_step=seen.first,
                        last_step=seen.last,
                        message=f"The softmax before {call.function} runs over dimension "
                        f"{call.prediction.dim} of {shape}"
                        f"{', the batch' if call.prediction.dim == 0 else ''}; the classes are "
                        f"dimension {min(1, len(shape) - 1)}.",
                        evidence={"dim": int(call.prediction.dim or 0), "shape": str(shape)},
                    )
                ]
        return self._inside(scene)

    def _inside(self, scene: Scene) -> list[Finding]:
        batches = {call.target.shape[0] for call in scene.calls if call.target.shape}
        for shape in scene.batch_softmaxes:
            if shape[0] in batches:
                return [
                    self.finding(
                        scene,
                        first_step=0,
                        message=f"A softmax of shape {list(shape)} runs over dimension 0, the "
                        "batch: samples influence each other.",
                        severity="warning",
                        certainty=0.75,
                        evidence={"shape": str(list(shape))},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Returns why the rule could not check the run."""
        return None if scene.calls else "no call compares a prediction with a target"


def _is_wrong(call: LossCall) -> bool:
    made = call.prediction
    if call.function not in CLASSIFICATION - LOGITS_OF_CLASSES or made.dim is None:
        return False
    return made.made_by == "LogSoftmax" and made.dim != min(1, len(made.shape) - 1)

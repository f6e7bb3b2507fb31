"""Samples in a batch that affect each other because of a softmax over the wrong dimension."""

from __future__ import annotations

from math import log

from comgra_decl.rules.api import (
    CLASSIFICATION,
    LOGITS_OF_CLASSES,
    Finding,
    LossCall,
    Numbers,
    Place,
    Rule,
    Scene,
    comparison_missing,
    place_of,
)

_NEAR = 0.02  # relative tolerance


class BatchMixing(Rule):
    """A softmax over the wrong dimension, which mixes the samples in a batch."""

    name = "batch_mixing"
    severity = "error"
    certainty = 0.9
    definition = (
        "The prediction passed to `nll_loss` was computed by a log-softmax over a dimension other "
        "than the classes (the second dimension, or the only one), or that passed to `ctc_loss` "
        "over another dimension than the last. Two other conditions lead only "
        "to a warning. First, a softmax in the backward graph of the loss runs over the batch. "
        "This is assumed if the softmax runs over dimension 0, the size of this dimension equals "
        "the batch size of the targets, and the next dimension has a different size. Second, the "
        "only loss of the run takes probabilities of classes, as `nll_loss` does, and its first "
        f"value is within {_NEAR:.0%} of ln(batch), while ln(classes) differs from ln(batch), "
        "unless the loss has fallen by half and is still near its minimum."
    )
    source = (
        "Karpathy, A Recipe for Training Neural Networks, which suggests using backprop to find "
        "information that is mixed across the batch dimension; our own definition."
    )
    advice = (
        "Compute the softmax over the classes: dim=1, or dim=-1 if the classes are the last "
        "dimension. Use `comgra-decl batch-mixing` to find out where samples are mixed."
    )

    _first: tuple[int, float] | None = None

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first softmax over the wrong dimension."""
        for call, seen in scene.calls.items():
            if _is_wrong(call):
                shape = list(call.prediction.shape)
                return [
                    self.finding(
                        scene,
                        place=place_of(scene, call),
                        first_step=seen.first,
                        last_step=seen.last,
                        message=f"The softmax before {call.function} is computed over dimension "
                        f"{call.prediction.dim} of "
                        f"{shape}{(', the batch' if call.prediction.dim == 0 else '')}; the "
                        f"classes are in dimension {min(1, len(shape) - 1)}.",
                        evidence={"dim": int(call.prediction.dim or 0), "shape": str(shape)},
                    )
                ]
        for fact in scene.told("ctc softmax"):
            return [
                self.finding(
                    scene,
                    place=Place(str(fact["where"])),
                    first_step=0,
                    message=f"The softmax before ctc_loss is computed over dimension {fact['dim']} "
                    f"of {fact['shape']}, which is [time, batch, classes]; the classes are the "
                    "last dimension.",
                    evidence={"dim": int(fact["dim"]), "shape": str(fact["shape"])},
                )
            ]
        return self._inside(scene) or self._guesses(scene)

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Store the first loss."""
        if numbers.name == "loss" and self._first is None and len(numbers.values):
            self._first = int(numbers.steps[0]), float(numbers.values[0])

    def _guesses(self, scene: Scene) -> list[Finding]:
        """Compare the first loss with the cost of guessing a sample in the batch."""
        if self._first is None or self._first[0] > 0 or len(scene.calls) != 1 or scene.learns:
            return []
        (call,) = scene.calls
        loss, classes = self._first[1], call.classes
        batch = call.target.shape[0] if call.target.shape else 0
        if min(batch, classes) < 2 or not call.target.is_integer:
            return []
        if call.function in LOGITS_OF_CLASSES:  # computes the softmax over the classes itself
            return []
        near = abs(loss - log(batch)) < _NEAR * log(batch)
        if not near or abs(log(batch) - log(classes)) < 5 * _NEAR * log(classes):
            return []
        return [
            self.finding(
                scene,
                place=place_of(scene, call),
                first_step=0,
                message=f"The first loss is {loss:.4g}, which is ln({batch}), the cost of "
                f"guessing among the samples in the batch. Guessing among {classes} classes costs "
                f"{log(classes):.4g}. A softmax is probably computed over the batch.",
                severity="warning",
                certainty=0.7,
                evidence={"loss": loss, "batch": batch, "classes": classes},
            )
        ]

    def _inside(self, scene: Scene) -> list[Finding]:
        batches = {call.target.shape[0] for call in scene.calls if call.target.shape}
        for shape in scene.batch_softmaxes:
            if shape[0] in batches:
                return [
                    self.finding(
                        scene,
                        first_step=0,
                        message=f"A softmax of shape {list(shape)} is computed over dimension 0, "
                        "the batch, so samples affect each other.",
                        severity="warning",
                        certainty=0.75,
                        evidence={"shape": str(list(shape))},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        return None if scene.told("ctc softmax") else comparison_missing(scene)


def _is_wrong(call: LossCall) -> bool:
    made = call.prediction
    if call.function not in CLASSIFICATION - LOGITS_OF_CLASSES or made.dim is None:
        return False
    return made.made_by == "LogSoftmax" and made.dim != min(1, len(made.shape) - 1)

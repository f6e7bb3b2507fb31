"""Losses whose structure cannot lead to the intended solution."""

from __future__ import annotations

from collections.abc import Iterator

from comgra_decl.rules.api import Finding, Rule, Scene, loss_missing


def _first(scene: Scene) -> Iterator[dict[str, int]]:
    """Yield the structure of each loss in the first record."""
    yield from scene.objectives[0] if scene.objectives else ()


class WrongLogScale(Rule):
    """Logarithms of scales that enter the loss with the wrong sign."""

    name = "wrong_log_scale"
    minimizes = True
    certainty = 0.75
    definition = (
        "The loss adds a tensor s, possibly negated or times a number, and exp(s) scales other "
        "values, as in the log-determinant of a normalizing flow, a Gaussian likelihood with a "
        "learned variance, or the posterior of a variational autoencoder. (The same applies to "
        "log(s) and s.) In a likelihood, the two terms oppose each other: the sum rewards scales "
        "that the scaled values penalize. The rule reports scales for which the same change "
        "reduces both the loss and the scaled values, so that these values shrink without limit. "
        "Scales that multiply some values and divide others are ignored. The signs are read from "
        "autograd's graph in the first records."
    )
    source = (
        "Dinh et al., Density estimation using Real NVP (2017), equation 3: log p(x) = log p(z) + "
        "log |det dz/dx|. Kingma and Welling, Auto-Encoding Variational Bayes (2014), appendix B. "
        "Our own definition."
    )
    advice = (
        "Check the sign of the log-determinant or of log sigma. For x -> z = x exp(s) + t, the "
        "loss is -(log p(z) + s.sum()). For a Gaussian, it is 0.5 ((x - mu) / sigma)^2 + log "
        "sigma. The KL term is -0.5 (1 + logvar - mu^2 - exp(logvar))."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first loss with such a scale."""
        for counts in _first(scene):
            along, against = int(counts.get("along", 0)), int(counts.get("against", 0))
            if along:
                return [
                    self.finding(
                        scene,
                        first_step=0,
                        message=f"{along} of {along + against} logarithms of scales enter the "
                        "loss with the wrong sign: it falls when the scaled values shrink and when "
                        "their log-scale is reduced, so nothing keeps the scale from "
                        "vanishing.",
                        evidence={"wrong": along, "right": against},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return loss_missing(scene)


class NoStopGradient(Rule):
    """Losses that only compare two trained outputs, so that a constant output is perfect."""

    name = "no_stop_gradient"
    certainty = 0.7
    definition = (
        "A step has a single loss, and each of its terms compares two tensors that are both "
        "computed from trained parameters and carry gradients, such as two views of a batch. "
        "In each pair, either both sides use the same parameters, or one side uses all parameters "
        "of the other and additional ones (a predictor). No term contains data or other samples. A "
        "network with a constant output then has the smallest possible loss."
    )
    source = (
        "Chen and He, Exploring Simple Siamese Representation Learning (2021), section 4.1: "
        "without stop-gradient, the outputs collapse to a constant vector."
    )
    advice = (
        "Detach the target side of each pair, D(p1, z2.detach()), or add a term that prevents "
        "collapse (negative pairs, variance)."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding if the loss of the first record has only such pairs."""
        losses = [*_first(scene)]
        if len(losses) != 1 or len(scene.optimizers) > 1:
            return []
        counts = losses[0]
        pairs, others = int(counts.get("pairs", 0)), int(counts.get("others", 0))
        predicted, alike = int(counts.get("predicted", 0)), int(counts.get("alike", 0))
        if not pairs or others or predicted + alike != pairs:
            return []
        return [
            self.finding(
                scene,
                first_step=0,
                message=f"The loss compares only {pairs} pairs of outputs with each other, and "
                "both sides carry gradients: a constant output is a perfect solution, and nothing "
                "prevents the outputs from collapsing to it. The target side is probably meant to "
                "be detached.",
                evidence={"pairs": pairs, "with a predictor": predicted},
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return loss_missing(scene)

"""Posteriors of generative models with the wrong scale, weight or noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comgra_decl.rules.api import (
    Factor,
    FactRule,
    Finding,
    Rule,
    RuleParameters,
    Scene,
    Severity,
    loss_missing,
)

_HARMFUL = 8.0  # times the limit of the weight: a warning


class VarianceAsScale(Rule):
    """Samples of a posterior that are scaled by its variance."""

    name = "variance_as_scale"
    severity = "error"
    certainty = 0.85
    definition = (
        "A loss contains the divergence of a Gaussian from the standard one, s - exp(s), which "
        "shows that s is the logarithm of the variance. The noise of the sample is multiplied by "
        "exp(s) instead of exp(s / 2). Both are read from autograd's graph in the first records."
    )
    source = (
        "Kingma and Welling, Auto-Encoding Variational Bayes (2014), appendix B: z = mu + sigma "
        "epsilon. Our own definition."
    )
    advice = "Scale the noise by the standard deviation: z = mu + torch.exp(0.5 * logvar) * noise."

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such posterior."""
        if not any(term["variance as scale"] for term in scene.terms("divergence")):
            return []
        return [
            self.finding(
                scene,
                first_step=0,
                message="The noise of the posterior's sample is multiplied by exp(s), but the "
                "divergence in the loss treats s as the logarithm of the variance: the sample is "
                "scaled by the variance instead of the standard deviation.",
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return loss_missing(scene) or _no_divergence(scene)


class DeterministicPosterior(Rule):
    """Posteriors whose variance no sample uses."""

    name = "deterministic_posterior"
    certainty = 0.75
    definition = (
        "A loss contains the divergence of a Gaussian from the standard one, s - exp(s), but "
        "nothing else uses s, so no sample is drawn with this variance. Losses with a policy "
        "gradient are ignored: there, it is the divergence from an earlier policy."
    )
    source = (
        "Kingma and Welling, Auto-Encoding Variational Bayes (2014), section 2.4: the decoder "
        "receives mu + sigma epsilon. Our own definition."
    )
    advice = (
        "Pass a sample to the decoder: z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such posterior."""
        wrong = any(term["deterministic"] for term in scene.terms("divergence"))
        if not wrong or scene.terms("policy"):
            return []
        return [
            self.finding(
                scene,
                first_step=0,
                message="The variance of the posterior appears only in the divergence: the decoder "
                "receives no sample, so the latent space is not regularized.",
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return loss_missing(scene) or _no_divergence(scene)


class DivergenceWeightParameters(RuleParameters):
    """Options of `divergence_weight`."""

    most: Factor = 32.0
    """Largest weight of an element of the divergence, relative to an element of the
    reconstruction.
    """


class DivergenceWeight(Rule):
    """Divergences that outweigh the reconstruction."""

    name = "divergence_weight"
    severity = "hint"
    certainty = 0.7
    definition = (
        "A loss adds the divergence of a Gaussian posterior from the standard one and an "
        "elementwise reconstruction. An element of the divergence weighs more than `most` times "
        "as much as an element of the reconstruction. In the variational bound, both weigh the "
        "same. Usually, the divergence is summed while the reconstruction is averaged over all "
        f"elements. From {_HARMFUL:g} times `most` on, the finding is a warning."
    )
    source = (
        "Higgins et al., beta-VAE (2017): a large weight makes the posterior equal the prior. Our "
        "own limit."
    )
    advice = (
        "Reduce both terms alike: sum each over the elements of a sample, and average over the "
        "batch. Raise the weight of the divergence slowly (warm-up)."
    )
    Parameters = DivergenceWeightParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such loss."""
        others = [float(t["weight"]) for t in scene.terms("reconstruction") if t["weight"] > 0]
        weights = [float(term["weight"]) for term in scene.terms("divergence")]
        if not others or not weights:
            return []
        ratio = max(weights) / max(others)
        if ratio <= self.parameters.most:
            return []
        severe = ratio > _HARMFUL * self.parameters.most
        return [
            self.finding(
                scene,
                first_step=0,
                message=f"An element of the divergence (KL) weighs {ratio:.3g} times as much as an "
                "element of the reconstruction: the posterior is pushed to the prior, and the "
                "latent variables carry no information. The two terms are probably reduced "
                "differently.",
                evidence={"ratio": ratio},
                **({"severity": "warning"} if severe else {}),
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return loss_missing(scene) or _no_divergence(scene)


def _no_divergence(scene: Scene) -> str | None:
    found = scene.terms("divergence")
    return None if found else "no loss contains the divergence of a Gaussian posterior"


class UniformNoise(FactRule):
    """Uniform random numbers in the place of Gaussian noise."""

    name = "uniform_noise"
    severity = "hint"
    certainty = 0.7
    definition = (
        "In the first records, the result of `rand` or `rand_like` is multiplied by a scale with a "
        "gradient (an exponential, softplus or root), as the noise of a posterior is, or is the "
        "target of an elementwise regression, as the noise of a denoiser is."
    )
    source = (
        "Kingma and Welling (2014): epsilon ~ N(0, 1). Ho et al., Denoising Diffusion "
        "Probabilistic Models (2020), algorithm 1."
    )
    advice = "Use torch.randn or torch.randn_like, which are Gaussian with mean 0."
    kind = "uniform noise"
    shown = ("shape",)

    def severity_of(self, fact: Mapping[str, Any]) -> Severity:
        """Return "warning" for noise that is scaled: random targets may be meant."""
        return "warning" if fact["use"] == "scale" else self.severity

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        use = "scales" if fact["use"] == "scale" else "compares a prediction with"
        return (
            f"{fact['where']} {use} uniform random numbers between 0 and 1. Noise is usually "
            "Gaussian, with mean 0."
        )

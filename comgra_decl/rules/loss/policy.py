"""Policy gradients with the wrong sign, weight or gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from comgra_decl.rules.api import (
    FactRule,
    Finding,
    Fraction,
    Positive,
    Rule,
    RuleParameters,
    Scene,
)

_PAIRED = 8  # elements of a factor that are compared with a residual
_CERTAIN = 3.0  # standard errors by which their correlation differs from zero


def _policies(scene: Scene) -> list[dict[str, Any]]:
    """Return the policy terms, without classifications whose samples have weights."""
    chooses = any(call.chooses for call in scene.calls)
    return [
        term
        for term in scene.terms("policy")
        if not term["labels"]
        or chooses
        or term["ratio"]
        or min(term["factor"]) < 0 < max(term["factor"])
    ]


def _policies_missing(scene: Scene) -> str | None:
    if not scene.objectives:
        return "the structure of the loss is not known"
    return None if _policies(scene) else "no loss contains a policy gradient"


def _agreement(scene: Scene, term: dict[str, Any]) -> float | None:
    """Return the correlation of a factor with the residuals of the values; None if unknown.

    The residuals belong to the same samples only if they are in the same record. Those in the same
    loss come first. A correlation that may be one of chance is unknown (Fisher's transformation:
    its standard error is 1 / sqrt(n - 3)).
    """
    factor = np.array(term["factor"], np.float64)
    here = [r for r in scene.terms("residual") if r["record"] == term["record"]]
    for other in sorted(here, key=lambda r: abs(r["loss"] - term["loss"])):
        left = np.array(other["values"], np.float64)
        if other["elements"] != term["elements"] or len(left) < _PAIRED:
            continue
        if len(left) == len(factor) and factor.std() > 0 and left.std() > 0:
            found = float(np.corrcoef(factor, left)[0, 1])
            size = np.arctanh(min(abs(found), 1 - 1e-9)) * np.sqrt(len(left) - 3)
            return found if size >= _CERTAIN else None
    return None


class PolicySignParameters(RuleParameters):
    """Options of `policy_sign`."""

    agreement: Fraction = 0.3
    """Smallest correlation of advantages with the residuals of the value estimates."""


class PolicySign(Rule):
    """Policy gradients that make good actions less likely."""

    name = "policy_sign"
    minimizes = True
    severity = "error"
    certainty = 0.85
    definition = (
        "A loss contains log-probabilities of chosen actions, or ratios of probabilities, times a "
        "factor without a gradient: the advantage. A loss must fall when actions with a positive "
        "advantage become more likely. The rule reports a loss that rises with them. Whether the "
        "factor is an advantage or its negative follows from the values' regression in the same "
        "step: an advantage is return - value, so its correlation with target - prediction is at "
        "least `agreement`, and three standard errors from zero. A loss that falls, with a factor "
        "that is never negative, imitates actions, and is right. Without such a regression, a loss "
        "that rises with the log-probabilities, while the factor is not mostly negative, is a "
        "hint. Signs and factors are read from autograd's graph in the first records."
    )
    source = (
        "Williams, Simple statistical gradient-following algorithms (1992); Schulman et al., "
        "Proximal Policy Optimization (2017), equation 7. Our own definition."
    )
    advice = (
        "Check the sign: optimizers minimize, so the loss is -(log_prob * advantage).mean(), or "
        "-min(ratio * advantage, clipped * advantage).mean(), with advantage = return - value."
    )
    Parameters = PolicySignParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first policy term with the wrong sign."""
        compared = [(term, _agreement(scene, term)) for term in _policies(scene)]
        known = [int(term["sign"]) * found for term, found in compared if found is not None]
        for term, agreement in compared:
            sign = int(term["sign"])
            wrong, sure = False, agreement is not None
            factor = np.asarray(term["factor"])
            if sign < 0 and bool((factor >= 0).all()):
                wrong = False  # weights, such as exp(advantage), with which actions are imitated
            elif agreement is not None:
                wrong = min(known) >= self.parameters.agreement
            elif known:
                continue
            else:
                wrong = sign > 0 and float(np.mean(term["factor"])) > -0.1 * float(
                    np.mean(np.abs(term["factor"]))
                )
            if not wrong:
                continue
            what = "ratios of probabilities" if term["ratio"] else "log-probabilities"
            reason = (
                f" The factor is an advantage: it agrees with return - value (correlation "
                f"{agreement:+.2f})."
                if sure and sign > 0
                else " The factor is the negative of an advantage: it agrees with value - return."
                if sure
                else " If the factor is an advantage or a return, and not a cost, the policy "
                "learns to avoid good actions."
            )
            return [
                self.finding(
                    scene,
                    first_step=0,
                    message=f"The sign of the policy's loss is probably wrong: the loss "
                    f"{'rises' if sign > 0 else 'falls'} with the {what} of the chosen actions "
                    f"times a factor.{reason}",
                    evidence={"sign": sign, "elements": int(term["elements"])},
                    **({} if sure else {"severity": "hint", "certainty": 0.6}),
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return _policies_missing(scene)


class WrongClipping(FactRule):
    """Clipped objectives that choose the larger gain."""

    name = "wrong_clipping"
    minimizes = True
    certainty = 0.8
    definition = (
        "A loss contains the minimum of two ratios of probabilities times a factor, one of them "
        "clipped, with a positive sign, or their maximum with a negative sign. The objective then "
        "chooses the larger of the two gains, so that clipping does not limit large steps."
    )
    source = (
        "Schulman et al., Proximal Policy Optimization (2017), equation 7: the objective is the "
        "smaller of the two."
    )
    advice = (
        "Maximize the minimum: loss = -min(ratio * A, clipped * A).mean(), which is "
        "max(-ratio * A, -clipped * A).mean()."
    )
    explained_by = ("policy_sign",)
    kind = "clipping"
    of_terms = True

    def chosen(self, scene: Scene) -> list[dict[str, Any]]:
        """Return the objectives that choose the larger gain."""
        return [term for term in super().chosen(scene) if term["wrong"]]

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            "The clipped objective chooses the larger of the two gains instead of the smaller one "
            "(min and max are swapped, or a sign is), so clipping does not limit the steps of the "
            "policy."
        )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return None if scene.terms("clipping") else "no loss contains a clipped objective"


class PolicyOfProbabilities(FactRule):
    """Policies that apply a softmax to probabilities."""

    name = "policy_of_probabilities"
    severity = "error"
    certainty = 0.9
    definition = (
        "The log-probabilities of chosen actions in a loss are computed by a softmax of the result "
        "of another softmax, as by Categorical(logits=probabilities)."
    )
    source = (
        "PyTorch's documentation of torch.distributions.Categorical: `logits` are normalized, "
        "`probs` are probabilities."
    )
    advice = (
        "Pass logits as logits, or probabilities as Categorical(probs=...): remove the softmax at "
        "the end of the model."
    )
    kind = "policy"
    of_terms = True

    def chosen(self, scene: Scene) -> list[dict[str, Any]]:
        """Return the policies with two softmaxes."""
        return [term for term in super().chosen(scene) if term["twice"]]

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            "The policy applies a softmax to probabilities, which are between 0 and 1, so all "
            "actions remain nearly equally likely."
        )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return _policies_missing(scene)


class FreshActions(FactRule):
    """Log-probabilities of actions that were never executed."""

    name = "fresh_actions"
    certainty = 0.75
    definition = (
        "In the first records, a step with a policy gradient samples actions (`multinomial`, as "
        "torch.distributions.Categorical does) and uses them only to select log-probabilities "
        "with a gradient. Nothing else receives them, so the environment cannot have executed "
        "them."
    )
    source = (
        "Williams (1992): the gradient contains the log-probability of the action that led to the "
        "return. Our own definition."
    )
    advice = "Pass the stored actions: dist.log_prob(actions), not dist.log_prob(dist.sample())."
    kind = "fresh choices"
    shown = ("shape",)

    def chosen(self, scene: Scene) -> list[dict[str, Any]]:
        """Return the samples, if a loss contains a policy gradient."""
        return super().chosen(scene) if _policies(scene) else []

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            f"{fact['where']} samples actions of shape {fact['shape']} that are used only for "
            "log-probabilities: the returns belong to other actions that were executed."
        )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return _policies_missing(scene)


class AttachedAdvantage(FactRule):
    """Advantages that carry a gradient into the value estimates."""

    name = "attached_advantage"
    certainty = 0.75
    definition = (
        "Log-probabilities of chosen actions, or ratios of probabilities, are multiplied by a "
        "difference of data and an output that carries a gradient, as in log_prob * (returns - "
        "values). The policy's loss then also trains the value estimates."
    )
    source = (
        "Mnih et al., Asynchronous Methods for Deep Reinforcement Learning (2016): the advantage "
        "is a constant in the policy's gradient. Our own definition."
    )
    advice = "Detach the advantage: advantage = (returns - values).detach()."
    kind = "attached factor"
    of_terms = True

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            "The advantage that multiplies the policy's log-probabilities carries a gradient: the "
            "policy's loss also changes the value estimates, to make chosen actions look good or "
            "bad."
        )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        known = any(scene.terms("attached factor"))
        return None if known else _policies_missing(scene)


class AttachedRatio(FactRule):
    """Ratios of probabilities whose denominator carries a gradient."""

    name = "attached_ratio"
    severity = "error"
    certainty = 0.85
    definition = (
        "A policy's loss contains the ratio of two probabilities of the chosen actions, and both "
        "carry gradients. If both come from the same policy, the ratio is 1 and its gradient 0."
    )
    source = "Schulman et al., Proximal Policy Optimization (2017), equation 6. Our own definition."
    advice = (
        "Compute the old log-probabilities once, when the actions are chosen, under no_grad (or "
        "detach them), and store them with the actions."
    )
    kind = "attached ratio"
    of_terms = True

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        same = (
            " Both are the same tensor, so the ratio is always 1 and its gradient 0."
            if fact["same"]
            else ""
        )
        return (
            "The old log-probabilities in the policy's ratio carry a gradient: they come from the "
            f"policy that is being trained.{same}"
        )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return _policies_missing(scene)


class EntropyWeightParameters(RuleParameters):
    """Options of `entropy_weight`."""

    most: Positive = 0.25
    """Largest weight of the entropy, relative to the size of the policy's gradient."""


class EntropyWeight(Rule):
    """Entropy terms that oppose or outweigh the policy's gradient."""

    name = "entropy_weight"
    certainty = 0.75
    definition = (
        "A step with a policy gradient adds the entropy of the policy to a loss, so that the "
        "policy becomes certain before it has explored, or subtracts it with more than `most` "
        "times the weight of the policy term (the weight of its log-probabilities times the "
        "standard deviation of the advantages, or their mean magnitude if they hardly vary). "
        "Usual weights are 0.001 to 0.05."
    )
    source = (
        "Mnih et al., Asynchronous Methods for Deep Reinforcement Learning (2016): the entropy is "
        "rewarded with a weight of 0.01. Our own definition and limit."
    )
    advice = (
        "Subtract the entropy from the loss, times a small weight: loss = policy_loss + 0.5 * "
        "value_loss - 0.01 * entropy.mean()."
    )
    Parameters = EntropyWeightParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such entropy."""
        sizes = [
            float(term["weight"]) * max(np.std(term["factor"]), 0.1 * np.abs(term["factor"]).mean())
            for term in _policies(scene)
            if np.isfinite(term["weight"])
        ]
        if not sizes:
            return []
        size = max(sizes)
        for term in scene.terms("entropy"):
            share = float(term["weight"]) / size if size else 0.0
            if term["sign"] > 0:
                message = (
                    "The loss rises with the entropy of the policy, so training makes the policy "
                    "certain; a bonus for exploration is subtracted."
                )
            elif share > self.parameters.most:
                message = (
                    f"The bonus for entropy weighs {share:.2g} times as much as the policy's "
                    "gradient: the policy is rewarded for choosing at random."
                )
            else:
                continue
            return [self.finding(scene, first_step=0, message=message, evidence={"share": share})]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        missing = _policies_missing(scene)
        if missing is None and not any(scene.terms("entropy")):
            return "no loss contains the entropy of a policy"
        return missing

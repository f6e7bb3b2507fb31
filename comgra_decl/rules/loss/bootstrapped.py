"""Temporal-difference losses with the wrong prediction or target."""

from __future__ import annotations

from comgra_decl.rules.api import ELEMENTWISE, Finding, Rule, Scene, loss_missing, place_of

_LARGEST = frozenset({"Max", "Amax", "Aminmax"})


class GradientOfTarget(Rule):
    """Bootstrapped targets that carry the gradient."""

    name = "gradient_of_target"
    certainty = 0.7
    definition = (
        "A loss compares two tensors, one of which is the sum of data and a multiple of an output, "
        "as in r + gamma V(s'). This side carries a gradient. Either the other side also carries "
        "one, and the two sides share parameters, or the other side is a detached output."
    )
    source = (
        "Sutton and Barto, Reinforcement Learning (2018), section 9.3: semi-gradient methods do "
        "not differentiate the target. Our own definition."
    )
    advice = "Detach the target, (r + gamma * V(s')).detach(), but not the prediction V(s)."

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such loss."""
        wrong = next(iter(scene.told("detached prediction")), None)
        if wrong is not None:
            return [
                self.finding(
                    scene,
                    first_step=0,
                    message=f"The wrong side of {wrong['function']} is detached: the prediction "
                    f"{wrong['shape']} carries no gradient, but its bootstrapped target (data plus "
                    "a multiple of an output) does.",
                    severity="error",
                    certainty=0.8,
                    evidence={"shape": str(wrong["shape"])},
                )
            ]
        for counts in scene.objectives[0] if scene.objectives else ():
            if counts.get("bootstrapped"):
                return [
                    self.finding(
                        scene,
                        first_step=0,
                        message="The bootstrapped target of a loss (data plus a multiple of an "
                        "output) carries a gradient: the loss also moves the target towards the "
                        "prediction.",
                        evidence={"terms": int(counts["bootstrapped"])},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return loss_missing(scene)


class LargestAsPrediction(Rule):
    """Q-learning that trains the largest value instead of the value of the action taken."""

    name = "largest_as_prediction"
    certainty = 0.7
    definition = (
        "The prediction of an elementwise regression loss is the maximum over an output and "
        "carries a gradient, whereas the target carries none. In training steps, a model is also "
        "called without gradients, as for the target in Q-learning."
    )
    source = (
        "Mnih et al., Human-level control (2015), equation 2: the loss compares Q(s, a) for the "
        "action taken with r + gamma max Q(s', a')."
    )
    advice = (
        "Select the values of the actions taken: `q.gather(1, actions.unsqueeze(1)).squeeze(1)`."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such loss."""
        infos = scene.table.infos
        if not any(i.key.pass_ == "no_grad" and i.kind == "computed" for i in infos):
            return []
        for call, seen in scene.calls.items():
            if call.function in ELEMENTWISE and call.prediction.made_by in _LARGEST:
                return [
                    self.finding(
                        scene,
                        place=place_of(scene, call),
                        first_step=seen.first,
                        last_step=seen.last,
                        message=f"{call.function} compares its target with the maximum of an "
                        "output. Only the largest value is trained, whichever action was taken, so "
                        "rewards are credited to the wrong actions.",
                        evidence={"function": call.function},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return (
            None if scene.calls else "no loss that compares a prediction with a target was called"
        )

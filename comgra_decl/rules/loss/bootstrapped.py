"""Temporal-difference losses with the wrong prediction or target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from comgra_decl.rules.api import (
    ELEMENTWISE,
    FactRule,
    Finding,
    Place,
    Rule,
    Scene,
    SlotInfo,
    Window,
    comparison_missing,
    loss_missing,
    place_of,
    read_rows,
    values_of,
)

_LARGEST = frozenset({"Max", "Amax", "Aminmax"})
_SHORT = 0.8  # discount of a horizon of 5 steps
_ENDED = 0.3  # share of transitions; fewer continue only if a mask is inverted
_NO_TARGET = "no target adds a discounted value to data in the first records"


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
        return comparison_missing(scene)


class _TargetRule(FactRule):
    """A rule about targets that add a discounted value to data."""

    kind = "bootstrap"

    def chosen(self, scene: Scene) -> list[dict[str, Any]]:
        """Return the facts about values that a regression may have as its target."""
        sizes = {call.target.elements for call in scene.calls if call.function in ELEMENTWISE}
        sizes |= {term["elements"] for term in scene.terms("residual")}
        return [fact for fact in super().chosen(scene) if fact["elements"] in sizes]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return None if _TargetRule.chosen(self, scene) else _NO_TARGET


class UnmaskedTarget(_TargetRule):
    """Bootstrapped targets that continue beyond the end of an episode."""

    name = "unmasked_target"
    severity = "hint"
    certainty = 0.7
    definition = (
        "In the first records, a regression's target is computed without gradients as data plus a "
        "discount (below 1) times values computed by a model, as in r + gamma V(s'). No "
        "call multiplies these values by zeros and ones, or sets some of them to another number."
    )
    source = (
        "Mnih et al., Human-level control through deep reinforcement learning (2015), algorithm "
        "1: the target is r for a state in which the episode ends. Our own definition."
    )
    advice = (
        "Multiply the next state's value by 1 - done: target = r + gamma * (1 - done) * V(s'). "
        "Ignore this hint if episodes never end."
    )
    shown = ("factor", "elements")

    def chosen(self, scene: Scene) -> list[dict[str, Any]]:
        """Return all targets if none of them is masked."""
        found = super().chosen(scene)
        return [] if any(fact["masked"] for fact in found) else found

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            f"{fact['where']} adds {fact['factor']:g} times the value of the next state to the "
            "reward for every transition. Nothing removes this value where the episode has ended, "
            "so values of terminal states are never learned and may grow without limit."
        )


class InvertedEnd(_TargetRule):
    """Bootstrapped targets that continue only where an episode has ended."""

    name = "inverted_end"
    certainty = 0.75
    definition = (
        "In the first records, the mask by which a bootstrapped target (see `unmasked_target`) "
        "multiplies, fills or selects the values of the next states keeps at most "
        f"{_ENDED:.0%} of them. Episodes rarely end in most transitions, so the mask is probably "
        "`done` instead of `1 - done`."
    )
    source = (
        "Mnih et al., Human-level control through deep reinforcement learning (2015), algorithm "
        "1: the target contains the next value unless the episode ends. Our own definition."
    )
    advice = "Multiply by 1 - done: target = r + gamma * (1 - done) * V(s')."
    shown = ("kept", "elements")

    def chosen(self, scene: Scene) -> list[dict[str, Any]]:
        """Return all targets if each keeps few values."""
        found = super().chosen(scene)
        known = [fact.get("kept") for fact in found]
        few = bool(known) and all(share is not None and share <= _ENDED for share in known)
        return found if few else []

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            f"{fact['where']} keeps the value of the next state for {float(fact['kept']):.0%} of "
            "the transitions and sets it to zero for the others: the mask of ended episodes is "
            "probably inverted."
        )


class IndexAsValue(_TargetRule):
    """Targets that contain the index of the best action instead of its value."""

    name = "index_as_value"
    severity = "error"
    certainty = 0.85
    definition = (
        "A bootstrapped target (see `unmasked_target`) discounts integers that a model computed, "
        "such as the second result of `max`."
    )
    source = "PyTorch's documentation of torch.max: it returns values and indices."
    advice = "Use the values: q(next_states).max(1).values, which is the same as max(1)[0]."
    shown = ("factor",)

    def chosen(self, scene: Scene) -> list[dict[str, Any]]:
        """Return the targets that contain integers."""
        return [fact for fact in super().chosen(scene) if fact.get("index")]

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            f"{fact['where']} adds discounted integers to the rewards: the index of the best "
            "action (argmax) instead of its value."
        )


class ShortHorizon(_TargetRule):
    """Discounts under which future rewards hardly count."""

    name = "short_horizon"
    severity = "hint"
    certainty = 0.6
    definition = (
        f"A bootstrapped target (see `unmasked_target`) discounts values by less than {_SHORT}, so "
        f"that rewards more than {1 / (1 - _SHORT):.0f} steps ahead hardly count."
    )
    source = "Sutton and Barto (2018), section 3.3: the horizon is about 1 / (1 - gamma) steps."
    advice = "Use a discount of 0.9 to 0.99, unless only the next rewards matter."
    shown = ("factor",)

    def chosen(self, scene: Scene) -> list[dict[str, Any]]:
        """Return the targets with a small discount."""
        return [fact for fact in super().chosen(scene) if float(fact["factor"]) < _SHORT]

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        factor = float(fact["factor"])
        return (
            f"{fact['where']} discounts the value of the next state by {factor:g}: rewards more "
            f"than {1 / (1 - factor):.1f} steps ahead hardly count."
        )


class AscendingReturns(FactRule):
    """Returns that are added up from the first step to the last."""

    name = "ascending_returns"
    severity = "warning"
    certainty = 0.75
    definition = (
        "In the first records, a loop computes each element of a tensor as data plus a discount "
        "times the previous result, and writes the elements in ascending order. Such sums contain "
        "the past instead of the future."
    )
    source = (
        "Sutton and Barto, Reinforcement Learning (2018), equation 3.9: G_t = R_(t+1) + gamma "
        "G_(t+1). Our own definition."
    )
    advice = "Start at the last step: for t in reversed(range(len(rewards)))."
    kind = "returns"

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            f"{fact['where']} adds up returns from the first step to the last: each return "
            "contains the rewards before its step, not those after it."
        )


class SameStates(Rule):
    """Next states that are the states themselves."""

    name = "same_states"
    severity = "warning"
    certainty = 0.7
    definition = (
        "A target adds a discounted value to data. In at least three records, the samples that a "
        "model receives with gradients are the same as those of every call without gradients that "
        "receives as many samples, so the value of the next state is that of the state itself."
    )
    source = "A bootstrapped target contains the value of the next state. Our own definition."
    advice = (
        "Store copies of states, state.copy() or state.clone(): environments may change the same "
        "array at every step. Check the order in which transitions are unpacked."
    )

    _same = 0
    _different = 0
    _first = -1

    def look(self, window: Window) -> None:
        """Compare the inputs of calls with and without gradients."""
        infos = window.table.infos
        given = [i for i in infos if i.kind == "input" and "float" in i.dtype and i.shape]
        trained = [i for i in given if i.key.pass_ == "forward" and i.key.iteration == 0]
        others = [i for i in given if i.key.pass_ == "no_grad"]
        for row in read_rows(window).tolist() if trained and others else ():
            for info in trained[:1]:
                mine = values_of(window, row, info.id)
                size = _samples(window, row, info)
                alike = (i for i in others if _samples(window, row, i) == size)
                theirs = [values_of(window, row, i.id) for i in alike]
                known = [each for each in theirs if each is not None]
                if mine is None or not known or (mine == mine[:1]).all():
                    continue
                if all(each.shape == mine.shape and (each == mine).all() for each in known):
                    self._first = self._first if self._same else int(window.steps[row])
                    self._same += 1
                else:
                    self._different += 1

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding if the samples never differ."""
        if self._same < 3 or self._different or not scene.told("bootstrap"):
            return []
        return [
            self.finding(
                scene,
                place=Place("input"),
                first_step=self._first,
                message="The model receives the same states with and without gradients in all "
                f"{self._same} records that were compared: the next states are the states "
                "themselves, so a target contains the value of its own state.",
                evidence={"records": self._same},
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if not scene.told("bootstrap"):
            return _NO_TARGET
        known = self._same + self._different
        return None if known else "no samples of inputs with and without gradients are recorded"


def _samples(window: Window, row: int, info: SlotInfo) -> int:
    """Return the number of samples of a tensor in a record; models also act on smaller batches."""
    return int(window.samples(np.array([info.id]))[row, 0])


class ActorSign(Rule):
    """Actors that minimize the value that a critic gives to their actions."""

    name = "actor_sign"
    minimizes = True
    severity = "warning"
    certainty = 0.75
    definition = (
        "In the first records, a target adds a discounted value to rewards, as in temporal "
        "differences, and another loss of the same step is only the mean of an output, with a "
        "positive sign. Minimizing it makes the actor choose actions with low values. If no "
        "reward is negative, this is a hint, since all may be costs, which an actor minimizes."
    )
    source = (
        "Lillicrap et al., Continuous control with deep reinforcement learning (2016): the actor "
        "maximizes Q(s, mu(s)). Our own definition."
    )
    advice = "Negate the actor's loss: actor_loss = -critic(states, actor(states)).mean()."

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding if a loss is the mean of an output."""
        signs = [term["sign"] for term in scene.terms("output")]
        targets = scene.told("bootstrap")
        if not signs or min(signs) <= 0 or not targets:
            return []
        costs = not any(fact.get("negative", True) for fact in targets)
        unless = ", which is right only if rewards are costs" if costs else ""
        return [
            self.finding(
                scene,
                first_step=0,
                message="A loss is the mean of an output, such as the critic's value of the "
                f"actor's actions, with a positive sign: training lowers this value{unless}.",
                **({"severity": "hint"} if costs else {}),
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if not scene.told("bootstrap"):
            return _NO_TARGET
        return None if scene.terms("output") else "no loss is the mean of an output"

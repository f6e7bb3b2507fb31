"""Gradients that vanish towards the first layers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    Count,
    Curve,
    Early,
    Finding,
    Fraction,
    Mask,
    Measured,
    Numbers,
    Patient,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    judging_models,
    normalises,
    per_run,
    row_quantile,
    sources_of,
    trained_models,
)

_FIRST = 5  # records whose median is the initial value
_FEWEST = 4  # minimum number of gradients to compare


class VanishingParameters(Patient):
    """Options of `vanishing_gradient`."""

    patience: Count = 10
    """Number of consecutive records that must meet the condition. The default is high because
    attention keys start like this.
    """

    ratio: Fraction = 1e-3
    """Smallest allowed gradient, relative to the upper quartile of all gradients."""

    fall: Fraction = 1e-3
    """Smallest allowed ratio to the upper quartile, relative to the initial value of this ratio."""

    won: Fraction = 0.05
    """A competing model has won if its loss falls below this share of its initial value."""

    faded: Fraction = 0.3
    """The gradients of the other model have vanished below this share of their initial norm."""


class VanishingGradient(SlotRule):
    """Gradients that vanish towards the first layers."""

    name = "vanishing_gradient"
    certainty = 0.7
    definition = (
        "Layers: for `patience` records in a row, the l2 norm of a gradient is nonzero but below "
        "`ratio` times the upper quartile of all such gradients in the step. This must hold in "
        "every iteration of the module. Alternatively, the ratio of the norm to this quartile "
        f"falls below `fall` times its initial value (the median over the first {_FIRST} "
        "records). The rule checks the gradients of module outputs, or of weights if output "
        f"gradients are not recorded, and requires at least {_FEWEST} of them. It ignores side "
        "branches, that is, tensors computed from a tensor whose gradient has not vanished "
        "(attention keys, residual branches that start at zero). Competing models: a step has "
        "several losses, the outputs of one model are passed to another model, and gradients flow "
        "between them. One of the losses has fallen below `won` times its initial value (the means "
        "of the first and last tenths are compared). Meanwhile, the gradients of all parameters of "
        "the first model have fallen below `faded` times their initial norm (the medians of the "
        "first and "
        f"last {_FIRST} records are compared). As a result, the first model no longer learns."
    )
    source = (
        "AutoTrainer, which reports a vanishing gradient if the norm of the first layer is below "
        "1e-3 times the norm of the last layer. Here the limit is relative to all other layers, "
        "so that it depends neither on the scale of the loss nor on the width."
    )
    advice = (
        "Between this layer and the loss, use normalization, residual connections or another "
        "activation function (ReLU, GELU), or use He or Glorot initialization."
    )
    explained_by = (
        "nonfinite",
        "saturated",
        "dead_units",
        "poor_initialisation",
        "cooperating_networks",
        "clamped_values",
        "zero_derivative",
    )
    explained_by_earlier = ("shrinking_weight",)
    Parameters = VanishingParameters
    of_state = True
    statistics = ("l2",)
    lowest, backwards, evidence = True, True, "share of the upper quartile"
    needs = "gradients, such as {select: '**', capture: [output_grad]}"

    _early = per_run(Early, _FIRST)
    _curves: dict[str, Curve] = per_run(dict)
    _sizes: dict[str, tuple[list[float], list[float]]] = per_run(dict)  # first and last norms
    _nodes: dict[str, Slots] = per_run(dict)
    _seen: SlotTable | None = None

    def look(self, window: Window) -> None:
        """Process the next training records."""
        super().look(window)
        if not window.has("l2"):
            return
        if window.table is not self._seen:
            self._seen, self._nodes = window.table, _models(window.table)
        for model, at in self._nodes.items():
            total = np.sqrt(np.nansum(window.read("l2", at).astype(np.float64) ** 2, axis=1))
            first, last = self._sizes.setdefault(model, ([], []))
            known = total[np.isfinite(total) & (total > 0)].tolist()
            first += known[: max(0, _FIRST - len(first))]
            last[:] = (last + known)[-_FIRST:]

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Process the next losses."""
        if numbers.name == "loss" or numbers.name.startswith("loss["):
            self._curves.setdefault(numbers.name, Curve()).add(numbers.steps, numbers.values)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about vanishing gradients, or about a competing model that has lost."""
        return super().findings(scene) or self._overpowered(scene)

    def _overpowered(self, scene: Scene) -> list[Finding]:
        one = "modules" in scene.documents and len(trained_models(scene)) < 2
        few = min(len(self._curves), len(self._sizes)) < 2
        if one or few or scene.records < 4 * _FIRST:
            return []
        falls = {}
        for name, curve in self._curves.items():
            (start, _), (end, _) = curve.mean(0, 0.1), curve.mean(0.9, 1)
            falls[name] = abs(end) / abs(start) if start else float("nan")
        won = min(falls, key=lambda name: falls[name] if falls[name] == falls[name] else np.inf)
        share = {m: float(np.median(b) / np.median(a)) for m, (a, b) in self._sizes.items() if b}
        judged = _judged_by_others(scene, set(share))
        faded = [m for m, s in share.items() if s < self.parameters.faded and m in judged]
        if not falls[won] < self.parameters.won or not faded:
            return []
        model = faded[0]  # the model that runs first; the gradients of both vanish once one has won
        slot = int(self._nodes[model][0])
        return [
            self.finding(
                scene,
                place=scene.table.place(slot),
                first_step=0,
                message=f"One of the competing models has won: {won} has fallen to "
                f"{falls[won]:.1%} of its initial value. The gradient norm of "
                f"{scene.table.infos[slot].key.node} and the layers after it has fallen to "
                f"{share[model]:.1%} of its initial value, so these layers no longer learn.",
                advice="Weaken the winning model: use a lower learning rate, fewer steps, noise "
                "on its inputs, a gradient penalty or spectral normalization. Alternatively, use "
                "a loss that does not saturate (-log D(G(z)), hinge, Wasserstein).",
                evidence={"loss": falls[won], "gradient": share[model]},
            )
        ]

    def advise(self, scene: Scene) -> str:
        """Return advice adapted to the optimizer settings."""
        if not normalises(scene):
            return self.advice
        return (
            "Between this layer and the loss, use residual connections or another activation "
            "function (ReLU, GELU), or use He or Glorot initialization."
        )

    def wants(self, table: SlotTable) -> Mask:
        """Return the gradients of outputs, or of weights if output gradients are not recorded."""
        return table.layer_gradients

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compare each gradient with the upper quartile in the same step."""
        size = window.read("l2", at).astype(np.float64)
        known = np.where(np.isfinite(size) & (size > 0), size, np.nan)
        enough = (~np.isnan(known)).sum(1) >= _FEWEST
        share = _largest_of_node(window.table, at, known) / row_quantile(known, 0.75)
        share[~enough] = np.nan
        fallen = share < self.parameters.fall * self._early.look(at, share)
        return (share < self.parameters.ratio) | fallen, share

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leave out side branches, where a gradient of normal magnitude takes another path.

        Examples are attention keys, and residual branches behind a gain that starts at zero.
        """
        table, sources = scene.table, sources_of(scene)
        vanished = set(fired.tolist())
        keep = [not self._arrives(table, sources, int(slot), vanished) for slot in fired]
        return fired[np.array(keep, np.bool_)]

    def _arrives(
        self, table: SlotTable, sources: dict[int, list[int]], slot: int, vanished: set[int]
    ) -> bool:
        """Return whether a tensor is computed from one whose gradient has a normal magnitude."""
        waiting, seen = [int(table.forward[slot])], set[int]()
        for forward in waiting:
            for source in sources.get(forward, []):
                gradient = table.by_key.get(table.infos[source].key._replace(pass_="grad"), -1)
                if gradient < 0 or source in seen or table.infos[source].kind != "computed":
                    continue
                seen.add(source)
                if gradient not in vanished:
                    return True
                waiting.append(source)
        return False

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        share = self.streak.worst[slot]
        return (
            f"The gradient vanishes towards the first layers: {scene.table.place(slot)} is "
            f"{share:.1e} times the upper quartile over all layers."
        )


def _largest_of_node(
    table: SlotTable, at: Slots, sizes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the largest norm over all iterations of each tensor, of shape [records, slots]."""
    group = table.remembered((_largest_of_node, len(at)), lambda t: _group(t, at))
    if group.max(initial=-1) == len(group) - 1:
        return sizes
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    largest = np.fmax.reduceat(sizes[:, order], starts, axis=1)
    return np.asarray(largest[:, group], np.float64)


def _group(table: SlotTable, at: Slots) -> Slots:
    """Return the index of each slot's tensor; all iterations of a tensor have the same index."""
    names = [(table.infos[slot].key.node, table.infos[slot].key.role) for slot in at.tolist()]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], np.int64)


def _models(table: SlotTable) -> dict[str, Slots]:
    """Return the gradients of the parameters of each model, in the order in which models run.

    If several models are called, a model is identified by the node name up to its first dot.
    """
    found: dict[str, list[int]] = {}
    at = np.flatnonzero(table.parameter_gradients)
    for slot in at[np.argsort(table.order[at], kind="stable")].tolist():
        found.setdefault(table.infos[slot].key.node.partition(".")[0], []).append(slot)
    return {name: np.array(slots, np.int64) for name, slots in found.items()}


def _judged_by_others(scene: Scene, models: set[str]) -> set[str]:
    """Return the models that pass outputs with gradients to another model, such as a critic."""
    if not scene.structures:
        return models
    judging = judging_models(scene)
    return {source for sink in judging.keys() & models for source in judging[sink] & models}

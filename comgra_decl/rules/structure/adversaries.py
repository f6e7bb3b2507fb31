"""Generators and discriminators whose losses do not oppose each other as they should."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from comgra_decl.rules.api import (
    Bools,
    Count,
    Finding,
    Patient,
    Place,
    Rule,
    Scene,
    SlotKey,
    Structure,
    Window,
    is_gradient,
    per_run,
    trained_models,
)

_SAME = 1e-3  # relative difference of |mean| and mean magnitude if all elements have one sign
_STATISTICS = ("mean", "abs_mean")
_MOST = 32  # judgements per graph


class Judged(NamedTuple):
    """A judgement of a discriminator: its model and output, and what it was computed from.

    Attributes:
        judge: the node of the discriminator.
        generator: the node of the model whose output it judges; empty if it judges data.
        carries: whether a gradient flows back to the generator.
        output: the key of the judgement.
        graph: the hash of the dependency graph.
    """

    judge: str
    generator: str
    carries: bool
    output: SlotKey
    graph: str


class AdversariesParameters(Patient):
    """Options of rules about generators and discriminators."""

    patience: Count = 5
    """Number of records in which all judgements must be pushed the same way."""


class _Adversaries(Rule):
    """Stores in which direction losses push the judgements about data and about generated samples.

    The gradient at a judgement tells the direction for every loss: it is negative if the loss wants
    a larger judgement.
    """

    Parameters = AdversariesParameters

    _pushes: dict[Judged, dict[int, int]] = per_run(dict)  # records by direction; 0 if mixed
    _first: dict[Judged, int] = per_run(dict)
    _known: dict[str, list[Judged]] = per_run(dict)

    def look(self, window: Window) -> None:
        """Read the gradients of judgements."""
        if not window.has(*_STATISTICS) or not window.structures:
            return
        passes = {info.key.pass_ for info in window.table.infos if is_gradient(info.key.pass_)}
        for graph in dict.fromkeys(each for each in window.structures if each is not None):
            rows = np.array([each == graph for each in window.structures])
            for judged in self._judgements(graph):
                for key in (judged.output._replace(pass_=pass_) for pass_ in sorted(passes)):
                    if key in window.table.by_key:
                        self._count(window, rows, judged, window.table.by_key[key])

    def _count(self, window: Window, rows: Bools, judged: Judged, slot: int) -> None:
        mean, size = (window.read(name, np.array([slot]))[rows, 0] for name in _STATISTICS)
        alike = np.abs(np.abs(mean) - size) <= _SAME * size
        for step, sign, same, known in zip(
            window.steps[rows].tolist(),
            np.sign(mean).tolist(),
            alike.tolist(),
            (size > 0).tolist(),
            strict=True,
        ):
            if known:
                counts = self._pushes.setdefault(judged, {})
                push = -int(sign) if same else 0
                counts[push] = counts.get(push, 0) + 1
                self._first.setdefault(judged, int(step))

    def _judgements(self, graph: str) -> list[Judged]:
        if graph not in self._known:
            structure = self.scene.structures.get(graph)
            models = trained_models(self.scene)
            found = [] if structure is None else [*_judgements(structure, graph, models)]
            if not models or structure is None:
                return found
            self._known[graph] = found
        return self._known[graph]

    def _directions(self) -> dict[tuple[str, str, bool], set[int]]:
        """Return the directions by judge, generator and whether a gradient flows back to it.

        A judgement that was not always pushed the same way has the direction 0.
        """
        found: dict[tuple[str, str, bool], set[int]] = {}
        for judged, counts in self._pushes.items():
            total = sum(counts.values())
            if total >= self.parameters.patience:
                ways = {*counts} if len(counts) == 1 else {0}
                found.setdefault(judged[:3], set()).update(ways)
        return found

    def _cases(self) -> Iterator[tuple[str, str, set[int], set[int], set[int]]]:
        """Yield judge, generator, and the directions for data, detached and attached samples."""
        found = self._directions()
        for judge, generator, carries in found:
            if generator and carries:
                data = found.get((judge, "", False), set())
                cut = found.get((judge, generator, False), set())
                yield judge, generator, data, cut, found[judge, generator, True]

    def _since(self, generator: str) -> int:
        steps = [first for j, first in self._first.items() if j.generator == generator]
        return min(steps, default=0)

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if len(trained_models(scene)) < 2:
            return "the run has fewer than two trained models"
        if not any(judged.generator for judged in self._pushes):
            return "no model judges the outputs of another one, or no output gradients are recorded"
        return None


class CooperatingNetworks(_Adversaries):
    """Generators that help the discriminator instead of deceiving it."""

    name = "cooperating_networks"
    severity = "error"
    certainty = 0.85
    definition = (
        "A trained model (the discriminator) judges data and the outputs of another trained model "
        "(the generator), with and without gradients to the generator. In all records, at least "
        "`patience`, the losses push its judgements about data one way, those about detached "
        "samples the other way, and those about samples with gradients also the other way. The "
        "direction is the sign of the gradient at the judgement, which all samples share."
    )
    source = (
        "Goodfellow et al., Generative Adversarial Networks (2014): the generator maximizes what "
        "the discriminator minimizes. Our own definition."
    )
    advice = (
        "Give the generator's loss the label of real data: bce(D(G(z)), ones), or -D(G(z)).mean() "
        "for a Wasserstein loss."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first generator that helps its discriminator."""
        for judge, generator, data, cut, attached in self._cases():
            if (data, cut, attached) not in (({1}, {-1}, {-1}), ({-1}, {1}, {1})):
                continue
            return [
                self.finding(
                    scene,
                    place=Place(generator),
                    first_step=self._since(generator),
                    message=f"The loss of {generator} pushes the judgements of {judge} about "
                    f"generated samples in the same direction as the loss of {judge} does, away "
                    "from those about data: the generator learns to be detected. Its labels are "
                    "probably swapped.",
                    evidence={"data": min(data), "generated": min(cut)},
                )
            ]
        return []


class OpposingLosses(_Adversaries):
    """One optimizer that trains a generator and its discriminator for opposite losses."""

    name = "opposing_losses"
    severity = "error"
    certainty = 0.8
    definition = (
        "One optimizer, and no other, contains all parameters of two models. One of them (the "
        "discriminator) judges data and the outputs of the other one (the generator). In all "
        "records of a dependency graph, at least `patience`, the losses push its judgements about "
        "data up and those about generated samples down, or the reverse, and other losses, or the "
        "same loss of the same samples, push those about generated samples with gradients to the "
        "generator the opposite way. Every loss then also updates the model that it is meant to "
        "oppose."
    )
    source = (
        "Goodfellow et al., Generative Adversarial Networks (2014): each loss updates only its "
        "own network. Our own definition."
    )
    advice = (
        "Create one optimizer for each network, with its own parameters, and detach generated "
        "samples in the discriminator's loss (`D(fake.detach())`)."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first generator that shares its discriminator's optimizer."""
        for judge, generator, data, cut, attached in self._cases():
            every = cut | attached
            opposed = data in ({1}, {-1}) and data <= attached and every == {1, -1}
            if not opposed or not _shares(scene, judge, generator):
                continue
            return [
                self.finding(
                    scene,
                    place=Place(generator),
                    first_step=self._since(generator),
                    message=f"One optimizer contains {generator} and {judge}, whose losses push "
                    "the judgements about generated samples in opposite directions: every loss "
                    "also updates the other model, and their effects cancel out.",
                    evidence={"models": 2},
                )
            ]
        return []


def _shares(scene: Scene, *models: str) -> bool:
    """Return whether one and the same optimizer holds all trainable parameters of all models."""
    holders: set[frozenset[int]] = set()
    model = ""
    for module in scene.documents.get("modules") or []:
        model = str(module["node"]) if not module["path"] else model
        if model in models:
            for facts in module["parameters"].values():
                if facts.get("trainable"):
                    only = [0] if facts.get("optimized") else []  # of a single optimizer
                    holders.add(frozenset(facts.get("holders", only)))
    return len(holders) == 1 and len(next(iter(holders))) == 1


def _judgements(structure: Structure, graph: str, models: list[str]) -> Iterator[Judged]:
    """Yield the outputs of trained models, and the trained model whose output each is based on.

    Outputs of models that no other one processes, or that process no other one's, are included.
    """
    if len(models) < 2:
        return
    before: dict[int, list[tuple[int, bool]]] = {}
    for a, b, gradient in structure.edges:
        before.setdefault(b, []).append((a, gradient))
    outputs = {
        index: key.node
        for index, key in enumerate(structure.keys)
        if key.node in models and key.role.startswith("output") and key.pass_ == "forward"
    }
    for index, judge in [*outputs.items()][:_MOST]:
        attached = _models_behind(index, judge, outputs, before, gradient_only=True)
        every = _models_behind(index, judge, outputs, before, gradient_only=False)
        for generator in every or {""}:
            yield Judged(judge, generator, generator in attached, structure.keys[index], graph)


def _models_behind(
    index: int,
    judge: str,
    outputs: dict[int, str],
    before: dict[int, list[tuple[int, bool]]],
    *,
    gradient_only: bool,
) -> set[str]:
    """Return the other models on whose outputs a tensor depends; none behind these."""
    found, waiting, seen = set(), [index], {index}
    for at in waiting:
        for source, gradient in before.get(at, ()):
            if source in seen or (gradient_only and not gradient):
                continue
            seen.add(source)
            if outputs.get(source, judge) != judge:
                found.add(outputs[source])
            else:
                waiting.append(source)
    return found

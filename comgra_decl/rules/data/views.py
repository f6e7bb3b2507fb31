"""Pairs of inputs that should differ but are identical."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    Finding,
    Patient,
    Rule,
    Scene,
    SlotKey,
    Window,
    per_run,
    trained_models,
)

_NAMES = ("mean", "std", "l2", "abs_mean", "min", "max")


class IdenticalViews(Rule):
    """Models called twice per step with identical inputs and outputs."""

    name = "identical_views"
    certainty = 0.75
    definition = (
        "In `patience` consecutive records, a model is called twice in a step with gradients. "
        "The inputs to the two calls have exactly the same statistics, and so do the outputs, "
        "although the samples differ from each other. If both calls receive one and the same "
        "tensor, an untrained model of the same class (a teacher) must also be called twice. The "
        "gradient at both outputs is not zero. "
        "The finding is only a hint where a target is compared, or a loss contains a policy "
        "gradient, since a model may be called twice for other purposes. "
        "The two augmented views, or the two sides of a pair, are then identical."
    )
    source = (
        "Our own definition. Examples are an augmentation that is seeded in each call and one that "
        "is not applied."
    )
    advice = (
        "Sample the second view independently: do not set a seed inside the augmentation, and do "
        "not pass the same tensor twice."
    )
    Parameters = Patient

    _runs: dict[str, tuple[int, int]] = per_run(dict)  # records in a row, their first step

    def look(self, window: Window) -> None:
        """Compare the first two calls to each model."""
        names = [name for name in _NAMES if window.has(name)]
        pairs = [*_pairs(self.scene, window)]
        if "mean" not in names or not pairs:
            return
        shown, single = _entered(window), _of_one_input(self.scene, window)
        for node, one, two, a, b in pairs:
            same = self._same(window, names, one, two)
            for first, second in shown:
                there = window.present[:, first] & window.present[:, second]
                same &= ~there | self._same(window, names, first, second)
            same &= single | bool(shown)
            if "l2" in names:
                size = window.read("l2", np.array([a, b]), "abs_max")
                same &= (size > 0).all(1)
            for row, step in enumerate(window.steps.tolist()):
                if not window.present[row, one]:
                    continue
                count, first_step = self._runs.get(node, (0, step))
                self._runs[node] = (
                    (count + 1, first_step if count else step) if same[row] else (0, step)
                )

    def _same(self, window: Window, names: list[str], one: int, two: int) -> NDArray[np.bool_]:
        found = window.present[:, one] & window.present[:, two]
        varied = np.zeros(len(window), np.bool_)
        for name in names:
            for over in ("mean", "std", "abs_max"):
                pair = window.read(name, np.array([one, two]), over)
                found &= pair[:, 0] == pair[:, 1]
            varied |= window.read(name, np.array([one]), "std")[:, 0] > 0
        return found & varied

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first model that receives the same input twice."""
        other = scene.supervised or any(scene.terms("policy"))
        for node, (count, first) in self._runs.items():
            if count >= self.parameters.patience:
                slot = next(i.id for i in scene.table.infos if i.key.node == node)
                return [
                    self.finding(
                        scene,
                        place=scene.table.place(slot),
                        first_step=first,
                        **({"severity": "hint"} if other else {}),
                        message=f"{node} is called twice per step and receives exactly the same "
                        "input both times, so its outputs are the same. The two views of each "
                        "pair are identical.",
                        evidence={"records": count},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return None if self._runs else "no model is called twice per step with gradients"


def _pairs(scene: Scene, window: Window) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield the node, both outputs and both gradients of each model called twice."""
    roots = {str(m["node"]) for m in scene.documents.get("modules") or [] if not m["path"]}
    by_key = window.table.by_key
    for info in window.table.infos:
        key = info.key
        if key.node not in roots or key.iteration or key.pass_ != "forward":
            continue
        if info.kind != "computed" or not key.role.startswith("output") or info.batch_dim is None:
            continue
        again = key._replace(iteration=1)
        third = key._replace(iteration=2)
        one, two = (by_key.get(k._replace(pass_="grad")) for k in (key, again))
        if again in by_key and third not in by_key and one is not None and two is not None:
            yield key.node, info.id, by_key[again], one, two


def _entered(window: Window) -> list[tuple[int, int]]:
    """Return the slots of the first two external inputs of a step, for each argument.

    Calls are counted over all models, so these inputs need not be consecutive.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for info in window.table.infos:
        if info.kind == "input" and info.key.node == "input" and info.key.pass_ == "forward":
            found.setdefault(info.key.role, []).append((info.key.iteration, info.id))
    pairs = [sorted(known) for known in found.values() if len(known) == 2]
    return [(known[0][1], known[1][1]) for known in pairs]


def _of_one_input(scene: Scene, window: Window) -> NDArray[np.bool_]:
    """Return the records in which a teacher and its student receive only one tensor."""
    if not _has_teacher(scene, window):
        return np.zeros(len(window), np.bool_)
    graphs = scene.structures.items()
    single = {
        name
        for name, graph in graphs
        if len({a for a, _, _ in graph.edges if graph.kinds[a] == "input"}) == 1
    }
    return np.array([name in single for name in window.structures] or [False] * len(window))


def _has_teacher(scene: Scene, window: Window) -> bool:
    """Return whether an untrained model of the class of a trained one is called exactly twice.

    Then both calls of the trained one should receive different views. Without such a model, a
    second call with the same tensor may have another purpose, such as a gradient penalty.
    """
    trained, by_key = trained_models(scene), window.table.by_key
    roots = {
        str(module["node"]): module["class"]
        for module in scene.documents.get("modules") or []
        if not module["path"]
    }
    for node, kind in roots.items():
        if node not in trained and kind in {roots[name] for name in trained}:
            for pass_ in ("forward", "no_grad"):
                calls = [SlotKey(node, "output", number, pass_) in by_key for number in range(3)]
                if calls == [True, True, False]:
                    return True
    return False

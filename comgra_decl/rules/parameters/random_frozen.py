"""Frozen layers that still have their random initial values."""

from __future__ import annotations

from math import prod, sqrt

import numpy as np

from comgra_decl.rules.api import (
    Count,
    Finding,
    First,
    Previous,
    Rule,
    RuleParameters,
    Scene,
    Window,
    per_run,
)

_STATISTICS = ("mean", "std", "abs_max")
_FEW = 100  # elements; fewer do not show their distribution


class RandomFrozenParameters(RuleParameters):
    """Options of `random_frozen`."""

    least: Count = 2
    """Number of frozen weights required."""


class RandomFrozen(Rule):
    """Frozen layers that still have their random initial values."""

    name = "random_frozen"
    certainty = 0.8
    definition = (
        "A model with trained parameters also has at least `least` frozen weights of linear or "
        f"convolutional layers with at least {_FEW} elements. All of these weights have exactly "
        "the distribution with which PyTorch initializes them: they lie within ±1/sqrt(fan in), "
        "the "
        "largest element is close to this bound, and the standard deviation is within a tenth of "
        "that of a uniform distribution. Trained weights leave these bounds. The weights must not "
        "change "
        "during the run, which excludes copies of a model and layers that are frozen later. "
        "Frozen random layers provide useful features only by chance."
    )
    source = (
        "PyTorch initializes nn.Linear and nn.Conv with kaiming_uniform_(a=sqrt(5)), which is "
        "uniform in ±1/sqrt(fan in). If names do not match, load_state_dict(strict=False) "
        "silently loads nothing."
    )
    advice = (
        "Check what load_state_dict returns (missing_keys, unexpected_keys), because names may "
        "differ by a prefix such as 'module.'. If the layers are meant to be random, disable "
        "this rule."
    )
    Parameters = RandomFrozenParameters

    _first: dict[str, First] = per_run(lambda: {name: First() for name in _STATISTICS})
    _latest: dict[str, Previous] = per_run(lambda: {name: Previous() for name in _STATISTICS})

    def look(self, window: Window) -> None:
        """Store the first and the latest statistics of weights."""
        at = np.flatnonzero(window.table.weights)
        if len(at) and window.has(*_STATISTICS):
            for name, first in self._first.items():
                values = window.read(name, at).astype(np.float64)
                first.look(at, values)
                self._latest[name].look(at, values)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first model with frozen random layers."""
        for frozen, trained in _models(scene):
            large = [slot for slot in frozen if prod(scene.table.infos[slot].shape) >= _FEW]
            if not trained or len(large) < self.parameters.least:
                continue
            if all(self._is_initial(scene, slot) for slot in large):
                return [
                    self.finding(
                        scene,
                        place=scene.table.place(large[0]),
                        first_step=0,
                        message=f"All {len(large)} frozen weights still have PyTorch's random "
                        "initial values (uniform in ±1/sqrt(fan in)): pretrained weights "
                        "were not loaded.",
                        evidence={"weights": len(large)},
                        also=len(large) - 1,
                        others=tuple(scene.table.place(slot) for slot in large[1:9]),
                    )
                ]
        return []

    def _is_initial(self, scene: Scene, slot: int) -> bool:
        at = np.array([slot])
        mean, std, most = (float(self._first[name].known(at)[0]) for name in _STATISTICS)
        latest = [float(self._latest[name].known(at)[0]) for name in _STATISTICS]
        if [mean, std, most] != latest:
            return False
        shape = scene.table.infos[slot].shape
        bound, count = 1 / sqrt(prod(shape[1:])), prod(shape)
        near = bound * (1 - 12 / count) <= most <= bound * (1 + 1e-5)
        uniform = abs(std / (bound / sqrt(3)) - 1) < 0.1
        return near and uniform and abs(mean) < 4 * std / sqrt(count)

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if not scene.documents.get("modules"):
            return "the run has no list of modules"
        if not scene.table.weights.any():
            return "no parameters are recorded; it needs {select: '**', capture: [parameter]}"
        return None


def _models(scene: Scene) -> list[tuple[list[int], bool]]:
    """Return each model's frozen weights of layers, and whether it trains other weights."""
    slots = {(i.key.node, i.key.role): i.id for i in scene.table.infos if i.kind == "parameter"
             and i.key.pass_ == "forward"}  # fmt: skip
    found: list[tuple[list[int], bool]] = []
    for module in scene.documents.get("modules") or []:
        if not module["path"] or not found:
            found.append(([], False))
        frozen, trained = found[-1]
        kind = str(module.get("class"))
        layer = kind == "Linear" or (kind.startswith("Conv") and "Transpose" not in kind)
        for name, facts in module["parameters"].items():
            held = bool(facts.get("trainable")) and facts.get("optimized", True)
            trained = trained or held
            slot = slots.get((str(module["node"]), name))
            if layer and name == "weight" and not facts.get("trainable") and slot is not None:
                frozen.append(slot)
        found[-1] = frozen, trained
    return found

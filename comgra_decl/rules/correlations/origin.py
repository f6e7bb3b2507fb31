"""The origin of quantities in a training step; upstream ones may cause those downstream."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from fnmatch import fnmatchcase

from comgra_decl.records import SlotInfo, SlotKey, Structure
from comgra_decl.rules.base import Scene
from comgra_decl.rules.table import is_gradient


class Origin(IntEnum):
    """Part of a step in which a quantity originates, upstream first."""

    DATA = 0
    """Inputs of the model, tags, types of execution, and categories of samples."""

    METRIC = 1
    """Metrics logged by the program, such as a learning rate or a temperature."""

    FORWARD = 2
    """Activations, parameters and buffers."""

    OUTCOME = 3
    """Measures of the result: losses, accuracies, findings of rules."""

    BACKWARD = 4
    """Gradients and updates."""


_OUTCOMES = (
    "*loss*", "*acc*", "*err*", "*perplexity*", "*ppl*", "*score*", "*reward*", "*return*",
    "*precision*", "*recall*", "*f1*", "*auc*", "*mse*", "*mae*", "*entropy*", "*likelihood*",
)  # fmt: skip


def is_loss_name(name: str) -> bool:
    """Return whether a metric is a loss, judging by its name."""
    return "loss" in name.lower()


def of_metric(name: str) -> Origin:
    """Return the origin of a metric, judging by its name."""
    lower = name.lower()
    if "grad" in lower:
        return Origin.BACKWARD
    outcome = any(fnmatchcase(lower, pattern) for pattern in _OUTCOMES)
    return Origin.OUTCOME if outcome else Origin.METRIC


def is_loss(info: SlotInfo) -> bool:
    """Return whether a tensor is a loss, judging by its kind or the class of its module."""
    return info.kind == "loss" or info.module_class.endswith("Loss")


class Origins:
    """The origins of a run's tensors, and which tensors belong to the loss.

    A tensor belongs to the loss if it is a target, a loss, or computed from a target or loss. Its
    correlation with the loss is trivial.
    """

    def __init__(self, scene: Scene) -> None:
        self._own = {info.key for info in scene.table.infos if _is_target_or_loss(info)}
        by_key = scene.table.by_key
        for structure in scene.structures.values():
            reached = {at for at, key in enumerate(structure.keys) if key in self._own}
            reached |= {at for at, kind in enumerate(structure.kinds) if kind in ("target", "loss")}
            reached |= _downstream(structure, reached)
            reached |= _only_for(structure, reached)
            self._own |= {structure.keys[at] for at in reached if structure.keys[at] in by_key}

    def belongs_to_loss(self, key: SlotKey) -> bool:
        """Return whether the values of this tensor in the forward pass belong to the loss."""
        return key._replace(pass_="forward") in self._own

    def of(self, info: SlotInfo) -> Origin:
        """Return the origin of a tensor."""
        pass_ = info.key.pass_
        if is_gradient(pass_) or pass_ == "update":
            return Origin.BACKWARD
        return Origin.DATA if info.kind == "input" else Origin.FORWARD


def _is_target_or_loss(info: SlotInfo) -> bool:
    return info.key.pass_ == "forward" and (info.kind == "target" or is_loss(info))


def _downstream(structure: Structure, start: Iterable[int]) -> set[int]:
    """Return the nodes computed directly or indirectly from the given nodes of a graph."""
    reached, waiting = set(start), list(start)
    sinks: dict[int, list[int]] = {}
    for a, b, _ in structure.edges:
        sinks.setdefault(a, []).append(b)
    while waiting:
        for sink in sinks.get(waiting.pop(), ()):
            if sink not in reached:
                reached.add(sink)
                waiting.append(sink)
    return reached


def _only_for(structure: Structure, own: set[int]) -> set[int]:
    """Return the inputs used only by the loss: targets passed to the model."""
    inputs = {at for at, kind in enumerate(structure.kinds) if kind == "input"}
    used = {a for a, b, _ in structure.edges if a in inputs and b not in own}
    return {a for a, b, _ in structure.edges if a in inputs and b in own} - used

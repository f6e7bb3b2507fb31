"""Activation functions after the last layer that remove negative values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    NO_SLOTS,
    Mask,
    Measured,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    grown,
    predictions,
    same_shape_edges,
    single_sources,
    target_pairs,
)

_SQUASHING = ("Sigmoid", "Softmax", "LogSoftmax", "LogSigmoid", "Tanh")
_CLIPPING = (
    *("Relu", "LeakyRelu", "Threshold", "Hardtanh", "Clamp", "Elu", "Gelu", "Silu", "Softplus"),
    *("Sigmoid", "Softmax", "LogSoftmax", "LogSigmoid", "Tanh", "Log", "Mul", "Sub", "Add", "Div"),
)
"""Functions, as autograd names them, that may lie behind a rectifier, or are one."""
_LEFT = 0.5  # share of the negative part that is left, at most


class RectifiedAnswer(SlotRule):
    """An activation function after the last layer that removes negative values."""

    name = "rectified_answer"
    severity = "error"
    certainty = 0.85
    definition = (
        "For `patience` records in a row, the network's prediction, or the input of its final "
        "sigmoid or softmax, has exactly the same maximum as the tensor from which it is computed, "
        f"but on average at most {_LEFT:.0%} of its negative values. The cause is a ReLU or leaky "
        "ReLU between the two. Predictions are ignored if their targets are numbers that are never "
        "negative."
    )
    source = "The seeded bug of comgra's tutorial; own definition."
    advice = (
        "Remove the activation function after the last layer: a sigmoid, a softmax and a loss that "
        "expects logits need numbers of both signs."
    )
    statistics = ("min", "max", "mean", "abs_mean")
    lowest, evidence = True, "share of negative values that is left"
    of_graph = True
    needs = "outputs of single layers, with `graph: true`"

    _lowest_target = np.zeros(0)
    _sources = NO_SLOTS

    def wants(self, table: SlotTable) -> Mask:
        """Returns tensors computed from a single tensor of the same shape."""
        self._sources = single_sources(self.scene)
        return self._sources >= 0

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares the extremes of each tensor with those of its input."""
        before = self._sources[at]
        same = window.read("max", at, "abs_max") == window.read("max", before, "abs_max")
        below, source_below = _negative(window, at), _negative(window, before)
        left = np.where(source_below > 0, below / source_below, np.nan)
        self._see_targets(window)
        return same & (left <= _LEFT), left

    def _see_targets(self, window: Window) -> None:
        """Notes the smallest value of every target."""
        table = window.table
        targets = table.remembered(RectifiedAnswer, _targets)
        self._lowest_target = grown(self._lowest_target, len(table), np.nan)
        if len(targets):
            lowest = np.fmin.reduce(window.read("min", targets), axis=0)
            self._lowest_target[targets] = np.fmin(self._lowest_target[targets], lowest)

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Keeps predictions, and inputs of their final sigmoid or softmax, that need both signs."""
        made = [call.prediction.made_by for call in scene.calls]
        if made and not any(name in _CLIPPING or not name for name in made):
            return fired[:0]  # losses get what no activation function has computed
        table, final = scene.table, predictions(scene)
        # targets may appear after the last measured window
        lowest = grown(self._lowest_target, len(table), np.nan)
        squashed = {
            source
            for source, sink in same_shape_edges(scene)
            if sink in final and table.infos[sink].module_class in _SQUASHING
        }
        positive = {
            prediction.id
            for prediction, target in target_pairs(scene)
            if "float" in target.dtype and lowest[target.id] >= 0
        }
        signed = (
            {slot for slot in final if slot not in positive} if any(target_pairs(scene)) else set()
        )
        keys = {table.infos[slot].key.node for slot in squashed | signed}
        wanted = [table.infos[slot].key.node in keys for slot in fired.tolist()]
        return fired[np.array(wanted, np.bool_)]

    def marks(self) -> dict[int, int]:
        """Returns nothing: within a network this is what activation functions do."""
        return {}

    def sentence(self, scene: Scene, slot: int) -> str:
        """Returns the message for a slot."""
        source = scene.table.place(int(self._sources[slot]))
        return (
            f"Between {source} and {scene.table.place(slot)} an activation function keeps "
            f"{max(0.0, self.streak.worst[slot]):.0%} of negative values, right before the "
            "prediction, which can hardly become negative."
        )


def _negative(window: Window, at: Slots) -> NDArray[np.float64]:
    """Returns the mean of the negative part, as a positive number; other elements count as 0."""
    mean = window.read("mean", at).astype(np.float64)
    return np.asarray((window.read("abs_mean", at) - mean) / 2)


def _targets(table: SlotTable) -> Slots:
    return np.flatnonzero(table.where(lambda info: info.kind == "target"))

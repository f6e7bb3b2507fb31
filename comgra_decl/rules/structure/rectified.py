"""Activation functions that remove negative values after the last layer."""

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
"""Autograd names of rectifiers and of functions that may follow one."""
_LEFT = 0.5  # largest share of the negative values that a rectifier keeps


class RectifiedAnswer(SlotRule):
    """An activation function that removes negative values after the last layer."""

    name = "rectified_answer"
    severity = "error"
    certainty = 0.85
    definition = (
        "The rule compares the model's prediction, or the input of its final sigmoid or softmax, "
        "with the tensor it is computed from. For `patience` records in a row, both have exactly "
        f"the same maximum, but the first one keeps, on average, at most {_LEFT:.0%} of the other "
        "one's negative values. The cause is a ReLU or leaky ReLU between the two tensors. "
        "Predictions whose targets are never negative are ignored."
    )
    source = "The seeded bug in comgra's tutorial; our own definition."
    advice = (
        "Remove the activation function after the last layer. A sigmoid, a softmax or a loss that "
        "expects logits requires both positive and negative values."
    )
    statistics = ("min", "max", "mean", "abs_mean")
    lowest, evidence = True, "share of negative values that remains"
    of_graph = True
    needs = "outputs of single layers, with `graph: true`"

    _lowest_target = np.zeros(0)
    _sources = NO_SLOTS

    def wants(self, table: SlotTable) -> Mask:
        """Return tensors computed from a single tensor of the same shape."""
        self._sources = single_sources(self.scene)
        return self._sources >= 0

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the share of the input's negative part that each tensor keeps."""
        before = self._sources[at]
        same = window.read("max", at, "abs_max") == window.read("max", before, "abs_max")
        below, source_below = _negative(window, at), _negative(window, before)
        left = np.where(source_below > 0, below / source_below, np.nan)
        self._see_targets(window)
        return same & (left <= _LEFT), left

    def _see_targets(self, window: Window) -> None:
        """Store the smallest value of every target."""
        table = window.table
        targets = table.remembered(RectifiedAnswer, _targets)
        self._lowest_target = grown(self._lowest_target, len(table), np.nan)
        if len(targets):
            lowest = np.fmin.reduce(window.read("min", targets), axis=0)
            self._lowest_target[targets] = np.fmin(self._lowest_target[targets], lowest)

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Keep predictions (or inputs of a final sigmoid or softmax) that must take both signs."""
        made = [call.prediction.made_by for call in scene.calls]
        if made and not any(name in _CLIPPING or not name for name in made):
            return fired[:0]  # losses receive tensors that no activation function has computed
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
        """Return no slots: between layers, activation functions are supposed to do this."""
        return {}

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        source = scene.table.place(int(self._sources[slot]))
        return (
            f"Between {source} and {scene.table.place(slot)}, an activation function keeps "
            f"{max(0.0, self.streak.worst[slot]):.0%} of the negative values, so the "
            "prediction can hardly become negative."
        )


def _negative(window: Window, at: Slots) -> NDArray[np.float64]:
    """Return the magnitude of the negative part, averaged over all elements."""
    mean = window.read("mean", at).astype(np.float64)
    return np.asarray((window.read("abs_mean", at) - mean) / 2)


def _targets(table: SlotTable) -> Slots:
    return np.flatnonzero(table.where(lambda info: info.kind == "target"))

"""Checklist values for tensors that only some models have.

A question about such tensors does not apply to a model without them.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import SlotInfo
from comgra_decl.rules.base import Scene
from comgra_decl.rules.graph import combined
from comgra_decl.rules.memory import Slots
from comgra_decl.rules.table import RECTIFIERS, SlotTable
from comgra_decl.rules.window import Window

Judged = tuple[str, Literal["fine", "unknown", "absent"]]

_SATURATE = ("Tanh", "Sigmoid")
_ATTEND = ("attention", "attn", "transformer")  # parts of the names of module classes
_DEAD = 0.5  # share of zeros in the gradient of a bias
_ZEROS = 0.98  # share of zeros in the output of a rectifier


def half(scene: Scene, largest: float | None) -> Judged | None:
    """Rates the largest number in half precision; None before the first record.

    Args:
        scene: facts about the run.
        largest: the largest magnitude of any tensor in half precision; None if there is none.
    """
    if not scene.records:
        return None
    if not scene.table.where(lambda i: i.dtype in ("float16", "bfloat16")).any():
        return f"none of the {len(scene.table)} recorded tensors is in half precision", "absent"
    return None if not largest else (f"largest number in half precision {largest:.3g}", "fine")


def alive(scene: Scene, last: NDArray[np.float32]) -> Judged | None:
    """Rates the zeros in rectifier outputs and in bias gradients.

    An element of a bias's gradient is exactly 0 if its unit is inactive for the whole batch. Other
    outputs, such as the input of a rectifier that is not a module, cannot show dead units.
    """
    table = scene.table
    rectified = table.outputs & table.where(lambda i: i.module_class in RECTIFIERS)
    biases = table.parameter_gradients & table.where(
        lambda i: i.key.role == "bias" and len(i.shape) == 1 and i.shape[0] > 3
    )
    parts, verdicts = [], []
    for mask, what, limit in (
        (rectified, "zeros", _ZEROS),
        (biases, "zeros in bias gradients", _DEAD),
    ):
        at, _ = known(scene, "abs_max", last, np.flatnonzero(mask))  # NaN is not zero
        at, zero = known(scene, "zero_fraction", last, at)
        if len(at):
            most = int(zero.argmax())
            where = table.place(int(at[most]))
            parts.append(f"at most {zero[most]:.0%} {what} ({where})")
            verdicts.append(zero[most] > limit)
    if parts:
        return f"{', '.join(parts)} in the last record", "unknown" if any(verdicts) else "fine"
    if not table.outputs.any():
        return None
    return "no finite ReLU output or bias gradient in the last record", "unknown"


def unsaturated(scene: Scene, last: NDArray[np.float32]) -> Judged | None:
    """Return the magnitude of the outputs of Tanh and Sigmoid modules."""
    table = scene.table
    mask = table.outputs & table.where(lambda i: i.module_class in _SATURATE)
    if not mask.any():
        return _without(scene, _SATURATE, "no Tanh or Sigmoid module")
    at, size = known(scene, "abs_mean", last, np.flatnonzero(mask))
    text = between(table, at, size)
    return (f"mean magnitude {text} in the last record", "fine") if text else None


def branches(scene: Scene, last: NDArray[np.float32]) -> Judged | None:
    """Return the size of the smallest branch, relative to the largest one it is combined with."""
    if scene.structure is None:
        return None
    groups = list(combined(scene).values())
    if not groups:
        return "no recorded tensors of the same shape are combined", "absent"
    shares, slots = [], []
    for group in groups:
        at, size = known(scene, "l2", last, np.array(group, np.int64))
        if len(at) > 1 and size.max() > 0:
            shares.append(float(size.min() / size.max()))
            slots.append(int(at[size.argmin()]))
    if not shares:
        return None
    least = int(np.argmin(shares))
    where = scene.table.place(slots[least])
    return f"smallest branch {shares[least]:.2g} of the largest ({where})", "fine"


class Attention:
    """Number of tokens over which the attention of the newest record is spread."""

    def __init__(self) -> None:
        self._spread: dict[int, float] = {}

    def look(self, window: Window) -> None:
        """Process the next training records.

        The number is 1 / E[sum p^2] over all rows, as in `attention_collapse`. For rows that sum to
        1, it is mean / (mean^2 + std^2).
        """
        at = window.table.remembered(Attention, _maybe_attention)
        if not len(at) or not window.has("mean", "std", "min", "max"):
            return
        mean, std, low, high = (
            window.read(name, at)[-1].astype(np.float64) for name in ("mean", "std", "min", "max")
        )
        tokens = window.of_shape(_tokens, at)
        tokens = np.broadcast_to(tokens, (len(window), len(at)))[-1]
        rows = (low >= -1e-6) & (high <= 1 + 1e-3) & (np.abs(mean * tokens - 1) < 1e-2)
        spread = mean / (mean**2 + std**2)
        self._spread.update({int(at[i]): float(spread[i]) for i in np.flatnonzero(rows)})

    def reading(self, scene: Scene) -> Judged | None:
        """Return the smallest and largest number of tokens; None if attention is not recorded."""
        if self._spread:
            at = np.array(list(self._spread), np.int64)
            values = np.array(list(self._spread.values()))
            return f"spread over {between(scene.table, at, values)} tokens", "fine"
        if scene.attentions:
            return None
        return _without(scene, _ATTEND, "no attention")


def known(
    scene: Scene, statistic: str, record: NDArray[np.float32], at: Slots
) -> tuple[Slots, NDArray[np.float64]]:
    """Return the slots with a finite value of a statistic in a record, and these values."""
    at = at[at < len(record)]
    if statistic not in scene.statistics or not len(at):
        return at[:0], np.zeros(0)
    values = record[at, scene.statistics.index(statistic), 0].astype(np.float64)
    finite = np.isfinite(values)
    return at[finite], values[finite]


def between(table: SlotTable, at: Slots, values: NDArray[np.floating]) -> str:
    """Return the smallest and largest values with their tensors; "" if there are none."""
    finite = np.flatnonzero(np.isfinite(values))
    if not len(finite):
        return ""
    ends = finite[values[finite].argmin()], finite[values[finite].argmax()]
    texts = [f"{values[i]:.2g} ({table.place(int(at[i]))})" for i in ends]
    return texts[0] if ends[0] == ends[1] else " to ".join(texts)


def _without(scene: Scene, classes: tuple[str, ...], text: str) -> Judged | None:
    """Return the reading "not applicable" unless the model has such a module."""
    modules = scene.documents.get("modules")
    if not modules:
        return None
    names = {str(module["class"]).lower() for module in modules}
    there = any(part.lower() in name for part in classes for name in names)
    return None if there else (f"{text} in the model", "absent")


def _tokens(info: SlotInfo) -> float:
    return info.shape[-1] if len(info.shape) >= 3 else np.nan


def _maybe_attention(table: SlotTable) -> Slots:
    return np.flatnonzero(table.outputs & table.where(lambda i: len(i.shape) >= 3))

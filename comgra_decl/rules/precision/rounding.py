"""Updates that half precision rounds away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    OPTIMIZERS,
    Mask,
    Measured,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
)

_HALF_STEP = {"bfloat16": 2.0**-8.5, "float16": 2.0**-11.5}
"""Half the distance between neighbouring values, relative to the value (geometric mean)."""

_BY_RATE = ("Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adamax", "Lion")
"""Optimizers that change each element by about the learning rate in each step."""


class LostUpdates(SlotRule):
    """Updates that are smaller than the resolution of half-precision weights."""

    name = "lost_updates"
    certainty = 0.75
    definition = (
        "For `patience` consecutive records, a weight that an optimizer trains is stored in "
        "bfloat16 or float16, and rounding discards its usual update. That is, the update is "
        "smaller than half the distance between neighbouring values at the weight's mean magnitude "
        "(2^-8.5 or 2^-11.5 of it). The usual update is the learning rate for "
        "optimizers such as Adam, and the learning rate times the gradient's mean magnitude for "
        "SGD without momentum."
    )
    source = (
        "IEEE 754. Zamirai et al., Revisiting BFloat16 Training (2020): rounding weight updates "
        "to the nearest value cancels small ones."
    )
    advice = (
        "Keep the weights in float32 and compute in half precision (torch.autocast), or raise the "
        "learning rate."
    )
    statistics = ("abs_mean",)
    lowest, evidence = True, "update / resolution"
    needs = "parameters in half precision, {select: '**', capture: [parameter]}"

    def wants(self, table: SlotTable) -> Mask:
        """Return the weights in half precision."""
        return table.weights & table.where(lambda info: info.dtype in _HALF_STEP)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compare the usual update with the resolution."""
        infos = window.table.infos
        known = self.scene.parameters
        step = np.array([_HALF_STEP[infos[s].dtype] for s in at.tolist()])
        trained = np.array(
            [
                bool(known.get((infos[s].key.node, infos[s].key.role), {}).get("optimized"))
                for s in at.tolist()
            ]
        )
        size = self._update(window, at)
        ratio = size / (step * window.read("abs_mean", at).astype(np.float64))
        return (ratio < 1) & (size > 0) & trained, ratio

    def _update(self, window: Window, at: Slots) -> NDArray[np.float64]:
        """Return the usual update per element, [records, slots]; NaN if it is unknown."""
        rates = [_rate(facts.get(OPTIMIZERS) or ()) for facts in window.facts]
        by_rate = np.array([rate if kind == "rate" else np.nan for kind, rate in rates])
        by_size = np.array([rate if kind == "size" else np.nan for kind, rate in rates])
        if len(rates) != len(window):
            return np.full((len(window), len(at)), np.nan)
        table = window.table
        keys = [table.infos[s].key._replace(pass_="grad") for s in at.tolist()]
        slots = np.array([table.by_key.get(key, -1) for key in keys], np.int64)
        size = window.read("abs_mean", np.maximum(slots, 0)).astype(np.float64)
        scaled = by_size[:, None] * np.where(slots >= 0, size, np.nan)
        return np.where(np.isnan(by_rate)[:, None], scaled, by_rate[:, None])

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        info = scene.table.infos[slot]
        return (
            f"{scene.table.place(slot)} is stored in {info.dtype}, and its updates are "
            f"{self.streak.worst[slot]:.2g} of half the distance between neighbouring values: "
            "rounding discards them."
        )


def _rate(optimizers: Sequence[Mapping[str, Any]]) -> tuple[str, float]:
    """Return the largest learning rate, and whether updates have its size or a gradient's."""
    groups = [(str(o.get("class")), g) for o in optimizers for g in o.get("groups") or ()]
    rates = [float(g["lr"]) for _, g in groups if isinstance(g.get("lr"), (int, float))]
    if rates and all(kind in _BY_RATE for kind, _ in groups):
        return "rate", max(rates)
    if rates and all(kind == "SGD" and not g.get("momentum") for kind, g in groups):
        return "size", max(rates)
    return "", np.nan

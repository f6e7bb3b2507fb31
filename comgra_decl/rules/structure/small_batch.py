"""BatchNorm over too few values."""

from __future__ import annotations

from math import nan, prod
from typing import Annotated

from comgra_decl.rules.api import (
    Count,
    Field,
    Int,
    Mask,
    Measured,
    Patient,
    Scene,
    SlotInfo,
    SlotRule,
    Slots,
    SlotTable,
    Window,
)


class SmallBatchParameters(Patient):
    """Options of `small_batch_norm`."""

    patience: Count = 3
    """Number of consecutive records that must meet the condition."""

    values: Annotated[Int, Field(ge=2)] = 8
    """Smallest allowed number of values from which a mean and a variance are computed."""


class SmallBatchNorm(SlotRule):
    """BatchNorm over too few values."""

    name = "small_batch_norm"
    certainty = 0.7
    definition = (
        "A BatchNorm module normalizes each channel over fewer than `values` values (samples in "
        "the batch times positions)."
    )
    source = (
        "Wu and He, Group Normalization (2018): the error of BatchNorm rises steeply for batch "
        "sizes below eight. If there are only two values, normalization preserves nothing but "
        "their order."
    )
    advice = "Use GroupNorm or LayerNorm, a larger batch, or SyncBatchNorm across devices."
    Parameters = SmallBatchParameters
    statistics = ("mean",)
    lowest, evidence = True, "values per channel"
    needs = "outputs of BatchNorm modules"

    def wants(self, table: SlotTable) -> Mask:
        """Return outputs of BatchNorm modules."""
        return table.outputs & table.where(lambda i: i.module_class.startswith("BatchNorm"))

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the number of values per channel."""
        counts = window.of_shape(_values, at)
        return counts < self.parameters.values, counts

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} normalizes each channel over only "
            f"{self.streak.worst[slot]:.0f} values."
        )


def _values(info: SlotInfo) -> float:
    """Return the number of samples times positions; the channels are the second dimension."""
    return info.shape[0] * prod(info.shape[2:]) if len(info.shape) > 1 else nan

"""The settings of a run's optimizers, for advice that refers to them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.finding import since

if TYPE_CHECKING:
    from comgra_decl.rules.base import Scene

DECOUPLED = ("AdamW", "SGD")
"""Optimizers that, in each step, subtract learning rate * weight decay * weight from a weight."""

_LOWERED = 0.01  # share of its maximum to which a schedule has reduced the learning rate

_ALIKE, _OFTEN = 1e-3, 3  # relative difference of total norms, and repetitions


class LearningRates:
    """The largest learning rate among each record's optimizers, over the run.

    Attributes:
        first: the rate in the first record that has one; None before that.
        now: the rate in the newest such record.
        most: the largest rate so far.
        zero: if the rate is now 0, the first step at which it was 0 and the step of the record
            before.
    """

    def __init__(self) -> None:
        self.first: float | None = None
        self.now: float | None = None
        self.most = 0.0
        self.zero: tuple[int, int | None] | None = None
        self._step: int | None = None

    def add(self, step: int, optimizers: Sequence[Mapping[str, Any]]) -> None:
        """Process the optimizers of the next record."""
        rates = [rate for rate, _, _ in parameter_groups(optimizers)]
        if not rates:
            return
        self.now = max(rates)
        self.first = self.now if self.first is None else self.first
        self.most = max(self.most, self.now)
        if self.now:
            self.zero = None
        elif self.zero is None:
            self.zero = step, self._step
        self._step = step

    @property
    def warms_up(self) -> bool:
        """Whether the learning rate has grown since the first record."""
        return self.first is not None and self.most > 1.1 * self.first


class Clipping:
    """Detects clipping of the total norm of the gradients that optimizers use.

    Clipping is detected if four consecutive records have the same total norm, within a thousandth,
    although the shares of individual parameters differ.

    Args:
        different: smallest difference between two records in the share of a parameter.

    Attributes:
        norm: the norm to which gradients are clipped; None if no clipping is known.
        total: the total norm in the newest record; NaN before the first.
        run: number of records since `first`, not counting it.
        first: the first step of the period in which the total norm is the same and the shares
            differ.
        records: number of records with a total norm that is finite and not 0.
    """

    def __init__(self, different: float = 5e-3) -> None:
        self._different = different
        self.norm: float | None = None
        self.total = math.nan
        self.run, self.first, self.records = 0, 0, 0
        self._shares = np.zeros(0)

    def look(self, steps: NDArray[np.int64], sizes: NDArray[Any]) -> None:
        """Process the l2 norms [records, n] of all parameter gradients in the next records."""
        # infinities stay, because the squares of the largest floats would overflow
        sizes = np.nan_to_num(sizes.astype(np.float64), posinf=np.inf)
        totals = np.sqrt((sizes**2).sum(1))
        usable = (totals > 0) & (totals < math.inf)
        if not usable.any():
            return
        steps, totals = steps[usable], totals[usable]
        shares = sizes[usable] / totals[:, None]
        before = np.zeros_like(shares)
        before[0, : len(self._shares)] = self._shares[: shares.shape[1]]
        before[1:] = shares[:-1]
        differ = (np.abs(shares - before) > self._different).any(axis=1)
        alike = np.abs(totals - np.append(self.total, totals[:-1])) <= _ALIKE * totals
        for step, total, same in zip(
            steps.tolist(), totals.tolist(), (alike & differ).tolist(), strict=True
        ):
            if same:
                self.run += 1
            else:
                self.run, self.first = 0, step
            if self.run >= _OFTEN:
                self.norm = total
        self.records += len(steps)
        self.total, self._shares = float(totals[-1]), shares[-1]


def raise_rate(scene: Scene, otherwise: str) -> str:
    """Return advice about updates that are too small."""
    rates = scene.rates
    if rates.now is None:
        return otherwise
    if rates.zero is not None:
        first, after = rates.zero
        if after is None:
            return "The learning rate is 0 from the start. Set it, or check its schedule."
        return (
            f"The learning rate is 0 {since(first, after)}; it was {rates.most:.3g} before. Check "
            "how many steps its schedule is designed for, and whether the schedule is called once "
            "per step or once per epoch."
        )
    if rates.now < _LOWERED * rates.most:
        return (
            f"The learning rate has fallen from {rates.most:.3g} to {rates.now:.3g}. Check "
            "its schedule."
        )
    return (
        f"Raise the learning rate of {rates.now:.3g}, or find out why the gradients are so small."
    )


def lower_rate(scene: Scene, otherwise: str, *, further: str = "") -> str:
    """Return advice about steps that are too large, leaving out what the program already does.

    Args:
        scene: facts about the run.
        otherwise: the advice if no learning rate is known.
        further: additional advice, one sentence.
    """
    rates = scene.rates
    if not rates.now:
        return otherwise
    warm = "" if rates.warms_up else ", or use a warmup"
    clip = "Clip the gradient norm (to about 1)."
    if scene.clipping.norm is not None:
        clip = f"Gradients are already clipped to a norm of {scene.clipping.norm:.3g}."
    text = f"Lower the learning rate of {rates.now:.3g} (start with a tenth of it){warm}. {clip}"
    return f"{text} {further}".rstrip()


def lower_decay(scene: Scene, otherwise: str) -> str:
    """Return advice about weights that shrink towards zero."""
    known = [*parameter_groups(scene.optimizers)]
    if not known:
        return otherwise
    rate, decay, kind = max(known, key=lambda group: group[0] * group[1])
    elsewhere = "look for a penalty in the loss or an unnecessary layer"
    if not any(decay for _, decay, _ in known):
        return f"No optimizer has weight decay, so {elsewhere}."
    if kind not in DECOUPLED:
        return f"Weight decay {decay:.3g} is added to the gradients: lower it, or {elsewhere}."
    peak = max(rate, scene.rates.most)  # a schedule may have lowered it since
    share, up_to = f"{100 * peak * decay:.3g}%", "up to " if peak > rate else ""
    removes = (
        f"Weight decay {decay:.3g} times learning rate {up_to}{peak:.3g} removes {up_to}{share} of "
        "each weight per step"
    )
    if peak * decay * max(scene.last_step, 1) < 1:
        return f"{removes}, which is too little to explain this: {elsewhere}."
    return f"{removes}: lower the weight decay (0.01 to 0.1 is common for AdamW)."


def decays(scene: Scene) -> bool:
    """Return whether any optimizer uses weight decay."""
    return any(decay for _, decay, _ in parameter_groups(scene.optimizers))


def normalises(scene: Scene) -> bool:
    """Return whether the model has a normalization layer."""
    return any("Norm" in info.module_class for info in scene.table.infos)


def keeps_statistics(module: Mapping[str, Any]) -> bool:
    """Return whether a module is of a kind that may keep running statistics."""
    return any(name in str(module.get("class")) for name in ("BatchNorm", "InstanceNorm"))


Group = tuple[float, float, str]
"""The learning rate, weight decay and optimizer class of a parameter group."""

_last_groups: tuple[object, Sequence[Group]] = (None, ())


def parameter_groups(optimizers: Sequence[Mapping[str, Any]]) -> Sequence[Group]:
    """Return the parameter groups of a record's optimizers that have a learning rate.

    Several rules ask for those of each record, and records share the facts that do not change, so
    the answer to the last question is kept.
    """
    global _last_groups
    asked, groups = _last_groups
    if asked is not optimizers:
        groups = [*_groups(optimizers)]
        _last_groups = optimizers, groups
    return groups


def _groups(optimizers: Sequence[Mapping[str, Any]]) -> Iterator[Group]:
    for optimizer in optimizers:
        for group in optimizer.get("groups") or ():
            rate, decay = group.get("lr"), group.get("weight_decay")
            if isinstance(rate, (int, float)):
                decay = decay if isinstance(decay, (int, float)) else 0.0
                yield float(rate), float(decay), str(optimizer.get("class", ""))

"""One recorded tensor of a run, and all that was recorded of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.errors import UnknownNameError, did_you_mean, is_one_of, shown
from comgra_decl.records import SlotInfo, SlotKey
from comgra_decl.store.parts import Part

from . import distributions, statistics
from .snapshot import Snapshot


class Slot:
    """One tensor that a run recorded: a node's output, a gradient, a parameter, an update, ...

    `Run.slot` makes it. It follows its run: after `Run.refresh` it shows the new records too.

    `type` chooses the records by type of execution or tag; None means those in train mode (all
    records, if none is). `over_batch` is how per-sample statistics were aggregated over the batch:
    "mean", "std" or "abs_max". NaN means that nothing was recorded.
    """

    def __init__(self, snapshot: Callable[[], Snapshot], key: SlotKey) -> None:
        """Use `Run.slot`."""
        self._current = snapshot
        self._key = key

    # -- which tensor it is

    @property
    def node(self) -> str:
        """The node: a module path or an annotated name."""
        return self._key.node

    @property
    def role(self) -> str:
        """The role in its node: "output", "input", "weight", ..."""
        return self._key.role

    @property
    def iteration(self) -> int:
        """Which call of the node within the step, counting from 0."""
        return self._key.iteration

    @property
    def pass_name(self) -> str:
        """The pass: "forward", "grad", "grad:loss", "update", ..."""
        return self._key.pass_

    @property
    def passes(self) -> list[str]:
        """All passes of the same tensor, in order of first appearance."""
        same = [key for key in self._snapshot.by_key if key[:3] == self._key[:3]]
        return [key.pass_ for key in same]

    @property
    def kind(self) -> str:
        """What the tensor is: "computed", "input", "parameter", "buffer", "loss" or "target"."""
        return self._info.kind

    @property
    def dtype(self) -> str:
        """Name of the tensor's dtype: "float32", "bfloat16", ..."""
        return self._info.dtype

    @property
    def batch_dim(self) -> int | None:
        """The dimension that counts the samples; None if the tensor has none."""
        return self._info.batch_dim

    @property
    def grad(self) -> Slot:
        """The gradient of this tensor.

        Raises:
            UnknownNameError: it has no recorded gradient, or several: `of` chooses one of them.
        """
        found = [name for name in self.passes if name.partition(":")[0] == "grad"]
        if len(found) != 1:
            what = "several gradients" if found else "no gradient"
            there = ", ".join(map(repr, found or self.passes))
            advice = f"Choose one with .of(name): {there}." if found else f"It has {there}."
            raise UnknownNameError(f"{self._name} has {what}. {advice}")
        return self.of(found[0])

    def of(self, name: str) -> Slot:
        """Returns another pass of the same tensor, such as "forward", "grad:loss" or "update".

        Raises:
            UnknownNameError: the tensor has no such pass; names those that it has.
        """
        if not is_one_of(name, self.passes):
            hint = did_you_mean(name, self.passes) or "."
            there = ", ".join(map(repr, self.passes))
            raise UnknownNameError(f"{self._name} has no pass {shown(name)}{hint} It has {there}.")
        return Slot(self._current, self._key._replace(pass_=name))

    # -- what was recorded of it

    def series(
        self, statistic: str = "mean", *, over_batch: str = "mean", type: str | None = None
    ) -> pd.Series[float]:
        """Returns one statistic by step, NaN where the tensor was not recorded.

        Raises:
            UnknownNameError: there is no such statistic or type; names near ones.
        """
        return statistics.series(self._snapshot, self._info, statistic, over_batch, type)

    def samples(self, statistic: str = "mean", *, type: str | None = None) -> pd.DataFrame:
        """Returns one statistic of each recorded sample: a row per step, a column per sample."""
        snapshot = self._snapshot
        columns = {
            number: statistics.sample_series(snapshot, self._info, statistic, number, type)
            for number in range(snapshot.view.meta.sample_count)
        }
        index = snapshot.step_index(snapshot.records(type))
        return pd.DataFrame(columns, index, dtype=np.float32).rename_axis(columns="sample")

    def row(self, step: int, *, type: str | None = None) -> pd.DataFrame:
        """Returns all statistics of each recorded sample at a step: a row per sample.

        `attrs["batch_index"]` holds each sample's place in the batch.
        """
        return statistics.sample_row(self._snapshot, self._info, step, type)

    def shape(self, step: int, *, type: str | None = None) -> tuple[int, ...] | None:
        """Returns the shape that the tensor had at a step; None if the record is damaged.

        Of several ranks, it is that of the first rank that has the tensor; of a shard, the first
        one of the whole tensor.

        Raises:
            UnknownNameError: it was not recorded at this step.
        """
        return statistics.shape(self._snapshot, self._info, step, type)

    def shapes(self, *, type: str | None = None) -> pd.Series[Any]:
        """Returns the shape by step, of the steps that recorded the tensor."""
        return statistics.shape_series(self._snapshot, self._info, type)

    def value(
        self, step: int, *, sample: int | None = None, part: Part = ..., type: str | None = None
    ) -> NDArray[Any]:
        """Returns the recorded values [samples, ...] at a step, or those of one sample [...].

        The dtype is the tensor's (bfloat16 as ml_dtypes.bfloat16). A tensor without a batch
        dimension counts as one sample.

        Args:
            step: the step.
            sample: number of a recorded sample; None: all.
            part: which elements, as an index of the array: `np.s_[0, :100]`. Only the parts of the
                file that hold them are read, and at most a megabyte around them.
            type: type of execution or tag.

        Raises:
            UnknownNameError: no values of this tensor were recorded at this step, or no such part.
        """
        return distributions.value(
            self._snapshot, self._info, step, sample=sample, part=part, type_=type
        )

    def histogram(
        self, step: int, *, type: str | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Returns counts [bins] and edges [bins + 1] of the values at a step.

        Large tensors are counted on an evenly spaced part of their elements.

        Raises:
            UnknownNameError: there is no histogram at this step.
        """
        return distributions.histogram(self._snapshot, self._info, step, type)

    def histograms(
        self, *, type: str | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Returns steps [k], counts [k, bins] and ranges [k, 2] of all recorded histograms."""
        return distributions.histograms(self._snapshot, self._info, type)

    @property
    def _snapshot(self) -> Snapshot:
        return self._current()

    @property
    def _info(self) -> SlotInfo:
        return self._snapshot.by_key[self._key]

    @property
    def _name(self) -> str:
        return f"{self.node!r} ({self.role}, iteration {self.iteration})"

    def __repr__(self) -> str:
        return (
            f"<Slot {self.node!r}, role {self.role!r}, pass {self.pass_name!r}, "
            f"iteration {self.iteration}: {self.dtype}>"
        )

"""One recorded tensor of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.errors import UnknownNameError, did_you_mean, is_one_of, shown
from comgra_decl.records import MESH, SlotInfo, SlotKey
from comgra_decl.store import levels
from comgra_decl.store.parts import Part

from . import distributions, statistics
from . import preview as previews
from .display import from_viewer
from .preview import Preview
from .ranks.view import JoinedView
from .snapshot import Snapshot


class Slot:
    """One tensor recorded by a run: a node's output, a gradient, a parameter, an update, ...

    Returned by `Run.slot`. After `Run.refresh`, it includes the new records.

    `type` selects the records by type of execution or by tag; None selects the records in train
    mode, or all records if there are none in train mode. `over_batch` selects how per-sample
    statistics are aggregated over the batch: "mean", "std" or "abs_max". NaN means that nothing was
    recorded.
    """

    def __init__(self, snapshot: Callable[[], Snapshot], key: SlotKey) -> None:
        """Use `Run.slot`."""
        self._current = snapshot
        self._key = key

    # -- identity

    @property
    def key(self) -> SlotKey:
        """Node, role, iteration and pass."""
        return self._key

    @property
    def node(self) -> str:
        """Name of the node: a module path or an annotated name."""
        return self._key.node

    @property
    def role(self) -> str:
        """Role of the tensor in its node: "output", "input", "weight", ..."""
        return self._key.role

    @property
    def iteration(self) -> int:
        """Which call of the node within the step, counting from 0."""
        return self._key.iteration

    @property
    def pass_name(self) -> str:
        """Name of the pass: "forward", "grad", "grad:loss", "update", ..."""
        return self._key.pass_

    @property
    def passes(self) -> list[str]:
        """All passes of the same tensor, in order of first appearance."""
        same = [key for key in self._snapshot.by_key if key[:3] == self._key[:3]]
        return [key.pass_ for key in same]

    @property
    def kind(self) -> str:
        """Kind of the tensor: "computed", "input", "parameter", "buffer", "loss" or "target"."""
        return self._info.kind

    @property
    def dtype(self) -> str:
        """Name of the tensor's dtype: "float32", "bfloat16", ..."""
        return self._info.dtype

    @property
    def batch_dim(self) -> int | None:
        """The batch dimension; None if the tensor has none."""
        return self._info.batch_dim

    @property
    def coordinates(self) -> dict[str, list[int]]:
        """Where in a device mesh the tensor lives: coordinates by dimension, such as {"pp": [1]}.

        These are the coordinates of the recorded ranks that have it; empty if the training job has
        no mesh with names. See also `Run.coordinates`.
        """
        view = self._snapshot.view
        if isinstance(view, JoinedView):
            return view.coordinates(self._info.id)
        own: dict[str, int] = view.document(MESH) or {}
        return {name: [at] for name, at in own.items()}

    @property
    def grad(self) -> Slot:
        """The gradient of this tensor.

        Raises:
            UnknownNameError: the tensor has no recorded gradient, or several; select one with `of`.
        """
        found = [name for name in self.passes if name.partition(":")[0] == "grad"]
        if len(found) != 1:
            what = "several gradients" if found else "no gradient"
            there = ", ".join(map(repr, found or self.passes))
            advice = f"Choose one with .of(name): {there}." if found else f"It has {there}."
            raise UnknownNameError(f"{self._name} has {what}. {advice}")
        return self.of(found[0])

    def of(self, name: str) -> Slot:
        """Return another pass of the same tensor, such as "forward", "grad:loss" or "update".

        Raises:
            UnknownNameError: the tensor has no such pass; the message lists its passes.
        """
        if not is_one_of(name, self.passes):
            hint = did_you_mean(name, self.passes) or "."
            there = ", ".join(map(repr, self.passes))
            raise UnknownNameError(f"{self._name} has no pass {shown(name)}{hint} It has {there}.")
        return Slot(self._current, self._key._replace(pass_=name))

    # -- recorded data

    def series(
        self, statistic: str = "mean", *, over_batch: str = "mean", type: str | None = None
    ) -> pd.Series[float]:
        """Return one statistic by step; NaN where the tensor was not recorded.

            step
            0     1.002241
            10         NaN
            20    0.987120
            Name: std, dtype: float32

        Raises:
            UnknownNameError: the statistic or type does not exist; similar names are suggested.
        """
        return statistics.series(self._snapshot, self._info, statistic, over_batch, type)

    @property
    def long(self) -> bool:
        """Whether the run has so many records that plots show `extremes` rather than all values."""
        return self._snapshot.view.n >= levels.LONG

    def extremes(
        self, statistic: str = "mean", *, over_batch: str = "mean", type: str | None = None
    ) -> pd.DataFrame:
        """Return the lowest and highest values of a statistic in spans of up to 256 records.

                       low  low_step      high  high_step
            step
            0     0.912004       131  1.002241          0
            256   0.898731       402  0.958310        257

        The index is the first step of each span. A run of a million records has about 4,000 spans,
        and reading them takes few reads. NaN and -1 where nothing was recorded.

        Raises:
            UnknownNameError: the statistic or type does not exist; similar names are suggested.
        """
        return statistics.extremes(self._snapshot, self._info, statistic, over_batch, type)

    def samples(self, statistic: str = "mean", *, type: str | None = None) -> pd.DataFrame:
        """Return a statistic for each recorded sample: one row per step, one column per sample.

            sample         0         1
            step
            0       0.013201 -0.104114
            10      0.018847 -0.098120

        NaN where a sample was not recorded.
        """
        snapshot = self._snapshot
        columns = {
            number: statistics.sample_series(snapshot, self._info, statistic, number, type)
            for number in range(snapshot.view.meta.sample_count)
        }
        index = snapshot.step_index(snapshot.records(type))
        return pd.DataFrame(columns, index, dtype=np.float32).rename_axis(columns="sample")

    def row(self, step: int, *, type: str | None = None) -> pd.DataFrame:
        """Return all statistics of each recorded sample at a step: one row per sample.

                        mean       std        l2 ...
            sample
            0       0.013201  1.002241  5.672901
            1      -0.104114  0.581002  1.180234

        `attrs["batch_index"]` contains the index of each sample in the batch; `attrs["labels"]`
        contains its category.
        """
        return statistics.sample_row(self._snapshot, self._info, step, type)

    def shape(self, step: int, *, type: str | None = None) -> tuple[int, ...] | None:
        """Return the shape of the tensor at a step; None if the record is damaged.

        In a run of multiple ranks, it is the shape on the first rank that has the tensor. For a
        sharded tensor, it is the first shape of the whole tensor.

        Raises:
            UnknownNameError: the tensor was not recorded at this step.
        """
        return statistics.shape(self._snapshot, self._info, step, type)

    def shapes(self, *, type: str | None = None) -> pd.Series[Any]:
        """Return the shape by step, for the steps at which the tensor was recorded.

            step
            0     (32, 8)
            10    (17, 8)
            Name: shape, dtype: object

        None where the record is damaged.
        """
        return statistics.shape_series(self._snapshot, self._info, type)

    def value(
        self, step: int, *, sample: int | None = None, part: Part = ..., type: str | None = None
    ) -> NDArray[Any]:
        """Return the recorded values [samples, ...] at a step, or those of one sample [...].

        The values have the dtype of the tensor; bfloat16 becomes ml_dtypes.bfloat16. A tensor
        without a batch dimension counts as one sample.

        Args:
            step: the step.
            sample: number of a recorded sample; None: all.
            part: which elements to return, as an array index such as `np.s_[0, :100]`. Only the
            parts of the file that contain these elements are read, plus at most a megabyte around
            them.
            type: type of execution or tag.

        Raises:
            UnknownNameError: no values of this tensor were recorded at this step, or the part does
                not exist.
        """
        return distributions.value(
            self._snapshot, self._info, step, sample=sample, part=part, type_=type
        )

    def preview(self, step: int, *, type: str | None = None) -> Preview:
        """Return the values at a step if they were kept, or else a small part of them.

        If the record contains no values, the result is the newest preview up to this step or, if
        there is none, the next one; `Preview.step` states its step. If there are several ranks, the
        first one that has a preview provides it.

        Args:
            step: the step.
            type: type of execution or tag.

        Raises:
            UnknownNameError: the step was not recorded, or the run has neither values nor previews
                of this tensor.
        """
        return previews.preview(self._snapshot, self._info, step, type)

    def histogram(
        self, step: int, *, type: str | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return counts [bins] and edges [bins + 1] of the values at a step.

        The histogram of a large tensor counts an evenly spaced subset of its elements.

        Raises:
            UnknownNameError: there is no histogram at this step.
        """
        return distributions.histogram(self._snapshot, self._info, step, type)

    def histograms(
        self, *, type: str | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Return steps [k], counts [k, bins] and edges [k, bins + 1] of all recorded histograms."""
        return distributions.histograms(self._snapshot, self._info, type)

    @property
    def plot(self) -> Any:
        """Plots of this tensor as HoloViews elements, which compose with `+` and `*`.

        Its methods are `series`, `samples`, `histogram`, `distribution` and `preview`.

        Raises:
            MissingPackageError: no viewer is installed.
        """
        return from_viewer("plot")(self)

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

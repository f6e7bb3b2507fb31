"""What a picture of a run is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from comgra_decl.errors import needed
from comgra_decl.pictures.cloud import Basis
from comgra_decl.records import SAMPLE

if TYPE_CHECKING:
    import xarray


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture of a run; converts to a numpy array.

        >>> run.picture("cam", 400, "conv2")
        <Picture 'cam' of 'conv2' at step 400: sample 8, height 6, width 6>

    Attributes:
        name: its name.
        values: the numbers; NaN where something is missing.
        axes: the name of each axis of `values`.
        node: the node that it shows; None if it shows several nodes.
        step: the step that it shows; None if it shows several steps.
        labels: the names of the entries of an axis, such as nodes or steps, by axis.
        facts: additional facts, such as the "gap" of integrated gradients: see `records.PICTURES`.
        basis: the axes of a cloud.
    """

    name: str
    values: NDArray[Any]
    axes: tuple[str, ...]
    node: str | None = None
    step: int | None = None
    labels: dict[str, list[Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    basis: Basis | None = None

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the values."""
        return np.array(self.values, dtype) if copy else np.asarray(self.values, dtype)

    def to_xarray(self) -> xarray.DataArray:
        """Return the picture as an `xarray.DataArray`.

        Its dims are `axes`. Steps, nodes and other labels are coordinates of their axis. Categories
        of samples are the coordinate `label` of the axis "sample", because several samples may
        share one. The node, the step and the facts are attributes.

        Raises:
            MissingPackageError: xarray is not installed; the message names the extra to install.
        """
        sizes = dict(zip(self.axes, self.values.shape, strict=True))
        coords: dict[str, Any] = {}
        for axis, labels in self.labels.items():
            if sizes.get(axis) != len(labels):
                continue  # names of numbers in the values, such as those of categories
            if axis == SAMPLE:
                coords["label"] = (axis, np.array(labels, object))
            else:
                coords[axis] = np.array(labels)
        attributes = {"node": self.node, "step": self.step, **self.facts}
        found: xarray.DataArray = needed("xarray", "xarray").DataArray(
            self.values, coords, self.axes, name=self.name, attrs=attributes
        )
        return found

    def __repr__(self) -> str:
        of = "" if self.node is None else f" of {self.node!r}"
        at = "" if self.step is None else f" at step {self.step}"
        sizes = (f"{n} {size}" for n, size in zip(self.axes, self.values.shape, strict=True))
        return f"<Picture {self.name!r}{of}{at}: {', '.join(sizes)}>"

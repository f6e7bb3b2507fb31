"""What a picture of a run is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from comgra_decl.pictures.cloud import Basis


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

    def __repr__(self) -> str:
        of = "" if self.node is None else f" of {self.node!r}"
        at = "" if self.step is None else f" at step {self.step}"
        sizes = (f"{n} {size}" for n, size in zip(self.axes, self.values.shape, strict=True))
        return f"<Picture {self.name!r}{of}{at}: {', '.join(sizes)}>"

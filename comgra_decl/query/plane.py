"""The plane in which the parameters of a training move most, from its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import UnknownNameError

from .checkpoints import Checkpoint

Floats = NDArray[np.float64]

_FEWEST = 3
"""Fewest checkpoints that determine a plane."""


@dataclass(frozen=True, eq=False)
class Plane:
    """The plane through the last of some checkpoints that shows most of the way to it.

    Its axes are the two largest principal components of the differences between the parameters of
    each checkpoint and those of the last one, without subtracting their mean (Li et al. 2018,
    section 7).

        >>> plane = run.plane()
        >>> plane.coordinates[-1]
        array([0., 0.])
        >>> plane.save("plane.npz")

    Attributes:
        steps: the steps of the checkpoints, ascending.
        coordinates: [steps, 2], their places in the plane. The last one is at the origin, and the
            largest magnitude of all is 1.
        explained: [2], the share of each axis in the sum of squares of the differences.
    """

    steps: tuple[int, ...]
    coordinates: Floats
    explained: Floats
    _axes: tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]] = field(repr=False)
    _origin: Floats = field(repr=False)

    def save(self, file: str | Path) -> None:
        """Store the plane as a .npz file, for `plane` of the picture `loss_slice`.

        The file contains `first.NAME` and `second.NAME` for each parameter, the change of the
        parameter for a coordinate of 1; `steps` and `coordinates`; and `origin`, the scalar
        product of each axis and the parameters at the origin.
        """
        arrays: dict[str, Any] = {
            f"{axis}.{name}": array
            for axis, named in zip(("first", "second"), self._axes, strict=True)
            for name, array in named.items()
        }
        arrays |= {"steps": np.array(self.steps), "coordinates": self.coordinates}
        arrays["origin"] = self._origin
        np.savez(file, **arrays)


def plane_of(checkpoints: Sequence[Checkpoint]) -> Plane:
    """Return the plane of some checkpoints, the last of which is the origin; see `Run.plane`."""
    if len(checkpoints) < _FEWEST:
        raise UnknownNameError(
            f"{len(checkpoints)} checkpoints determine no plane; it needs at least {_FEWEST}. "
            "Declare more, as in `checkpoints: {every: 5}`."
        )
    last = checkpoints[-1]
    names = last.parameters
    products = np.zeros((len(checkpoints),) * 2)
    for name in names:
        moves = _moves(checkpoints, name)
        products += moves @ moves.T
    squares, vectors = np.linalg.eigh(products)
    squares, vectors = squares[:-3:-1], vectors[:, :-3:-1]
    if squares[1] <= 1e-12 * squares[0] or not squares[0] > 0:
        raise UnknownNameError("the parameters of the checkpoints lie on a line, not in a plane.")
    vectors = vectors * np.where(vectors[np.abs(vectors).argmax(0), [0, 1]] < 0, -1, 1)
    lengths = np.sqrt(squares)
    coordinates = vectors * lengths
    scale = np.abs(coordinates).max()
    axes: tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]] = ({}, {})
    origin = np.zeros(2)
    for name in names:
        value = np.asarray(last[name])
        found = scale * (vectors / lengths).T @ _moves(checkpoints, name)
        origin += found @ value.astype(np.float64).ravel()
        for axis, own in zip(axes, found, strict=True):
            axis[name] = own.reshape(value.shape)
    return Plane(
        tuple(each.step for each in checkpoints),
        coordinates / scale,
        squares / np.trace(products),
        axes,
        origin,
    )


def _moves(checkpoints: Sequence[Checkpoint], name: str) -> Floats:
    """Return how far a parameter is from that of the last checkpoint, [checkpoints, elements]."""
    values = [np.asarray(each[name]).astype(np.float64).ravel() for each in checkpoints]
    moves: Floats = np.stack(values) - values[-1]
    return moves

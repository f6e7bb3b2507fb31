"""The cloud of a node's values: the points of all samples, in a frame that stays as it is."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError, UnknownNameError
from comgra_decl.pictures.cloud import Basis
from comgra_decl.query import Picture
from comgra_decl.viewer.model.cache import Cache
from comgra_decl.viewer.model.record_pictures import Computed, without_values
from comgra_decl.viewer.model.runview import RunView

_MOST_POINTS = 2000
_MOST_LAID_OUT = 2000
"""Most points of all steps that t-SNE lays out while one waits."""

_KEPT = 16 << 20
"""Bytes of the frames that a session keeps."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cloud:
    """Points of a node, [samples, 2], in a frame that is the same at all steps.

    Attributes:
        points: the points at this step. They lie outside the frame if the record is newer than the
            frame and its values have moved on.
        low: the lowest coordinates at the steps of the frame.
        high: the highest ones.
        labels: the label of each sample.
        note: how they were computed.
        steps: the number of steps in the frame.
        method: "pca" or "tsne".
    """

    points: Floats
    low: tuple[float, float]
    high: tuple[float, float]
    labels: list[str]
    note: str
    steps: int
    method: str = "pca"

    @property
    def outside(self) -> int:
        """The number of points outside the frame."""
        beyond = (self.points < self.low) | (self.points > self.high)
        return int(beyond.any(1).sum())


@dataclass(frozen=True, eq=False, slots=True)
class _Frame:
    """What a session keeps of a node's cloud, so that new records move no point."""

    basis: Basis | None
    low: Floats
    high: Floats
    steps: int


def layouts_here() -> list[str]:
    """Return the methods that can lay out a cloud, according to the installed packages."""
    return ["pca", *(["tsne"] if find_spec("openTSNE") else [])]


class Clouds:
    """The clouds of one session, of which each keeps its axes and its frame.

    Attributes:
        method: "pca" or "tsne".
    """

    def __init__(self) -> None:
        self.method = "pca"
        self._frames = Cache(_KEPT)

    def fit_again(self) -> None:
        """Fit all axes and frames to the records that exist now."""
        self._frames.clear()

    def of(self, view: RunView, type_: str, step: int, node: str) -> Cloud | Computed:
        """Return the cloud of a node at a step, or why there is none."""
        try:
            return self._cloud(view, type_, step, node)
        except ComgraError as error:
            return without_values(view, "cloud", type_, node, str(error))

    def _cloud(self, view: RunView, type_: str, step: int, node: str) -> Cloud:
        key = (str(view.run.path), view.number, type_, node, self.method)
        if self.method == "tsne":
            placed = view.now(("tsne", type_, node), lambda: _laid_out(view, node, type_))
            frame = self._frames.get(key, lambda: _framed(placed))
        else:
            frame, placed = self._projected(view, type_, node, key)
        steps, values = placed.labels["step"], placed.values
        if step not in steps:
            raise UnknownNameError(f"{node} was recorded with a different shape at step {step}.")
        if values.shape[1] > _MOST_POINTS:
            raise UnknownNameError(f"{values.shape[1]} points are too many to show.")
        return Cloud(
            values[steps.index(step)],
            (float(frame.low[0]), float(frame.low[1])),
            (float(frame.high[0]), float(frame.high[1])),
            ["" if label is None else str(label) for label in placed.labels["sample"]],
            _note(placed, frame, step),
            frame.steps,
            self.method,
        )

    def _projected(
        self, view: RunView, type_: str, node: str, key: Hashable
    ) -> tuple[_Frame, Picture]:
        """Return the frame, and the points of all steps on its axes."""
        frame = self._frames.get(key, lambda: _framed(view.run.embedding(node, type=type_)))
        basis = frame.basis
        assert basis is not None
        placed = view.now(
            ("cloud", type_, node, basis), lambda: view.run.embedding(node, basis, type=type_)
        )
        return frame, placed


def _framed(placed: Picture) -> _Frame:
    low, high = placed.values.min((0, 1)), placed.values.max((0, 1))
    return _Frame(placed.basis, low, high, len(placed.labels["step"]))


def _note(placed: Picture, frame: _Frame, step: int) -> str:
    if frame.basis is None:
        trust = placed.facts["trustworthiness"][placed.labels["step"].index(step)]
        return f"t-SNE, trustworthiness {trust:.2f}"
    shares = " and ".join(f"{100 * share:.0f} %" for share in frame.basis.explained.tolist())
    return f"principal components with {shares} of the variance"


def _laid_out(view: RunView, node: str, type_: str) -> Picture:
    run = view.run
    samples = len(run.samples(int(view.steps(type_)[-1]), type=type_))
    if samples * len(view.steps(type_)) > _MOST_LAID_OUT:
        raise UnknownNameError(
            f"{len(view.steps(type_))} steps of {samples} samples take too long to lay out here; "
            f"call run.embedding({node!r}, method='tsne')."
        )
    return run.embedding(node, method="tsne", type=type_)

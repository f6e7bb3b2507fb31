"""The cloud of a node's values: the points of all samples, in a frame that stays as it is."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from importlib.util import find_spec
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError
from comgra_decl.pictures.cloud import Basis
from comgra_decl.query import Picture, open_run
from comgra_decl.viewer.model.cache import Cache
from comgra_decl.viewer.model.record_pictures import without_values
from comgra_decl.viewer.model.runview import RunView

_MOST_POINTS = 2000
_MOST_LAID_OUT = 20_000
"""Most points of all steps that are laid out on a background thread."""

_MOST_LAYOUTS = 8
"""Most layouts that a session keeps."""

METHOD_NAMES = {"pca": "principal components", "tsne": "t-SNE", "umap": "UMAP"}
"""What a person calls each method."""

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
        method: "pca", "tsne" or "umap".
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


@dataclass(frozen=True, slots=True)
class NoCloud:
    """Why there is no cloud.

    Attributes:
        why: the reason.
        lines: YAML of the spec that would fill the card; "" if no spec would.
        method: "pca", "tsne" or "umap".
        again: whether fitting again helps.
    """

    why: str
    lines: str = ""
    method: str = "pca"
    again: bool = False


@dataclass(slots=True)
class _Layout:
    """A layout by t-SNE or UMAP on a background thread; `placed` or `problem` is its result."""

    placed: Picture | None = None
    problem: str = ""


_PACKAGES = {"tsne": "openTSNE", "umap": "umap"}
_ended: WeakKeyDictionary[RunView, int] = WeakKeyDictionary()
_turn = threading.Lock()  # one layout at a time per process


def layouts_here() -> list[str]:
    """Return the methods that can lay out a cloud, according to the installed packages."""
    return ["pca", *(method for method, package in _PACKAGES.items() if find_spec(package))]


def laid_out(view: RunView) -> int:
    """Return the number of layouts of a run that have ended; sessions notice the end by it."""
    return _ended.get(view, 0)


class Clouds:
    """The clouds of one session, of which each keeps its axes and its frame.

    Attributes:
        method: "pca", "tsne" or "umap".
    """

    def __init__(self) -> None:
        self.method = "pca"
        self._frames = Cache(_KEPT)
        self._layouts: dict[Hashable, _Layout] = {}
        self._fitted = 0

    @property
    def state(self) -> tuple[str, int]:
        """What decides how a cloud is drawn: the method, and how often it was fitted again."""
        return self.method, self._fitted

    def fit_again(self) -> None:
        """Fit all axes, layouts and frames to the records that exist now."""
        self._fitted += 1
        self._frames.clear()
        self._layouts.clear()

    def of(self, view: RunView, type_: str, step: int, node: str) -> Cloud | NoCloud:
        """Return the cloud of a node at a step, or why there is none."""
        try:
            return self._cloud(view, type_, step, node)
        except ComgraError as error:
            empty = without_values(view, "cloud", type_, node, str(error))
            return NoCloud(empty.why, empty.lines, self.method)

    def _cloud(self, view: RunView, type_: str, step: int, node: str) -> Cloud | NoCloud:
        key = (str(view.run.path), view.number, type_, node, self.method)
        if self.method == "pca":
            frame, placed = self._projected(view, type_, node, key)
        else:
            layout = self._layouts.get(key) or self._lay_out(view, type_, node, key)
            if layout.placed is None:
                return NoCloud(layout.problem or _BUSY, method=self.method)
            placed = layout.placed
            frame = self._frames.get(key, lambda: _framed(placed))
        steps, values = placed.labels["step"], placed.values
        if step not in steps:
            if self.method != "pca" and step > steps[-1]:
                return NoCloud("This record is newer than the layout.", "", self.method, True)
            return NoCloud(f"{node} was recorded with a different shape at step {step}.")
        if values.shape[1] > _MOST_POINTS:
            return NoCloud(f"{values.shape[1]} points are too many to show.")
        return Cloud(
            values[steps.index(step)],
            (float(frame.low[0]), float(frame.low[1])),
            (float(frame.high[0]), float(frame.high[1])),
            ["" if label is None else str(label) for label in placed.labels["sample"]],
            _note(placed, frame, step, self.method),
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

    def _lay_out(self, view: RunView, type_: str, node: str, key: Hashable) -> _Layout:
        """Start a layout on a background thread."""
        while len(self._layouts) >= _MOST_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        new = self._layouts[key] = _Layout()
        steps = len(view.steps(type_))
        samples = len(view.run.samples(int(view.steps(type_)[-1]), type=type_))
        if samples * steps > _MOST_LAID_OUT:
            new.problem = (
                f"{steps} steps of {samples} samples take too long to lay out here; "
                f"call run.embedding({node!r}, method={self.method!r})."
            )
            return new
        arguments = (new, view, node, self.method, type_)
        threading.Thread(
            target=_work, args=arguments, name="comgra_decl layout", daemon=True
        ).start()
        return new


_BUSY = "The points are being laid out in the background."


def _work(layout: _Layout, view: RunView, node: str, method: str, type_: str) -> None:
    try:
        with _turn:
            run = open_run(view.run.path)  # of its own, because the page goes on reading
            run = run if view.number is None else run.rank(view.number)
            layout.placed = run.embedding(node, method=method, type=type_)
    except Exception as error:  # noqa: BLE001 - the page that asked shows it
        layout.problem = str(error) or type(error).__name__
    finally:
        _ended[view] = _ended.get(view, 0) + 1


def _framed(placed: Picture) -> _Frame:
    low, high = placed.values.min((0, 1)), placed.values.max((0, 1))
    return _Frame(placed.basis, low, high, len(placed.labels["step"]))


def _note(placed: Picture, frame: _Frame, step: int, method: str) -> str:
    if frame.basis is None:
        trust = placed.facts["trustworthiness"][placed.labels["step"].index(step)]
        return f"{METHOD_NAMES[method]}, trustworthiness {trust:.2f}"
    shares = " and ".join(f"{100 * share:.0f} %" for share in frame.basis.explained.tolist())
    return f"{METHOD_NAMES[method]} with {shares} of the variance"

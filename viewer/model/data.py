"""The first recorded batches, as the model received them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError
from comgra_decl.query.batches import Summary, channel_axis, summary
from comgra_decl.viewer.model.drawing import numbers
from comgra_decl.viewer.model.gallery import Tile, declared_image, drawn_input
from comgra_decl.viewer.model.runview import RunView, Slot
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.tokens import has_tokens, labels

FIRST = 4
"""Number of batches that are shown, as in `comgra-decl data`."""

_MOST_SAMPLES = 16
_STATISTICS = ("min", "max", "mean", "std", "nonfinite")


@dataclass(frozen=True, slots=True)
class Batch:
    """Some samples of an input at one step.

    Attributes:
        step: the step.
        tiles: the samples that were recorded, at most 16.
        recorded: their number.
        samples: the number of samples in the batch; None if the tensor has no batch dim.
        whole: whether the record contains the values, not a preview in which places are averaged.
    """

    step: int
    tiles: tuple[Tile, ...]
    recorded: int
    samples: int | None
    whole: bool


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input of the model or a target.

    Attributes:
        node: its node.
        role: its role.
        shapes: its shapes at these steps.
        dtype: its dtype.
        facts: what its recorded samples contain: from their values or, without them, from their
            statistics, which know no channels, duplicates and classes; None if neither is known.
        counted: whether `facts` come from values.
        batches: its samples by step; none for a target.
        classes: for a tensor of classes, how often each of them occurs, the most frequent first.
    """

    node: str
    role: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    facts: Summary | None
    counted: bool = False
    batches: tuple[Batch, ...] = ()
    classes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Data:
    """The batches of a type of execution.

    Attributes:
        steps: the first four recorded steps.
        tensors: inputs, then targets.
        undone: whether the spec says how to undo the normalisation of images.
    """

    steps: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    undone: bool


def first_batches(view: RunView, at: Selection) -> Data:
    """Return the first recorded batches of the selected type of execution."""

    def read() -> Data:
        steps = tuple(view.steps(at.type)[:FIRST].tolist())
        given = [s for s in view.slots.values() if s.pass_ == "forward" and s.iteration == 0]
        targets = [s for s in given if s.kind == "target"]
        named = _classes_of(view, at, steps, targets)
        found = [_tensor(view, at, steps, s, named) for s in given if s.kind == "input"]
        found += [_tensor(view, at, steps, slot, None) for slot in targets]
        undone = declared_image(view, at.type) is not None
        return Data(steps, tuple(each for each in found if each is not None), undone)

    return view.now(("data", at.type), read)


_Kept = dict[int, tuple[NDArray[Any], tuple[str, ...], bool]]
"""By step: values, names of their axes, and whether no places were averaged."""


def _kept(view: RunView, at: Selection, steps: tuple[int, ...], slot: Slot) -> _Kept:
    kept: _Kept = {}
    for step in steps:
        try:
            preview = view.preview(slot, step, at.type)
        except ComgraError:
            continue
        if preview.step != step:
            continue  # of another batch
        inner = preview.meanings[slot.batch_dim is not None :]
        exact = all(axis.how == "all" for axis in inner)
        values = preview.values
        if values.dtype.kind not in "fiub":
            values = numbers(values)
        kept[step] = values, preview.axes, exact
    return kept


def _tensor(
    view: RunView,
    at: Selection,
    steps: tuple[int, ...],
    slot: Slot,
    named: dict[int, list[str]] | None,
) -> Tensor | None:
    """Return what one tensor contains; None if it was not recorded at these steps.

    Args:
        view: the run.
        at: the selected type of execution.
        steps: the steps.
        slot: the tensor.
        named: labels of the samples by step; None for a target, whose samples are not drawn.
    """
    kept = _kept(view, at, steps, slot)
    present = [s for s in steps if s in kept or slot.id in view.row(s, at.type, "mean").lines()]
    if not present:
        return None
    dims = {step: view.shape(slot, replace(at, step=step)) for step in present}
    exact = [values for values, _, whole in kept.values() if whole and slot.batch_dim is not None]
    axes = next((names for _, names, _ in kept.values()), ())
    convolved = axes[1:2] == ("channel",)
    counted = bool(exact)
    facts = summary(slot.role, exact, convolved=convolved) if exact else None
    if facts is None and slot.batch_dim is not None:
        facts = _from_statistics(view, at, present, slot, dims)
    batches: tuple[Batch, ...] = ()
    if named is not None:
        drawn = ((step, *kept[step]) for step in kept)
        batches = tuple(
            _batch(view, at, slot, step, values, whole, named.get(step, []), convolved)
            for step, values, _, whole in drawn
        )
    return Tensor(
        slot.node,
        slot.role,
        tuple(dict.fromkeys(dims.values())),
        slot.dtype,
        facts,
        counted,
        batches,
        _counts(view, slot, facts),
    )


def _from_statistics(
    view: RunView,
    at: Selection,
    steps: list[int],
    slot: Slot,
    dims: dict[int, tuple[int, ...]],
) -> Summary | None:
    """Return what the recorded samples contain, from the statistics of each of them.

    All samples of a tensor have the same number of values, so the variance of all values is the
    mean of the samples' variances plus the variance of their means. Means and standard deviations
    of samples with NaN or infinite values are left out.
    """
    found: dict[str, list[float]] = {name: [] for name in _STATISTICS}
    for step in steps:
        try:
            row = view.sample_row(slot, step, at.type)
        except ComgraError:
            continue
        for sample in row.lines():
            line = row.line(sample)
            for name in _STATISTICS:
                found[name].append(line.get(name, np.nan))
    if not found["min"] or slot.dtype.startswith("complex") or len({*dims.values()}) > 1:
        return None
    low, high, mean, std, bad = (np.array(found[name]) for name in _STATISTICS)
    whole = np.isfinite(mean) & np.isfinite(std) & ~(bad > 0)
    return Summary(
        label=slot.role,
        shapes=[[*dims[step]] for step in steps[:1]],
        dtype=slot.dtype,
        low=_finite(low, np.min),
        high=_finite(high, np.max),
        mean=float(mean[whole].mean()) if whole.any() else None,
        std=float(np.sqrt((std[whole] ** 2).mean() + mean[whole].var())) if whole.any() else None,
        nonfinite=int(np.nansum(bad)),
        channels=[], repeated=0, shared=0, samples=len(mean), classes={}, fewest=None,
    )  # fmt: skip


def _finite(values: NDArray[Any], reduced: Callable[[NDArray[Any]], Any]) -> float | None:
    finite = values[np.isfinite(values)]
    return float(reduced(finite)) if finite.size else None


def _batch(
    view: RunView,
    at: Selection,
    slot: Slot,
    step: int,
    values: NDArray[Any],
    whole: bool,
    named: list[str],
    convolved: bool,
) -> Batch:
    declared = declared_image(view, at.type)
    batched = slot.batch_dim is not None
    samples = values if batched else values[None]
    axis = channel_axis(samples.shape, convolved=convolved)
    if samples.ndim == 4 and axis == 3:
        samples = np.moveaxis(samples, 3, 1)
    tiles = tuple(
        Tile(
            sample,
            named[sample] if sample < len(named) else "",
            **drawn_input(view, np.atleast_1d(value), declared),
        )
        for sample, value in enumerate(samples[:_MOST_SAMPLES])
    )
    shape = view.shape(slot, replace(at, step=step))
    size = shape[slot.batch_dim] if slot.batch_dim is not None else None
    return Batch(step, tiles, len(samples), size, whole)


def _classes_of(
    view: RunView, at: Selection, steps: tuple[int, ...], targets: list[Slot]
) -> dict[int, list[str]]:
    """Return a label for each recorded sample, by step: its category, or else its target."""
    known: dict[int, list[str]] = {}
    for step in steps:
        given = view.run.samples(step, type=at.type or None)["label"]
        if given.notna().any():
            known[step] = ["" if label is None else str(label) for label in given]
    for slot in targets:
        if slot.batch_dim is None:
            continue
        for step, (values, _, _) in _kept(view, at, steps, slot).items():
            if values.ndim == 1 and values.dtype.kind in "iub":
                known.setdefault(step, _names(view, slot, values))
    return known


def _names(view: RunView, slot: Slot, values: NDArray[Any]) -> list[str]:
    """Return integers as text: as tokens if they are declared."""
    found = labels(view, values) if has_tokens(view, slot) else values
    return [str(each) for each in found.tolist()]


def _counts(view: RunView, slot: Slot, facts: Summary | None) -> tuple[tuple[str, int], ...]:
    """Return the classes in a target, or the values in another tensor of few integers."""
    if facts is None or not facts.classes:
        return ()
    pairs = sorted(facts.classes.items(), key=lambda item: -item[1])
    names = _names(view, slot, np.array([value for value, _ in pairs]))
    return tuple(zip(names, (number for _, number in pairs), strict=True))

"""What is done to a tensor: ablation, noise, steering, patching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from comgra_decl.errors import ProbeError, did_you_mean
from comgra_decl.hooks.probing.samples import call_named, widened
from comgra_decl.spec.interventions import (
    AddChange,
    CategoryDifference,
    Change,
    ClampChange,
    FunctionChange,
    NoiseChange,
    PatchChange,
    ProjectionChange,
    RecordedMean,
    RecordedPatch,
    RecordedSpec,
    ScaleChange,
)


@dataclass(frozen=True)
class Recorded:
    """A tensor in a record of a run.

    Attributes:
        values: [samples, ...].
        labels: the label of each sample; "" if it has none.
        where: the run, the step and the tensor, for messages.
    """

    values: torch.Tensor
    labels: Sequence[str]
    where: str


Recall = Callable[[RecordedSpec], Recorded]
"""Reads what a run has recorded of the tensor that is changed."""


@dataclass(frozen=True)
class Sampled:
    """The samples that pass through a model.

    Attributes:
        count: the number of samples.
        labels: the label of each sample; None while they are not known yet, in which case a change
            that depends on them has no effect.
        replicas: how many times the batch contains all samples, one copy after the other.
        start: where the positions of the batch begin in the sequence that a model generates; None
            if parts count positions within the tensor.
    """

    count: int
    labels: Sequence[str] | None
    replicas: int = 1
    start: int | None = None


def needs_clean(do: Change) -> bool:
    """Return whether a change depends on the tensor's value in the unchanged pass."""
    if do == "mean" or isinstance(do, NoiseChange):
        return True
    if isinstance(do, PatchChange):
        return not isinstance(do.patch, RecordedPatch) and not _is_file(do.patch)
    vector = do.add if isinstance(do, AddChange) else None
    vector = do.project_off if isinstance(do, ProjectionChange) else vector
    return isinstance(vector, CategoryDifference)


def changed(
    do: Change,
    tensor: torch.Tensor,
    clean: torch.Tensor | None,
    samples: Sampled,
    recall: Recall | None = None,
) -> torch.Tensor:
    """Return the changed tensor, of the same shape and dtype; gradients pass through.

    It may be expanded, and may share memory with `clean` or with what a function keeps.

    Args:
        do: the change.
        tensor: the tensor, [replicas * samples, ...], or a parameter. It is never written to.
        clean: its value in the unchanged pass, [samples, ...]; for a parameter, its own.
        samples: the samples.
        recall: reads records of other runs; None if that is not possible.

    Raises:
        ProbeError: the change is not possible for this tensor.
    """
    with torch.autocast(tensor.device.type, enabled=False):
        if needs_clean(do):
            new = _from_clean(do, tensor, clean, samples)
        else:
            new = _changed(do, tensor, samples, recall or _recall_nothing)
    given: object = new
    if not isinstance(given, torch.Tensor) or given.shape != tensor.shape:
        found = list(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise ProbeError(f"must give a tensor of shape {list(tensor.shape)}, not {found}")
    return new if new.dtype == tensor.dtype else new.to(tensor.dtype)


def _changed(do: Change, tensor: torch.Tensor, samples: Sampled, recall: Recall) -> torch.Tensor:
    if do == "zero":
        return torch.zeros_like(tensor)
    if isinstance(do, ScaleChange):
        return tensor * do.scale
    if isinstance(do, ClampChange):
        return tensor.clamp(*do.clamp)
    if isinstance(do, AddChange):
        return tensor + do.scale * _fitting(_vector(do.add, tensor, recall), tensor)
    if isinstance(do, ProjectionChange):
        return _projected(tensor, _vector(do.project_off, tensor, recall), do.dim)
    if isinstance(do, PatchChange):
        if isinstance(do.patch, RecordedPatch):
            return _of_samples(do.patch, recall(do.patch), tensor, samples)
        return _fitting(_from_file(str(do.patch), tensor), tensor).broadcast_to(tensor.shape)
    assert isinstance(do, FunctionChange)
    given: torch.Tensor = call_named(do, tensor.clone())  # it may write to what it receives
    return given


def _from_clean(
    do: Change, tensor: torch.Tensor, clean: torch.Tensor | None, samples: Sampled
) -> torch.Tensor:
    """Make a change that depends on the unchanged pass."""
    if clean is None:
        raise ProbeError(
            "the unchanged pass did not compute this tensor: it has made fewer calls, as where the "
            "unchanged text ends earlier"
            if samples.start is not None
            else "the unchanged pass did not compute this tensor"
        )
    if isinstance(do, NoiseChange):
        return tensor + _repeated(_noise(do, clean), tensor, samples)
    if not clean.dim() or len(clean) != samples.count:
        raise ProbeError(
            f"needs samples in the first dimension, but the shape is {list(clean.shape)} for "
            f"{samples.count} samples"
        )
    if isinstance(do, AddChange):
        assert isinstance(do.add, CategoryDifference)
        difference = _of_categories(do.add, clean, samples)
        return tensor if difference is None else tensor + do.scale * difference
    if isinstance(do, ProjectionChange):
        assert isinstance(do.project_off, CategoryDifference)
        difference = _of_categories(do.project_off, clean, samples)
        return tensor if difference is None else _projected(tensor, difference, do.dim)
    if isinstance(do, PatchChange):
        assert not isinstance(do.patch, RecordedPatch)
        source = clean[_sources(do.patch, samples.count)] if do.patch != "clean" else clean
        return _repeated(source, tensor, samples)
    assert do == "mean"
    return _repeated(clean.mean(0, keepdim=True).expand_as(clean), tensor, samples)


def _is_file(source: object) -> bool:
    return isinstance(source, str) and source.endswith(".npy")


def _repeated(value: torch.Tensor, tensor: torch.Tensor, samples: Sampled) -> torch.Tensor:
    """Return a value of the unchanged pass, once for each copy of the samples."""
    if samples.replicas > 1:
        value = value.repeat(samples.replicas, *[1] * (value.dim() - 1))
    if value.shape != tensor.shape:
        raise ProbeError(
            f"its shape is {list(tensor.shape)}, but {list(value.shape)} in the unchanged pass"
        )
    return value


def _noise(do: NoiseChange, clean: torch.Tensor) -> torch.Tensor:
    """Return the noise; it is drawn on the CPU, so that it is the same on every device."""
    generator = torch.Generator().manual_seed(do.seed)
    drawn = torch.randn(clean.shape, generator=generator).to(clean.device, clean.dtype)
    return do.noise * clean.std(correction=0) * drawn


def _sources(patch: str | int | list[int], count: int) -> list[int]:
    """Return, for each sample, the sample whose value it receives."""
    if patch == "other":
        return [*range(1, count), 0]
    assert not isinstance(patch, str)
    sources = patch if isinstance(patch, list) else [patch] * count
    if len(sources) != count:
        raise ProbeError(f"patch lists {len(sources)} samples, but the probe has {count}")
    for source in sources:
        if not 0 <= source < count:
            raise ProbeError(
                f"sample {source} does not exist; there are {count} (0 to {count - 1})"
            )
    return sources


def _projected(tensor: torch.Tensor, direction: torch.Tensor, along: int) -> torch.Tensor:
    """Remove the component of a dimension along a direction.

    A direction with several dimensions belongs to the last dimensions of the tensor, as in
    broadcasting, and is averaged over all of them except `along`.
    """
    rank, shape = tensor.dim(), list(direction.shape)
    if not -rank <= along < rank:
        raise ProbeError(f"a tensor of shape {list(tensor.shape)} has no dimension {along}")
    dim = along % rank
    tensor, direction = widened(tensor), widened(direction)
    if direction.dim() > 1:
        kept = dim - rank + direction.dim()
        if not 0 <= kept < direction.dim():
            raise ProbeError(f"the direction has the shape {shape}, without dimension {along}")
        direction = direction.mean([d for d in range(direction.dim()) if d != kept])
    if direction.dim() != 1 or len(direction) != tensor.shape[dim]:
        raise ProbeError(
            f"the direction has the shape {shape}, but dimension {along} has {tensor.shape[dim]} "
            "entries"
        )
    view = [1] * rank
    view[dim] = len(direction)
    square = direction @ direction
    if not float(square) > 0:
        raise ProbeError("the direction is 0")
    direction = direction.reshape(view)
    component = (tensor * direction).sum(dim, keepdim=True)
    return tensor - component / square * direction


def _recall_nothing(source: RecordedSpec) -> Recorded:
    raise ProbeError(
        f"values of a run ({source.run}) are read only while a program is traced; save them to a "
        ".npy file instead"
    )


def _of_samples(
    patch: RecordedPatch, found: Recorded, tensor: torch.Tensor, samples: Sampled
) -> torch.Tensor:
    """Return the recorded value that each sample receives."""
    count, known = samples.count, len(found.values)
    wanted = patch.sample
    if wanted is None and known != count:
        raise ProbeError(
            f"{found.where} has {known} samples, but the probe has {count}; choose with `sample`"
        )
    rows = [*range(count)] if wanted is None else wanted
    rows = rows if isinstance(rows, list) else [rows] * count
    if len(rows) != count:
        raise ProbeError(f"sample lists {len(rows)} samples, but the probe has {count}")
    for row in rows:
        if not 0 <= row < known:
            raise ProbeError(f"{found.where} has no sample {row}; it has {known}")
    values = found.values.to(tensor.device, tensor.dtype)[rows]
    values = values.repeat(samples.replicas, *[1] * (values.dim() - 1))
    if values.shape != tensor.shape:
        raise ProbeError(
            f"{found.where} has the shape {list(found.values.shape[1:])} for each sample, but this "
            f"tensor {list(tensor.shape[1:])}"
        )
    return values


def _fitting(vector: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return what is broadcast to a tensor, without making it larger."""
    pairs = zip(reversed(vector.shape), reversed(tensor.shape), strict=False)
    if vector.dim() > tensor.dim() or any(own not in (1, size) for own, size in pairs):
        last = f", whose last dimension has {tensor.shape[-1]} entries" if tensor.dim() else ""
        raise ProbeError(
            f"values of shape {list(vector.shape)} cannot be broadcast to a tensor of shape "
            f"{list(tensor.shape)}{last}"
        )
    return vector


def _vector(given: Any, tensor: torch.Tensor, recall: Recall) -> torch.Tensor:
    """Return a steering vector, or a direction.

    Raises:
        ProbeError: it cannot be read, or contains NaN or infinity, after which every effect would
            be NaN.
    """
    found = _read(given, tensor, recall)
    if not bool(torch.isfinite(found).all()):
        source = given if isinstance(given, str) else None
        source = given.run if isinstance(given, RecordedMean) else source
        where = "" if source is None else f" of {source}"
        count = int((~torch.isfinite(found)).sum())
        raise ProbeError(
            f"the vector{where} contains NaN or infinite values in {tensor.dtype} "
            f"({count} of {found.numel()})"
        )
    return found


def _read(given: Any, tensor: torch.Tensor, recall: Recall) -> torch.Tensor:
    if isinstance(given, str):
        return _from_file(given, tensor)
    if isinstance(given, RecordedMean):
        found = recall(given)
        values = found.values.to(tensor.device)
        values = values if values.dtype.is_floating_point else values.double()
        if given.difference is None:
            return values.mean(0).to(tensor.dtype)
        means = _difference(given.difference, values, found.labels, found.where)
        return means.to(tensor.dtype)
    try:
        return torch.tensor(given, dtype=tensor.dtype, device=tensor.device)
    except (TypeError, ValueError) as error:
        raise ProbeError(f"{given} is not a regular list of numbers: {error}") from None


def _from_file(name: str, tensor: torch.Tensor) -> torch.Tensor:
    try:
        found = np.load(Path(name), allow_pickle=False)
        return torch.from_numpy(np.ascontiguousarray(found)).to(tensor.device, tensor.dtype)
    except (OSError, ValueError, TypeError) as error:
        raise ProbeError(f"{name} cannot be read as a .npy file: {error}") from None


def _of_categories(
    given: CategoryDifference, clean: torch.Tensor, samples: Sampled
) -> torch.Tensor | None:
    """Return the difference of the means; None while the labels are not known."""
    if samples.labels is None:
        return None
    if len(samples.labels) != samples.count:
        raise ProbeError("needs a label for each sample")
    return _difference(given.difference, clean, samples.labels, "")


def _difference(
    categories: Sequence[int | str], values: torch.Tensor, labels: Sequence[str], where: str
) -> torch.Tensor:
    """Return the difference of the means over the samples with two labels."""
    means = []
    for category in map(str, categories):
        places = [i for i, label in enumerate(labels) if label == category]
        if not places:
            known = sorted({*labels} - {""})
            whose = f" of {where}" if where else ""
            raise ProbeError(
                f"no sample{whose} has the label {category!r} "
                f"({', '.join(known) or 'they have none'}){did_you_mean(category, known)}"
            )
        means.append(values[places].mean(0))
    return means[0] - means[1]

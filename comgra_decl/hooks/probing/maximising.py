"""Activation maximisation: inputs to which the units of a layer respond strongly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from comgra_decl.errors import ProbeError
from comgra_decl.hooks.probing.samples import widened
from comgra_decl.hooks.probing.subject import Drawn, Map, Point, Subject
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.records import MAXIMISED
from comgra_decl.spec.axes import Layouts
from comgra_decl.spec.pictures import MaximiseSpec

_SEED = 0

_FIRST = 8
"""Number of units if the spec names none."""


def maximised(spec: MaximiseSpec, subject: Subject) -> Drawn:
    """Return the inputs that maximise units of the selected layers.

    The units take the places of the samples in a batch, so that each pass serves as many units as
    there are samples.

    Raises:
        ProbeError: the input is tokens, or a layer has no such units; the message states why.
    """
    point = subject.point()
    if point.node is not None:
        raise ProbeError("maximise changes numbers, but the input of the model is tokens")
    start = _start(point, spec.noise)
    maps = []
    for path in subject.selected(spec.select):
        watch = _Values(path, torch.zeros(len(point.value), dtype=torch.int64))
        with torch.no_grad():
            subject.output(point, watch)
        own = spec.units or list(range(min(watch.size, _FIRST)))
        chunks = torch.tensor(own).split(len(point.value))
        found = [_ascent(spec, subject, start, path, chunk) for chunk in chunks]
        inputs, values, begun = (torch.cat(each) for each in zip(*found, strict=True))
        parts = {"": inputs, ".value": values, ".start": begun}
        maps += [Map(path, MAXIMISED + end, part, per_sample=False) for end, part in parts.items()]
    keys = ("method", "points", "step_size", "decay", "noise")
    facts = {key: getattr(spec, key) for key in keys}
    return Drawn(maps, {**facts, "units": spec.units, "input": point.role})


@dataclass(frozen=True)
class _Start:
    """Where the ascent begins.

    Attributes:
        point: the input, the same for each place in the batch.
        mean: the mean of the samples, [1, ...].
        scale: the standard deviation of the samples; 1 if they do not vary.
    """

    point: Point
    mean: torch.Tensor
    scale: float


def _start(point: Point, noise: float) -> _Start:
    samples = point.value
    scale = float(samples.double().std(correction=0)) or 1.0
    mean = samples.mean(0, keepdim=True)
    random = torch.Generator().manual_seed(_SEED)
    drawn = torch.randn(mean.shape, generator=random, dtype=torch.float64)
    begun = mean + noise * scale * drawn.to(mean.device, mean.dtype)
    return _Start(replace(point, value=begun.expand(samples.shape).contiguous()), mean, scale)


def _ascent(
    spec: MaximiseSpec, subject: Subject, start: _Start, path: str, units: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the input that each unit reaches, [units, ...], its value, and that of the start."""
    point, mean, places = start.point, start.mean, len(start.point.value)
    chosen = torch.cat([units, units[-1:].expand(places - len(units))])  # fills the batch
    begun = None
    for _ in range(spec.points):
        leaf = point.value.detach().clone().requires_grad_()
        with torch.enable_grad():
            # a clone, because the model may change its input in place
            values = _values(subject, replace(point, value=leaf.clone()), path, chosen)
            if not values.requires_grad:
                raise ProbeError(f"the output of {path} has no gradient")
            (gradient,) = torch.autograd.grad(values.sum(), leaf, materialize_grads=True)
        begun = values.detach() if begun is None else begun
        flat = gradient.flatten(1)
        size = flat.double().pow(2).mean(1).sqrt().reshape(-1, *[1] * (gradient.dim() - 1))
        step = torch.where(size > 0, spec.step_size * start.scale / size, 0.0).to(gradient.dtype)
        moved = point.value + step * gradient
        point = replace(point, value=mean + (1 - spec.decay) * (moved - mean))
    with torch.no_grad():
        reached = _values(subject, replace(point, value=point.value.clone()), path, chosen)
    assert begun is not None  # there is at least one step
    count = len(units)
    return point.value[:count], reached[:count], begun[:count]


def _values(subject: Subject, point: Point, path: str, units: torch.Tensor) -> torch.Tensor:
    """Return the value of one unit of a layer in each sample."""
    watch = _Values(path, units)
    subject.output(point, watch)
    return watch.values


class _Values:
    """Reads the units of a layer in its first call, before a later operation changes its output."""

    def __init__(self, path: str, units: torch.Tensor) -> None:
        self._path = path
        self._units = units
        self._layouts = Layouts()
        self._means: torch.Tensor | None = None  # over all positions, [samples, units]

    @property
    def size(self) -> int:
        """The number of units."""
        return self._read().shape[1]

    @property
    def values(self) -> torch.Tensor:
        """The mean of one unit over all positions, [samples]."""
        return self._read().gather(1, self._units.to(self._read().device)[:, None])[:, 0]

    def _read(self) -> torch.Tensor:
        if self._means is None:
            raise ProbeError(f"{self._path} was not called, or returns no floating-point tensor")
        return self._means

    def before(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Do nothing at the beginning of a call."""

    def after(self, path: str, module: nn.Module, output: Any) -> Any:
        """Read an output, and return it unchanged."""
        first = next((t for _, t in tensors_in(output) if t.is_floating_point()), None)
        dim, class_ = 0, type(module).__name__
        if first is not None and first.dim() > 1:
            dim = 1 + self._layouts.unit_dim(first.shape[1:], node=path, module_class=class_)
        if path != self._path or self._means is not None or first is None:
            return output
        if first.dim() < 2 or len(first) != len(self._units):
            raise ProbeError(f"{path} returns {list(first.shape)}, which has no units per sample")
        apart = widened(first).movedim(dim, 1)
        size = apart.shape[1]
        if int(self._units.max()) >= size:
            raise ProbeError(
                f"{path} has no unit {int(self._units.max())}; the last one is {size - 1}"
            )
        self._means = apart.reshape(len(apart), size, -1).mean(2)
        return output

"""Slices through a loss: its value along one or two directions in the space of the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn

from comgra_decl.errors import ProbeError, did_you_mean
from comgra_decl.hooks.probing.loading import named_tensors, tensors_in_file
from comgra_decl.hooks.probing.measuring import Gauge
from comgra_decl.hooks.probing.subject import Drawn, Map, Subject
from comgra_decl.records import SLICE
from comgra_decl.spec.pictures import LossSliceSpec, TowardsFile

_SEED = 0

Direction = Sequence[torch.Tensor]
"""One tensor for each parameter."""


def loss_slice(spec: LossSliceSpec, subject: Subject) -> Drawn:
    """Return the mean loss of the samples on a line or a grid around the parameters.

    Raises:
        ProbeError: the loss is unknown, or a direction does not fit; the message states why.
    """
    parameters = subject.trained(spec.select)
    random = torch.Generator().manual_seed(_SEED)
    directions: list[Direction] = [
        _towards(each, subject, parameters)
        if isinstance(each, TowardsFile)
        else _random(parameters, random)
        for each in spec.directions
    ]
    named = [d.to if isinstance(d, TowardsFile) else d for d in spec.directions]
    way: dict[str, Any] = {}
    if spec.plane is not None:
        directions, way = _in_plane(spec.plane, subject, parameters)
        named = ["first component", "second component"]
    line = np.linspace(-spec.reach, spec.reach, spec.points)
    line[spec.points // 2] = 0.0  # exactly the step's parameters
    sizes = [spec.points] * len(directions)
    losses = np.full(sizes, np.nan)
    gauge = Gauge(spec, subject.samples, subject.unchanged.output)
    with torch.no_grad():
        for place in product(*map(range, sizes)):
            with _moved(parameters, directions, [float(line[i]) for i in place]):
                args, kwargs = subject.samples.to(subject.copy.device)
                losses[place] = float(gauge(subject.run(args, kwargs, None))[0].mean())
    facts = {
        "method": spec.method,
        "measure": gauge.name,
        "directions": named,
        "coordinates": line.tolist(),
        "value": float(losses[tuple(n // 2 for n in sizes)]),
        **way,
    }
    return Drawn([Map("", SLICE, torch.from_numpy(losses), per_sample=False)], facts)


def _random(parameters: Sequence[nn.Parameter], random: torch.Generator) -> list[torch.Tensor]:
    """Return a random direction in which each filter is as long as that of the parameter.

    Filters are the slices along the first dimension. Parameters with one dimension, such as biases
    and the weights of norms, stay as they are (Li et al. 2018, section 4 and appendix).
    """
    found = []
    for parameter in parameters:
        drawn = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        if parameter.dim() < 2:
            drawn = torch.zeros_like(drawn)
        else:
            size = parameter.detach().double().cpu().flatten(1).norm(dim=1)
            scale = size / drawn.flatten(1).norm(dim=1).clamp(min=1e-300)
            drawn = drawn * scale.reshape(-1, *[1] * (drawn.dim() - 1))
        found.append(drawn.to(parameter.device, parameter.dtype))
    return found


def _towards(
    spec: TowardsFile, subject: Subject, parameters: Sequence[nn.Parameter]
) -> list[torch.Tensor]:
    """Return the direction to the parameters in a file, which are at 1."""
    given = _of_parameters(spec.to, tensors_in_file(spec.to), subject, parameters)
    return [
        tensor.to(parameter.device, parameter.dtype) - parameter.detach()
        for tensor, parameter in zip(given, parameters, strict=True)
    ]


def _in_plane(
    file: str, subject: Subject, parameters: Sequence[nn.Parameter]
) -> tuple[list[Direction], dict[str, Any]]:
    """Return both directions of a plane, and the way of the training relative to this step."""
    given = tensors_in_file(file)
    if not {"steps", "coordinates", "origin"} <= given.keys():
        raise ProbeError(f"{file} contains no plane; write it with run.plane().save(...)")
    here: list[float] = []
    directions: list[Direction] = []
    for axis, origin in zip(("first.", "second."), given["origin"].tolist(), strict=True):
        own = {n.removeprefix(axis): t for n, t in given.items() if n.startswith(axis)}
        along = _of_parameters(file, own, subject, parameters)
        inner = square = 0.0
        for tensor, parameter in zip(along, parameters, strict=True):
            inner += float((tensor.double() * parameter.detach().double().cpu()).sum())
            square += float(tensor.double().square().sum())
        here.append((inner - origin) / square)
        directions.append([t.to(p.device, p.dtype) for t, p in zip(along, parameters, strict=True)])
    way = given["coordinates"].double() - torch.tensor(here, dtype=torch.float64)
    return directions, {"way": {"steps": given["steps"].tolist(), "coordinates": way.tolist()}}


def _of_parameters(
    file: str,
    given: Mapping[str, torch.Tensor],
    subject: Subject,
    parameters: Sequence[nn.Parameter],
) -> list[torch.Tensor]:
    """Return the tensor in a file for each parameter."""
    named = list(named_tensors(subject.copy.module))
    found = []
    for parameter in parameters:
        own = [name for name, tensor, _ in named if tensor is parameter]
        name = next((name for name in own if name in given), None)
        if name is None:
            raise ProbeError(f"{file} has no {own[0]!r}{did_you_mean(own[0], given)}")
        if given[name].shape != parameter.shape:
            raise ProbeError(
                f"{name!r} has the shape {list(given[name].shape)} in {file}, but "
                f"{list(parameter.shape)} in the model"
            )
        found.append(given[name])
    return found


@contextmanager
def _moved(
    parameters: Sequence[nn.Parameter], directions: Sequence[Direction], place: Sequence[float]
) -> Iterator[None]:
    """Move the parameters, in place, because they may be tied or cached; then restore them."""
    saved = [p.detach().clone() for p in parameters]
    try:
        for direction, far in zip(directions, place, strict=True):
            for parameter, along in zip(parameters, direction, strict=True):
                parameter.detach().add_(along, alpha=far)
        yield
    finally:
        for parameter, content in zip(parameters, saved, strict=True):
            parameter.detach().copy_(content)

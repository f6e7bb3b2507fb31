"""Pictures by Captum's classes, on a copy of the model that calls hooks like any other."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from comgra_decl.errors import ProbeError, did_you_mean
from comgra_decl.hooks.probing.copying import CleanCopy
from comgra_decl.hooks.probing.places import with_tensor
from comgra_decl.hooks.probing.samples import imported, widened
from comgra_decl.hooks.probing.seclusion import without_global_hooks
from comgra_decl.hooks.probing.subject import Drawn, Map, Subject
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.spec.pictures import CaptumSpec

_MODEL = ("model", "forward_func")
_GAP = "return_convergence_delta"
_OURS = (*_MODEL, "self", "layer", "inputs", "target", "additional_forward_args", "device_ids")


def captum_picture(spec: CaptumSpec, subject: Subject, classes: torch.Tensor | None) -> Drawn:
    """Return the attributions that a class of Captum computes.

    Raises:
        ProbeError: the class cannot be used in this way; the message states why.
    """
    target = spec.method.target
    kind = imported(target)
    made, given = _keywords(kind, spec)
    needs_layer = "layer" in inspect.signature(kind.__init__).parameters
    if not needs_layer and spec.select:
        raise ProbeError(f"{target} explains the input and takes no layer; omit `select`")
    if needs_layer and not spec.select:
        raise ProbeError(f"{target} explains a layer; name it in `select`")
    paths = subject.selected(spec.select) if needs_layer else [""]
    copy = CleanCopy(subject.copy.module, subject.copy.paths, traceable=True)
    try:
        modules = {path: m for m in copy.module.modules() if (path := copy.paths[id(m)]) in paths}
        model = _Outputs(copy.module, *subject.samples.to(copy.device), of_layer=needs_layer)
        maps, gaps = [], None
        for path in paths:
            layer = {"layer": modules[path]} if needs_layer else {}
            subject.rewind()
            with warnings.catch_warnings(), without_global_hooks(), torch.enable_grad():
                warnings.simplefilter("ignore")  # about the hooks that it sets on the copy
                method = kind(model, **layer, **made)
                found = method.attribute(**model.call(kind, classes), **given)
            values, gaps = _split(found, target, asked=bool(given.get(_GAP)))
            maps.append(_map(values, path, model, subject, of_layer=needs_layer))
    finally:
        copy.close()
    if len({(each.node, each.role) for each in maps}) < len(maps):
        raise ProbeError(f"{target} explains the input through one layer; `select` one")
    return Drawn(maps, {} if gaps is None else {"gap": gaps})


def _keywords(kind: Any, spec: CaptumSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide the keys of a picture into those of the constructor and those of `attribute`."""
    attribute: Any = getattr(kind, "attribute", None)
    if not isinstance(kind, type) or attribute is None:
        raise ProbeError(f"{spec.method.target} is not a class with a method `attribute`")
    of_constructor = inspect.signature(kind).parameters
    if not {*_MODEL} & {*of_constructor}:
        raise ProbeError(f"{spec.method.target} is not made from a model")
    of_call = inspect.signature(attribute).parameters
    known = [name for name in (*of_constructor, *of_call) if name not in _OURS]
    made: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for name, value in (spec.method.model_extra or {}).items():
        if name not in known:
            raise ProbeError(
                f"{spec.method.target} has no {name!r}{did_you_mean(name, known)} (it has "
                f"{', '.join(known)})"
            )
        side = made if name in of_constructor else given
        side[name] = _tuples(value)
    return made, given


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


class _Outputs(nn.Module):
    """A model as Captum calls it: with tensors alone, returning one number per sample or class."""

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, of_layer: bool
    ) -> None:
        super().__init__()
        self.module = module
        self._given: Any = (args, dict(kwargs))
        every = [t for part in self._given for _, t in tensors_in(part)]
        size = next((len(t) for t in every if t.dim()), 0)
        usable = [t for t in every if t.dim() and len(t) == size]
        floating = [t for t in usable if t.is_floating_point()]
        if not floating and not of_layer:
            raise ProbeError(
                "the model's input is tokens, which have no gradient; use one of Captum's Layer "
                "classes with the embedding as `select`"
            )
        first = (floating or usable)[0]
        self.tensors = [first, *(t for t in every if t is not first)]

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        args, kwargs = self._given
        for old, new in zip(self.tensors, tensors, strict=True):
            args, kwargs = with_tensor(args, old, new), with_tensor(kwargs, old, new)
        output = self.module(*args, **kwargs)
        for _, tensor in tensors_in(output):
            if tensor.is_floating_point() and tensor.dim() in (1, 2):
                single = tensor.dim() == 2 and tensor.shape[1] == 1
                return widened(tensor[:, 0] if single else tensor)
        raise ProbeError("the model returns no [samples, classes] or [samples]")

    def call(self, kind: Any, classes: torch.Tensor | None) -> dict[str, Any]:
        """Return the keyword arguments of `attribute`."""
        first, *others = (t.detach().clone() for t in self.tensors)
        call: dict[str, Any] = {"inputs": first}
        if first.is_floating_point():
            first.requires_grad_()  # Captum warns otherwise
        if others:
            call["additional_forward_args"] = tuple(others)
        if "target" in inspect.signature(kind.attribute).parameters:
            call["target"] = classes
        return call


def _split(found: Any, target: str, *, asked: bool) -> tuple[torch.Tensor, list[float] | None]:
    gaps = None
    if asked:
        found, delta = found
        gaps = delta.detach().double().flatten().tolist()
    if isinstance(found, tuple) and len(found) == 1:
        (found,) = found
    if not isinstance(found, torch.Tensor):
        raise ProbeError(f"{target} returns {type(found).__name__}, not a single tensor")
    return found.detach(), gaps


def _map(
    values: torch.Tensor, path: str, model: _Outputs, subject: Subject, *, of_layer: bool
) -> Map:
    if not values.dim() or len(values) != len(subject.samples):
        raise ProbeError(f"the attributions have the shape {list(values.shape)}, without samples")
    explained = model.tensors[0]
    if of_layer and values.shape != explained.shape:
        return Map(path, "output", values)
    point = subject.point()
    return Map(path, "output", values) if point.node is not None else Map(None, point.role, values)

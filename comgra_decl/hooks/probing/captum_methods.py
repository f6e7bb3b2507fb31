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
from comgra_decl.hooks.probing.language import TokenSubject
from comgra_decl.hooks.probing.places import with_tensor
from comgra_decl.hooks.probing.samples import imported
from comgra_decl.hooks.probing.seclusion import without_global_hooks
from comgra_decl.hooks.probing.subject import Drawn, Map, Subject
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.spec.pictures import CaptumSpec

_MODEL = ("model", "forward_func")
_GAP = "return_convergence_delta"
_INNER = "attribution_method"
_BASELINES = "baselines"
_MASKS = ("feature_mask", "layer_mask")
_TENSORS = (_BASELINES, *_MASKS)
"""Arguments that are lists in a spec and tensors for Captum."""

_OF_INPUT = ("NeuronAttribution", "GuidedGradCam")
"""Classes, or base classes, that take a layer and explain the input."""

_OURS = (*_MODEL, "self", "layer", "inputs", "target", "additional_forward_args", "device_ids")


def captum_picture(spec: CaptumSpec, subject: Subject, classes: torch.Tensor | None) -> Drawn:
    """Return the attributions that a class of Captum computes.

    Raises:
        ProbeError: the class cannot be used in this way; the message states why.
    """
    target = spec.method.target
    outer = _Method(target, spec.method.model_extra or {})
    inner = outer.inner or outer
    given = {**inner.given, **outer.given}
    needs_layer = "layer" in inner.of_constructor
    if not needs_layer and spec.select:
        raise ProbeError(f"{target} explains the input and takes no layer; omit `select`")
    if needs_layer and not spec.select:
        raise ProbeError(f"{target} explains a layer; name it in `select`")
    paths = subject.selected(spec.select) if needs_layer else [""]
    copy = CleanCopy(subject.copy.module, subject.copy.paths, traceable=True)
    try:
        modules = {path: m for m in copy.module.modules() if (path := copy.paths[id(m)]) in paths}
        of_layer = needs_layer and not inner.explains_input
        args, kwargs = subject.samples.to(copy.device)
        model = _Outputs(copy.module, args, kwargs, _Explained(spec, subject, classes), of_layer)
        given |= model.tensors_of(inner, given)
        _check_given(inner, given)
        maps, gaps = [], None
        for path in paths:
            layer = {"layer": modules[path]} if needs_layer else {}
            subject.rewind()
            with warnings.catch_warnings(), without_global_hooks(), torch.enable_grad():
                warnings.simplefilter("ignore")  # about the hooks that it sets on the copy
                method = inner.kind(model, **layer, **inner.made)
                if outer is not inner:
                    method = outer.kind(method, **outer.made)
                found = method.attribute(**model.call(inner), **given)
            values, gaps = _split(found, target, asked=bool(given.get(_GAP)))
            maps.append(_map(values, path, subject, of_layer=of_layer))
    finally:
        copy.close()
    if len({(each.node, each.role) for each in maps}) < len(maps):
        raise ProbeError(f"{target} explains the input through one layer; `select` one")
    return Drawn(maps, {} if gaps is None else {"gap": gaps})


_SHAPES = {"neuron_selector": "[2, 1, 1]", "sliding_window_shapes": "[3, 4, 4]"}
"""Examples of arguments that a class of Captum needs."""


def _check_given(method: _Method, given: Mapping[str, Any]) -> None:
    """Refuse a method that lacks an argument of its constructor or of `attribute`."""
    own = [*_OURS, *method.made, *given]
    for name, parameter in {**method.of_constructor, **method.of_call}.items():
        required = parameter.default is parameter.empty
        several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if required and not several and name not in own:
            example = f", as in {name}: {_SHAPES[name]}" if name in _SHAPES else ""
            raise ProbeError(f"{method.kind.__name__} needs {name}{example}")


class _Method:
    """A class of Captum, or one with the same methods, and its keys.

    Args:
        target: its name.
        keys: the keys of the spec.

    Attributes:
        kind: the class.
        of_constructor: the parameters of its constructor.
        of_call: the parameters of `attribute`.
        made: the arguments of its constructor.
        given: the arguments of `attribute`.
        inner: the method that it is made from, instead of a model.

    Raises:
        ProbeError: there is no such class or key.
    """

    def __init__(self, target: str, keys: Mapping[str, Any]) -> None:
        self.kind: Any = imported(target)
        attribute: Any = getattr(self.kind, "attribute", None)
        if not isinstance(self.kind, type) or attribute is None:
            raise ProbeError(f"{target} is not a class with a method `attribute`")
        self.of_constructor = inspect.signature(self.kind).parameters
        self.of_call = inspect.signature(attribute).parameters
        self.inner = self._inner(target, keys)
        of_inner = () if self.inner is None else self.inner.of_call
        known = [n for n in (*self.of_constructor, *self.of_call, *of_inner) if n not in _OURS]
        self.made: dict[str, Any] = {}
        self.given: dict[str, Any] = {}
        for name, value in keys.items():
            if name not in known:
                raise ProbeError(
                    f"{target} has no {name!r}{did_you_mean(name, known)} (it has "
                    f"{', '.join(dict.fromkeys(known))})"
                )
            if name != _INNER:
                side = self.made if name in self.of_constructor else self.given
                side[name] = value if name in _TENSORS else _tuples(value)

    def _inner(self, target: str, keys: Mapping[str, Any]) -> _Method | None:
        if {*_MODEL} & {*self.of_constructor}:
            return None
        if _INNER not in self.of_constructor:
            raise ProbeError(f"{target} is not made from a model")
        named = keys.get(_INNER)
        if not isinstance(named, Mapping) or not isinstance(named.get("_target_"), str):
            raise ProbeError(
                f"{target} is made from another method; name it, as in {_INNER}: {{_target_: "
                "captum.attr.Saliency}"
            )
        return _Method(named["_target_"], {k: v for k, v in named.items() if k != "_target_"})

    @property
    def explains_input(self) -> bool:
        """Whether a class that takes a layer explains the input nevertheless."""
        return bool({base.__name__ for base in self.kind.__mro__} & {*_OF_INPUT})


class _Explained:
    """The number that a picture explains, in the form of Captum: a column for each sample's class.

    Captum repeats samples, and their columns with them.

    Attributes:
        classes: the column of each sample; None if there is one number per sample.
    """

    def __init__(self, spec: CaptumSpec, subject: Subject, classes: torch.Tensor | None) -> None:
        self._subject = subject
        self._loss = spec.target == "loss" and classes is not None
        self._tokens = isinstance(subject, TokenSubject)
        self._pair: tuple[torch.Tensor, torch.Tensor] | None = None
        self.classes = classes
        other = subject.other if isinstance(subject, TokenSubject) else None
        if other is not None and classes is not None:
            self._pair = classes, other
            self.classes = torch.arange(len(classes), device=classes.device)

    def of(self, output: Any) -> torch.Tensor:
        """Return the columns, [batch, columns] or [batch], of an output of the model.

        Raises:
            ProbeError: the model returns something else.
        """
        for _, tensor in tensors_in(output):
            if tensor.is_floating_point() and tensor.dim() in ((2, 3) if self._tokens else (1, 2)):
                columns = self._subject.columns(tensor)
                if self._pair is not None:
                    one, other = self._pair
                    return columns[:, one] - columns[:, other]
                return -columns.log_softmax(1) if self._loss else columns
        raise ProbeError("the model returns no [samples, classes] or [samples]")


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


class _Outputs(nn.Module):
    """A model as Captum calls it: with tensors alone, returning one number per sample or class."""

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        explained: _Explained,
        of_layer: bool,
    ) -> None:
        super().__init__()
        self.module = module
        self._explained = explained
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
        return self._explained.of(self.module(*args, **kwargs))

    def call(self, method: _Method) -> dict[str, Any]:
        """Return the keyword arguments of `attribute` that are not in the spec."""
        first, *others = (t.detach().clone() for t in self.tensors)
        call: dict[str, Any] = {"inputs": first}
        if first.is_floating_point():
            first.requires_grad_()  # Captum warns otherwise
        if others:
            call["additional_forward_args"] = tuple(others)
        if "target" in method.of_call:
            call["target"] = self._explained.classes
        return call

    def tensors_of(self, method: _Method, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the arguments that Captum needs as tensors like the input.

        Raises:
            ProbeError: they cannot be made from what the spec contains.
        """
        like = self.tensors[0].detach()
        found = {}
        for name in _MASKS:
            if isinstance(given.get(name), list):
                found[name] = _as_tensor(name, given[name], torch.int64, like)
        value = given.get(_BASELINES)
        expected = method.of_call.get(_BASELINES)
        several = expected is not None and expected.default is inspect.Parameter.empty
        if several and value is None:
            raise ProbeError(f"{method.kind.__name__} needs baselines, as in baselines: zeros")
        if isinstance(value, list):
            tensor = _as_tensor(_BASELINES, value, like.dtype, like)
            found[_BASELINES] = tensor if tensor.dim() == like.dim() else tensor[None]
        elif isinstance(value, str) or (several and isinstance(value, (int, float))):
            found[_BASELINES] = _filled(value, like)
        if several and len(found[_BASELINES]) == 1:  # Captum expects a distribution
            found[_BASELINES] = found[_BASELINES].repeat(2, *[1] * (like.dim() - 1))
        return found


def _as_tensor(name: str, value: Any, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    try:
        found = torch.tensor(value, dtype=dtype, device=like.device)
    except (TypeError, ValueError) as error:
        raise ProbeError(f"{name} is not a regular list of numbers: {error}") from None
    if found.shape[-like.dim() + 1 :] != like.shape[1:]:
        raise ProbeError(
            f"{name} has the shape {list(found.shape)}, but a sample has {list(like.shape[1:])}"
        )
    return found


def _filled(value: str | float, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor like the input that is filled with a number, or with that of a name."""
    if value == "mean" and like.is_floating_point():
        return like.mean(0, keepdim=True).expand_as(like).clone()
    number = {"zeros": 0, "ones": 1}.get(value) if isinstance(value, str) else value
    if number is None:
        raise ProbeError(
            f"baselines: {value!r} is neither zeros, ones, mean (of numbers), a number nor a list"
        )
    return torch.full_like(like, number)


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


def _map(values: torch.Tensor, path: str, subject: Subject, *, of_layer: bool) -> Map:
    if not values.dim() or len(values) != len(subject.samples):
        raise ProbeError(f"the attributions have the shape {list(values.shape)}, without samples")
    if of_layer:
        return Map(path, "output", values)
    point = subject.point()
    return Map(path, "output", values) if point.node is not None else Map(None, point.role, values)

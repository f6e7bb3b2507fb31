"""Sparse autoencoders and transcoders, whose features become modules of a copy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from comgra_decl.errors import ProbeError, SpecError, reason_of
from comgra_decl.hooks.module_tree import Top
from comgra_decl.hooks.plans import ModulePlan
from comgra_decl.hooks.probing.copying import CleanCopy
from comgra_decl.hooks.probing.passes import tensors_of
from comgra_decl.hooks.probing.places import Modules, Named, picked, with_tensor
from comgra_decl.hooks.probing.samples import call_named
from comgra_decl.hooks.probing.seclusion import unseen
from comgra_decl.spec import Capture
from comgra_decl.spec.dictionaries import DictionaryPlace, DictionarySpec

_METHODS = ("encode", "decode")


class Dictionary(Protocol):
    """A sparse autoencoder or transcoder."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of a tensor."""

    def decode(self, features: torch.Tensor) -> torch.Tensor:
        """Return the tensor that features describe."""


class Features(nn.Module):
    """The module of a copy that returns the features of a tensor.

    Args:
        dictionary: what computes them. Its parameters are none of the copy's.
        path: the path of the features, for messages.

    Attributes:
        found: the features of the call in progress, which others may replace afterwards.
    """

    def __init__(self, dictionary: Dictionary, *, path: str) -> None:
        super().__init__()
        self.found: torch.Tensor | None = None
        self._held = (dictionary,)
        self._path = path

    @property
    def dictionary(self) -> Dictionary:
        """What computes the features."""
        return self._held[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of a tensor.

        Raises:
            ProbeError: the dictionary does not fit the tensor.
        """
        # A copy, because the model goes on with the tensor, to which `encode` may write.
        self.found = self._called("encode", x.clone())
        return self.found

    def decode(self, features: torch.Tensor) -> torch.Tensor:
        """Return the tensor that features describe.

        Raises:
            ProbeError: the dictionary does not fit the features.
        """
        return self._called("decode", features)

    def _called(self, method: str, x: torch.Tensor) -> torch.Tensor:
        try:
            with unseen():
                found = getattr(self.dictionary, method)(x)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ProbeError(
                f"{self._path}: {method} of {type(self.dictionary).__name__} fails with a tensor "
                f"of shape {list(x.shape)} and {x.dtype}: {reason_of(error)}"
            ) from error
        if not isinstance(found, torch.Tensor):
            raise ProbeError(
                f"{self._path}: {method} of {type(self.dictionary).__name__} must return a tensor, "
                f"got {type(found).__name__}"
            )
        return found


class _Spliced:
    """The `forward` of a module whose output a dictionary describes.

    Without a change of the features, it returns the output as it is.

    Args:
        host: the module.
        name: the name of the features in it.
        features: the features.
        place: what they describe.
        path: their path, for messages.
    """

    def __init__(
        self, host: nn.Module, name: str, features: Features, *, place: DictionaryPlace, path: str
    ) -> None:
        self._host = host
        self._name = name
        self._features = features
        self._forward: Callable[..., Any] = host.forward
        self._place = place
        self._path = path
        self.__signature__ = inspect.signature(host.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._called(*args, **kwargs)
        place, features = self._place, self._features
        own = self._named(place.role, tensors_of("output", output))
        read = own
        if place.reads == "input":
            read = self._named("input", tensors_of("input", (args, kwargs)))
        new, old = features(read.tensor), features.found
        features.found = None
        assert old is not None
        if new is old:
            return output
        y = own.tensor
        decoded = features.decode(new)
        if place.keep_error:
            decoded = y + (decoded - features.decode(old)).to(y.dtype)
        if decoded.shape != y.shape:
            raise ProbeError(
                f"{self._path}: decode must return a tensor of shape {list(y.shape)}, got "
                f"{list(decoded.shape)}"
            )
        return with_tensor(output, y, decoded.to(y.dtype))

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as it is without features, which nn.Sequential would call as well."""
        del self._host._modules[self._name]
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._host._modules[self._name] = self._features

    def _named(self, role: str, tensors: list[Named]) -> Named:
        found = picked(role, tensors)
        if found is None:
            known = ", ".join(each.role for each in tensors) or "none"
            raise ProbeError(f"{self._path}: its module has no tensor {role!r} ({known})")
        return found


def attach(
    copy: CleanCopy, name: str, place: DictionaryPlace, dictionary: Dictionary, *, where: str
) -> str:
    """Make the features of a dictionary a module of a copy; return its path.

    Args:
        copy: the copy.
        name: the name of the dictionary.
        place: where it belongs.
        dictionary: the dictionary.
        where: the place of the declaration, for messages.

    Raises:
        SpecError: `place` does not select a single module, or the dictionary has no `encode` and
            `decode`.
    """
    if isinstance(dictionary, type):
        raise SpecError([f"{where}: {dictionary.__name__} is a class; pass an object of it"])
    lacks = [method for method in _METHODS if not callable(getattr(dictionary, method, None))]
    if lacks:
        raise SpecError(
            [f"{where}: {type(dictionary).__name__} has no method {' and no '.join(lacks)}"]
        )
    modules = Modules(copy)
    problems = modules.unmatched(place.select, f"{where}.select")
    paths = modules.matching(place.select)
    if not problems and len(paths) != 1:
        shown = ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "")
        problems = [f"{where}.select: must select a single module, but selects {shown or 'none'}"]
    if problems:
        raise SpecError(problems)
    host = modules.by_path[paths[0]]
    if hasattr(host, name):
        raise SpecError([f"{where}: {paths[0]} has an attribute {name!r}; use another name"])
    path = f"{paths[0]}.{name}".removeprefix(".")
    features = Features(dictionary, path=path)
    features.training = host.training
    copy.adopt(path, features, host=host, name=name)
    host.forward = _Spliced(host, name, features, place=place, path=path)
    return path


class Dictionaries:
    """The dictionaries of one probe.

    Args:
        declared: the dictionaries by name.
    """

    def __init__(self, declared: Mapping[str, DictionarySpec]) -> None:
        self._declared = declared
        self._loaded: dict[str, Dictionary] = {}
        self._plans: dict[str, ModulePlan] = {}
        self._modules: dict[str, nn.Module] = {}  # by path, of the newest copy

    def attach(self, copy: CleanCopy) -> None:
        """Add the features to a copy.

        Raises:
            SpecError: a dictionary cannot be loaded, or does not belong to a single module.
        """
        self._modules = {}
        for name, spec in self._declared.items():
            where = f"comgra.dictionaries.{name}"
            if name not in self._loaded:
                try:
                    found = call_named(spec.load)
                except Exception as error:
                    target = spec.load.target
                    raise SpecError([f"{where}.load: {target}: {reason_of(error)}"]) from error
                self._loaded[name] = _moved(found, copy.device)
            path = attach(copy, name, spec, self._loaded[name], where=where)
            self._modules[path] = copy.module.get_submodule(path) if path else copy.module

    def plans(self, top: Top, *, values: bool) -> dict[str, ModulePlan]:
        """Return the plans with which the features are recorded, by path."""
        for path, module in self._modules.items():
            if path not in self._plans:
                capture = Capture(output=True, values=values)
                self._plans[path] = ModulePlan(top, path, module, capture)
        return {path: self._plans[path] for path in self._modules}


def _moved(dictionary: Any, device: torch.device) -> Any:
    """Return a dictionary for use on a device, without gradients of its own."""
    if not isinstance(dictionary, nn.Module):
        return dictionary
    return dictionary.to(device).requires_grad_(requires_grad=False).train(mode=False)

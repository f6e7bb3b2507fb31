"""Types of execution: labels for a step, derived from the inputs of its model."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from comgra_decl.hooks.call_context import is_no_step, torch_variable
from comgra_decl.hooks.recursion import EveryCall
from comgra_decl.spec.types import ByFunction, ByInput
from comgra_decl.torch_private import without_functions

if TYPE_CHECKING:
    from comgra_decl.spec.types import TypesSpec

Label = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], Any]


class Labeller:
    """Labels a call to the outermost module according to the spec.

    Args:
        spec: the source of the labels; `by` must be set.
        warn: called once with the reason why a call received no label.
    """

    def __init__(self, spec: TypesSpec, *, warn: Callable[[str], None]) -> None:
        assert spec.by is not None
        self._by = spec.by
        self._warn = warn
        self._label: Label | None = None
        self._failed = False

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[str]:
        """Return the labels, the type first; empty if there are none or an error occurred."""
        try:
            if self._label is None:
                self._label = _label_of(self._by)
            return _texts(self._label(module, args, kwargs))
        except Exception as error:
            self._warn_once(error)
            return []

    def _warn_once(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            self._warn(
                "types.by returned no step type, so the step has type 'train': "
                f"{type(error).__name__}: {error}"
            )


def _label_of(by: ByInput | ByFunction) -> Label:
    if isinstance(by, ByFunction):
        return _unseen(functools.partial(_function(by.target), **by.arguments))
    names = None if by.bins is None else by.names or _names_between(by.bins)
    label = functools.partial(_label_of_input, by, names)
    return label if by.shape is not None else _unseen(label)


def _unseen(label: Label) -> Label:
    """Hide the computations of `label` from autograd and from the recorded graph."""

    def unseen(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with torch.no_grad(), without_functions():
            return label(module, args, kwargs)

    return unseen


def _function(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _texts(found: Any) -> list[str]:
    labels = [found] if isinstance(found, str) or not isinstance(found, Iterable) else [*found]
    if any(not isinstance(label, str) or not label.strip() for label in labels):
        raise TypeError(
            f"a step type must be a non-empty string or a list of non-empty strings, got {found!r}"
        )
    return labels


def _label_of_input(
    by: ByInput,
    names: list[str] | None,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> str:
    value = find_input(by.input, module, args, kwargs)
    number = _size(value, by.shape) if by.shape is not None else _plain(value)
    if by.bins is None or names is None:
        return str(number)
    return names[bisect_right(by.bins, number)]


def find_input(
    which: int | str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return an input of a call by its position, its name, or its key in a mapping.

    Raises:
        LookupError: there is no such input.
    """
    if isinstance(which, int) and which < len(args):
        return args[which]
    given = dict(enumerate(args)) | dict(kwargs)
    if which in given:
        return given[which]
    if isinstance(which, str):
        names = [*inspect.signature(module.forward).parameters]
        if which in names[: len(args)]:
            return args[names.index(which)]
        for value in given.values():
            if isinstance(value, Mapping) and which in value:
                return value[which]
    known = ", ".join(map(str, given))
    raise LookupError(f"the model was not given {which!r}, only {known}")


def _size(value: Any, dim: int) -> int:
    return int(value.shape[dim]) if hasattr(value, "shape") else len(value)


def _plain(value: Any) -> Any:
    """Return the number, string or boolean in an input; may wait for a device."""
    plain = value.item() if isinstance(value, torch.Tensor) else value
    if not isinstance(plain, (str, int, float)):
        raise TypeError(f"an input of type {type(value).__name__} is not a single value")
    return plain


def _names_between(bins: list[float]) -> list[str]:
    limits = [f"{limit:g}" for limit in bins]
    return [f"<{limits[0]}", *(f"{a}-{b}" for a, b in pairwise(limits)), f">={limits[-1]}"]


class RootWatch:
    """Waits between records for the next call to an outermost module, and then removes itself.

    While it waits, a single global hook is installed; after that call, none is. A step that is not
    recorded therefore costs one call to `on_call`, no matter how many modules the model has.

    Args:
        on_call: called with (module, args, kwargs) of each call until it returns True.
        on_fault: called with an error in tracing itself.
    """

    def __init__(
        self,
        on_call: Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], bool],
        *,
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._on_call = on_call
        self._on_fault = on_fault
        self._calls = EveryCall(self._before)

    @property
    def waiting(self) -> bool:
        """Whether the next call is still awaited."""
        return self._calls.on

    def install(self) -> None:
        """Start waiting for the next call."""
        self._calls.install()

    def remove(self) -> None:
        """Stop waiting."""
        self._calls.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        try:
            if not self._calls.on or torch.compiler.is_compiling() or is_no_step():
                return
            # A global pre-hook receives no keyword arguments, but its caller's frame has them.
            kwargs = torch_variable(sys._getframe(1), "kwargs") or {}
            if self._on_call(module, args, kwargs):
                self.remove()
        except Exception as error:
            self._on_fault(error)

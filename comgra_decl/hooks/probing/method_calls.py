"""The calls of a model that one of its methods makes, such as `generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from comgra_decl.hooks.probing.copying import CleanCopy
from comgra_decl.hooks.pytree import first_batch_size, tensors_in, tensors_of

_CACHES = ("past_key_values", "cache_params")
"""Arguments that contain what earlier calls have computed, as in transformers."""

_TOKENS = ("inputs_embeds", "decoder_input_ids", "input_ids")
"""Arguments that contain one entry for each position, the one that counts first."""


class ModelCall(NamedTuple):
    """One call of a model, or of a part of it that the method calls itself.

    Attributes:
        module: the path of what is called; "" for the model.
        rows: the number of samples in the batch.
        positions: those that the call computes, counted from the start of the sequence; None if
            its arguments contain no sequence.
    """

    module: str
    rows: int
    positions: range | None


class MethodCalls:
    """Follows the calls that are made while a method of a copy runs.

    Positions are counted from the start of the sequence: after those in the cache, if the call
    receives one that knows its length; otherwise, a call is taken to compute one position more
    than the one before, which is the last one that it receives.

    Args:
        clean: the copy, whose modules are called like any others (`traceable`).
        begin: called with each call that is about to begin.
        end: called after each call.
    """

    def __init__(
        self, clean: CleanCopy, *, begin: Callable[[ModelCall], None], end: Callable[[], None]
    ) -> None:
        self._modules = {clean.paths.get(id(m), ""): m for m in clean.module.modules()}
        self._begin = begin
        self._end = end
        self._ends: dict[str, int] = {}  # the position after the last one, by module
        self._given: dict[str, Mapping[str, Any]] = {}  # the arguments of the last call, by module

    @property
    def kept(self) -> dict[str, int]:
        """The number of positions that the caches contain, by module, where that is known.

        It is smaller than what was computed if the method has cut off the last positions, as after
        tokens that were proposed and rejected.
        """
        lengths = {path: _cached(given) for path, given in self._given.items()}
        return {path: length for path, length in lengths.items() if length}

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the calls."""
        self._watch()
        try:
            yield
        finally:
            self._ignore()

    def _watch(self) -> None:
        for path, module in self._modules.items():
            module._compiled_call_impl = partial(self._call, path)

    def _ignore(self) -> None:
        for module in self._modules.values():
            module._compiled_call_impl = None

    def _call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Make an outermost call, in place of `Module.__call__`."""
        self._ignore()  # the calls within it belong to it
        try:
            self._begin(self._described(path, args, kwargs))
            output = self._modules[path](*args, **kwargs)
            self._end()
        finally:
            self._watch()
        return output

    def _described(self, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelCall:
        given = _sequence(args, kwargs)
        if given is None:
            return ModelCall(path, first_batch_size(args, kwargs) or 1, None)
        rows, length = given.shape[:2]
        start = _cached(kwargs)
        if start is None:
            before = self._ends.get(path)
            start = 0 if before is None else max(0, before + 1 - length)
        self._ends[path], self._given[path] = start + length, kwargs
        return ModelCall(path, rows, range(start, start + length))


def _sequence(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the argument with one entry for each position, [samples, positions, ...]."""
    named = [kwargs.get(name) for name in _TOKENS]
    whole = (t for t in tensors_of(args) if t.dim() == 2 and not t.is_floating_point())
    for tensor in (*named, *whole):
        if isinstance(tensor, torch.Tensor) and tensor.dim() >= 2 and tensor.shape[1]:
            return tensor
    return None


def _cached(kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of positions in the cache; None if it is not known."""
    cache: Any = next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
    length = getattr(cache, "get_seq_length", None)
    if length is not None:
        try:
            return int(length())
        except Exception:  # the cache of a model without attention, such as Mamba, has no length
            return None
    if isinstance(cache, (tuple, list)):  # keys of the first layer: [..., positions, width]
        found = tensors_in(cache)
        return int(found[0][1].shape[-2]) if found and found[0][1].dim() >= 2 else None
    return None

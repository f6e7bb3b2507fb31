"""Find the category of each sample in a batch, to choose which samples are recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.hooks.pytree import gradient_function, tensors_in
from comgra_decl.hooks.schedule.types import find_input
from comgra_decl.spec.samples import CategoryFunction, CategoryInput

if TYPE_CHECKING:
    from torch import nn

    from comgra_decl.spec.samples import SamplesSpec

_MOST_NODES = 64
"""The number of autograd nodes to search from the loss for the function that saved the targets."""

Labels = Callable[[], Sequence[Any]]
"""Returns one label per sample. Called on the writer thread, so it may wait for a device."""


class Categories:
    """Finds the categories of a step's first batch in the calls in the step.

    Args:
        by: the source of the categories.
        warn: called once per kind of problem.
        expected: whether a missing target is a problem. In an evaluation, it is not, because
            recording ends before the loss is computed.
    """

    def __init__(self, by: Any, *, warn: Callable[[str], None], expected: bool) -> None:
        self._by = by
        self._expected = expected or by != "target"
        self._warn = warn
        self._function: Callable[..., Any] | None = None
        self._call: tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]] | None = None
        self._labels: Labels | None = None
        self._size: int | None = None  # of the batch whose categories are searched

    def restart(self) -> None:
        """Reset the state, at the start of a step or after an unrecorded one."""
        self._call = self._labels = self._size = None

    def take(self) -> Labels | None:
        """End the step; return a function that returns the labels of its first batch, or None."""
        labels, size = self._labels, self._size
        if labels is None and size is not None and self._expected:
            self._warn(f"samples.by found no categories ({self._missing})")
        self.restart()
        return labels

    def enter(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], size: int | None
    ) -> None:
        """Handle the call to an outermost module, with a batch of `size` samples."""
        if self._labels is not None:
            return
        try:
            parametric = next(root.parameters(), None) is not None
            if not parametric:  # it may be a loss
                self._look_for_target(t for _, t in tensors_in(args))
                return
            if self._size is None:
                self._size = size
                self._call = root, args, kwargs
                if isinstance(self._by, CategoryInput):
                    self._keep(find_input(self._by.input, root, args, kwargs))
        except Exception as error:
            self._fail(error)

    def leave(self, output: Any) -> None:
        """Handle the output of the current outermost module."""
        call, self._call = self._call, None
        if call is None or not isinstance(self._by, CategoryFunction):
            return
        try:
            if self._function is None:
                module, _, name = self._by.target.rpartition(".")
                self._function = getattr(import_module(module), name)
            with torch.no_grad():
                found = self._function(*call, output, **(self._by.model_extra or {}))
            self._keep(found)
        except Exception as error:
            self._fail(error)

    def loss(self, loss: torch.Tensor) -> None:
        """Handle `backward()` on `loss`, whose autograd graph holds the targets."""
        if self._by == "target" and self._labels is None:
            try:
                function = gradient_function(loss)
                if function is not None:
                    self._look_for_target(_saved_targets(function))
            except Exception as error:
                self._fail(error)

    def _look_for_target(self, tensors: Any) -> None:
        if self._by == "target":
            for tensor in tensors:
                if _is_category(tensor) and len(tensor) == self._size:
                    self._keep(tensor)
                    return

    def _keep(self, found: Any) -> None:
        """Store the current labels; labels on a device are fetched later."""
        if isinstance(found, torch.Tensor):
            if found.dim() != 1:
                raise ValueError(
                    f"there must be one category per sample, got shape {tuple(found.shape)}"
                )
            if found.is_floating_point() or found.is_complex():
                raise TypeError(f"categories must be integers, got {found.dtype}")
            self._labels = partial(_listed, found.detach().clone())
        else:
            labels = list(found)
            self._labels = lambda: labels

    @property
    def _missing(self) -> str:
        if self._by == "target":
            return "no loss received one integer per sample of the model's first input"
        return "neither the model's input nor its output provided any"

    def _fail(self, error: Exception) -> None:
        self._size = None
        self._warn(
            "samples.by provided no categories, so the first samples are recorded: "
            f"{type(error).__name__}: {error}"
        )


def categories(
    spec: SamplesSpec, *, warn: Callable[[str], None], training: bool
) -> Categories | None:
    """Return the category finder for a spec, None if the spec does not need one."""
    if spec.by is None or not spec.count:
        return None
    return Categories(spec.by, warn=warn, expected=training)


def _is_category(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 1 and not (tensor.is_floating_point() or tensor.is_complex())


def _saved_targets(node: Any) -> Any:
    """Yield the targets saved for backward by the functions nearest to a loss."""
    queue, seen = [node], {node}
    for current in islice(_growing(queue), _MOST_NODES):
        try:
            saved = getattr(current, "_saved_target", None)
        except RuntimeError:  # freed by an earlier backward
            saved = None
        if isinstance(saved, torch.Tensor):
            yield saved
        for following, _ in current.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)


def _growing(queue: list[Any]) -> Any:
    """Yield the entries of a list, including those added during the iteration."""
    position = 0
    while position < len(queue):
        yield queue[position]
        position += 1


def _listed(tensor: torch.Tensor) -> list[Any]:
    return list(tensor.tolist())

"""Fold linear changes of tensors into the weights that produce or receive them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from comgra_decl.errors import EditError
from comgra_decl.hooks.modes import CallWatch
from comgra_decl.hooks.probing.changes import Sampled, changed
from comgra_decl.hooks.probing.passes import Edit
from comgra_decl.hooks.probing.passes import tensors_of as tensors_of_call
from comgra_decl.hooks.probing.places import chosen, picked
from comgra_decl.hooks.pytree import tensors_of
from comgra_decl.spec.interventions import (
    AddChange,
    PatchChange,
    ProjectionChange,
    ScaleChange,
)
from comgra_decl.torch_private import without_functions

if TYPE_CHECKING:
    from collections.abc import Mapping

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.RMSNorm)
_LINEAR = (nn.Linear, *_CONVOLUTIONS)
_KNOWN = (*_LINEAR, *_NORMS, nn.Embedding)

_BY_SAMPLE = ("clean", "other")
"""Patches with other values for each sample, even if those in the batch are equal."""

_READS_NO_VALUES = frozenset("__get__ size dim stride numel is_contiguous __len__".split())
SUMS = frozenset("add __add__ __radd__ add_ __iadd__".split())


@dataclass(frozen=True)
class Affine:
    """A change of the features of a tensor: x becomes A x + shift.

    Attributes:
        matrix: A, [features, features], or its diagonal, [features]; float64.
        shift: [features], float64.
    """

    matrix: torch.Tensor
    shift: torch.Tensor

    @property
    def only_shifts(self) -> bool:
        """Whether A is the identity."""
        return self.matrix.dim() == 1 and bool((self.matrix == 1).all())

    @property
    def shifts(self) -> bool:
        """Whether something is added."""
        return bool(self.shift.any())


def affine(
    edit: Edit,
    path: str,
    tensor: torch.Tensor,
    clean: torch.Tensor | None,
    *,
    dim: int,
    heads: Callable[[str], int | None],
    samples: Sampled,
) -> Affine:
    """Return a change as a function of one dimension of a tensor.

    Args:
        edit: the change.
        path: the module whose tensor it is.
        tensor: the tensor.
        clean: its value in the unchanged pass.
        dim: the dimension that the weights produce or receive.
        heads: returns the number of heads of a module.
        samples: the samples.

    Raises:
        EditError: the change depends on more than this dimension, or is not linear.
    """
    dim %= tensor.dim()
    size, do = tensor.shape[dim], edit.spec.do
    inside = torch.ones(size, dtype=torch.bool, device=tensor.device)
    for name, each in edit.divisions(path, tensor, heads).items():
        part = edit.parts[name]
        wanted = chosen(name, part, each.count)
        if part.only is None or (each.dim == dim and len({*wanted}) == each.count):
            continue
        if each.dim != dim:  # even if this batch has no other positions
            raise EditError(
                f"{name} divides dimension {each.dim} of {list(tensor.shape)}, but weights are the "
                "same for all of it"
            )
        along = torch.zeros(each.count, dtype=torch.bool, device=tensor.device)
        along[wanted] = True
        inside &= along.repeat_interleave(each.size)
    ones, zeros = torch.ones_like(inside, dtype=torch.float64), torch.zeros(size).double()
    zeros = zeros.to(tensor.device)
    if isinstance(do, ProjectionChange):
        if do.dim % tensor.dim() != dim:
            raise EditError(f"the direction lies along dimension {do.dim}, not {dim}")
        shape = [1] * tensor.dim()
        shape[0], shape[dim] = size, size
        basis = torch.eye(size, dtype=torch.float64, device=tensor.device).reshape(shape)
        matrix = changed(do, basis, clean, samples).reshape(size, size).T
        identity = torch.eye(size, dtype=torch.float64, device=tensor.device)
        return Affine(torch.where(inside[:, None], matrix, identity), zeros)
    if do == "zero" or isinstance(do, ScaleChange):
        factor = do.scale if isinstance(do, ScaleChange) else 0.0
        return Affine(torch.where(inside, factor * ones, ones), zeros)
    if isinstance(do, AddChange):
        added = changed(do, torch.zeros_like(tensor, dtype=torch.float64), clean, samples)
        return Affine(ones, torch.where(inside, _along(added, dim, "what is added"), zeros))
    if isinstance(do, PatchChange) and (isinstance(do.patch, list) or do.patch in _BY_SAMPLE):
        raise EditError(
            f"`patch: {do.patch}` takes each sample's value from another place, but a bias is the "
            "same for all samples"
        )
    if do == "mean" or isinstance(do, PatchChange):
        fixed = changed(do, tensor.double(), None if clean is None else clean.double(), samples)
        what = "the mean" if do == "mean" else "the patch"
        shift = torch.where(inside, _along(fixed, dim, what), zeros)
        return Affine(torch.where(inside, zeros, ones), shift)
    kind = next(iter(do.model_dump(by_alias=True)))
    raise EditError(f"{kind} is not a linear function of the tensor")


def _along(values: torch.Tensor, dim: int, what: str) -> torch.Tensor:
    """Return values that are the same along all dimensions but one."""
    rows = values.movedim(dim, -1).reshape(-1, values.shape[dim])
    if not torch.equal(rows, rows[:1].expand_as(rows)):
        raise EditError(
            f"{what} is not the same for all samples and positions, but a bias is. Change tensors "
            "without positions, or `add` a vector"
        )
    return rows[0]


# -- who produces and uses a tensor ------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """A tensor that was produced or used.

    Attributes:
        order: its place among all events.
        module: path of the module that did it, if its weights are known; None for a function.
        call: which call of the module.
        name: the class of the module, or the name of the function.
        operands: the tensors that a function received.
    """

    order: int
    module: str | None
    call: int
    name: str
    operands: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class Place:
    """A tensor that a change means.

    Attributes:
        order: its place among all events.
        path: the module that receives or returns it.
        call: which call of the module.
        tensor: the tensor.
    """

    order: int
    path: str
    call: int
    tensor: torch.Tensor


class Flow(CallWatch):
    """Finds out in one pass through a copy which modules and functions use each tensor.

    What happens within a module whose weights are known is the business of that module.

    Args:
        edits: the changes, for whose tensors `places` is filled.

    Attributes:
        uses: what has used a tensor, by its id.
        places: (number of the change, place) in the order of the pass.
        calls: the number of the last call of each module.
    """

    def __init__(self, edits: list[Edit]) -> None:
        super().__init__()
        self._edits = edits
        self._numbers = count()
        self._within: list[str] = []  # modules with known weights that are being called
        self._kept: list[torch.Tensor] = []  # so that no id is used twice
        self._producers: dict[int, list[Event]] = {}
        self.uses: dict[int, list[Event]] = {}
        self.places: list[tuple[int, Place]] = []
        self.calls: dict[str, int] = {}

    def handle(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function and note what it uses and makes."""
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", type(func).__name__)
        if self._within or name in _READS_NO_VALUES:
            return result
        given, made = tensors_of((*args, *kwargs.values())), tensors_of((result,))
        event = Event(next(self._numbers), None, 0, name, tuple(given))
        for tensor in given:
            if not any(tensor is other for other in made):  # as a dropout returns its input
                self._use(tensor, event)
        in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        for tensor in made:
            known = any(tensor is other for other in given)
            if not known or in_place:
                self._make(tensor, event)
            if known and in_place:
                self._use(tensor, event)
        return result

    def before(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Note what a module receives."""
        with without_functions():
            self._before(path, module, (*args, *kwargs.values()), (args, dict(kwargs)))

    def _before(self, path: str, module: nn.Module, given: Any, value: Any) -> None:
        call = self.calls[path] = self.calls.get(path, -1) + 1
        self._find(path, call, "input", value)
        if is_known(module) and not self._within:
            event = Event(next(self._numbers), path, call, type(module).__name__)
            for tensor in tensors_of(given):
                self._use(tensor, event)
        if is_known(module):
            self._within.append(path)

    def after(self, path: str, module: nn.Module, output: Any) -> Any:
        """Note what a module returns."""
        with without_functions():
            self._after(path, module, output)
        return output

    def _after(self, path: str, module: nn.Module, output: Any) -> None:
        call = self.calls[path]
        if is_known(module):
            self._within.pop()
            if not self._within:
                event = Event(next(self._numbers), path, call, type(module).__name__)
                for tensor in tensors_of((output,)):
                    self._make(tensor, event)
        self._find(path, call, "output", output)
        if not path:
            event = Event(next(self._numbers), None, 0, "the model's output")
            for tensor in tensors_of((output,)):
                self._use(tensor, event)

    def _find(self, path: str, call: int, side: str, value: Any) -> None:
        for number, edit in enumerate(self._edits):
            if edit.spec.of_parameters or not edit.means(path, call, side):
                continue
            found = picked(edit.spec.role, tensors_of_call(side, value))
            if found is not None:
                place = Place(next(self._numbers), path, call, found.tensor)
                self.places.append((number, place))

    def _use(self, tensor: torch.Tensor, event: Event) -> None:
        self._kept.append(tensor)
        self.uses.setdefault(id(tensor), []).append(event)

    def _make(self, tensor: torch.Tensor, event: Event) -> None:
        self._kept.append(tensor)
        self._producers.setdefault(id(tensor), []).append(event)

    def producer(self, tensor: torch.Tensor, before: int) -> Event | None:
        """Return what has made the content of a tensor that it has before an event."""
        made = [event for event in self._producers.get(id(tensor), ()) if event.order < before]
        return made[-1] if made else None


def is_known(module: nn.Module) -> bool:
    """Return whether changes can be folded into the weights of a module."""
    return type(module) in _KNOWN or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    """Return whether a module is the linear layer of GPT-2 in transformers."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def feature_dim(module: nn.Module) -> int:
    """Return the dimension of activations that the weights of a module produce and receive."""
    return 1 if isinstance(module, (*_CONVOLUTIONS, *_NORMS[1:5])) else -1


# -- into weights ------------------------------------------------------------------------------


def refusal(module: nn.Module, side: str, change: Affine) -> str | None:
    """Return why the weights of a module cannot express a change; None if they can.

    Args:
        module: a module that `is_known`.
        side: "output" or "input".
        change: the change.
    """
    kind, weight = type(module).__name__, _own(module, "weight")
    if weight is None:
        return f"a {kind} without a weight, or with one that is computed"
    if isinstance(module, _NORMS) and weight.dim() > 1:
        return f"a {kind} over several dimensions"
    if change.shifts and _own(module, "bias") is None and not isinstance(module, nn.Embedding):
        return f"a {kind} without a bias"
    what = (_refusal_of_output if side == "output" else _refusal_of_input)(module, change)
    return None if what is None else f"a {kind}{what}"


def _refusal_of_output(module: nn.Module, change: Affine) -> str | None:
    if isinstance(module, _NORMS) and change.matrix.dim() == 2:
        return ", which scales its features one by one"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return " with max_norm"
    return None


def _refusal_of_input(module: nn.Module, change: Affine) -> str | None:
    if isinstance(module, (*_NORMS, nn.Embedding)):
        return ", which is not linear"
    if isinstance(module, _CONVOLUTIONS):
        if change.matrix.dim() == 2 and module.groups != 1:
            return " with groups, which does not mix all channels"
        if change.shifts and _pads(module):
            return " with padding, at whose borders nothing is added"
    return None


def fold(module: nn.Module, side: str, change: Affine) -> None:
    """Change the weights of a module so that its output, or input, is changed.

    Args:
        module: a module for which `refusal` returns None.
        side: "output" or "input".
        change: the change.
    """
    weight, bias = _own(module, "weight"), _own(module, "bias")
    assert weight is not None
    # most layers have their outputs in dimension 0; an embedding and GPT-2's Conv1D in the last
    last = isinstance(module, nn.Embedding) or _is_transposed(module)
    old = weight.double().movedim(-1, 0) if last else weight.double()
    added: torch.Tensor | float = 0.0
    if side == "output":
        new = _times(change.matrix, old)
        if isinstance(module, nn.Embedding):
            new = new + change.shift[:, None]
        if bias is not None:
            added = _times(change.matrix, bias.double()) + change.shift - bias.double()
    else:
        groups = int(getattr(module, "groups", 1))
        by_group = old.reshape(groups, -1, *old.shape[1:])  # [groups, outputs, inputs, ...]
        shift = change.shift.reshape(groups, -1)
        added = torch.einsum("goi...,gi->go...", by_group, shift).reshape(len(old), -1).sum(1)
        if change.matrix.dim() == 2:
            new = torch.einsum("oi...,ij->oj...", old, change.matrix)
        else:
            diagonal = change.matrix.reshape(groups, 1, -1, *[1] * (old.dim() - 2))
            new = (by_group * diagonal).reshape(old.shape)
    weight.copy_(new.movedim(0, -1) if last else new)
    if bias is not None:
        bias.copy_(bias.double() + added)


def _pads(module: Any) -> bool:
    padding = module.padding
    return padding == "same" or (not isinstance(padding, str) and any(padding))


def _times(matrix: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the product of a matrix, or of a diagonal one, with the first dimension of values."""
    if matrix.dim() == 2:
        product: torch.Tensor = torch.tensordot(matrix, values, 1)
        return product
    return matrix.reshape(-1, *[1] * (values.dim() - 1)) * values


def _own(module: nn.Module, name: str) -> torch.Tensor | None:
    return dict(module.named_parameters(recurse=False)).get(name)

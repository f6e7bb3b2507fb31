"""The samples of a probe: arguments for the model, chosen once and then kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from comgra_decl.errors import ProbeError
from comgra_decl.hooks.probing.places import with_tensor
from comgra_decl.hooks.pytree import first_batch_size, tensors_in
from comgra_decl.hooks.tensors.boundaries import input_role
from comgra_decl.spec.dictionaries import DictionaryFunction
from comgra_decl.spec.interventions import FunctionChange, FunctionMeasure
from comgra_decl.spec.probes import BatchFunction, BatchValues, ProbeSpec
from comgra_decl.stats.sample_selection import balanced
from comgra_decl.torch_private import torch_pytree

_NO_CLASS = -1


@dataclass(frozen=True)
class Samples:
    """What a probe passes through the model.

    Attributes:
        args: positional arguments, as the program passed them.
        kwargs: keyword arguments.
        places: the position of each sample in its original batch.
        labels: a human-readable label for each sample; empty if there are none.
        classes: int64 [samples], the class of each sample; None if unknown.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    places: list[int]
    labels: list[str]
    classes: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.places)

    def to(self, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with all tensors copied to a device.

        They are copied even if they are already on that device, because a model may change its
        input.
        """
        moved: tuple[tuple[Any, ...], dict[str, Any]] = mapped(
            (self.args, self.kwargs), lambda tensor: tensor.detach().to(device, copy=True)
        )
        return moved


@dataclass(frozen=True)
class KeptSamples:
    """The samples of a probe, as the run that is resumed has kept them.

    Attributes:
        tensors: the arguments of the model by role, such as "input.mask": [samples, ...], or any
            shape if they have no samples.
        places: the position of each sample in its original batch.
        labels: as in `Samples`.
        classes: the class of each sample; None if unknown.
        declared: the section of the spec that has chosen the samples.
    """

    tensors: Mapping[str, torch.Tensor]
    places: list[int]
    labels: list[str]
    classes: list[int] | None
    declared: dict[str, Any]

    def again(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Samples:
        """Return the samples as arguments of the same form as those of a call.

        Arguments that are no tensors are those of the call.

        Raises:
            ProbeError: the call has other tensors; the message states which.
        """
        size, given = first_batch_size(args, kwargs), {}
        for path, tensor in (*tensors_in(args), *tensors_in(kwargs)):
            role = input_role(path)
            kept = self.tensors.get(role)
            if kept is None:
                raise ProbeError(f"the model now receives {role}, which the run does not contain")
            shape = [*tensor.shape]
            along = bool(shape) and shape[0] == size
            shape = [len(self.places), *shape[1:]] if along else shape
            fits = kept.dtype == tensor.dtype and kept.dim() == len(shape)
            if not fits or (along and len(kept) != len(self.places)):
                raise ProbeError(
                    f"{role} was {kept.dtype} {list(kept.shape)} and is now {tensor.dtype} {shape}"
                )
            given[id(tensor)] = kept

        def kept_for(tensor: torch.Tensor) -> torch.Tensor:
            return given[id(tensor)].to(tensor.device)

        new_args, new_kwargs = mapped((args, dict(kwargs)), kept_for)
        classes = None if self.classes is None else torch.tensor(self.classes)
        return Samples(new_args, new_kwargs, self.places, self.labels, classes)


class FirstBatch:
    """The first batch of a run, some of whose samples become those of a probe.

    All of it is kept until the loss reveals the classes of its samples.

    Args:
        args: the positional arguments of the model.
        kwargs: its keyword arguments.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.size = first_batch_size(args, kwargs) or 0
        if not self.size:
            raise ProbeError("the model was called without a batch of samples")
        self._args, self._kwargs = mapped(
            (args, dict(kwargs)), lambda tensor: tensor.detach().clone()
        )

    def chosen(
        self, count: int, *, by: Sequence[Any] | None, classes: Sequence[Any] | None
    ) -> Samples:
        """Return `count` samples in the batch.

        Args:
            count: the number of samples.
            by: the category of each sample in the batch, to take the same number from each.
            classes: the class of each sample in the batch, if known.
        """
        count, size = min(count, self.size), self.size
        usable = by is not None and len(by) == size
        places = balanced(by or (), count) if usable else list(range(count))
        index = torch.tensor(places)

        def taken(tensor: torch.Tensor) -> torch.Tensor:
            along = tensor.dim() > 0 and tensor.shape[0] == size
            return tensor[index.to(tensor.device)] if along else tensor

        args, kwargs = mapped((self._args, self._kwargs), taken)
        known = classes is not None and len(classes) == size
        targets = torch.tensor([int((classes or ())[i]) for i in places]) if known else None
        shown = by if usable else classes if known else None
        labels = [] if shown is None else [str(shown[i]) for i in places]
        return Samples(args, kwargs, places, labels, targets)


def given_samples(
    spec: ProbeSpec,
    device: torch.device,
    *,
    like: Mapping[str, Any],
    warn: Callable[[str], None],
) -> Samples:
    """Return the samples that the spec provides, either itself or through a function.

    Args:
        spec: the probe.
        device: where to put the samples.
        like: the program's own arguments by name. Numbers in the spec get the floating-point
            dtype of the argument with their name, so that `1` means what `1.0` does.
        warn: called if there are more samples than the probe keeps.

    Raises:
        ProbeError: they are not valid samples; the message states why.
    """
    args: tuple[Any, ...] = ()
    labels: Sequence[Any] | None = spec.labels
    if isinstance(spec.batch, BatchFunction):
        args, kwargs, labels = _called(spec.batch)
    else:
        assert isinstance(spec.batch, BatchValues)
        kwargs = _as_tensors(spec.batch.arguments, like, device)
    size = first_batch_size(args, kwargs)
    if not size:
        raise ProbeError("`batch` contains no tensor with a sample dimension")
    if labels is not None and len(labels) != size:
        raise ProbeError(f"`batch` has {size} samples but {len(labels)} labels")
    if size > spec.samples.count:
        warn(
            f"`batch` has {size} samples, but the probe keeps only the first {spec.samples.count}; "
            f"to keep all, set its samples.count to {size}"
        )
    # a sample with another label, such as one of a foreign category, has no class
    classes = [label if isinstance(label, int) else _NO_CLASS for label in labels or ()]
    known = any(label != _NO_CLASS for label in classes)
    batch = FirstBatch(args, kwargs)
    samples = batch.chosen(spec.samples.count, by=None, classes=classes if known else None)
    if labels is None:
        return samples
    return replace(samples, labels=[str(labels[place]) for place in samples.places])


def call_named(
    function: BatchFunction | FunctionChange | FunctionMeasure | DictionaryFunction, *arguments: Any
) -> Any:
    """Return the result of a function that the spec names, called with its further keys as well."""
    return imported(function.target)(*arguments, **(function.model_extra or {}))


def imported(target: str) -> Any:
    """Return a function or class that the spec names."""
    module, _, name = target.rpartition(".")
    return getattr(import_module(module), name)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in at least float32, so that calculations with it are precise."""
    precise = tensor.dtype in (torch.float32, torch.float64) or not tensor.is_floating_point()
    return tensor if precise else tensor.float()


def _called(function: BatchFunction) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    found = call_named(function)
    if not (isinstance(found, tuple) and len(found) == 3):
        raise ProbeError(f"{function.target} must return (args, kwargs, labels), got {type(found)}")
    args, kwargs, labels = found
    return tuple(args), dict(kwargs), labels if labels is None else [_plain(x) for x in labels]


def _plain(label: Any) -> Any:
    return label.item() if isinstance(label, torch.Tensor) else label


def _as_tensors(
    values: Mapping[str, Any], like: Mapping[str, Any], device: torch.device
) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in values.items():
        own = like.get(name)
        dtype = own.dtype if isinstance(own, torch.Tensor) and own.is_floating_point() else None
        try:
            found[name] = torch.tensor(value, dtype=dtype, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ProbeError(f"batch.{name} is not a regular list of numbers: {error}") from None
    return found


def mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a nested value with a function applied to all of its tensors, to each of them once."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keeps the tensors alive

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor, function(tensor)
        return made[id(tensor)][1]

    value = torch_pytree.tree_map_only(torch.Tensor, once, value)
    done = {id(new) for _, new in made.values()}
    for _, tensor in tensors_in(value):
        if id(tensor) not in done:  # in a dataclass or a mapping, which pytrees do not traverse
            value = with_tensor(value, tensor, function(tensor))
    return value

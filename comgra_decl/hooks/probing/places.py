"""The places at which a change is made: modules, the role of a tensor, and parts of it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from comgra_decl.errors import ProbeError, did_you_mean
from comgra_decl.hooks.plans import facts_of
from comgra_decl.hooks.probing.copying import CleanCopy
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.spec.globs import matches
from comgra_decl.spec.interventions import KNOWN_PARTS, PartSpec, PlaceSpec
from comgra_decl.spec.nodes import Selector, Selectors
from comgra_decl.spec.pictures import PictureSpec
from comgra_decl.spec.selectors import is_selected, misses

HEADS = ("num_heads", "n_heads", "nhead", "n_head", "num_attention_heads")
"""Attributes of modules, or of their `config`, that contain their number of heads."""

EVERY_PARAMETER = "parameter"


class Named(NamedTuple):
    """A tensor of a module, with its role."""

    role: str
    tensor: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Division:
    """How a dimension of a tensor is divided into parts.

    Attributes:
        dim: the dimension, not negative.
        count: the number of parts.
        size: the number of indices in each part.
    """

    dim: int
    count: int
    size: int


class Modules:
    """The modules of a copy by path, as selectors and changes find them."""

    def __init__(self, clean: CleanCopy) -> None:
        self.by_path: dict[str, nn.Module] = {
            clean.paths[id(m)]: m for m in clean.module.modules() if id(m) in clean.paths
        }
        self._aliases = {
            name: clean.paths[id(m)]
            for name, m in clean.module.named_modules(remove_duplicate=False)
            if id(m) in clean.paths and name not in self.by_path
        }

    def selected(self, change: PlaceSpec) -> list[str]:
        """Return the paths of the modules that a change selects, in the order of the model."""
        return self.matching(change.select, change.exclude)

    def matching(self, select: Sequence[Selector], exclude: Sequence[Selector] = ()) -> list[str]:
        """Return the paths of the modules that selectors select, in the order of the model."""
        facts = [facts_of(path, module) for path, module in self.by_path.items()]
        return [f.path for f in facts if is_selected(select, f) and not is_selected(exclude, f)]

    def unmatched(self, select: Sequence[Selector], where: str) -> list[str]:
        """Return a sentence for each pattern that matches no module."""
        facts = [facts_of(path, module) for path, module in self.by_path.items()]
        return [
            sentence + self._other_names(select) for sentence in misses(where, [*select], facts)
        ]

    def problems_of_pictures(self, pictures: Mapping[str, PictureSpec]) -> list[str]:
        """Return a sentence for each pattern of a picture that is not optional and matches nothing.

        Args:
            pictures: the pictures by name.
        """
        found = []
        for name, picture in pictures.items():
            select: Selectors = getattr(picture, "select", [])
            if not select or getattr(picture, "optional", False):
                continue
            where = f"comgra.pictures.{name}.select"
            unmatched = self.unmatched(select, where)
            if not unmatched and not self.matching(select):
                unmatched = [f"{where}: selects no module"]
            found += unmatched
        return found

    def problems(self, change: PlaceSpec, where: str) -> list[str]:
        """Return a sentence for each pattern and parameter of a change that does not exist."""
        found = self.unmatched(change.select, f"{where}.select")
        paths = self.selected(change)
        if not found and not paths:
            every = bool(self.matching(change.select))
            why = (
                "exclude: excludes every selected module" if every else "select: selects no module"
            )
            found.append(f"{where}.{why}")
        if found or not change.of_parameters or any(self.parameters(p, change) for p in paths):
            return found
        known = sorted({name for p in paths for name, _ in _own(self.by_path[p])})
        there = ", ".join(known) or "they have none"
        sentence = f"{where}.role: no selected module has a parameter {change.role!r} ({there})"
        computed = next(filter(None, (self._computed(p, change.role) for p in paths)), None)
        return [sentence + (computed or did_you_mean(change.role, known))]

    def _other_names(self, select: Sequence[Selector]) -> str:
        """Name the modules of which patterns match only further names."""
        globs = [glob for selector in select for glob in selector.path]
        return "".join(
            f"; {alias!r} is another name of {path!r}, so select {path!r}"
            for alias, path in self._aliases.items()
            if any(matches(glob, alias) for glob in globs)
        )

    def _computed(self, path: str, name: str) -> str | None:
        """Explain a parameter that a module computes from others, as in weight norm."""
        module = self.by_path[path]
        inner = f"{path}.parametrizations.{name}".removeprefix(".")
        if inner in self.by_path:
            from_ = ", ".join(own for own, _ in _own(self.by_path[inner]))
            return (
                f"; {name} is computed and is the output of {inner!r}, so select that, with the "
                f"role output or one of {from_}"
            )
        if isinstance(vars(module).get(name), torch.Tensor):
            return f"; {name} is computed from these parameters, so change one of them"
        return None

    def parameters(self, path: str, change: PlaceSpec) -> list[tuple[str, torch.Tensor]]:
        """Return the parameters of a module that a change selects, with their names."""
        wanted = change.role
        own = _own(self.by_path[path])
        return [(n, t) for n, t in own if wanted in (EVERY_PARAMETER, n)]

    def heads(self, path: str) -> int | None:
        """Return the number of attention heads of a module, or of the closest one around it."""
        levels = path.split(".")
        for length in range(len(levels), -1, -1):
            module = self.by_path.get(".".join(levels[:length]))
            for holder in (module, getattr(module, "config", None)):  # a config of transformers
                for name in HEADS:
                    found = getattr(holder, name, None)
                    if isinstance(found, int) and not isinstance(found, bool):
                        return found
        return None


def _own(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in module._parameters.items() if tensor is not None]


def picked(role: str, tensors: Sequence[Named]) -> Named | None:
    """Return the tensor that a role means; `output` and `input` may mean the first of several."""
    exact = next((each for each in tensors if each.role == role), None)
    if exact is not None or role not in ("output", "input"):
        return exact
    floating = (each for each in tensors if each.tensor.is_floating_point())
    return next(floating, tensors[0] if tensors else None)


def with_tensor(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """Return a nested value, as in `tensors_in`, in which one tensor is replaced.

    Raises:
        ProbeError: the value is of a type whose contents cannot be replaced.
    """
    if value is old:
        return new
    kind = type(value)
    if isinstance(value, Mapping):
        changed: Any = copy.copy(value)
        for key, child in value.items():
            other = with_tensor(child, old, new)
            if other is not child:
                try:
                    changed[key] = other
                except TypeError as error:
                    raise ProbeError(f"a tensor in {kind.__name__} cannot be replaced") from error
        return changed
    if isinstance(value, (tuple, list)):
        children = [with_tensor(child, old, new) for child in value]
        return kind(*children) if hasattr(value, "_fields") else kind(children)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        filled = copy.copy(value)
        for field in dataclasses.fields(value):
            child = getattr(value, field.name, None)
            object.__setattr__(filled, field.name, with_tensor(child, old, new))
        return filled
    return value


def with_copies(output: Any) -> Any:
    """Return a nested output with copies of its tensors, which others may write to."""
    with suppress(ProbeError):  # of a type whose contents cannot be replaced
        for _, tensor in tensors_in(output):
            output = with_tensor(output, tensor, tensor.clone())
    return output


def division(
    name: str,
    part: PartSpec,
    shape: Sequence[int],
    heads: int | None,
    known: Mapping[str, int] = KNOWN_PARTS,
) -> Division:
    """Return how a part divides a tensor of a shape.

    Args:
        name: the name of the part.
        part: its declaration.
        shape: the shape of the tensor.
        heads: the number of attention heads, if it is known.
        known: the dimension of each part without a `dim`. Heads with a dimension of their own are
            its indices.

    Raises:
        ProbeError: the tensor cannot be divided this way; the message states why.
    """
    declared = known[name] if part.dim is None else part.dim
    rank = len(shape)
    if not -rank <= declared < rank:
        raise ProbeError(f"{name}: a tensor of shape {list(shape)} has no dimension {declared}")
    dim = declared % rank
    groups = part.groups
    if groups is None and name == "head" and known is KNOWN_PARTS:
        if heads is None:
            raise ProbeError(
                f"{name}: the number of heads is unknown, because no module around it, or its "
                f"`config`, has one of {', '.join(HEADS)}; write `groups`"
            )
        groups = heads
    if groups is None:
        return Division(dim, shape[dim], 1)
    if shape[dim] % groups:
        raise ProbeError(
            f"{name}: {shape[dim]} indices of dimension {dim} (shape {list(shape)}) cannot be "
            f"divided into {groups} equal groups"
        )
    return Division(dim, groups, shape[dim] // groups)


@dataclasses.dataclass
class Target:
    """Tensors of selected modules, and the parts that divide them.

    Attributes:
        spec: says which tensors.
        parts: the parts that `spec` names, and those of a sweep.
        paths: the selected modules.
    """

    spec: PlaceSpec
    parts: Mapping[str, PartSpec]
    paths: Sequence[str]

    def means(self, path: str, number: int, side: str) -> bool:
        """Return whether one of the tensors is on this side of a call (see `Numbered`)."""
        here = path in self.paths and self.spec.role.startswith(side)
        return here and self.spec.iteration in (None, number)

    def led(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a call with the dimension of the samples first.

        Raises:
            ProbeError: it has no such dimension.
        """
        dim = self.spec.batch_dim
        if not dim:
            return tensor
        if dim >= tensor.dim():
            raise ProbeError(f"a tensor of shape {list(tensor.shape)} has no dimension {dim}")
        return tensor.movedim(dim, 0)

    def divisions(
        self, path: str, tensor: torch.Tensor, heads: Callable[[str], int | None]
    ) -> dict[str, Division]:
        """Return how the parts divide a tensor of a module, [samples, ...].

        Raises:
            ProbeError: they cannot divide it.
        """
        found = {
            name: division(name, part, tensor.shape, heads(path), self.spec.known_parts)
            for name, part in self.parts.items()
        }
        for name, each in found.items():
            if each.dim == 0 and not self.spec.of_parameters:
                raise ProbeError(f"{name}: {of_samples(self.parts[name].dim, tensor)}")
        return found


def of_samples(dim: int | None, tensor: torch.Tensor) -> str:
    """Explain why a dimension cannot be divided, or contain a direction."""
    return f"dimension {dim} of a tensor of shape {list(tensor.shape)} is that of the samples"


def chosen(name: str, part: PartSpec, count: int) -> list[int]:
    """Return the parts to change.

    Raises:
        ProbeError: there is no such part.
    """
    if part.only is None:
        return [*range(count)]
    for index in part.only:
        if not -count <= index < count:
            raise ProbeError(
                f"{name}: {index} does not exist; there are {count} (0 to {count - 1})"
            )
    return [index % count for index in part.only]


def chosen_in_sequence(name: str, part: PartSpec, count: int, start: int) -> list[int]:
    """Return the parts to change of a tensor that contains some positions of a sequence.

    Args:
        name: the name of the part.
        part: its declaration, whose positions are counted from the start of the sequence.
        count: the number of positions in the tensor.
        start: the first of them.

    Raises:
        ProbeError: a position is counted from the end, which is not known yet.
    """
    if part.only is None:
        return [*range(count)]
    for index in part.only:
        if index < 0:
            raise ProbeError(
                f"{name}: {index} counts from the end of a sequence that is still being generated; "
                "count from its start"
            )
    return [index - start for index in part.only if start <= index < start + count]


class Region(NamedTuple):
    """Parts of a tensor, of which only the elements that belong to all are meant.

    Attributes:
        replica: the copy of the samples in a batch; None for all copies.
        path: the module; None for all selected modules.
        indices: the chosen parts of each name.
    """

    replica: int | None
    path: str | None
    indices: Mapping[str, Sequence[int]]


def mask(
    shape: Sequence[int],
    divisions: Mapping[str, Division],
    regions: Sequence[Region],
    *,
    replicas: int,
    device: torch.device,
) -> torch.Tensor | None:
    """Return which elements belong to any of the regions; None if all do.

    The mask is a boolean tensor that can be broadcast to the shape.
    """
    whole = [region for region in regions if not region.indices]
    if whole and any(region.replica is None for region in whole):
        return None
    sizes = [1] * len(shape)
    for each in divisions.values():
        sizes[each.dim] = shape[each.dim]
    apart = any(region.replica is not None for region in regions)
    found = torch.zeros([replicas if apart else sizes[0], *sizes[1:]], dtype=torch.bool)
    for region in regions:
        inside = torch.ones(sizes, dtype=torch.bool)
        for name, indices in region.indices.items():
            dim = divisions[name].dim
            along = torch.zeros(divisions[name].count, dtype=torch.bool)
            along[list(indices)] = True
            view = [1] * len(shape)
            view[dim] = shape[dim]
            inside = inside & along.repeat_interleave(divisions[name].size).reshape(view)
        if region.replica is None:
            found |= inside
        else:
            found[region.replica] |= inside[0]
    if apart:
        found = found.repeat_interleave(shape[0] // replicas, 0)
    return found.to(device)


def combinations(indices: Mapping[str, Sequence[int]]) -> list[dict[str, list[int]]]:
    """Return each combination of one part of each name, the last name varying fastest."""
    names = [*indices]
    return [
        {name: [index] for name, index in zip(names, each, strict=True)}
        for each in product(*indices.values())
    ]

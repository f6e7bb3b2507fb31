"""Passes in which a change reaches only certain tensors, and only directly: path patching.

A path leads from the changed tensor to a receiver. In a first pass the change is made, the
receiver's new value is taken, and everything else that the spec names keeps its value. In a second
pass, the receiver alone has the new value (Wang et al. 2022, "Interpretability in the wild", and
Goldowsky-Dill et al. 2023, "Localizing model behavior with path patching").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from comgra_decl.errors import ProbeError
from comgra_decl.hooks.probing.changes import Sampled
from comgra_decl.hooks.probing.copying import Watch
from comgra_decl.hooks.probing.effects import Group, change_of, groups
from comgra_decl.hooks.probing.passes import Call, Edit, Numbered, Study, Tally, tensors_of
from comgra_decl.hooks.probing.places import Region, Target, chosen, mask, picked, with_tensor
from comgra_decl.spec.interventions import INTO, InterventionSpec


@dataclass
class Route:
    """Where a change may go.

    Attributes:
        receivers: the tensors that it reaches.
        frozen: the modules whose outputs keep their values on the way.
        tally: counts what the receivers receive.
    """

    receivers: Target
    frozen: Sequence[str]
    tally: Tally = field(default_factory=Tally)


def receiver_groups(spec: InterventionSpec, route: Route, study: Study) -> list[Group]:
    """Return the receivers of a sweep, by module.

    Raises:
        ProbeError: a tensor does not have the parts, or the modules have different ones.
    """
    names, by_module = spec.swept_of_receivers, INTO in spec.sweep
    return groups(route.receivers, study, names=names, by_module=by_module)


# -- what keeps its value ----------------------------------------------------------------------


@dataclass
class _Held:
    """Values without the change.

    Attributes:
        tensors: those of the tensors that are changed, and of the receivers.
        outputs: those of the floating-point tensors that each call of a frozen module returns.
    """

    tensors: dict[Call, torch.Tensor] = field(default_factory=dict)
    outputs: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)


class _Holding(Numbered):
    """Takes the values in a pass without the change."""

    def __init__(self, edit: Edit, route: Route) -> None:
        super().__init__()
        self.held = _Held()
        self._targets = (edit, route.receivers)
        self._frozen = frozenset(route.frozen)

    def handled(self, path: str, number: int, side: str, value: Any) -> Any:
        """Take the tensors of a call."""
        for target in self._targets:
            if target.means(path, number, side):
                found = picked(target.spec.role, tensors_of(side, value))
                if found is not None:
                    call = Call(path, target.spec.role, number)
                    self.held.tensors[call] = found.tensor.detach().clone()
        if side == "output" and path in self._frozen:
            self.held.outputs[path, number] = [t.detach().clone() for t in _floating(value)]
        return value


def _floating(output: Any) -> list[torch.Tensor]:
    return [t for _, t in tensors_of("output", output) if t.is_floating_point()]


class _Direct(Numbered):
    """Lets changed tensors reach the receivers directly, and nothing else.

    Args:
        edit: the tensors that are changed.
        route: where the change may go.
        held: the values without the change.
        source: returns the value of a changed tensor.
        kept: returns, for a frozen module, in which copies of the samples its output keeps its
            value.
        copies: how many copies of the samples the batch contains.

    Attributes:
        received: the values of the receivers.
    """

    def __init__(
        self,
        edit: Edit,
        route: Route,
        held: _Held,
        *,
        source: Callable[[Call], torch.Tensor],
        kept: Callable[[str], Sequence[bool]],
        copies: int = 1,
    ) -> None:
        super().__init__()
        self.received: dict[Call, torch.Tensor] = {}
        self._edit, self._route, self._held = edit, route, held
        self._source, self._kept, self._copies = source, kept, copies
        self._frozen = frozenset(route.frozen)

    def handled(self, path: str, number: int, side: str, value: Any) -> Any:
        """Replace the tensors of a call, or take them."""
        if side == "output" and path in self._frozen:
            value = self._freeze(path, number, value)
        if self._edit.means(path, number, side):
            call = Call(path, self._edit.spec.role, number)
            found = picked(call.role, tensors_of(side, value))
            if found is not None:
                value = with_tensor(value, found.tensor, self._source(call))
        receivers = self._route.receivers
        if receivers.means(path, number, side):
            call = Call(path, receivers.spec.role, number)
            found = picked(call.role, tensors_of(side, value))
            if found is not None:
                self.received[call] = found.tensor.clone()
                kept = held_value(self._held.tensors, call, self._copies)
                value = with_tensor(value, found.tensor, kept)
        return value

    def _freeze(self, path: str, number: int, value: Any) -> Any:
        kept = self._kept(path)
        if not any(kept):
            return value
        tensors, known = _floating(value), self._held.outputs.get((path, number), [])
        if [t.shape[1:] for t in tensors] != [t.shape[1:] for t in known]:
            raise ProbeError(f"{path}: returns other tensors than without the change")
        for tensor, content in zip(tensors, known, strict=True):
            new = _copies_of(content, self._copies)
            if not all(kept):
                size = len(content)
                parts = [
                    new[i * size : (i + 1) * size] if keep else tensor[i * size : (i + 1) * size]
                    for i, keep in enumerate(kept)
                ]
                new = torch.cat(parts)
            value = with_tensor(value, tensor, new)
        return value


def held_value(values: Mapping[Call, torch.Tensor], call: Call, copies: int) -> torch.Tensor:
    """Return a value without the change, for each copy of the samples, in memory of its own.

    Raises:
        ProbeError: there was no such call.
    """
    if call not in values:
        raise ProbeError(f"{call.path}: is called more often than without the change")
    return _copies_of(values[call], copies)


def _copies_of(value: torch.Tensor, copies: int) -> torch.Tensor:
    if copies == 1:
        return value.clone()
    return value.repeat(copies, *[1] * (value.dim() - 1))


def _is_around(path: str, other: str) -> bool:
    """Return whether one module contains the other, or is the same."""
    return path in ("", other) or other == "" or _within(path, other) or _within(other, path)


def _within(inner: str, outer: str) -> bool:
    return inner.startswith(f"{outer}.")


# -- passes ------------------------------------------------------------------------------------


class Paths:
    """Makes the passes in which a change reaches only receivers.

    Args:
        edit: the change.
        route: where it may go.
        study: makes the passes.
        first: changes made in every pass.
    """

    def __init__(self, edit: Edit, route: Route, study: Study, first: Sequence[Edit]) -> None:
        self._edit, self._route, self._study, self._first = edit, route, study, first
        self._held = _Held()

    @contextmanager
    def without(self) -> Iterator[Any]:
        """Make the pass without the change, whose values are kept; yield the model's output."""
        holding = _Holding(self._edit, self._route)
        with self._study.changed(self._first, watch=holding) as output:
            self._held = holding.held
            yield output
        self._first = [edit.uncounted() for edit in self._first]

    def sent(
        self, regions: Sequence[Region] | None, *, copies: int = 1, counted: bool = True
    ) -> dict[Call, Any]:
        """Return the values of the receivers if the change is made in regions.

        Args:
            regions: see `Edit`.
            copies: how many copies of the samples the batch contains.
            counted: whether what is changed is counted.
        """
        edit = replace(self._edit if counted else self._edit.uncounted(), regions=regions)
        samples = Sampled(self._study.samples.count, self._study.samples.labels, copies)

        def source(call: Call) -> torch.Tensor:
            held = held_value(self._held.tensors, call, copies)
            heads = self._study.modules.heads
            clean = self._study.clean.get(call)
            return edit.applied(held, call, clean, heads=heads, samples=samples)

        def kept(path: str) -> list[bool]:
            return [not self._is_open(path, regions, copy) for copy in range(copies)]

        direct = _Direct(edit, self._route, self._held, source=source, kept=kept, copies=copies)
        with self._study.changed(self._first, replicas=copies, watch=direct):
            return direct.received

    def _is_open(self, path: str, regions: Sequence[Region] | None, copy: int) -> bool:
        """Return whether a frozen module contains a changed tensor, or belongs to its module."""
        if regions is None:
            return any(_is_around(path, each) for each in self._edit.paths)
        here = [region for region in regions if region.replica in (None, copy)]
        wide = any(region.path is None for region in here)
        paths = self._edit.paths if wide else [region.path or "" for region in here]
        return any(_is_around(path, each) for each in paths)

    @contextmanager
    def received(
        self,
        values: Mapping[Call, torch.Tensor],
        regions: Sequence[Region] | None,
        *,
        sources: Sequence[int] | None = None,
        watch: Watch | None = None,
        counted: bool = True,
    ) -> Iterator[Any]:
        """Make a pass in which receivers have other values; yield the model's output.

        Args:
            values: the values.
            regions: which of the receivers, and in which copy; None: all.
            sources: for each copy of the samples, the copy in `values` that it receives; None: the
                batch contains the samples once.
            watch: observes the calls.
            counted: whether what the receivers receive is counted.
        """
        route = self._route if counted else replace(self._route, tally=Tally())
        receiving = _Receiving(route, self._study, values, regions, sources, watch)
        copies = 1 if sources is None else len(sources)
        with self._study.changed(self._first, replicas=copies, watch=receiving) as output:
            yield output

    def reached(self, values: Mapping[Call, torch.Tensor], copy: int | None) -> set[str]:
        """Return the modules whose receivers differ.

        Args:
            values: the values of the receivers.
            copy: the copy of the samples to compare with the first one; None: there is only one,
                which is compared with the values without the change.
        """
        size = self._study.samples.count
        found = set()
        for call, value in values.items():
            if copy is None:
                same = torch.equal(value, self._held.tensors[call])
            else:
                same = torch.equal(value[copy * size : (copy + 1) * size], value[:size])
            if not same:
                found.add(call.path)
        return found

    # -- with a gradient

    def changes(self) -> dict[Call, torch.Tensor]:
        """Return the change of each element of the changed tensors."""
        own = {c: t for c, t in self._held.tensors.items() if self._is_changed(c)}
        return {c: change_of(self._edit, c, t, self._study) for c, t in own.items()}

    def _is_changed(self, call: Call) -> bool:
        spec = self._edit.spec
        return (call.path, call.role) in {(path, spec.role) for path in self._edit.paths} and (
            spec.iteration in (None, call.iteration)
        )

    @contextmanager
    def linked(
        self, paths: Sequence[str]
    ) -> Iterator[tuple[dict[Call, torch.Tensor], dict[Call, torch.Tensor]]]:
        """Make a pass with gradients; yield the changed tensors, and the receivers, by call.

        Args:
            paths: the modules whose tensors are changed, to which frozen modules do not apply.
        """
        leaves: dict[Call, torch.Tensor] = {}

        def source(call: Call) -> torch.Tensor:
            leaves[call] = held_value(self._held.tensors, call, 1).requires_grad_()
            return leaves[call].clone()

        def kept(path: str) -> list[bool]:
            return [not any(_is_around(path, each) for each in paths)]

        direct = _Direct(self._edit, self._route, self._held, source=source, kept=kept)
        with torch.enable_grad(), self._study.changed(self._first, watch=direct):
            yield leaves, direct.received

    def open_modules(self, path: str | None) -> frozenset[str]:
        """Return the frozen modules that do not apply to a change in a module; None: in all."""
        paths = self._edit.paths if path is None else [path]
        return frozenset(f for f in self._route.frozen if any(_is_around(f, p) for p in paths))


class _Receiving(Numbered):
    """Replaces the tensors of receivers; see `Paths.received`."""

    def __init__(
        self,
        route: Route,
        study: Study,
        values: Mapping[Call, torch.Tensor],
        regions: Sequence[Region] | None,
        sources: Sequence[int] | None,
        inner: Watch | None,
    ) -> None:
        super().__init__(inner)
        self._route, self._study, self._values = route, study, values
        self._regions, self._sources = regions, sources

    def handled(self, path: str, number: int, side: str, value: Any) -> Any:
        """Replace the tensor of a call."""
        receivers = self._route.receivers
        call = Call(path, receivers.spec.role, number)
        if not receivers.means(path, number, side) or call not in self._values:
            return value
        found = picked(call.role, tensors_of(side, value))
        if found is None:
            return value
        return with_tensor(value, found.tensor, self._replaced(call, found.tensor))

    def _replaced(self, call: Call, tensor: torch.Tensor) -> torch.Tensor:
        copies = 1 if self._sources is None else len(self._sources)
        new = self._values[call]
        if self._sources is not None:
            parts = new.unflatten(0, (-1, self._study.samples.count))
            new = parts[[*self._sources]].flatten(0, 1)
        receivers = self._route.receivers
        divisions = receivers.divisions(call.path, tensor, self._study.modules.heads)
        regions = self._regions
        if regions is None:
            indices = {n: chosen(n, receivers.parts[n], d.count) for n, d in divisions.items()}
            regions = [Region(None, None, indices)]
        regions = [region for region in regions if region.path in (None, call.path)]
        if not regions:
            return tensor
        shape, device = tensor.shape, tensor.device
        where = mask(shape, divisions, regions, replicas=copies, device=device)
        new = new.clone() if where is None else torch.where(where, new, tensor)
        self._route.tally.add(call, tensor, new, where)
        return new

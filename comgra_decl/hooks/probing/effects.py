"""The effects of a change in many places, one at a time or estimated from a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from comgra_decl.errors import ProbeError
from comgra_decl.hooks.probing.measuring import Gauge
from comgra_decl.hooks.probing.passes import Call, Edit, Numbered, Study, tensors_of
from comgra_decl.hooks.probing.places import (
    Division,
    Modules,
    Named,
    Region,
    Target,
    chosen,
    combinations,
    mask,
    picked,
    with_tensor,
)
from comgra_decl.hooks.probing.samples import widened
from comgra_decl.spec.interventions import NODE, FunctionChange, InterventionSpec

_SAME = 1e-3
"""Largest difference, relative to the largest measure, between a pass with one copy of the samples
and one with several, if a model does not mix samples."""


_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Effects:
    """The effects of a change in all places.

    Attributes:
        values: [samples, places], the measure with the change minus the baseline.
        baseline: [samples], the measure without it.
    """

    values: torch.Tensor
    baseline: torch.Tensor


@dataclass(frozen=True)
class Group:
    """The places in one module or, if modules are not swept, in all of them.

    Attributes:
        path: the module; None for all.
        swept: the parts that are changed one at a time, by name.
        fixed: the parts that are changed in each place.
    """

    path: str | None
    swept: dict[str, list[int]]
    fixed: dict[str, list[int]]

    @property
    def regions(self) -> list[Region]:
        """The places."""
        return [
            Region(None, self.path, {**self.fixed, **each}) for each in combinations(self.swept)
        ]


class Sought(Protocol):
    """What the places of a sweep are found in, such as a `Study`."""

    @property
    def modules(self) -> Modules:
        """The modules of the copy."""

    @property
    def clean(self) -> Mapping[Call, torch.Tensor]:
        """The tensors of the unchanged pass, of which only the shapes count."""


def groups(target: Target, study: Sought, *, names: Sequence[str], by_module: bool) -> list[Group]:
    """Return the places of a sweep, by module.

    Args:
        target: the tensors.
        study: the samples, after the unchanged pass.
        names: the parts that are swept.
        by_module: whether modules are swept, too.

    Raises:
        ProbeError: a tensor does not have the parts, or the modules have different ones.
    """
    found = []
    for path, tensor in _tensors(target, study):
        divisions = target.divisions(path, tensor, study.modules.heads)
        indices = {n: chosen(n, target.parts[n], d.count) for n, d in divisions.items()}
        fixed = {name: each for name, each in indices.items() if name not in names}
        found.append(Group(path, {name: indices[name] for name in names}, fixed))
    if by_module or not found:
        return found
    if any((group.swept, group.fixed) != (found[0].swept, found[0].fixed) for group in found):
        raise ProbeError("the selected modules have different parts; add node to `sweep`")
    return [replace(found[0], path=None)]


def changed_groups(spec: InterventionSpec, edit: Edit, study: Sought) -> list[Group]:
    """Return the places where a sweep makes the change, by module.

    Raises:
        ProbeError: a tensor does not have the parts, or the modules have different ones.
    """
    return groups(edit, study, names=spec.swept, by_module=NODE in spec.sweep)


def _tensors(target: Target, study: Sought) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield one tensor of each module that a target has."""
    for path in target.paths:
        if target.spec.of_parameters:
            yield from ((path, t) for _, t in study.modules.parameters(path, target.spec)[:1])
            continue
        call = Call(path, target.spec.role, target.spec.iteration or 0)
        if call in study.clean:
            yield path, target.led(study.clean[call])


# -- one at a time -----------------------------------------------------------------------------


def swept(
    spec: InterventionSpec, edit: Edit, study: Study, *, first: Sequence[Edit], gauge: Gauge
) -> Effects:
    """Return the effects of making a change in one place at a time.

    Raises:
        ProbeError: the change is not possible, or its effect cannot be measured.
    """
    regions = [r for group in changed_groups(spec, edit, study) for r in group.regions]
    again = [each.uncounted() for each in first]

    def measured(here: Sequence[Region], places: Sequence[int], counted: bool) -> torch.Tensor:
        placed = [r._replace(replica=at) for r, at in zip(here, places, strict=True)]
        own = edit if counted else edit.uncounted()
        edits = [*again, replace(own, regions=placed)]
        with study.changed(edits, replicas=1 + len(here)) as output:
            return gauge(output, 1 + len(here))

    with torch.no_grad():
        with study.changed(first) as output:
            baseline = gauge(output)[0]
        count, values = spec.batch // study.samples.count, None
        if count > 2 and can_repeat([edit, *first], study):
            values = together(regions, measured, count=count, check=baseline)
        if values is None:
            edit.tally.clear()
            values = torch.stack(
                [_one(region, edit, study, again, gauge) - baseline for region in regions], 1
            )
    return Effects(values, baseline)


def can_repeat(edits: Sequence[Edit], study: Study) -> bool:
    """Return whether a batch may contain the samples several times."""
    if any(isinstance(edit.spec.do, FunctionChange) for edit in edits):
        return False  # it may depend on the whole batch
    if edits[0].spec.of_parameters:
        return False
    return study.mixes_nothing and all(
        tensor.dim() and len(tensor) == study.samples.count for tensor in study.clean.values()
    )


def _one(
    region: Region, edit: Edit, study: Study, first: Sequence[Edit], gauge: Gauge
) -> torch.Tensor:
    here = replace(edit, regions=[region])
    with study.changed([*first, here]) as output:
        return gauge(output)[0]


def together(
    items: Sequence[_Item],
    measured: Callable[[Sequence[_Item], Sequence[int], bool], torch.Tensor],
    *,
    count: int,
    check: torch.Tensor,
) -> torch.Tensor | None:
    """Return the effects, [samples, items], from passes in which the samples are repeated.

    One copy of the samples in each pass is unchanged, and the others are compared with it. The
    first pass is made again with the copies in reverse order: if a model mixes samples, or treats
    them by their place in the batch, the results differ.

    Args:
        items: what is changed, one item in each copy.
        measured: makes a pass with items in these copies, and returns [1 + items, samples]; the
            last argument says whether what it changes is counted.
        count: the number of copies in a pass.
        check: the measure of a pass with one copy.

    Returns:
        None if a model gives other results for a batch with several copies.
    """
    found = []
    for begin in range(0, len(items), count - 1):
        here = items[begin : begin + count - 1]
        try:
            values = measured(here, range(1, 1 + len(here)), True)
            if not begin and not agree(values[0], check):
                return None
            places = [*reversed(range(len(here)))]
            back = values.flip(0) if begin else measured(here, places, False)
        except Exception:
            if begin:
                raise
            return None  # it may still work with one copy, which otherwise raises the same error
        if not agree(back.flip(0), values):
            return None
        found.append(values[1:] - values[0])
    return torch.cat(found).T if found else check.new_zeros(len(check), 0)


def agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether results are the same up to what a batch of another size may change."""
    scale = float(other.nan_to_num(0.0, 0.0, 0.0).abs().max()) if other.numel() else 0.0
    return bool(torch.allclose(one, other, rtol=_SAME, atol=_SAME * scale, equal_nan=True))


# -- estimated ---------------------------------------------------------------------------------


class Tapping(Numbered):
    """Reads tensors at once, and their gradients from hooks on them.

    Only what the module receives or returns has the gradient, not what else uses the same tensor,
    because only that is changed.

    Args:
        target: the tensors.
        led: puts the dimension of the samples first; None if it is there.

    Attributes:
        values: the tensors, [samples, ...].
        gradients: the gradients of the tensors, after a backward pass.
        leaves: the tensors without a history.
    """

    def __init__(
        self, target: Target, led: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        super().__init__()
        self.values: dict[Call, torch.Tensor] = {}
        self.gradients: dict[Call, torch.Tensor] = {}
        self.leaves: list[torch.Tensor] = []
        self._target = target
        self._led = led or (lambda tensor: tensor)

    def handled(self, path: str, number: int, side: str, value: Any) -> Any:
        """Tap the selected tensor of a call."""
        if self._target.means(path, number, side):
            return self._tapped(path, number, value, tensors_of(side, value))
        return value

    def _tapped(self, path: str, number: int, value: Any, tensors: Sequence[Named]) -> Any:
        found = picked(self._target.spec.role, tensors)
        if found is None or not found.tensor.is_floating_point():
            return value
        call, tensor = Call(path, self._target.spec.role, number), found.tensor
        if not tensor.requires_grad:
            tensor = tensor.detach().requires_grad_()
            self.leaves.append(tensor)
        # Has the gradient of this use alone and, unlike a view, the model may write to it.
        tensor = tensor.clone()
        self.values[call] = self._led(tensor.detach()).clone()
        tensor.register_hook(lambda gradient: self._keep(call, gradient))
        return with_tensor(value, found.tensor, tensor)

    def _keep(self, call: Call, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # None behind layers without one, such as quantized ones
            self.gradients[call] = self._led(gradient.detach()).clone()


def estimated(
    spec: InterventionSpec, edit: Edit, study: Study, *, first: Sequence[Edit], gauge: Gauge
) -> Effects:
    """Return estimates of the effects, from one pass with gradients.

    The estimate for a place is the sum of the gradient of the measure times the change of the
    values there, which is the first term of a Taylor series (Nanda 2023, "Attribution patching").

    Raises:
        ProbeError: the measure has no gradient, or the change is not possible.
    """
    study.subject.check_gradients()
    tapping = Tapping(edit, edit.led)
    with torch.enable_grad(), study.changed(first, watch=tapping) as output:
        measures = gauge(output)[0]
        if not measures.requires_grad:
            raise ProbeError("the measure has no gradient with respect to the selected tensors")
        parameters = (p for p in study.subject.copy.module.parameters() if p.requires_grad)
        gradients = gradients_of(measures, tapping, [*parameters, *tapping.leaves])
    with torch.no_grad():
        changes = {c: change_of(edit, c, value, study) for c, value in tapping.values.items()}
        wanted = changed_groups(spec, edit, study)
        parts = [first_order(each, changes, wanted, edit, study) for each in gradients]
        values = parts[0] if len(parts) == 1 else torch.stack([each.sum(0) for each in parts])
    return Effects(values, measures.detach())


Gradients = dict[Call, torch.Tensor]


def gradients_of(
    measures: torch.Tensor, tapping: Tapping, leaves: Sequence[torch.Tensor]
) -> list[Gradients]:
    """Return the gradients of the measures with respect to the tapped tensors.

    Returns:
        One entry with the gradient of each sample's measure at the sample's own values or, if the
        measure of a sample depends on other samples, an entry for each sample, with the gradient of
        its measure at the values of all samples.
    """

    def backward(of: torch.Tensor) -> Gradients:
        tapping.gradients = {}
        torch.autograd.grad(of, leaves, allow_unused=True, retain_graph=True)
        return tapping.gradients

    together = backward(measures.sum())
    weights = torch.arange(1, len(measures) + 1, device=measures.device)
    weighted = backward((measures * weights).sum())
    apart = all(agree(weighted[call], _scaled(together[call], weights)) for call in together)
    return [together] if apart else [backward(measure) for measure in measures]


def _scaled(gradient: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply the gradient at the values of each sample by a weight."""
    if not gradient.dim() or len(gradient) != len(weights):
        shape, count = list(gradient.shape), len(weights)
        raise ProbeError(
            f"an estimate needs samples in the first dimension, but the shape is {shape} for "
            f"{count} samples"
        )
    return gradient * weights.view(-1, *[1] * (gradient.dim() - 1))


def change_of(edit: Edit, call: Call, old: torch.Tensor, study: Study) -> torch.Tensor:
    """Return the change of each element of a tensor, at least in float32."""
    clean = study.clean.get(call)
    new = edit.new(old, call, None if clean is None else edit.led(clean), study.samples)
    edit.tally.add(call, old, new, edit.where(call.path, old, study.modules.heads))
    return widened(new) - widened(old)


def first_order(
    gradients: Gradients,
    changes: Mapping[Call, torch.Tensor],
    wanted: Sequence[Group],
    edit: Edit,
    study: Study,
) -> torch.Tensor:
    """Return the gradients times the changes, summed over each place, [samples, places]."""
    found = []
    for group in wanted:
        each = []
        for call in (call for call in changes if group.path in (None, call.path)):
            change = changes[call]
            gradient = gradients.get(call)
            total = torch.zeros_like(change) if gradient is None else widened(gradient) * change
            each.append(_by_place(total, call.path, group, edit, study))
        found.append(torch.stack(each).sum(0))
    return torch.cat(found, 1)


def _by_place(
    values: torch.Tensor, path: str, group: Group, edit: Edit, study: Study
) -> torch.Tensor:
    """Return the sums of values, [samples, ...], over each place, [samples, places]."""
    divisions = edit.divisions(path, values, study.modules.heads)
    dims = [each.dim for each in divisions.values()]
    for dim in range(1, values.dim()):
        if dim not in dims:
            values = values.sum(dim, keepdim=True)
    for name, each in divisions.items():
        if dims.count(each.dim) == 1 and each.size > 1:
            values = values.unflatten(each.dim, (each.count, each.size)).sum(each.dim + 1)
            divisions[name] = Division(each.dim, each.count, 1)
    sums = []
    for region in group.regions:
        where = mask(values.shape, divisions, [region], replicas=1, device=values.device)
        inside = values if where is None else torch.where(where, values, 0.0)
        sums.append(inside.flatten(1).sum(1))
    return torch.stack(sums, 1)

"""What a change does through receivers alone: path patching, and its estimate from a gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from comgra_decl.errors import ProbeError
from comgra_decl.hooks.probing.effects import (
    Effects,
    Gradients,
    Tapping,
    agree,
    can_repeat,
    changed_groups,
    first_order,
    gradients_of,
    together,
)
from comgra_decl.hooks.probing.measuring import Gauge
from comgra_decl.hooks.probing.passes import Call, Edit, Study
from comgra_decl.hooks.probing.paths import Paths, Route, receiver_groups
from comgra_decl.hooks.probing.places import Region, mask
from comgra_decl.spec.interventions import InterventionSpec


def routed(
    spec: InterventionSpec,
    edit: Edit,
    route: Route,
    study: Study,
    *,
    first: Sequence[Edit],
    gauge: Gauge,
) -> Effects:
    """Return the effects of a change in each place through each receiver.

    Returns:
        The places are all pairs, in the order of the changes.

    Raises:
        ProbeError: the change is not possible, or its effect cannot be measured.
    """
    senders = [r for group in changed_groups(spec, edit, study) for r in group.regions]
    receivers = [r for group in receiver_groups(spec, route, study) for r in group.regions]
    paths = Paths(edit, route, study, first)
    with torch.no_grad():
        with paths.without() as output:
            baseline = gauge(output)[0]
        count, values = spec.batch // study.samples.count, None
        if count > 2 and can_repeat([edit, *first], study):
            values = _many(paths, senders, receivers, gauge, count=count, baseline=baseline)
        if values is None:
            edit.tally.clear()
            route.tally.clear()
            values = baseline.new_zeros(len(baseline), len(senders), len(receivers))
            for i, sender in enumerate(senders):
                received = paths.sent([sender])
                for j in _reached_of(paths, received, receivers, None):
                    with paths.received(received, [receivers[j]]) as output:
                        values[:, i, j] = gauge(output)[0] - baseline
    return Effects(values.flatten(1), baseline)


def _reached_of(
    paths: Paths,
    received: Mapping[Call, torch.Tensor],
    receivers: Sequence[Region],
    copy: int | None,
) -> list[int]:
    """Return the receivers that a change reaches; the others have no effect."""
    reached = paths.reached(received, copy)
    return [
        j for j, r in enumerate(receivers) if (reached if r.path is None else r.path in reached)
    ]


def _many(
    paths: Paths,
    senders: Sequence[Region],
    receivers: Sequence[Region],
    gauge: Gauge,
    *,
    count: int,
    baseline: torch.Tensor,
) -> torch.Tensor | None:
    """Return the effects, [samples, senders, receivers], from passes with several copies.

    Returns:
        None if a model gives other results for a batch with several copies.
    """
    samples = len(baseline)
    found = baseline.new_zeros(samples, len(senders), len(receivers))
    for begin in range(0, len(senders), count - 1):
        here = senders[begin : begin + count - 1]
        copies = 1 + len(here)
        try:
            placed = [r._replace(replica=1 + i) for i, r in enumerate(here)]
            received = paths.sent(placed, copies=copies)
            if not begin and not _is_independent(paths, here, received, samples):
                return None
        except Exception:
            if begin:
                raise
            return None  # it may still work with one copy, which otherwise raises the same error
        pairs = [
            (i, j) for i in range(len(here)) for j in _reached_of(paths, received, receivers, 1 + i)
        ]

        def measured(
            some: Sequence[tuple[int, int]],
            places: Sequence[int],
            counted: bool,
            received: Mapping[Call, torch.Tensor] = received,
        ) -> torch.Tensor:
            sources, regions = [0] * (1 + len(some)), []
            for (i, j), at in zip(some, places, strict=True):
                sources[at] = 1 + i
                regions.append(receivers[j]._replace(replica=at))
            with paths.received(received, regions, sources=sources, counted=counted) as output:
                return gauge(output, len(sources))

        effects = together(pairs, measured, count=count, check=baseline)
        if effects is None:
            return None
        for k, (i, j) in enumerate(pairs):
            found[:, begin + i, j] = effects[:, k]
    return found


def _is_independent(
    paths: Paths, here: Sequence[Region], received: Mapping[Call, torch.Tensor], samples: int
) -> bool:
    """Return whether the receivers are the same if the copies are in reverse order."""
    copies = 1 + len(here)
    placed = [r._replace(replica=copies - 2 - i) for i, r in enumerate(here)]
    other = paths.sent(placed, copies=copies, counted=False)
    return all(
        agree(other[call].unflatten(0, (-1, samples)).flip(0).flatten(0, 1), value)
        for call, value in received.items()
    )


def estimated_paths(
    spec: InterventionSpec,
    edit: Edit,
    route: Route,
    study: Study,
    *,
    first: Sequence[Edit],
    gauge: Gauge,
) -> Effects:
    """Return estimates of the effects of a change in each place through each receiver.

    The estimate is the gradient of the measure at the receiver, times the change that reaches it,
    to first order (edge attribution patching, Syed et al. 2023, "Attribution patching outperforms
    automated circuit discovery"). The gradient of the measure is computed once. It then goes from
    each receiver along the path to the changed tensors.

    Raises:
        ProbeError: the measure has no gradient, or the change is not possible.
    """
    study.subject.check_gradients()
    tapping = Tapping(route.receivers)
    with torch.enable_grad(), study.changed(first, watch=tapping) as output:
        measures = gauge(output)[0]
        if not measures.requires_grad:
            raise ProbeError("the measure has no gradient with respect to the receivers")
        parameters = (p for p in study.subject.copy.module.parameters() if p.requires_grad)
        gradients = gradients_of(measures, tapping, [*parameters, *tapping.leaves])
    paths = Paths(edit, route, study, [each.uncounted() for each in first])
    with torch.no_grad():
        with paths.without():
            pass
        changes = paths.changes()
    wanted = changed_groups(spec, edit, study)
    receivers = [r for group in receiver_groups(spec, route, study) for r in group.regions]
    parts: dict[int, torch.Tensor] = {}
    for opened in {paths.open_modules(group.path) for group in wanted}:
        here = [k for k, group in enumerate(wanted) if paths.open_modules(group.path) == opened]
        inside = [edit.paths if (p := wanted[k].path) is None else [p] for k in here]
        sending = [path for each in inside for path in each]
        with paths.linked(sending) as (leaves, received):
            for k in here:
                found = [
                    torch.stack(
                        [
                            first_order(
                                _along(received, leaves, each, region, route, study),
                                changes,
                                [wanted[k]],
                                edit,
                                study,
                            )
                            for region in receivers
                        ],
                        2,
                    )
                    for each in gradients
                ]
                parts[k] = found[0] if len(found) == 1 else torch.stack([f.sum(0) for f in found])
    values = torch.cat([parts[k] for k in range(len(wanted))], 1)
    return Effects(values.flatten(1), measures.detach())


def _along(
    received: Mapping[Call, torch.Tensor],
    leaves: Mapping[Call, torch.Tensor],
    gradients: Gradients,
    region: Region,
    route: Route,
    study: Study,
) -> Gradients:
    """Return the gradients at the changed tensors, of what goes through one receiver."""
    tensors, given = [], []
    for call, tensor in received.items():
        gradient = gradients.get(call)
        if gradient is None or not tensor.requires_grad or region.path not in (None, call.path):
            continue
        divisions = route.receivers.divisions(call.path, tensor, study.modules.heads)
        where = mask(tensor.shape, divisions, [region], replicas=1, device=tensor.device)
        tensors.append(tensor)
        given.append(gradient if where is None else torch.where(where, gradient, 0.0))
    if not tensors:
        return {}
    found: Sequence[torch.Tensor | None] = torch.autograd.grad(
        tensors, [*leaves.values()], given, retain_graph=True, allow_unused=True
    )
    return {c: g for c, g in zip(leaves, found, strict=True) if g is not None}

"""Effects of changes on what a method such as `generate` returns, in one place at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.errors import ProbeError
from comgra_decl.hooks.probing.changed_calls import ChangedCalls
from comgra_decl.hooks.probing.effects import Group, changed_groups
from comgra_decl.hooks.probing.interventions import counted, listed, nothing
from comgra_decl.hooks.probing.passes import Call, Edit
from comgra_decl.hooks.probing.places import Modules, with_copies
from comgra_decl.hooks.probing.samples import call_named, widened
from comgra_decl.hooks.pytree import equal
from comgra_decl.hooks.tensors.capture import StepCapture
from comgra_decl.hooks.tensors.slots import Slot
from comgra_decl.records import EFFECT_PREFIX, INTERVENTION, PROBE_MODE, RawStep, StepInfo
from comgra_decl.spec.interventions import (
    OF_SEQUENCES,
    FunctionMeasure,
    InterventionSpec,
    intervention_type,
    needs_labels,
)
from comgra_decl.stats import Reducer

if TYPE_CHECKING:
    from comgra_decl.hooks.tensors.slots import SlotTable

_ANY_SIZE = 1 << 62


@dataclass(frozen=True)
class Called:
    """What a method has returned, and how long its sequence was.

    Attributes:
        output: what it returned.
        positions: the number of positions that its calls have computed; None if they have none.
    """

    output: Any
    positions: int | None


@dataclass(frozen=True)
class MethodEffect:
    """The effects of one intervention.

    Attributes:
        name: the intervention.
        facts: see `records.INTERVENTION`.
        effects: [samples] or, for a sweep, [samples, places].
    """

    name: str
    facts: dict[str, Any]
    effects: torch.Tensor

    @property
    def nothing(self) -> str | None:
        """A sentence about an intervention without any effect; None if it has one."""
        found = nothing(self.facts, swept=bool(self.facts["axes"]))
        return None if found is None else found.format(f"intervention {self.name!r}")

    def record(self, node: str, step: int, table: SlotTable) -> RawStep:
        """Return the record of the effects.

        Args:
            node: the node of the model.
            step: its step.
            table: assigns the ids of slots.
        """
        count = len(self.effects)
        capture = StepCapture(
            Reducer(histogram_elements=None, sample_count=count),
            max_value_elements=_ANY_SIZE,
            sample_count=count,
            followed=False,
        )
        capture.begin()
        capture.batch_size = count
        slot = Slot(lambda: node, "effect", pass_=EFFECT_PREFIX + self.name)
        capture.add(slot, self.effects, batch_dim=0, values=True)
        info = StepInfo(step, time.time(), intervention_type(self.name), PROBE_MODE)
        raw = capture.close(info, table)
        info.samples = [*range(count)]
        info.extra[INTERVENTION] = self.facts
        return raw


@dataclass(frozen=True)
class _Sought:
    """What the places of a sweep are found in; see `effects.groups`."""

    modules: Modules
    clean: Mapping[Call, torch.Tensor]


def problems_of(name: str, spec: InterventionSpec) -> list[str]:
    """Return what an intervention on a method cannot have, one sentence each."""
    where = f"interventions[{name!r}]"
    found = []
    if not isinstance(spec.measure, FunctionMeasure):
        found.append(
            f"{where}.measure: a method has no loss or logits of its own; name a function of what "
            "it returns, as in {_target_: my_project.measure}"
        )
    for given, key in ((spec.into, "into"), (spec.estimate, "estimate")):
        if given is not None:
            found.append(f"{where}.{key}: is possible for one call of the model, not for a method")
    changes = [(f"{where}.first[{i}]", change) for i, change in enumerate(spec.first)]
    for place, change in [*changes, (where, spec)]:
        if change.of_gradients:
            found.append(f"{place}.pass: a method has no gradients")
        if needs_labels(change.do):
            found.append(f"{place}.do: difference needs labels, which the call does not have")
    return found


def effects_on(
    name: str,
    spec: InterventionSpec,
    changes: ChangedCalls,
    call: Callable[[ChangedCalls], Called],
    *,
    samples: int,
) -> MethodEffect:
    """Return the effects of an intervention; each place is a call of the method.

    All calls begin in the same state, also of the generators.

    Args:
        name: the intervention.
        spec: its declaration, for which `problems_of` is empty.
        changes: makes its changes.
        call: calls the method.
        samples: the number of samples that it receives.

    Raises:
        ProbeError: a change is not possible, or the result cannot be measured.
        SpecError: a change is made nowhere.
    """

    def measured(output: Any) -> torch.Tensor:
        assert isinstance(spec.measure, FunctionMeasure)  # see `problems_of`
        return _measured(spec.measure, output, samples)

    with torch.no_grad():
        with changes.remembered():
            whole = call(changes)
            clean = measured(whole.output)
        *first, last = changes.edits
        sought = _Sought(changes.modules, _in_sequence(last, changes, whole.positions))
        if not spec.sweep:
            wanted: Sequence[Group] = []
            output = _changed(changes, None, call)
            changes.require()
            columns, same = [measured(output)], equal(output, whole.output)
            baseline = clean
        else:
            wanted = changed_groups(spec, last, sought)
            output = _changed(changes, first, call) if first else whole.output
            baseline = measured(output)
            columns = [
                measured(_changed(changes, changes.placed(region, counted=False), call))
                for group in wanted
                for region in group.regions
            ]
            changes.require()
            same = all(torch.equal(value, baseline) for value in columns)
    values = torch.stack([value - baseline for value in columns], 1)
    facts = {
        "measure": spec.measure.target if isinstance(spec.measure, FunctionMeasure) else "",
        "clean": clean.tolist(),
        "baseline": baseline.tolist(),
        "changes": [counted(edit.tally) for edit in changes.edits],
        "same": same,
        "axes": spec.sweep,
        "places": listed(wanted, spec.swept),
    }
    return MethodEffect(name, facts, values if spec.sweep else values[:, 0])


def _changed(
    changes: ChangedCalls,
    edits: Sequence[Edit] | None,
    call: Callable[[ChangedCalls], Called],
) -> Any:
    """Return what the method returns with changes; then restore the state of the copy."""
    try:
        with changes.made(changes.edits if edits is None else edits):
            return call(changes).output
    finally:
        changes.rewind()


def _in_sequence(
    edit: Edit, changes: ChangedCalls, positions: int | None
) -> dict[Call, torch.Tensor]:
    """Return tensors with the shapes that the changed ones would have for the whole sequence."""
    found = {}
    for call, tensor in changes.shapes.items():
        shape = [*tensor.shape]
        if positions is not None and call.role == edit.spec.role and call.path in edit.paths:
            divisions = edit.divisions(call.path, edit.led(tensor), changes.modules.heads)
            for name in (name for name in divisions if name in OF_SEQUENCES):
                dim = divisions[name].dim
                shape[dim if dim > edit.spec.batch_dim else dim - 1] = positions
        found[call] = torch.empty(shape, device="meta")
    return found


def _measured(measure: FunctionMeasure, output: Any, samples: int) -> torch.Tensor:
    found = call_named(measure, with_copies(output))
    if not isinstance(found, torch.Tensor) or found.shape != (samples,):
        shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise ProbeError(
            f"{measure.target} must return one number per sample, [{samples}], not {shape}"
        )
    return widened(found) if found.is_floating_point() else found.double()

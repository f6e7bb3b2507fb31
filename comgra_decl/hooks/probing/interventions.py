"""The interventions on one probe: checked before training, made at its records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import isnan
from typing import Any

import torch
from torch import nn

from comgra_decl.errors import ProbeError, SpecError, did_you_mean, reason_of
from comgra_decl.hooks.probing.backward_passes import BackwardPasses, measured_name
from comgra_decl.hooks.probing.changes import Recorded
from comgra_decl.hooks.probing.copying import CleanCopy, Watch
from comgra_decl.hooks.probing.effects import Group, changed_groups, estimated, swept
from comgra_decl.hooks.probing.measuring import Gauge
from comgra_decl.hooks.probing.passes import Call, Edit, Study, Tally
from comgra_decl.hooks.probing.path_effects import estimated_paths, routed
from comgra_decl.hooks.probing.paths import Paths, Route, receiver_groups
from comgra_decl.hooks.probing.places import EVERY_PARAMETER, Modules, Target
from comgra_decl.hooks.probing.samples import Samples
from comgra_decl.hooks.probing.subject import Subject
from comgra_decl.hooks.pytree import equal
from comgra_decl.spec.interventions import (
    ATTENTION,
    ChangeSpec,
    GradientMeasure,
    InterventionSpec,
    Objective,
    PartSpec,
    PlaceSpec,
    RecordedSpec,
)
from comgra_decl.spec.probes import probe_type

Recaller = Callable[[str, RecordedSpec, Call], Recorded]
"""Reads a tensor from a record of a run, given the type of execution and the call that stand for
what the spec leaves open. It raises a `ComgraError` if there is no such record."""

_SHOWN = 4


@dataclass(frozen=True)
class Made:
    """What an intervention has given.

    Attributes:
        facts: see `records.INTERVENTION`.
        effects: [samples] or, for a sweep, [samples, places]; None if they cannot be measured.
            There is only one row if something is measured that all samples share.
        gradients: those of the parameters, by `id`; None without a backward pass.
    """

    facts: dict[str, Any]
    effects: torch.Tensor | None
    gradients: Mapping[int, torch.Tensor | None] | None = None


class Interventions:
    """Makes the interventions on a probe.

    Args:
        declared: the interventions by name.
        warn: called once for each intervention that cannot be made, or that did nothing.
        tell: called with (intervention, sentence) about what the first one has changed.

    Attributes:
        recall: reads what other runs have recorded; None if that is not possible.
        nothing: for each intervention that has been made, why its newest record shows no effect,
            with "{}" for its name; None if it has one.
    """

    def __init__(
        self,
        declared: Mapping[str, InterventionSpec],
        *,
        warn: Callable[[str], None],
        tell: Callable[[str, str], None],
    ) -> None:
        self._declared = declared
        self._warn = warn
        self._tell = tell
        self._told: set[str] = set()
        self._over: set[str] = set()  # those that failed
        self._records = 0
        self._checked = False
        self._passes: tuple[Study, BackwardPasses] | None = None  # of the record in progress
        self.recall: Recaller | None = None
        self.nothing: dict[str, str | None] = {}

    # -- before training -----------------------------------------------------------------------

    def require(self, clean: CleanCopy, samples: Samples) -> None:
        """Try all changes once, before the program's first forward pass.

        Raises:
            SpecError: a pattern, a role or a part does not exist in the model; lists every
                problem.
        """
        if self._checked:
            return
        self._checked = True
        modules = Modules(clean)
        problems = [problem for name in self._declared for problem in self._missing(name, modules)]
        if not problems:
            study = self.study(Subject(clean, samples), labels=None)
            with suppress(Exception):  # reported when the probe itself runs
                study.observe()
            if study.output is not None:
                problems = [p for name in self._declared for p in self._rehearsed(name, study)]
            study.rewind()
        if problems:
            raise SpecError(problems)

    def _missing(self, name: str, modules: Modules) -> Iterator[str]:
        """Yield the problems with the names of modules and parameters in an intervention."""
        for where, change in self._changes(name):
            yield from modules.problems(change, where)
        spec, where = self._declared[name], f"comgra.interventions.{name}"
        if spec.into is not None:
            yield from modules.problems(spec.into, f"{where}.into")
            yield from modules.unmatched(spec.frozen, f"{where}.frozen")
        if isinstance(spec.measure, GradientMeasure):
            yield from _missing_measure(spec.measure, modules, f"{where}.measure")

    def _changes(self, name: str) -> Iterator[tuple[str, ChangeSpec]]:
        """Yield the changes of an intervention in their order, with their places in the spec."""
        spec, where = self._declared[name], f"comgra.interventions.{name}"
        for i, change in enumerate(spec.first):
            yield f"{where}.first[{i}]", change
        yield where, spec

    def _rehearsed(self, name: str, study: Study) -> Iterator[str]:
        """Yield the problems that appear if the changes are made."""
        spec = self._declared[name]
        edits, route = self._edits(name, study.modules), self._route(name, study.modules)
        received: Mapping[Any, torch.Tensor] = {}
        try:
            if spec.sweep:
                places = [r for g in changed_groups(spec, edits[-1], study) for r in g.regions]
                edits[-1] = replace(edits[-1], regions=places[:1])
            with torch.no_grad():
                received = _tried(spec, edits, route, study)
        except ProbeError as error:
            yield f"comgra.interventions.{name}: {error}"
            return
        except torch.OutOfMemoryError:
            return
        except Exception as error:
            yield f"comgra.interventions.{name}: the pass fails ({type(error).__name__}: {error})"
            return
        for (where, change), edit in zip(self._changes(name), edits, strict=True):
            if not edit.tally.tensors:
                gone = change.of_gradients and _is_there(change, edit.paths, study)
                why = _no_gradient if gone else _never
                yield why(where, change, edit.paths, study)
        if route is not None and not received:
            where = f"comgra.interventions.{name}.into"
            yield _never(where, route.receivers.spec, route.receivers.paths, study)

    def _edits(self, name: str, modules: Modules) -> list[Edit]:
        spec = self._declared[name]
        recall = None if self.recall is None else partial(self.recall, probe_type(spec.of))
        return [
            Edit(change, _parts(change), modules.selected(change), recall=recall)
            for change in (*spec.first, spec)
        ]

    def _route(self, name: str, modules: Modules) -> Route | None:
        """Return where an intervention's change may go; None: everywhere."""
        spec = self._declared[name]
        if spec.into is None:
            return None
        parts, paths = spec.swept_parts_of_receivers, modules.selected(spec.into)
        return Route(Target(spec.into, parts, paths), modules.matching(spec.frozen))

    # -- at a record ---------------------------------------------------------------------------

    def study(self, subject: Subject, *, labels: Sequence[str] | None) -> Study:
        """Return a study of the samples; the unchanged pass comes first."""
        modules = Modules(subject.copy)
        wanted: dict[str, set[str]] = {}
        for name, spec in self._declared.items():
            into = [] if spec.into is None else [spec.into]
            for place in [*(change for _, change in self._changes(name)), *into]:
                for path in () if place.of_parameters else modules.selected(place):
                    wanted.setdefault(path, set()).add(place.role)
        return Study(subject, wanted, labels=labels)

    def due(self) -> list[str]:
        """Return the interventions to make at a record of the probe."""
        number = self._records
        self._records += 1
        return [
            name
            for name, spec in self._declared.items()
            if name not in self._over and number % spec.every == 0
        ]

    @property
    def follows_gradients(self) -> bool:
        """Whether any intervention changes or measures gradients."""
        return any(spec.needs_gradients for spec in self._declared.values())

    def unchanged_gradients(
        self, study: Study, watch: Watch
    ) -> Mapping[int, torch.Tensor | None] | None:
        """Make a pass with gradients but without changes, which `watch` records.

        Returns:
            The gradients of the parameters, by `id`; None if there are none, in which case each
            intervention that needs them gives the reason.
        """
        try:
            return self._backward(study).unchanged(None, watch).gradients
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) and not study.subject.copy.moved:
                raise
            return None

    def _backward(self, study: Study) -> BackwardPasses:
        """Return the passes with gradients of a record."""
        if self._passes is None or self._passes[0] is not study:
            specs = {n: spec for n, spec in self._declared.items() if spec.needs_gradients}
            objective: Objective = next(iter(specs.values())).objective  # the same for all
            edits = [
                edit.uncounted()
                for name in specs
                for edit in self._edits(name, study.modules)
                if edit.spec.of_gradients
            ]
            self._passes = study, BackwardPasses(study, objective, edits)
        return self._passes[1]

    def release(self) -> None:
        """Release what belongs to the record that has ended."""
        self._passes = None

    def is_swept(self, name: str) -> bool:
        """Return whether an intervention stores only its effects."""
        return bool(self._declared[name].sweep)

    def needs_gradients(self, name: str) -> bool:
        """Return whether an intervention changes or measures gradients."""
        return self._declared[name].needs_gradients

    def stores_values(self, name: str) -> bool:
        """Return whether the record of an intervention contains all values."""
        return self._declared[name].values

    def made(self, name: str, study: Study, watch: Watch | None) -> Made | None:
        """Make an intervention; return None if it cannot be made, which is reported.

        Args:
            name: the intervention.
            study: the samples, after the unchanged pass.
            watch: observes the calls, unless the intervention is swept.

        Raises:
            OutOfMemoryError: the device has too little memory, and the copy may move to the CPU.
        """
        try:
            spec = self._declared[name]
            edits, route = self._edits(name, study.modules), self._route(name, study.modules)
            if spec.needs_gradients:
                passes = self._backward(study)
                if spec.sweep:
                    made = _swept_gradients(spec, edits, passes, study)
                else:
                    made = _changed_gradients(spec, edits, passes, watch)
            elif spec.sweep:
                made = _swept(spec, edits, route, study)
            else:
                made = _whole(spec, edits, route, study, watch)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) and not study.subject.copy.moved:
                raise
            self._over.add(name)
            self._warn(f"intervention {name!r} is not made: {reason_of(error)}")
            return None
        self._report(name, spec, made)
        return made

    def place(self, name: str, study: Study) -> tuple[str, str]:
        """Return the path of the first module that an intervention changes, and the role there."""
        spec = self._declared[name]
        return study.modules.selected(spec)[0], spec.role

    def _report(self, name: str, spec: InterventionSpec, made: Made) -> None:
        """Say once what has changed, and if nothing has."""
        facts, whose = made.facts, f"intervention {name!r}"
        if name not in self._told:
            self._told.add(name)
            self._tell(name, f"{whose} changed {_amount(facts['changes'])}")
            if "unmeasured" in facts and "measure" in spec.model_fields_set:
                self._warn(f"{whose} has no effects: {facts['unmeasured']}")
            missing = [i for i, value in enumerate(facts.get("clean", ())) if isnan(value)]
            if missing:
                self._warn(
                    f"{whose}: {_samples(missing)} no measure (NaN), even without the change"
                )
        idle = nothing(facts, swept=bool(spec.sweep))
        self.nothing[name] = idle
        if idle is not None:
            self._warn(idle.format(whose))


def nothing(facts: Mapping[str, Any], *, swept: bool) -> str | None:
    """Return a sentence about a change without any effect; None if there is none.

    It contains "{}" for the name of the intervention.

    Args:
        facts: see `records.INTERVENTION`.
        swept: whether the change was made in one place at a time.
    """
    changes = facts["changes"]
    idle = [i for i, change in enumerate(changes) if not change["changed"]]
    if len(idle) == len(changes):
        return "{} did nothing: every element kept its value"
    if idle:
        which = ", ".join(str(i + 1) for i in idle)
        return f"change {which} of {{}} did nothing: every element kept its value"
    if facts.get("received", {}).get("changed") == 0:
        return (
            "{} did nothing: no receiver has another value, because no path leads to one that "
            "avoids all other modules in `select`, `into` and `frozen`"
        )
    if facts["same"]:
        result = "the model's output is the same"
        if facts.get("gradients"):
            result += ", and so are the gradients of all parameters and inputs"
        result = "no place has an effect" if swept else result
        return f"{{}} did nothing: it changed {_amount(changes)}, but {result}"
    return None


def _tried(
    spec: InterventionSpec, edits: Sequence[Edit], route: Route | None, study: Study
) -> Mapping[Any, torch.Tensor]:
    """Make all changes once; return what the receivers of a path have received."""
    if spec.needs_gradients:
        measure = spec.measure if isinstance(spec.measure, GradientMeasure) else None
        remembered = [edit.uncounted() for edit in edits if edit.spec.of_gradients]
        BackwardPasses(study, None, remembered).made(edits, measure)
        return {}
    if route is None:
        with study.changed(edits):
            return {}
    receiver_groups(spec, route, study)
    paths = Paths(edits[-1], route, study, edits[:-1])
    with paths.without():
        pass
    received = paths.sent(edits[-1].regions)
    with paths.received(received, None):
        return received


def _parts(change: ChangeSpec) -> dict[str, PartSpec]:
    return change.swept_parts if isinstance(change, InterventionSpec) else change.parts


def _never(where: str, change: PlaceSpec, paths: Sequence[str], study: Study) -> str:
    """Explain why no tensor was found."""
    shown = ", ".join(path or "the model" for path in paths[:_SHOWN])
    more = ", ..." if len(paths) > _SHOWN else ""
    called = [path for path in paths if path in study.seen]
    if not called and change.role != ATTENTION:
        inert = next((path for path in paths if _is_container(study.modules.by_path[path])), None)
        advice = ""
        if inert is not None:
            kind = type(study.modules.by_path[inert]).__name__
            advice = f"; {inert} is a {kind}, so select its members, as in '{inert}.*'"
        return f"{where}.select: none of the selected modules ({shown}{more}) is called{advice}"
    if change.role == ATTENTION:
        return (
            f"{where}.role: no selected module ({shown}{more}) computes an attention pattern by "
            "softmax over [samples, heads, queries, keys] or by scaled_dot_product_attention"
        )
    roles = sorted({role for path in called for role in study.seen[path]})
    if change.iteration is not None and change.role in {*roles, "output", "input"}:
        return f"{where}.iteration: no selected module is called {change.iteration + 1} times"
    return (
        f"{where}.role: no call of a selected module ({shown}{more}) has {change.role!r}; it has "
        f"{', '.join(roles)}{did_you_mean(change.role, roles)}"
    )


def _missing_measure(measure: GradientMeasure, modules: Modules, where: str) -> Iterator[str]:
    """Yield what is wrong with the names in a measure of a gradient."""
    module = modules.by_path.get(measure.gradient)
    if module is None:
        near = did_you_mean(measure.gradient, modules.by_path)
        yield f"{where}.gradient: there is no module {measure.gradient!r}{near}"
    elif measure.of_parameters and measure.role != EVERY_PARAMETER:
        held = [name for name, tensor in module._parameters.items() if tensor is not None]
        if measure.role not in held:
            there = ", ".join(held) or "none"
            yield (
                f"{where}.role: {measure.gradient or 'the model'} has no parameter "
                f"{measure.role!r}; it has {there}{did_you_mean(measure.role, held)}"
            )


def _is_there(change: PlaceSpec, paths: Sequence[str], study: Study) -> bool:
    """Return whether the selected modules have the tensor whose gradient is to be changed."""
    return change.of_parameters or any(
        Call(path, change.role, change.iteration or 0) in study.clean for path in paths
    )


def _no_gradient(where: str, change: PlaceSpec, paths: Sequence[str], _study: Study) -> str:
    """Explain why no gradient was found."""
    shown = ", ".join(path or "the model" for path in paths[:_SHOWN])
    more = ", ..." if len(paths) > _SHOWN else ""
    return (
        f"{where}.pass: no gradient reaches {change.role!r} of a selected module ({shown}{more}): "
        "the model's output does not depend on it, or it is frozen or detached"
    )


def _is_container(module: nn.Module) -> bool:
    """Return whether a module only holds others, such as a ModuleList."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _samples(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN])) + (", ..." if len(numbers) > _SHOWN else "")
    return f"sample {shown} has" if len(numbers) == 1 else f"samples {shown} have"


def _amount(changes: Sequence[Mapping[str, Any]]) -> str:
    texts = [
        f"{c['changed']:,} of {c['elements']:,} elements in {c['tensors']} "
        f"tensor{'s' if c['tensors'] != 1 else ''} by up to {c['largest']:.3g}"
        for c in changes
    ]
    return ", then ".join(texts)


def _whole(
    spec: InterventionSpec,
    edits: Sequence[Edit],
    route: Route | None,
    study: Study,
    watch: Watch | None,
) -> Made:
    """Make all changes in one pass, which `watch` records."""
    facts: dict[str, Any] = {}
    effects = None
    with torch.no_grad(), _changed(edits, route, study, watch) as output:
        same = equal(output, study.output)
        try:
            gauge = Gauge(spec.objective, study.subject.samples, study.output)
            clean, value = gauge(study.output)[0], gauge(output)[0]
            effects = value - clean
            facts = {"measure": gauge.name, "clean": clean.tolist(), "baseline": clean.tolist()}
        except ProbeError as error:
            facts = {"unmeasured": str(error)}
    facts |= {"changes": [counted(edit.tally) for edit in edits], "same": same}
    if route is not None:
        facts["received"] = counted(route.tally)
    return Made({**facts, "axes": [], "places": []}, effects)


@contextmanager
def _changed(
    edits: Sequence[Edit], route: Route | None, study: Study, watch: Watch | None
) -> Iterator[Any]:
    """Make a pass with changes, of which the last one may reach only receivers."""
    if route is None:
        with study.changed(edits, watch=watch) as output:
            yield output
        return
    paths = Paths(edits[-1], route, study, edits[:-1])
    with paths.without():
        pass
    with paths.received(paths.sent(None), None, watch=watch) as output:
        yield output


def _swept(
    spec: InterventionSpec, edits: Sequence[Edit], route: Route | None, study: Study
) -> Made:
    """Return the effects of the last change in each place, with the others always made."""
    *first, edit = edits
    gauge = Gauge(spec.objective, study.subject.samples, study.output)
    with torch.no_grad():
        clean = gauge(study.output)[0]
    if route is None:
        method = swept if spec.estimate is None else estimated
        found = method(spec, edit, study, first=first, gauge=gauge)
    else:
        way = routed if spec.estimate is None else estimated_paths
        found = way(spec, edit, route, study, first=first, gauge=gauge)
    facts = {
        "measure": gauge.name,
        "clean": clean.tolist(),
        "baseline": found.baseline.tolist(),
        "changes": [counted(each.tally) for each in edits],
        "same": not bool(found.values.any()),
        "axes": spec.sweep,
        "places": listed(changed_groups(spec, edit, study), spec.swept),
    }
    if route is not None:
        facts["into"] = listed(receiver_groups(spec, route, study), spec.swept_of_receivers)
        if spec.estimate is None:
            facts["received"] = counted(route.tally)
    return Made(facts, found.values)


def _changed_gradients(
    spec: InterventionSpec,
    edits: Sequence[Edit],
    passes: BackwardPasses,
    watch: Watch | None,
) -> Made:
    """Make all changes in one pass with gradients, which `watch` records."""
    measure = spec.measure if isinstance(spec.measure, GradientMeasure) else None
    unchanged = passes.unchanged(measure)
    made = passes.made(edits, measure, watch)
    facts: dict[str, Any] = {"gradients": True, "same": made.equals(unchanged)}
    effects, gauge = None, passes.gauge
    assert gauge is not None  # an intervention has an objective
    if measure is not None:
        assert unchanged.measured is not None
        assert made.measured is not None
        name, clean, value = measured_name(measure, gauge.name), unchanged.measured, made.measured
    elif all(edit.spec.of_gradients for edit in edits):
        facts["unmeasured"] = (
            "a change of gradients leaves the model's output as it is; measure a gradient, as in "
            "`measure: {gradient: blocks.0, role: weight}`"
        )
    else:
        name, clean, value = gauge.name, gauge(unchanged.output)[0], gauge(made.output)[0]
    if "unmeasured" not in facts:
        effects = value - clean
        facts |= {"measure": name, "clean": clean.tolist(), "baseline": clean.tolist()}
    facts["changes"] = [counted(edit.tally) for edit in edits]
    return Made({**facts, "axes": [], "places": []}, effects, made.gradients)


def _swept_gradients(
    spec: InterventionSpec,
    edits: Sequence[Edit],
    passes: BackwardPasses,
    study: Study,
) -> Made:
    """Return the effects on a gradient of the last change in each place, one pass for each."""
    measure, gauge, (*first, edit) = spec.measure, passes.gauge, edits
    assert isinstance(measure, GradientMeasure)  # checked in the spec
    assert gauge is not None
    clean = passes.unchanged(measure).measured
    baseline = passes.made(first, measure).measured
    assert clean is not None
    assert baseline is not None
    again = [each.uncounted() for each in first]
    wanted = changed_groups(spec, edit, study)
    columns = []
    for region in (region for group in wanted for region in group.regions):
        value = passes.made([*again, replace(edit, regions=[region])], measure).measured
        assert value is not None
        columns.append(value - baseline)
    values = torch.stack(columns, 1)
    facts = {
        "gradients": True,
        "measure": measured_name(measure, gauge.name),
        "clean": clean.tolist(),
        "baseline": baseline.tolist(),
        "changes": [counted(each.tally) for each in edits],
        "same": not bool(values.any()),
        "axes": spec.sweep,
        "places": listed(wanted, spec.swept),
    }
    return Made(facts, values)


def listed(found: Iterable[Group], names: Sequence[str]) -> list[list[Any]]:
    """Return the places of a sweep in the form of `records.INTERVENTION`."""
    return [[group.path, *(group.swept[name] for name in names)] for group in found]


def counted(tally: Tally) -> dict[str, Any]:
    """Return what a change has changed, in the form of `records.INTERVENTION`."""
    return {
        "tensors": tally.tensors,
        "elements": tally.elements,
        "changed": tally.changed,
        "largest": tally.largest,
    }

"""One probe: what it copies, when it runs, and what its record contains."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from comgra_decl.errors import ProbeError, SpecError, reason_of, wrong_spec
from comgra_decl.hooks.probing.checks import checked, declared_mask
from comgra_decl.hooks.probing.copying import CleanCopy, NotReadyError, unwrapped
from comgra_decl.hooks.probing.methods import drawn
from comgra_decl.hooks.probing.places import Modules
from comgra_decl.hooks.probing.samples import FirstBatch, KeptSamples, Samples, given_samples
from comgra_decl.hooks.probing.seclusion import Autocast, secluded
from comgra_decl.hooks.probing.subject import Drawn, Subject
from comgra_decl.hooks.pytree import first_batch_size, tensors_in
from comgra_decl.hooks.schedule.allowance import Allowance
from comgra_decl.hooks.schedule.countdown import Countdown
from comgra_decl.hooks.tensors.boundaries import input_role
from comgra_decl.hooks.tensors.capture import StepCapture
from comgra_decl.hooks.tensors.categories import Categories
from comgra_decl.hooks.tensors.recorder import TensorRecorder, Wanted
from comgra_decl.hooks.tensors.slots import Slot
from comgra_decl.records import (
    EFFECT_PREFIX,
    INTERVENTION,
    PICTURE_PREFIX,
    PICTURES,
    PROBE_MODE,
    PROBE_SAMPLES,
    RawStep,
    StepInfo,
)
from comgra_decl.spec.interventions import intervention_type
from comgra_decl.spec.probes import probe_type
from comgra_decl.stats import Reducer
from comgra_decl.torch_private import without_functions

if TYPE_CHECKING:
    from torch import nn

    from comgra_decl.hooks.plans import ModulePlan, TopPlan
    from comgra_decl.hooks.probing.dictionaries import Dictionaries
    from comgra_decl.hooks.probing.interventions import Interventions, Made, Recaller
    from comgra_decl.hooks.probing.passes import Study
    from comgra_decl.hooks.tensors.slots import SlotTable
    from comgra_decl.spec import Spec
    from comgra_decl.spec.pictures import PictureSpec

_ANY_SIZE = 1 << 62
"""A probe stores tensors of any size, because its samples are few and were chosen for
inspection."""

_PATIENCE = 3

_NEVER = (
    "none of the first {} recorded steps called {} with a batch of samples, so this probe has no "
    "record yet"
)

_FULL = "{} lacks memory for passes of the copy, so the copy is on the CPU"

_SHARED = (
    "Python cannot copy some objects in the model's attributes, of type {}, so the copy uses those "
    "of the program"
)

_OTHERS = (
    "its samples are not those of the earlier sessions, so that records before and after this step "
    "cannot be compared: {}"
)

_TIME_FIRST = (
    "{path} ({kind} with batch_first=False) takes the first dimension, {count}, for time, and the "
    "probe takes it for the samples. If the model receives [time, samples, ...], its records and "
    "effects mix samples: let it receive [samples, time, ...], and transpose in `forward`"
)

InputSlot = Callable[[str, int], Slot]
"""Returns the slot of an input of a model, by role and iteration."""


@dataclass(frozen=True)
class Pending:
    """What the probe needs to run at a step, once the step has been recorded.

    Attributes:
        copy: the model as it was when its forward pass began.
        plan: the plan of the model, whose slots the record fills.
        autocast: the state of autocast at that time.
        iteration: the index of this model in its step, as counted for inputs.
        seconds: how long copying took.
    """

    copy: CleanCopy
    plan: TopPlan
    autocast: Autocast
    iteration: int
    seconds: float


class Probe:
    """Passes the same samples through a copy of the model at recorded steps.

    Args:
        name: its name in the spec.
        spec: the spec of the run.
        input_slot: returns the slots of the model's inputs.
        warn: called once for each missing record or picture, with the reason.
        say: receives the budget's choices.
        tell: receives what the interventions change.
        check: receives numbers about the pictures of each record; see `records.PICTURE_CHECKS`.

    Attributes:
        pending: set from the first model call of a step until its end, if the probe is due.
        earlier: the samples of earlier sessions of a resumed run, or why they cannot be used.
    """

    def __init__(
        self,
        name: str,
        spec: Spec,
        *,
        input_slot: InputSlot,
        warn: Callable[[str], None],
        say: Callable[[str, str], None],
        tell: Callable[[str, str], None],
        check: Callable[[dict[str, Any]], None],
    ) -> None:
        self.name = name
        self.pending: Pending | None = None
        self.earlier: KeptSamples | str | None = None
        self._spec = own = spec.probes[name]
        self._pictures = {k: p for k, p in spec.pictures.items() if p.of == name}
        self._interventions = _interventions(name, spec, warn=warn, tell=tell)
        self._places: dict[str, tuple[str, str]] = {}
        self._dictionaries = _dictionaries(name, spec)
        self._check = check
        self._mask: torch.Tensor | None = None
        self._input_slot = input_slot
        self._report = warn
        self._kept = False  # whether a record of this session contains the samples
        self._began = False  # whether there were any samples to put through a copy
        self._over = False  # whether the model cannot be probed
        self._checked = False  # whether the modules that pictures select are known to exist
        self._times = False  # whether a model with time in the first dimension has been reported
        self._shares = False  # whether the copy's shared objects have been reported
        self._host = False  # whether the device has too little memory for the copy's passes
        self._steps = 0  # recorded training steps so far
        self._countdown = Countdown(own.schedule, clock=time.monotonic)
        self._allowance = Allowance(own.schedule.budget, say=say, whose=probe_type(name))
        self._samples: Samples | None = None
        self._first: FirstBatch | None = None  # until the classes of its samples are known
        self._of_loss, self._by = self._finders()
        self._slots: dict[tuple[str, str, str], Slot] = {}
        histogram = None if spec.histogram is None else spec.histogram.elements
        self._capture = StepCapture(
            Reducer(histogram_elements=histogram, sample_count=own.samples.count),
            max_value_elements=_ANY_SIZE,
            sample_count=own.samples.count,
            followed=False,
        )
        self._recorder = TensorRecorder(on_fault=_raise)

    def _finders(self) -> tuple[Categories, Categories | None]:
        """Return the finders of the classes and the categories of the first batch."""
        by = self._spec.samples.by
        of_loss = Categories("target", warn=lambda _: None, expected=False)
        apart = by is not None and by != "target"
        return of_loss, Categories(by, warn=self._warn, expected=True) if apart else None

    @property
    def places(self) -> dict[str, tuple[str, str]]:
        """The node and the role of the first tensor that each intervention changes."""
        return self._places

    @property
    def nothing(self) -> Mapping[str, str | None]:
        """Which interventions did nothing; see `Interventions`."""
        return {} if self._interventions is None else self._interventions.nothing

    def recall(self, recaller: Recaller) -> None:
        """Let interventions take values from records of other runs."""
        if self._interventions is not None:
            self._interventions.recall = recaller

    # -- during a step -------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether the probe runs at the step in progress if that step is recorded."""
        due = not self._over and self.pending is None and self._countdown.due(self._steps)
        return due and not self._allowance.indebted(time.perf_counter())

    def enter(
        self,
        module: nn.Module,
        plan: TopPlan,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        iteration: int,
        single: bool,
    ) -> None:
        """Copy a model that is about to be called, and keep the arguments of its first call.

        Args:
            module: the model.
            plan: its plan.
            args: the positional arguments of the call.
            kwargs: its keyword arguments.
            iteration: as in `Pending`.
            single: whether the call is no part of a training, which a wrong spec ends.

        Raises:
            SystemExit: a pattern of a picture or an intervention matches nothing.
        """
        if self._spec.model not in (None, plan.top.label):
            return
        if not first_batch_size(args, kwargs):  # a parametrization, which computes a parameter
            return
        began = time.perf_counter()
        parts = ((part.path, part.module()) for part in plan.parts)
        paths = {id(part): path for path, part in parts if part is not None}
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        autocast = Autocast.now(device.type)
        try:
            with secluded(device):
                copy = self._copied(module, paths)
                if self._samples is None and self._first is None:
                    self._mask = declared_mask(self._spec.mask)
                    self._take_samples(module, args, kwargs, copy.device)
                if self._pictures and not (self._checked or single):
                    self._checked = True
                    _require_modules(self._pictures, copy)
                if self._interventions is not None:
                    self._require(self._interventions, copy, autocast)
        except Exception as error:
            self._failed(error, single=single)
            return
        if copy.shared and not self._shares:
            self._shares = True
            self._warn(_SHARED.format(", ".join(copy.shared)))
        if copy.moved and not self._host:
            self._warn(f"{device} lacks memory for a copy of the model, so the copy is on the CPU")
        took = time.perf_counter() - began
        self.pending = Pending(copy, plan, autocast, iteration, took)

    def _copied(self, module: nn.Module, paths: Mapping[int, str]) -> CleanCopy:
        """Return a copy of the model with the features of its dictionaries."""
        copy = CleanCopy(module, paths, host=self._host)
        if self._dictionaries is not None:
            self._dictionaries.attach(copy)
        return copy

    def _take_samples(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        if self._spec.batch is not None:
            like = _by_name(module, args, kwargs)
            self._samples = given_samples(self._spec, device, like=like, warn=self._warn)
            return
        earlier, self.earlier = self.earlier, None
        if isinstance(earlier, KeptSamples):
            try:
                self._samples = earlier.again(args, kwargs)
                return
            except ProbeError as error:
                earlier = str(error)
        if earlier is not None:
            self._warn(_OTHERS.format(earlier))
        self._first = FirstBatch(args, kwargs)
        for finder in self._finding:
            finder.restart()
            finder.enter(module, args, kwargs, self._first.size)

    def _require(self, interventions: Interventions, copy: CleanCopy, autocast: Autocast) -> None:
        """Check the interventions on samples whose classes are not known yet."""
        samples = self._samples
        if samples is None:
            assert self._first is not None  # just taken
            samples = self._first.chosen(self._spec.samples.count, by=None, classes=None)
        copy.set_mode(_TRAINING[self._spec.mode])
        with _under(autocast, copy):
            interventions.require(copy, samples)

    @property
    def _finding(self) -> list[Categories]:
        """The finders that are still searching for the classes of the first batch."""
        if self._first is None:
            return []
        return [finder for finder in (self._of_loss, self._by) if finder is not None]

    def called(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], size: int | None
    ) -> None:
        """Search for the classes of the first batch in another call, which may be a loss."""
        for finder in self._finding:
            finder.enter(module, args, kwargs, size)

    def left(self, output: Any) -> None:
        """Search for the categories of the first batch in a model's output."""
        for finder in self._finding:
            finder.leave(output)

    def loss(self, loss: torch.Tensor) -> None:
        """Search for the classes of the first batch in the graph of a loss."""
        for finder in self._finding:
            finder.loss(loss)

    def drop(self) -> None:
        """Forget the step, which is not recorded."""
        if self.pending is not None:
            self.pending.copy.close()
            self.pending = None
            self._first = None

    def _warn(self, text: str) -> None:
        self._report(f"probe {self.name!r}: {text}")

    def _failed(self, error: Exception, *, single: bool) -> None:
        """Handle a copy that could not be made; a wrong spec ends a training."""
        if isinstance(error, NotReadyError):
            return
        if not isinstance(error, SpecError):
            self._refuse(reason_of(error))
        elif single:
            self._refuse("; ".join(error.problems))
        else:
            raise SystemExit(wrong_spec(error)) from error

    def _refuse(self, reason: str) -> None:
        self._over = True
        self._first = None
        self._warn(f"{reason.removesuffix('.')}. The run has no records from this probe")

    def _report_absence(self) -> None:
        if not (self._began or self._over):
            self._warn(_NEVER.format(self._steps, self._spec.model or "a model"))

    def finish(self) -> None:
        """Report that there is no record at the end of a run that was too short to do so before."""
        if 0 < self._steps < _PATIENCE:
            self._report_absence()

    # -- after a recorded step -----------------------------------------------------------------

    def ended(self, info: StepInfo, table: SlotTable) -> Iterator[RawStep]:
        """Run the probe if it is due; yield its record, and those of its interventions.

        Args:
            info: the record of the training step.
            table: assigns the ids of slots.
        """
        number, pending, self.pending = self._steps, self.pending, None
        self._steps += 1
        if pending is None:
            if self._steps == _PATIENCE:
                self._report_absence()
            return
        self._began = True
        began = time.perf_counter()
        records: list[RawStep] | None = []
        try:
            records = self._recorded(pending, info, table)
            if records is None:
                pending = self._moved(pending)
                records = self._recorded(pending, info, table)
        except ProbeError as error:
            self._refuse(str(error))
        except Exception as error:
            self._refuse(f"the copy of the model failed ({type(error).__name__}: {error})")
        finally:
            self._capture.drop()
            if self._interventions is not None:
                self._interventions.release()
            pending.copy.close()
            cost = pending.seconds + time.perf_counter() - began
            self._countdown.recorded(number)
            self._allowance.charge(began - pending.seconds, cost, step=0.0)
            self._allowance.correct(0.0, cost=cost)
        yield from records or ()

    def _recorded(self, pending: Pending, info: StepInfo, table: SlotTable) -> list[RawStep] | None:
        """Return the records; None if the device has too little memory, and the CPU may have it."""
        copy = pending.copy
        with secluded(copy.device):
            subject = Subject(copy, self._chosen())
            copy.set_mode(_TRAINING[self._spec.mode])
            try:
                return [*self._records(pending, subject, info, table)]
            except torch.OutOfMemoryError:
                if copy.moved:
                    raise
            subject.rewind()
        return None

    def _moved(self, pending: Pending) -> Pending:
        """Move the copy to the CPU, where further copies are made at once."""
        self._capture.drop()
        with secluded(pending.copy.device):
            copy = CleanCopy(pending.copy.module, pending.copy.paths, host=True)
        pending.copy.close()
        self._host = True
        self._warn(_FULL.format(pending.copy.device))
        return replace(pending, copy=copy)

    def _records(
        self,
        pending: Pending,
        subject: Subject,
        info: StepInfo,
        table: SlotTable,
    ) -> Iterator[RawStep]:
        samples, study = subject.samples, None
        if self._interventions is not None:
            study = self._interventions.study(subject, labels=samples.labels)
            subject.rewind = study.rewind
        elif self._pictures or subject.copy.device.type != "cpu":  # whose memory may not suffice
            from comgra_decl.hooks.probing.passes import Rewind

            subject.rewind = Rewind(subject.copy)
        self._begin(samples)
        with _under(pending.autocast, subject.copy):
            facts = self._run(pending, subject, study)
        extra: dict[str, Any] = {PICTURES: facts} if facts else {}
        if self._keeps_inputs:
            self._kept = True
            classes = None if samples.classes is None else samples.classes.tolist()
            declared = self._spec.samples.model_dump(mode="json")
            extra[PROBE_SAMPLES] = {"declared": declared, "classes": classes}
        yield self._closed(probe_type(self.name), samples, extra, info, table)
        if self._interventions is None or study is None:
            return
        for name in self._interventions.due():
            self._begin(samples)
            try:
                with _under(pending.autocast, subject.copy):
                    made = self._intervene(name, self._interventions, study, pending)
            except torch.OutOfMemoryError:  # the record of the probe is already complete
                self._host = True
                self._warn(
                    f"{_FULL.format(subject.copy.device)} from the next record on. Until "
                    f"then, there is no intervention {name!r}"
                )
                return
            if made is not None:
                extra = {INTERVENTION: made.facts}
                yield self._closed(intervention_type(name), samples, extra, info, table)

    @property
    def _keeps_inputs(self) -> bool:
        """Whether the next record contains the values of the samples, for a later session."""
        return self._spec.batch is None and (self._spec.values or not self._kept)

    def _begin(self, samples: Samples) -> None:
        self._capture.begin()
        self._capture.batch_size = len(samples)
        self._capture.backwards.current = "grad"  # the pass of all gradients of the copy

    def _closed(
        self,
        type_: str,
        samples: Samples,
        extra: dict[str, Any],
        info: StepInfo,
        table: SlotTable,
    ) -> RawStep:
        own = StepInfo(info.step, info.time, type_, PROBE_MODE)
        raw = self._capture.close(own, table)
        own.samples = samples.places
        if samples.labels:
            own.extra["labels"] = samples.labels
        own.extra.update(extra)
        return raw

    def _chosen(self) -> Samples:
        """Return the samples, which are chosen when the probe's first step ends."""
        if self._samples is None:
            assert self._first is not None  # taken with the first copy
            classes, by = self._of_loss.take(), None if self._by is None else self._by.take()
            found = None if classes is None else classes()
            of_by = found if self._spec.samples.by == "target" else by and by()
            self._samples = self._first.chosen(self._spec.samples.count, by=of_by, classes=found)
            self._first = None
        return self._samples

    def _run(self, pending: Pending, subject: Subject, study: Study | None) -> dict[str, Any]:
        """Pass the samples through the copy, read its tensors, and make the pictures."""
        keeps = self._spec.values or self._keeps_inputs
        reading = self._reading(pending, subject, values=self._spec.values, inputs=keeps)
        if study is not None:
            study.observe(reading)
            self._read_unchanged_gradients(pending, subject, study)
        elif self._pictures:
            subject.observe(reading)
        else:
            args, kwargs = subject.samples.to(subject.copy.device)
            with torch.no_grad():
                subject.copy.run(args, kwargs, watch=reading)
        facts: dict[str, Any] = {}
        made: dict[str, Drawn] = {}
        refused: dict[str, list[str]] = {}
        for name, picture in self._pictures.items():
            try:
                result = drawn(picture, subject)
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError) and not subject.copy.moved:
                    raise
                reason = reason_of(error)
                facts[name] = {"method": str(picture.method), "refused": reason}
                refused.setdefault(reason, []).append(repr(name))
                continue
            facts[name], made[name] = result.facts, result
            for each in result.maps:
                slot = self._own_slot(PICTURE_PREFIX + name, pending, each.node, each.role)
                self._add(slot, each.values, values=True, per_sample=each.per_sample)
        for reason, names in refused.items():
            what = "is no picture" if len(names) == 1 else "are no pictures"
            self._warn(f"there {what} {', '.join(names)}: {reason}")
        if made:
            numbers = checked(made, self._mask)
            self._check(numbers)
            self._report_mask(made, numbers["pictures"])
        return facts

    def _read_unchanged_gradients(self, pending: Pending, subject: Subject, study: Study) -> None:
        """Add the gradients without changes to the record, if an intervention needs gradients."""
        if self._interventions is None or not self._interventions.follows_gradients:
            return
        reading = self._reader(pending, subject, values=self._spec.values)
        reading.gradients = "only"
        found = self._interventions.unchanged_gradients(study, reading)
        self._add_gradients(pending, subject.copy, found, values=self._spec.values)

    def _add_gradients(
        self,
        pending: Pending,
        copy: CleanCopy,
        gradients: Mapping[int, torch.Tensor | None] | None,
        *,
        values: bool,
    ) -> None:
        """Add the gradients of parameters, by `id`, to the record."""
        modules = Modules(copy).by_path
        for plan in pending.plan.parameters if gradients else ():
            path, _, name = plan.slot.names()[0].rpartition(".")
            module = modules.get(path)
            parameter = None if module is None else module._parameters.get(name)
            gradient = None if gradients is None else gradients.get(id(parameter))
            if gradient is not None and plan.capture.parameter_grad:
                with without_functions():
                    slot = plan.slot.in_pass("grad")
                    self._capture.add(slot, gradient, batch_dim=None, values=values)

    def _report_mask(self, made: Mapping[str, Drawn], numbers: Mapping[str, Any]) -> None:
        """Report a mask that fits none of the pictures it could be compared with."""
        explain = [n for n, drawn_ in made.items() if "target" in drawn_.facts and drawn_.maps]
        if self._mask is None or not explain or any("outside" in numbers[n] for n in explain):
            return
        shapes = ", ".join(f"{n} {[*made[n].maps[0].values.shape]}" for n in explain)
        self._warn(
            f"the mask has the shape {[*self._mask.shape]}, which fits none of the pictures "
            f"({shapes}), so it is not used. A mask must have the shape of one sample of a "
            "picture, such as [height, width] or [length], or of all of its samples"
        )

    def _reading(
        self, pending: Pending, subject: Subject, *, values: bool, inputs: bool
    ) -> _Reading:
        """Read the samples; return what reads the tensors of a pass."""
        args, kwargs = subject.samples.to(subject.copy.device)
        for path, tensor in (*tensors_in(args), *tensors_in(kwargs)):
            slot = self._input_slot(input_role(path), pending.iteration)
            self._add(slot, tensor, values=inputs)
            image = self._spec.show.image if tensor.is_floating_point() else None
            misfit = None if image is None else image.misfit(tensor.shape)
            if misfit is not None:
                self._warn(f"show: {misfit}")
        return self._reader(pending, subject, values=values)

    def _reader(self, pending: Pending, subject: Subject, *, values: bool) -> _Reading:
        """Return what reads the tensors of a pass."""
        plans = {plan.path: plan for plan in pending.plan.modules}
        if self._dictionaries is not None:
            plans |= self._dictionaries.plans(pending.plan.top, values=values)
        return _Reading(
            plans,
            self._recorder,
            self._capture,
            values=values,
            count=len(subject.samples),
            time_first=self._report_time,
        )

    def _report_time(self, path: str, module: nn.Module, count: int) -> None:
        if not self._times:
            self._times = True
            kind = type(module).__name__
            self._warn(_TIME_FIRST.format(path=path or "the model", kind=kind, count=count))

    def _intervene(
        self, name: str, interventions: Interventions, study: Study, pending: Pending
    ) -> Made | None:
        """Make an intervention, and read its tensors and effects."""
        reading = None
        if not interventions.is_swept(name):
            values = interventions.stores_values(name)
            reading = self._reading(pending, study.subject, values=values, inputs=values)
            if interventions.needs_gradients(name):
                reading.gradients = "also"
        made = interventions.made(name, study, reading)
        if made is None:
            return None
        top = pending.plan.top
        path, role = interventions.place(name, study)
        self._places[name] = (top.node(path), role)
        for place in [*made.facts["places"], *made.facts.get("into", ())]:
            place[0] = None if place[0] is None else top.node(place[0])
        if made.effects is not None:
            slot = self._own_slot(EFFECT_PREFIX + name, pending, "", "effect")
            self._add(slot, made.effects, values=True)
        if reading is not None:
            values = interventions.stores_values(name)
            self._add_gradients(pending, study.subject.copy, made.gradients, values=values)
        return made

    def _add(
        self, slot: Slot, tensor: torch.Tensor, *, values: bool, per_sample: bool = True
    ) -> None:
        with without_functions():
            dim = self._capture.batch_dim(tensor, "auto" if per_sample else None, slot)
            self._capture.add(slot, tensor.detach(), batch_dim=dim, values=values)

    def _own_slot(self, pass_: str, pending: Pending, path: str | None, role: str) -> Slot:
        top = pending.plan.top
        node = "input" if path is None else top.node(path)
        slot = self._slots.get((pass_, node, role))
        if slot is None:
            slot = self._slots[pass_, node, role] = Slot(
                lambda: "input" if path is None else top.node(path),
                role,
                iteration=pending.iteration if path is None else 0,
                pass_=pass_,
                kind="input" if path is None else "computed",
            )
        return slot


_TRAINING = {"eval": False, "train": True, "as_is": None}
"""The mode of a copy's modules, by the mode of the probe."""


def _require_modules(pictures: Mapping[str, PictureSpec], copy: CleanCopy) -> None:
    """Raise a SpecError if a pattern of a picture matches no module."""
    problems = Modules(copy).problems_of_pictures(pictures)
    if problems:
        raise SpecError(problems)


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name; empty if its signature does not fit them."""
    try:
        bound = inspect.signature(unwrapped(module).forward).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return {}
    return {**bound.arguments, **kwargs}


def _under(autocast: Autocast, copy: CleanCopy) -> AbstractContextManager[Any]:
    """Return the program's autocast, unless the copy is on another device."""
    return nullcontext() if copy.moved else autocast.again()


def _interventions(
    probe: str,
    spec: Spec,
    *,
    warn: Callable[[str], None],
    tell: Callable[[str, str], None],
) -> Interventions | None:
    """Return the interventions on a probe; None if there are none."""
    declared = {name: each for name, each in spec.interventions.items() if each.of == probe}
    if not declared:
        return None
    from comgra_decl.hooks.probing.interventions import Interventions

    return Interventions(declared, warn=warn, tell=tell)


def _dictionaries(probe: str, spec: Spec) -> Dictionaries | None:
    """Return the dictionaries of a probe; None if there are none."""
    declared = {name: each for name, each in spec.dictionaries.items() if each.of == probe}
    if not declared:
        return None
    from comgra_decl.hooks.probing.dictionaries import Dictionaries

    return Dictionaries(declared)


class _Reading:
    """Reads the inputs and outputs of the modules that the spec selects.

    Args:
        plans: the plans of these modules, by path.
        recorder: reads tensors.
        capture: the record.
        values: whether to store all values.
        count: the number of samples.
        time_first: called with a module that takes the dimension of the samples for time.

    Attributes:
        gradients: whether to read gradients: "no", "also", or "only" gradients.
    """

    def __init__(
        self,
        plans: Mapping[str, ModulePlan],
        recorder: TensorRecorder,
        capture: StepCapture,
        *,
        values: bool,
        count: int,
        time_first: Callable[[str, nn.Module, int], None],
    ) -> None:
        self._plans = plans
        self._recorder = recorder
        self._capture = capture
        self._values = values
        self._count = count
        self._time_first = time_first
        self.gradients: Literal["no", "also", "only"] = "no"

    def before(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Read the inputs of a module."""
        if getattr(module, "batch_first", True) is False and args:
            shape: tuple[int, ...] = getattr(args[0], "shape", ())
            if len(shape) == 3 and shape[0] == self._count != shape[1]:
                self._time_first(path, module, self._count)
        plan = self._plans.get(path)
        wanted = None if plan is None else self._wanted(plan.inputs)
        if plan is not None and wanted is not None:
            given = [(input_role(p), t) for p, t in (*tensors_in(args), *tensors_in(kwargs))]
            self._read(plan, (plan, "input"), given, wanted)

    def after(self, path: str, module: nn.Module, output: Any) -> Any:
        """Read the outputs of a module, and return them unchanged."""
        plan = self._plans.get(path)
        wanted = None if plan is None else self._wanted(plan.outputs)
        if plan is not None and wanted is not None:
            named = [(plan.role + p, t) for p, t in tensors_in(output)]
            self._read(plan, plan, named, wanted)
        return output

    def _wanted(self, declared: Wanted) -> Wanted | None:
        """Return what to read of a tensor; None for nothing."""
        tensor = declared.tensor and self.gradients != "only"
        gradient = declared.gradient and self.gradients != "no"
        return Wanted(tensor, gradient) if tensor or gradient else None

    def _read(
        self,
        plan: ModulePlan,
        what: object,
        tensors: Sequence[tuple[str, torch.Tensor]],
        wanted: Wanted,
    ) -> None:
        counted = (what, "gradients") if self.gradients == "only" else what  # another pass
        iteration = self._capture.iteration(counted, plan.node)
        if iteration is None:
            return
        how = replace(plan.capture, values=self._values)
        with without_functions():
            for role, tensor in tensors:
                self._recorder.read(
                    tensor,
                    role,
                    partial(plan.slot, iteration=iteration),
                    capture=self._capture,
                    how=how,
                    wanted=wanted,
                )


def _raise(error: BaseException) -> None:
    raise error

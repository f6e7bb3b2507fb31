"""When to look: follows the steps of a training and switches the tracer on and off.

Between recorded steps one global optimizer hook counts steps, and nothing else is attached. The
hook that ends the step before a recorded one arms the tracer; the one that ends the recorded step
closes the record and disarms it, unless the next step is recorded too. Where it depends on the
type of a step whether it is recorded, the tracer is armed by the call of the model instead.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from comgra_decl.hooks.choosing import Choosing
from comgra_decl.hooks.compiled import anything_compiled
from comgra_decl.hooks.hand_updates import BY_HAND, HandUpdates
from comgra_decl.hooks.limits import Captures
from comgra_decl.hooks.optimizers import CalledModels, Optimizers
from comgra_decl.hooks.patches import run_natively, watch_mode
from comgra_decl.hooks.root_calls import RootCall
from comgra_decl.hooks.step_clock import StepClock
from comgra_decl.hooks.tree import has_parameters
from comgra_decl.hooks.when.agenda import Agenda, Plan
from comgra_decl.hooks.when.budget import Meter
from comgra_decl.hooks.when.pace import Pace
from comgra_decl.hooks.when.skipped import watch_skips
from comgra_decl.hooks.when.types import Labeller, RootWatch
from comgra_decl.hooks.when.unended import UNENDED, UnendedSteps
from comgra_decl.hooks.words.hearing import Hearing
from comgra_decl.hooks.words.numbers import read_number
from comgra_decl.records import GRAD_SCALE, SKIPPED_STEP, RawStep, Said, SlotInfo

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from comgra_decl.hooks.when.resuming import Resumption
    from comgra_decl.spec import Spec


class HookManager(Choosing):
    """Attaches to the running program and hands each recorded step to `sink`.

    Args:
        spec: what to capture and when.
        sink: receives each closed record on the training thread; must be quick.
        on_fault: told once about an error of our own; tracing has stopped by then.
        scalars: receives the numbers and notes of all steps now and then, like `sink`.
        meter: what recording costs outside the training thread.
        ready: called before a step is recorded; what it raises ends the tracing like a fault.
    """

    def __init__(
        self,
        spec: Spec,
        sink: Callable[[RawStep], None],
        *,
        on_fault: Callable[[BaseException], None],
        scalars: Callable[[Said], None] | None = None,
        meter: Meter | None = None,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(spec, sink, scalars=scalars, meter=meter or Meter())
        self._on_fault = on_fault
        self._ready = ready
        self._quiet = 0.0  # no step before this one can be due
        self._pace = Pace()
        self._deferred = False
        self._watched = False  # whether it is decided about when the model is called
        self._begun_unseen = False  # whether the step that begins has called its model already
        self._asides = self._usual = 0
        self._undecided = []
        self._evaluated = []
        self._kept_enough = False
        self._stepped = False
        self._incoming: deque[tuple[Spec | None, str]] = deque()
        self._agenda = Agenda(spec, self._budget)
        self._watch = RootWatch(self._on_watched_call, on_fault=self._fault)
        self._labeller = self._new_labeller(spec)
        self._clock = self._new_clock(spec)
        self._optimizers = Optimizers(forget=lambda number: self._clock.forget(number))
        self._called = CalledModels(on_fault=self._fault)
        self._hand = HandUpdates(held=self._optimizers.hold)
        self._unended = UnendedSteps()
        self._captures = Captures(self._reporter.warn, on_fault=self._fault)
        self._patches = (
            watch_mode(self._on_mode, on_fault=self._fault),
            watch_skips(self._on_skip, before=self._say_scale, on_fault=self._fault),
            *self._captures.patches,
        )
        self._hearing = Hearing(self)
        self._scale_said = -1  # the last step of which the gradient scale was said
        self._handles: list[RemovableHandle] = []
        self._resumption: Resumption | None = None  # until a resumed training has made a step

    def _new_labeller(self, spec: Spec) -> Labeller | None:
        return None if spec.types.by is None else Labeller(spec.types, warn=self._reporter.warn)

    def _new_clock(self, spec: Spec) -> StepClock:
        return StepClock(spec.schedule.step, warn=self._reporter.warn)

    # -- lifecycle -----------------------------------------------------------------------------

    def attach(self) -> None:
        """Starts following the program."""
        run_natively(self._rest.after_optimizer, self._on_mode, self._on_skip, self._say_scale)
        run_natively(self._owners.note, self._owners.note_parameter)
        self._handles = [
            register_optimizer_step_post_hook(self._rest.after_optimizer),
            register_module_module_registration_hook(self._owners.note),
            register_module_parameter_registration_hook(self._owners.note_parameter),
        ]
        for patch in self._patches:
            patch.apply()
        self._losses.start()
        if not self._clock.explicit:
            self._losses.announce(self._on_backward)
        self._hearing.start()
        self._begin_step()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Follows the call in which tracing was attached: that of an outermost module, beginning.

        Hooks that are registered within a call are not called for it.
        """
        if self._watch.waiting:
            if self._on_watched_call(module, args, kwargs):
                self._watch.remove()
        elif self._tracer.installed:
            try:
                self._tracer.enter(module, args, kwargs)
                self._beside.enter(module, args, kwargs)
            except Exception as error:
                self._fault(error)

    def resume(self, slots: Iterable[SlotInfo], resumption: Resumption) -> None:
        """Goes on with a run, before anything is attached.

        Args:
            slots: those that the run has.
            resumption: finds out which step the training goes on with.
        """
        self._table.resume(slots)
        self._resumption = resumption
        self._step = resumption.expected
        self._scalars.resume(self._step)
        self._agenda.resume(self._step)

    def detach(self) -> None:
        """Stops following; a program that never stepped still gets what it computed recorded."""
        if self._stopped:
            return
        try:
            if self._undecided and not self._train.root_calls:
                self._emit_undecided()
            if self._evaluation.open:
                self._finish_evaluation()
            if self._hand.over():
                self._end_by_hand()
            elif self._clock.complete:
                self._end_step()
            if self._train.open and not self._stepped and len(self._train):
                self._finish_unstepped()
        except Exception as error:
            self._fault(error)
        if not self._stopped:
            self._end_tracing()

    def stop(self) -> None:
        """Asks, from any thread, that tracing ends with the current step."""
        self._stop_requested = True
        self._rest.end()

    def stop_keeping(self) -> None:
        """Asks, from any thread, that steps are no longer captured to be decided about later."""
        self._kept_enough = True

    def look(self) -> None:
        """Looks, from another thread and about once a second, whether steps end at all."""
        if self._stopped:
            return
        models = [plan.top.module() for plan in [*self._tracer.tops.values()]]
        parameters = (p for model in models if model is not None for p in model.parameters())
        before = self._unended.found
        if self._unended.look(self._step, parameters) and before is None:
            sentence = UNENDED.format(self._step)
            self._reporter.warn(sentence)
            if self._stepped:  # else there will be a record that brings it
                self._scalars.remark(sentence)
            self._hand.unseen()
            self._losses.announce(self._on_backward)

    @property
    def late_documents(self) -> dict[str, Any]:
        """The documents that changed after the last record; asked when all is over."""
        return self._reporter.late_documents

    def replace(self, spec: Spec | None, note: str) -> None:
        """Asks, from any thread, that `spec` is in effect from the next step on.

        Args:
            spec: the changed declaration; only keys of `spec.live.LIVE_KEYS` differ. None: there
                is only something to note.
            note: what is noted in the run.
        """
        self._incoming.append((spec, note))
        self._rest.end()

    def _adopt(self) -> None:
        """Goes by a changed spec from the step that is about to begin."""
        while self._incoming:
            spec, note = self._incoming.popleft()
            self._scalars.note(note if spec is None else f"{note}, from step {self._step} on")
            if spec is not None:
                self._finish_evaluation()
                self._disarm()
                self._follow_anew(spec)

    def _follow_anew(self, spec: Spec) -> None:
        tracer, structures, before = self._tracer, self._structures, self._spec
        self._table.renew()
        self._budget = self._new_budget(spec.schedule, before=self._budget)
        self._agenda = Agenda(spec, self._budget, before=self._agenda)
        self._evaluation.follow(spec.schedule.eval, factor=self._budget.factor)
        self._reporter.follow(spec)
        self._follow(spec)
        self._labeller = self._new_labeller(spec)
        self._structures.go_on_from(structures)
        self._tracer.go_on_from(tracer)
        if spec.schedule.step != before.schedule.step:
            self._clock = self._new_clock(spec)
        self._quiet = 0.0

    def _remove_everything(self) -> None:
        self._stopped = True
        with ExitStack() as each:  # all of them, whatever one of them does; the last is first
            each.callback(self._evaluation.capture.drop)
            each.callback(self._train.drop)
            for handle in self._handles:
                each.callback(handle.remove)
            for patch in self._patches:
                each.callback(patch.restore)
            for part in (self._scalars, self._losses, self._hearing):
                each.callback(part.stop)
            each.callback(self._disarm)
            each.callback(self._watch.remove)
            each.callback(self._called.stop)
            each.callback(self._rest.end)
        self._handles.clear()

    # -- events --------------------------------------------------------------------------------

    def _after_optimizer(self, optimizer: Any) -> None:
        self._rest.end()
        if self._hand.possible and not self._hand.active:
            self._hand.give_way()
            self._losses.announce(None)
        if self._resumption is not None:
            self._resumption.stepped(optimizer)
        if self._armed:
            self._stepped = True
            if not self._captures.active:
                self._tracer.after_optimizer(self._train, optimizer)
        if self._ends_step(optimizer):
            self._end_step()
        if self._clock.unfamiliar:
            self._clock.unfamiliar = False
            if not (self._armed or self._stopped or anything_compiled()):
                self._called.watch()
                self._rest.end()

    def _on_backward(self, tensors: Any) -> None:
        """`backward` is about to be called, in a program whose optimizers nobody has seen step."""
        if self._stopped:
            return
        if self._hand.over():
            self._begun_unseen = True  # what was called until now belongs to the next step
            try:
                self._end_by_hand()
            finally:
                self._begun_unseen = False
        self._hand.backward(tensors)
        if self._hand.active and not self._armed and self._step + 1 >= self._quiet:
            self._watch.install()
            self._stance.force_if_needed()

    def _on_backward_done(self) -> None:
        self._train.backwards.end()
        if self._hand.pending:
            self._tracer.parameters.keep_gradients()

    def _end_by_hand(self) -> None:
        """The program has written its parameters: a step is over."""
        if not self._hand.active:
            self._hand.active = True
            self._reporter.say("steps", BY_HAND)
        self._stepped = True
        if self._armed:
            self._tracer.after_hand(self._train)
        self._end_step()

    def _ends_step(self, optimizer: Any) -> bool:
        """Whether an optimizer that has stepped ends the step of the training."""
        self._optimizers.note(optimizer)
        seen = None
        if self._clock.rule == "last_optimizer" and (self._armed or self._called.watched):
            seen = self._optimizers.seen(optimizer, iter(self._called))
        classes = [base.__name__ for base in type(optimizer).__mro__]
        return self._clock.stepped(id(optimizer), seen=seen, classes=classes)

    def _say_scale(self, scaler: Any, *, always: bool = False) -> None:
        """Mixed precision is about to let an optimizer step, or not: what is the loss scaled by?"""
        if self._stopped or not (self._armed or always) or self._scale_said == self._step:
            return
        scale = getattr(scaler, "_scale", None)
        number = read_number(scale) if isinstance(scale, torch.Tensor) else None
        if number is not None:
            self._scale_said = self._step
            self._scalars.measured(GRAD_SCALE, number)

    def _on_skip(self, optimizer: Any, scaler: Any) -> None:
        """Mixed precision did not let an optimizer step; the step has ended all the same."""
        if self._stopped:
            return
        self._say_scale(scaler, always=True)
        self._train.skipped = True
        self._scalars.measured(SKIPPED_STEP, 1.0)
        self._scalars.note("the optimizer's step was skipped: a gradient is not finite")
        self._rest.after_optimizer(optimizer, None, None)

    def _settle_resumption(self, resumption: Resumption) -> None:
        """The first step of a resumed training ends: by now it is known which one it is."""
        self._resumption = None
        self._step, text = resumption.settle()
        self._scalars.resume(self._step, text)
        self._agenda.resume(self._step)
        self._quiet = 0.0

    def _end_step(self) -> None:
        self._clock.end()
        self._hand.end_step()
        self._optimizers.begin_step()
        self._called.begin_step()
        if self._resumption is not None:
            self._settle_resumption(self._resumption)
        self._scalars.end_step(self._step, self._agenda.labels)
        if self._stop_requested:
            self._stop_when_safe()
            return
        cost = None
        if self._armed:
            cost = self._close_train()
        elif self._agenda.typed:
            self._agenda.end(recorded=False)
        if self._budget.timed:
            self._budget.step_ended(cost, self._agenda.ended)
        self._step += 1
        self._asides = 0
        self._undecided.clear()
        self._evaluated.clear()
        self._roots.evaluating = False
        if self._incoming:
            self._adopt()
        self._begin_step()
        self._begin_rest()

    def _begin_rest(self) -> None:
        """Counts the next steps only, unless there is more to do in each."""
        busy = (
            self._armed
            or self._evaluation.open
            or self._watch.waiting
            or self._budget.timed
            or self._agenda.typed
            or self._scalars.talks
            or self._called.watched
        )
        step = self._begun = self._step
        steps = min(self._quiet - 1 - step, self._pace.steps(step))
        owner = None if busy else self._clock.simple
        self._rest.begin(owner or 0, int(max(steps, 0)))
        if self._stopped or self._stop_requested or self._incoming:  # another thread may say so
            self._rest.end()

    def _begin_step(self) -> None:
        plan = Plan.WAIT
        if self._step >= self._quiet:
            if self._keeps and self._kept_enough:
                self._keeps = False
                self._agenda.stop_keeping()
            plan = self._agenda.plan(self._step)
            self._quiet = self._agenda.quiet_until
            if self._begun_unseen:
                plan = Plan.WAIT  # it stays due
            self._deferred = self._keeps or self._agenda.typed
        if plan is Plan.ARM:
            self._arm()
        elif self._armed or self._evaluation.open:
            self._finish_evaluation()
            self._disarm()
        self._watched = plan is Plan.WATCH
        if self._watched or (plan is Plan.ARM and self._labeller is not None):
            self._watch.install()
            # Compiled code must not find the hook; what the first step compiles is not known yet.
            (self._stance.force_if_needed if self._step else self._stance.force)()
        elif self._watch.waiting:
            self._watch.remove()
            if not self._tracer.installed:
                self._stance.restore()

    def _on_watched_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        """An outermost module is called; returns whether that decides about the step."""
        try:
            attached = self._tracer.installed
            if self._hand.over():
                self._end_by_hand()
            kind = self._roots.kind(module)
            training = kind is not RootCall.EVALUATION
            if not training:
                self._begin_evaluation()
            elif not has_parameters(module) or self._comes_before(kind):
                return False  # a transform of the data, perhaps
            else:
                self._decide(module, args, kwargs)
            if self._tracer.installed and not attached:
                self._tracer.enter(module, args, kwargs)
                self._beside.enter(module, args, kwargs)
            elif training and not attached:
                self._stance.restore()
        except Exception as error:
            self._fault(error)
            return True
        return training

    def _comes_before(self, kind: RootCall) -> bool:
        """Whether a call is none by whose arguments the type of a step is told: a teacher's."""
        return kind is not RootCall.TRAINING and self._labeller is not None

    def _decide(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Arms in the middle of the step if its labels say so."""
        if self._labeller is not None:
            self._agenda.declare(self._labeller(module, args, kwargs))
        if self._watched and self._agenda.due:
            self._arm()

    # -- what the program says -----------------------------------------------------------------

    def _on_tag(self, *names: str) -> None:
        """The program labels the step in progress, or the evaluation it is in."""
        if self._roots.evaluating or self._roots.maybe:
            self._evaluation.tags.update(dict.fromkeys(names))
            return
        too_late = self._watched and not self._watch.waiting and not self._armed
        self._agenda.tag(names, too_late=too_late)
        self._quiet = -math.inf
        self._rest.end()

    def _on_step(self) -> None:
        """The program says that a step ends here."""
        if self._stopped:
            return
        if self._hand.possible:
            self._hand.give_way()
            self._losses.announce(None)
        if self._tracer.inside:
            self._reporter.warn("comgra.step() does nothing inside the call of a module")
        elif self._clock.by_program():
            self._stepped = True
            self._end_step()

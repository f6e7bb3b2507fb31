"""End training steps, and decide whether the next one is recorded."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.hooks.call_context import is_backward, is_nested_step, is_within_call
from comgra_decl.hooks.compiled.stance import anything_compiled
from comgra_decl.hooks.cross_thread import act_for, here
from comgra_decl.hooks.guarded import Ending
from comgra_decl.hooks.hand_updates import BY_HAND
from comgra_decl.hooks.module_tree import has_parameters, in_training
from comgra_decl.hooks.scalars.alarm import LossAlarm
from comgra_decl.hooks.scalars.numbers import read_number
from comgra_decl.hooks.schedule.agenda import Plan
from comgra_decl.hooks.schedule.idle import IdleSteps, Pace
from comgra_decl.hooks.schedule.types import RootWatch
from comgra_decl.hooks.step_clock import Seen
from comgra_decl.hooks.step_state import RootCall, Stage
from comgra_decl.records import GRAD_SCALE, SKIPPED_STEP

if TYPE_CHECKING:
    from torch import nn

    from comgra_decl.hooks.declared import Declared
    from comgra_decl.hooks.limits import Captures
    from comgra_decl.hooks.measuring.measured import Measured
    from comgra_decl.hooks.optimizers import CalledModels, Optimizers
    from comgra_decl.hooks.record_hooks import RecordHooks
    from comgra_decl.hooks.report import Reporter
    from comgra_decl.hooks.root_calls import RootCalls
    from comgra_decl.hooks.scalars.automatic import AutomaticMetrics
    from comgra_decl.hooks.scalars.losses import LossWatch
    from comgra_decl.hooks.scalars.scalars import Scalars
    from comgra_decl.hooks.schedule.evaluation import EvaluationPhases
    from comgra_decl.hooks.schedule.resuming import Resumption
    from comgra_decl.hooks.stalls import OwnWork
    from comgra_decl.hooks.step_records import StepRecords
    from comgra_decl.hooks.step_state import StepState
    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.hooks.training_threads import Lane, Lanes, Turns
    from comgra_decl.spec import Spec


class Steps:
    """Ends training steps and begins the next ones.

    Between recorded steps, one global optimizer hook counts steps, and nothing else is attached. At
    the end of the step before a recorded one, that hook arms the other hooks. At the end of the
    recorded step, it closes the record and disarms the other hooks, unless the next step is
    recorded as well. If the type of a step determines whether the step is recorded, the model call
    arms the hooks instead.

    Args:
        declared: the components that depend on the spec.
        state: the state of the step in progress.
        records: closes and emits records.
        hooks: installs and removes the hooks of a record.
        lanes: the training threads.
        turns: decides which thread is followed.
        training: the record of a training step.
        evaluation: the evaluation phases and their record.
        roots: distinguishes training from evaluation.
        optimizers: the optimizers of the program.
        called: the models called in the step in progress.
        graphs: detects the capture of CUDA graphs.
        losses: observes `backward`.
        scalars: receives the metrics of all steps.
        automatic: collects the metrics that need no code in the program.
        measured: the steps that are measured instead of recorded; None if there are none.
        idle: counts the steps that need no other work.
        reporter: receives choices and warnings.
        ending: whether tracing continues, and how it ends.
        together: lock held by a thread while it handles an event of a step.
        own: adds up the time that tracing takes.
        change: switches to another spec, starting with the step about to begin.
        ended: called when a step has ended and the next one has begun; may raise.

    Attributes:
        signs: the number of events that may have changed parameters.
        resumption: determines the step at which a resumed run continues; None after that step.
    """

    def __init__(
        self,
        declared: Declared,
        *,
        state: StepState,
        records: StepRecords,
        hooks: RecordHooks,
        lanes: Lanes,
        turns: Turns,
        training: StepCapture,
        evaluation: EvaluationPhases,
        roots: RootCalls,
        optimizers: Optimizers,
        called: CalledModels,
        graphs: Captures,
        losses: LossWatch,
        scalars: Scalars,
        automatic: AutomaticMetrics,
        measured: Measured | None,
        idle: IdleSteps,
        reporter: Reporter,
        ending: Ending,
        together: AbstractContextManager[Any],
        own: OwnWork,
        change: Callable[[Spec], None],
        ended: Callable[[], None],
    ) -> None:
        self._declared = declared
        self._state = state
        self._records = records
        self._hooks = hooks
        self._lanes = lanes
        self._turns = turns
        self._train = training
        self._evaluation = evaluation
        self._roots = roots
        self._optimizers = optimizers
        self._called = called
        self._graphs = graphs
        self._losses = losses
        self._scalars = scalars
        self._automatic = automatic
        self._measured = measured
        self._idle = idle
        self._reporter = reporter
        self._ending = ending
        self._together = together
        self._own = own
        self._change = change
        self._ended = ended
        self._watch = RootWatch(self._on_watched_call, on_fault=ending.fault)
        self._pace = Pace()
        self._quiet = 0.0  # the first step that can be due
        self._told_several = False  # whether a note says that `sudden` has no effect
        self._incoming: deque[tuple[Spec | None, str]] = deque()
        self._is_by_hand_reported = False
        self._nested = False  # whether optimizer steps are nested, so that hooks run twice
        self._begun_unseen = False  # whether the step that begins has already called its model
        self._kept_enough = False
        self._scale_known = -1  # the last step whose gradient scale was logged
        self.signs = 0
        self.resumption: Resumption | None = None

    # -- requests ------------------------------------------------------------------------------

    def replace(self, spec: Spec | None, note: str) -> None:
        """Request another spec from the next step on, or only a note; callable from any thread."""
        self._incoming.append((spec, note))
        self._idle.end()

    def stop_keeping(self) -> None:
        """Stop capturing steps outside the schedule; may be called from any thread."""
        self._kept_enough = True

    def ask_again(self) -> None:
        """Recompute whether the next step is due."""
        self._quiet = -math.inf
        self._idle.end()

    def stop(self) -> None:
        """Stop watching for model calls."""
        self._watch.remove()
        self._automatic.stop()

    @property
    def is_too_late(self) -> bool:
        """Whether labels can no longer cause the step in progress to be recorded."""
        return self._state.stage is Stage.DECLINED

    # -- optimizer steps -----------------------------------------------------------------------

    def after_optimizer(self, optimizer: Any) -> None:
        """Handle an optimizer step that requires more than counting."""
        with self._together:
            self._idle.end()
            if is_nested_step(sys._getframe(1), optimizer):
                self._nested = True
                return
            self.signs += 1
            lane = None if is_backward() else self._turns.elsewhere(ends=True)
            if lane is None:
                self._after_followed(optimizer)
            elif not self._ending.over:
                lane.hand.give_way()
                self.announce()
                if lane.clock.stepped(id(optimizer), classes=_classes(optimizer)):
                    self._end_elsewhere(lane)

    def _after_followed(self, optimizer: Any) -> None:
        state, lane = self._state, self._lanes.followed
        hand = lane.hand
        if hand.possible and not (hand.active and hand.parameters):
            hand.give_way()
            self.announce()
        if self.resumption is not None:
            self.resumption.stepped(optimizer)
        if state.armed:
            state.any_ended = True
            if not self._graphs.active:
                self._declared.tracer.after_optimizer(self._train, optimizer)
        if self._ends_step(optimizer):
            self.end()
        clock = self._lanes.followed.clock
        if clock.unfamiliar:
            clock.unfamiliar = False
            busy = state.armed or self._ending.over or self._lanes.several
            if not (busy or anything_compiled()):
                self._called.watch()
                self._idle.end()

    def _ends_step(self, optimizer: Any) -> bool:
        """Return whether an optimizer step ends the training step."""
        self._optimizers.use(optimizer)
        seen: Seen | None = None
        lane, armed = self._lanes.followed, self._state.armed
        if lane.clock.rule == "last_optimizer" and (armed or self._called.watched):
            seen = self._optimizers.seen(optimizer, iter(self._called))
            if armed and seen.own and not self._lanes.several and lane.thread:
                act_for(lane.thread)  # the optimizer trains models called in the followed thread
        classes = () if lane.clock.rule == "last_optimizer" else _classes(optimizer)
        return lane.clock.stepped(id(optimizer), seen=seen, classes=classes)

    # -- mixed precision -----------------------------------------------------------------------

    def note_scale(self, scaler: Any, *, always: bool = False) -> None:
        """Log the gradient scale once per step, before a scaler takes or skips a step."""
        armed, number = self._state.armed, self._state.number
        if self._ending.over or not (armed or always) or self._scale_known == number:
            return
        if armed and self._lanes.is_beside(here()):
            return
        if armed and self._train.probing is not None:
            self._train.probing.scaling(scaler)
        scale = getattr(scaler, "_scale", None)
        value = read_number(scale) if isinstance(scale, torch.Tensor) else None
        if value is not None:
            self._scale_known = number
            self._scalars.measured(GRAD_SCALE, value)

    def on_skip(self, optimizer: Any, scaler: Any) -> None:
        """Handle an optimizer step skipped by a gradient scaler, which ends the step as well."""
        if self._ending.over:
            return
        with self._together:
            if self._turns.elsewhere(ends=True) is None:
                self.note_scale(scaler, always=True)
                self._train.skipped = True
                if self._state.armed and self._train.probing is not None:
                    self._train.probing.stepping(optimizer, closure=False)
            self._scalars.measured(SKIPPED_STEP, 1.0)
            self._scalars.note("the optimizer step was skipped: a gradient is not finite")
        self._idle.after_optimizer(optimizer, None, None)

    # -- manual updates ------------------------------------------------------------------------

    def announce(self) -> None:
        """Observe `backward` before it runs, as long as manual updates may end steps."""
        by_hand = any(lane.hand.possible and not lane.clock.explicit for lane in self._lanes)
        self._losses.announce(self._on_backward if by_hand else None)

    def _on_backward(self, tensors: Any) -> None:
        """Handle a call to `backward`, before it runs, in a program without optimizer steps."""
        if self._ending.over:
            return
        lane = self._turns.elsewhere()
        if lane is not None:
            if lane.hand.over():
                self._report_by_hand()
                lane.hand.active = True
                self._end_elsewhere(lane)
            lane.hand.backward(tensors)
            self.announce()
            return
        if self._turns.hand.over():
            self._begun_unseen = True  # the calls so far belong to the next step
            try:
                self.end_by_hand()
            finally:
                self._begun_unseen = False
        hand = self._turns.hand
        hand.backward(tensors)
        if not hand.possible:  # an optimizer holds the parameters: stop observing `backward`
            self.announce()
        if hand.active and not self._state.armed and self._state.number + 1 >= self._quiet:
            self._watch.install()
            self._state.reconsider()
            self._hooks.stance.force_if_needed()

    def on_backward_done(self, whole: bool) -> None:
        """Handle the end of `backward` in a recorded step.

        Args:
            whole: whether it computed the gradients of all tensors that it reached.
        """
        self._hooks.on_backward_done(whole=whole, by_hand=self._turns.hand.pending)

    def end_by_hand(self) -> None:
        """End the step after a manual update to the parameters."""
        hand = self._turns.hand
        if not hand.active:
            hand.active = True
            self._report_by_hand()
        self._state.any_ended = True
        if self._state.armed:
            self._declared.tracer.after_hand(self._train)
        self.end()

    def _report_by_hand(self) -> None:
        if not self._is_by_hand_reported:
            self._is_by_hand_reported = True
            self._reporter.say("steps", BY_HAND)

    # -- explicit steps ------------------------------------------------------------------------

    def by_program(self) -> None:
        """Handle `comgra.step()`."""
        if self._ending.over:
            return
        with self._together:
            lane = self._turns.elsewhere(ends=True)
            if lane is None:
                self._followed_by_program()
                return
            lane.hand.give_way()
            self.announce()
            if lane.clock.by_program():
                self._end_elsewhere(lane)

    def _followed_by_program(self) -> None:
        if self._turns.hand.possible:
            self._turns.hand.give_way()
            self.announce()
        if self._declared.tracer.inside:
            self._reporter.warn("comgra.step() has no effect inside a module's forward")
        elif self._turns.clock.by_program():
            self._state.any_ended = True
            self.end()

    # -- ending a step -------------------------------------------------------------------------

    def end(self) -> None:
        """End the step in progress and begin the next one."""
        with self._own:
            with self._together:
                if self._measured is not None:
                    self._measured.end(self._state.number)
                self._end_followed()
            self._ended()

    def _end_followed(self) -> None:
        lanes, lane, state = self._lanes, self._lanes.followed, self._state
        scalars, agenda = self._scalars, self._declared.agenda
        if lane.saying is not scalars.saying:
            scalars.turn_to(lane.saying)
        lane.clock.end()
        lane.hand.end_step()
        self._optimizers.begin_step()
        self._called.begin_step()
        if self.resumption is not None:
            self._settle_resumption(self.resumption)
        number = state.number
        plain = None if state.armed else self._declared.budget.last_plain
        self._automatic.end_step(recorded=state.armed, plain=plain)
        scalars.end_step(number, agenda.labels or self._roots.labels)
        if self._ending.requested:
            self._ending.when_safe()
            return
        cost, once = None, 0.0
        if state.armed:
            lane.record = number
            state.tuned_before = state.trained > 0 and not state.in_training_mode
            lane.calls = bool(state.trained or state.aside)
            cost = self._records.close_step()
            if cost is not None:
                once = self._train.once + self._declared.compiled.take_compiling()
        elif agenda.typed:
            agenda.end(recorded=False)
        seen = self._idle.counted() + 1
        self._declared.budget.step_ended(cost, agenda.ended, steps=seen, once=once)
        state.end(steps=1 + lanes.passed)
        lanes.passed = lanes.refused = 0
        lane.waits = True
        if scalars.alarm is not None:
            self._heed(scalars.alarm)
        if lanes.several:
            self.end_unfinished(lanes.prune())
        self._roots.evaluating = False
        if self._incoming:
            self._adopt()
        self.begin()
        self._begin_rest()

    def _heed(self, alarm: LossAlarm) -> None:
        """Schedule the next steps for recording after a sudden loss."""
        reason = alarm.taken()
        if reason is None:
            return
        if _is_one_of_several():  # without communication, the ranks cannot choose the same steps
            if not self._told_several:
                self._told_several = True
                self._scalars.remark(
                    f"schedule.sudden: {reason}; no further steps are recorded, because this "
                    "option has no effect on multiple ranks, which must record the same steps"
                )
            return
        # A manual update is seen in the next backward pass, too late to record that step.
        steps = self._declared.agenda.alarm(self._state.number + self._begun_unseen)
        if steps is not None:
            self._quiet = -math.inf
            text = f"schedule.sudden: {reason}; steps {steps[0]} to {steps[1]} are recorded"
            self._scalars.remark(text)

    def _settle_resumption(self, resumption: Resumption) -> None:
        """Set the step number at the end of the first step of a resumed run."""
        self.resumption = None
        self._state.number, text = resumption.settle()
        self._scalars.resume(self._state.number, text)
        self._declared.agenda.resume(self._state.number)
        self._quiet = 0.0

    def _adopt(self) -> None:
        """Apply requested specs, starting with the step about to begin, and add their notes."""
        while self._incoming:
            spec, note = self._incoming.popleft()
            number = self._state.number
            self._scalars.note(note if spec is None else f"{note}, from step {number} on")
            if spec is not None:
                self._records.finish_evaluation()
                self._hooks.disarm()
                self._change(spec)
                self._quiet = 0.0

    def end_unfinished(self, lanes: Iterable[Lane]) -> None:
        """End the steps of threads that have ended, possibly after a manual update."""
        for lane in lanes:
            if lane.hand.over():
                self._end_elsewhere(lane)
        self._scalars.turn_to(self._lanes.followed.saying)

    def _end_elsewhere(self, lane: Lane) -> None:
        """End a step of one thread while another thread's step is being followed."""
        lane.clock.end()
        lane.hand.end_step()
        lane.waits = True
        self.signs += 1
        number = self._state.number + self._lanes.passed
        if self._records.begun or self._lanes.passed:
            self._lanes.passed += 1
            number += 1
        else:  # do not reserve a number for the followed thread, which may never begin its step
            self._state.number += 1
        if lane.saying is not self._scalars.saying:
            self._scalars.turn_to(lane.saying)
        self._scalars.end_step(number, lane.labels)
        lane.labels = {}

    # -- beginning a step ----------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step: capture it, leave the decision to a model call, or only count it."""
        state, hooks = self._state, self._hooks
        plan = self._plan()
        if plan is Plan.ARM:
            state.begin(plan)
            hooks.arm(thread=self._turns.thread_to_follow())
        else:
            if state.armed or self._evaluation.open:
                self._records.finish_evaluation()
                hooks.disarm()
            state.begin(plan)
        labelled = plan is Plan.ARM and self._declared.labeller is not None
        if plan is Plan.WATCH or labelled:
            self._watch.install()
            # Compiled code must not run with the hook on it. For step 0, it is not known yet
            # whether anything will be compiled.
            (hooks.stance.force_if_needed if state.number else hooks.stance.force)()
        elif self._watch.waiting:
            self._watch.remove()
            if not self._declared.tracer.installed:
                hooks.stance.restore()
        if self._measured is not None:
            self._measured.begin(state.number)

    def _plan(self) -> Plan:
        declared, lanes, plan = self._declared, self._lanes, Plan.WAIT
        number = self._state.number
        if number >= self._quiet:
            agenda = declared.agenda
            if declared.keeps and self._kept_enough:
                declared.keeps = False
                agenda.stop_keeping()
            plan = agenda.plan(number)
            self._quiet = agenda.quiet_until
            if self._measured is not None:
                measured = self._measured.next_after(number)
                plan = Plan.WAIT if measured == number else plan  # the record stays due
                self._quiet = min(self._quiet, measured)
            self._state.deferred = declared.keeps or agenda.typed
        if lanes.several:
            self._quiet = -math.inf
            plan = self._turns.in_turn(plan, keeps=declared.keeps)
        if self._begun_unseen:  # the record stays due
            lanes.owed = lanes.owed or (lanes.several and plan is Plan.ARM)
            plan = Plan.WAIT
        return plan

    def _begin_rest(self) -> None:
        """Only count the next steps, unless each of them needs more work."""
        state, lanes = self._state, self._lanes
        busy = (
            state.armed
            or self._evaluation.open
            or self._watch.waiting
            or self._declared.budget.attentive
            or self._declared.agenda.typed
            or self._scalars.talks
            or self._called.watched
            or lanes.several
            or self._nested
        )
        plain = not (state.armed or self._evaluation.open or self._watch.waiting or lanes.several)
        measures = self._measured is not None and self._measured.running
        self._automatic.begin_step(plain=plain and not measures)
        busy = busy or measures or self._automatic.timing
        step = state.count_from_here()
        lane = lanes.followed
        self._losses.follow(lane.helper or lane.thread)
        owner = None if busy else lane.clock.simple
        steps = 0 if owner is None else min(self._quiet - 1 - step, self._pace.steps(step))
        self._idle.begin(owner or 0, int(max(steps, 0)))
        if self._ending.over or self._ending.requested or self._incoming:
            self._idle.end()  # another thread may have sent a request in the meantime

    # -- watched model calls -------------------------------------------------------------------

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Handle a call for which no hook runs; return whether a model call was being watched."""
        if not self._watch.waiting:
            return False
        if self._on_watched_call(module, args, kwargs):
            self._watch.remove()
        return True

    def _on_watched_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        """Handle the call to an outermost module; return whether it decides about the step."""
        with self._together:
            if self._lanes.several and (
                is_within_call(sys._getframe(1)) or not self._turns.turn_here()
            ):
                return False  # another thread started watching during this call
            try:
                return self._decides(module, args, kwargs)
            except Exception as error:
                self._ending.fault(error)
                return True

    def _decides(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        declared = self._declared
        attached = declared.tracer.installed
        if self._turns.hand.over():
            self.end_by_hand()
        gradient, training_mode = torch.is_grad_enabled(), in_training(module)
        kind = self._roots.kind(module, training_mode=training_mode, gradient=gradient)
        training = kind is not RootCall.EVALUATION
        # the arguments of a teacher's call do not determine the type of a step
        comes_before = kind is not RootCall.TRAINING and declared.labeller is not None
        if not training:
            self._records.begin_evaluation()
        elif not has_parameters(module) or comes_before:
            return False  # possibly a data transform
        else:
            self._decide(module, args, kwargs)
        if declared.tracer.installed and not attached:
            declared.tracer.enter(module, args, kwargs)
            declared.beside.enter(module, args, kwargs)
        elif training and not attached:
            self._hooks.stance.restore()
        return training

    def _decide(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """If the labels of the step make it due, arm the hooks during the step."""
        agenda, labeller = self._declared.agenda, self._declared.labeller
        if labeller is not None:
            agenda.declare(labeller(module, args, kwargs))
        watching = self._state.stage is Stage.WATCHING
        if watching and self._state.decide(due=agenda.due):
            self._hooks.arm(thread=self._turns.thread_to_follow())


def _classes(optimizer: Any) -> list[str]:
    return [base.__name__ for base in type(optimizer).__mro__]


def _is_one_of_several() -> bool:
    """Whether this process trains together with other processes."""
    distributed = torch.distributed
    several = distributed.is_available() and distributed.is_initialized()
    return several and distributed.get_world_size() > 1

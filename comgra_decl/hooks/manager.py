"""When to look: follows the steps of a training and switches the tracer on and off.

Between recorded steps one global optimizer hook counts steps, and nothing else is attached. The
hook that ends the step before a recorded one arms the tracer; the one that ends the recorded step
closes the record and disarms it, unless the next step is recorded too. Where it depends on the
type of a step whether it is recorded, the tracer is armed by the call of the model instead.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from comgra_decl.hooks.call_context import (
    is_backward,
    is_called_by_module,
    is_nested_step,
    is_within_call,
)
from comgra_decl.hooks.choosing import Choosing
from comgra_decl.hooks.compiled.control_flow import untouched_control_flow
from comgra_decl.hooks.compiled.stance import anything_compiled
from comgra_decl.hooks.cross_thread import act_for, forget_all, here
from comgra_decl.hooks.hand_updates import BY_HAND, HandUpdates
from comgra_decl.hooks.hook_lists import Placed, after_steps, tidy
from comgra_decl.hooks.limits import Captures
from comgra_decl.hooks.module_tree import has_parameters
from comgra_decl.hooks.optimizers import CalledModels, Optimizers
from comgra_decl.hooks.other_threads import alive
from comgra_decl.hooks.patches import run_natively, watch_mode
from comgra_decl.hooks.root_calls import RootCall
from comgra_decl.hooks.scalars.listener import Listener
from comgra_decl.hooks.scalars.numbers import read_number
from comgra_decl.hooks.scalars.scalars import Saying
from comgra_decl.hooks.schedule.agenda import Agenda, Plan
from comgra_decl.hooks.schedule.budget import Meter
from comgra_decl.hooks.schedule.idle import Pace
from comgra_decl.hooks.schedule.skipped import watch_skips
from comgra_decl.hooks.schedule.types import Labeller, RootWatch
from comgra_decl.hooks.schedule.unended import UNENDED, UnendedSteps
from comgra_decl.hooks.step_clock import Seen, StepClock
from comgra_decl.hooks.training_threads import IN_TURNS, Lane, Lanes
from comgra_decl.records import GRAD_SCALE, SKIPPED_STEP, RawStep, Said, SlotInfo

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from comgra_decl.hooks.schedule.resuming import Resumption
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
        self._said_by_hand = False
        self._nested = False  # whether an optimizer's step is told of twice
        self._signs = 0  # how often something was seen to change parameters
        self._begun_unseen = False  # whether the step that begins has called its model already
        self._asides = self._usual = 0
        self._undecided = []
        self._evaluated = []
        self._kept_enough = False
        self._stepped = False
        self._in_training_mode, self._tuned_before = False, True
        self._incoming: deque[tuple[Spec | None, str]] = deque()
        self._agenda = Agenda(spec, self._budget)
        self._watch = RootWatch(self._on_watched_call, on_fault=self._fault)
        self._labeller = self._new_labeller(spec)
        self._optimizers = Optimizers(forget=self._forget)
        self._called = CalledModels(on_fault=self._fault)
        self._lanes = Lanes(self._new_lane(0, saying=self._scalars.saying))
        self._unended = UnendedSteps()
        self._captures = Captures(self._reporter.warn, on_fault=self._fault)
        self._patches = (
            watch_mode(self._on_mode, on_fault=self._fault),
            watch_skips(self._on_skip, before=self._say_scale, on_fault=self._fault),
            untouched_control_flow(),
            *self._captures.patches,
        )
        self._listener = Listener(self)
        self._scale_said = -1  # the last step of which the gradient scale was said
        self._handles: list[RemovableHandle | Placed] = []
        self._resumption: Resumption | None = None  # until a resumed training has made a step

    def _new_labeller(self, spec: Spec) -> Labeller | None:
        return None if spec.types.by is None else Labeller(spec.types, warn=self._reporter.warn)

    def _new_clock(self, spec: Spec) -> StepClock:
        return StepClock(spec.schedule.step, warn=self._reporter.warn)

    def _new_lane(self, thread: int, *, saying: Saying | None = None) -> Lane:
        hand = HandUpdates(held=self._are_trained)
        return Lane(thread, self._new_clock(self._spec), hand, saying or Saying())

    def _are_trained(self, leaves: list[torch.Tensor]) -> bool:
        tops = (plan.top.module() for plan in [*self._tracer.tops.values()])
        return self._optimizers.train(leaves, models=[top for top in tops if top is not None])

    def _forget(self, optimizer: int) -> None:
        for lane in self._lanes:
            lane.clock.forget(optimizer)

    # -- lifecycle -----------------------------------------------------------------------------

    def attach(self) -> None:
        """Starts following the program."""
        run_natively(self._idle.after_optimizer, self._on_mode, self._on_skip, self._say_scale)
        run_natively(self._owners.note, self._owners.note_parameter)
        self._handles = [
            after_steps.add(self._idle.after_optimizer),
            register_module_module_registration_hook(self._owners.note),
            register_module_parameter_registration_hook(self._owners.note_parameter),
        ]
        for patch in self._patches:
            patch.apply()
        self._losses.start()
        self._announce()
        self._listener.start()
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

    def enter_direct(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        """The same for a call of `forward` that no call of the module has made.

        Returns:
            What is to be told of its output (None if it fails); None if the call is not followed.
        """
        if not self._tracer.installed:
            return None
        self._direct.follow(module, args, kwargs)
        return lambda output: self._direct.followed(module, args, output)

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
            self._headroom.give_back()
            tidy()  # it may have ended in the midst of an optimizer's hooks
            return
        try:
            self._end_unfinished(lane for lane in self._lanes if lane is not self._lanes.followed)
            if self._undecided and not self._train.root_calls:
                self._emit_undecided()
            if self._evaluation.open:
                self._finish_evaluation()
            if self._hand.over():
                self._end_by_hand()
            elif self._clock.complete:
                self._end_step()
            self._finish_last()
        except Exception as error:
            self._fault(error)
        if not self._stopped:
            self._end_tracing()
        self._headroom.give_back()
        self._direct.forget()  # what may stay on torch keeps none of the program's classes alive

    def _finish_last(self) -> None:
        """Closes what came after the last step; all there is, if no step was seen to end."""
        for lane in self._lanes:
            if (sentence := lane.clock.in_vain) is not None:
                self._reporter.warn(sentence)
        never_ended = not (self._stepped or self._clock.running)
        if self._train.open and never_ended and len(self._train):
            self._finish_unstepped()
        elif self._scalars.losses or (self._train.open and "loss" in self._train.calls):
            self._finish_unended()
        elif self._train.open and self._asides and not self._train.root_calls:
            self._emit_undecided()  # a test without gradients

    def stop(self) -> None:
        """Asks, from any thread, that tracing ends with the current step."""
        self._stop_requested = True
        self._idle.end()

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
        if self._unended.look(self._step, parameters, signs=self._signs) and before is None:
            sentence = UNENDED.format(self._step)
            self._reporter.warn(sentence)
            if self._stepped:  # else there will be a record that brings it
                self._scalars.remark(sentence)
            self._hand.unseen()
            self._announce()

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
        self._idle.end()

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
            for lane in self._lanes:
                lane.clock = self._new_clock(spec)
        self._quiet = 0.0

    def _remove_everything(self) -> None:
        self._stopped = True
        with ExitStack() as each:  # all of them, whatever one of them does; the last is first
            each.callback(tidy)  # a place may be left of a step in which another thread trained
            each.callback(forget_all)
            each.callback(self._evaluation.capture.drop)
            each.callback(self._train.drop)
            for handle in self._handles:
                each.callback(handle.remove)
            for patch in self._patches:
                each.callback(patch.restore)
            for part in (self._scalars, self._losses, self._listener):
                each.callback(part.stop)
            each.callback(self._disarm)
            each.callback(self._watch.remove)
            each.callback(self._called.stop)
            each.callback(self._idle.end)
        self._handles.clear()

    # -- events --------------------------------------------------------------------------------

    def _after_optimizer(self, optimizer: Any) -> None:
        with self._together:
            self._idle.end()
            if is_nested_step(sys._getframe(1), optimizer):
                self._nested = True
                return
            self._signs += 1
            lane = None if is_backward() else self._speaks(ends=True)
            if lane is None:
                self._after_followed(optimizer)
            elif not self._stopped:
                lane.hand.give_way()
                self._announce()
                if lane.clock.stepped(id(optimizer), classes=_classes(optimizer)):
                    self._end_elsewhere(lane)

    def _after_followed(self, optimizer: Any) -> None:
        if self._hand.possible and not (self._hand.active and self._hand.parameters):
            self._hand.give_way()
            self._announce()
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
            busy = self._armed or self._stopped or self._lanes.several
            if not (busy or anything_compiled()):
                self._called.watch()
                self._idle.end()

    def _announce(self) -> None:
        """Hears of `backward` before it runs, as long as updates by hand may end steps."""
        by_hand = any(lane.hand.possible and not lane.clock.explicit for lane in self._lanes)
        self._losses.announce(self._on_backward if by_hand else None)

    def _on_backward(self, tensors: Any) -> None:
        """`backward` is about to be called, in a program whose optimizers nobody has seen step."""
        if self._stopped:
            return
        lane = self._speaks()
        if lane is not None:
            if lane.hand.over():
                self._note_by_hand()
                lane.hand.active = True
                self._end_elsewhere(lane)
            lane.hand.backward(tensors)
            self._announce()
            return
        if self._hand.over():
            self._begun_unseen = True  # what was called until now belongs to the next step
            try:
                self._end_by_hand()
            finally:
                self._begun_unseen = False
        self._hand.backward(tensors)
        if not self._hand.possible:  # an optimizer holds what is trained: no more to hear
            self._announce()
        if self._hand.active and not self._armed and self._step + 1 >= self._quiet:
            self._watch.install()
            self._stance.force_if_needed()

    def _on_backward_done(self, whole: bool) -> None:
        self._unused.end(whole=whole)
        self._train.backwards.end()
        self._evaluation.capture.backwards.end()
        if self._hand.pending:
            self._tracer.parameters.keep_gradients()

    def _end_by_hand(self) -> None:
        """The program has written its parameters: a step is over."""
        if not self._hand.active:
            self._hand.active = True
            self._note_by_hand()
        self._stepped = True
        if self._armed:
            self._tracer.after_hand(self._train)
        self._end_step()

    def _note_by_hand(self) -> None:
        if not self._said_by_hand:
            self._said_by_hand = True
            self._reporter.say("steps", BY_HAND)

    def _ends_step(self, optimizer: Any) -> bool:
        """Whether an optimizer that has stepped ends the step of the training."""
        self._optimizers.note(optimizer)
        seen: Seen | None = None
        if self._clock.rule == "last_optimizer" and (self._armed or self._called.watched):
            seen = self._optimizers.seen(optimizer, iter(self._called))
            if self._armed and seen.own and not self._lanes.several and self._lanes.followed.thread:
                act_for(self._lanes.followed.thread)  # it trains what that one has called
        return self._clock.stepped(id(optimizer), seen=seen, classes=_classes(optimizer))

    def _say_scale(self, scaler: Any, *, always: bool = False) -> None:
        """Mixed precision is about to let an optimizer step, or not: what is the loss scaled by?"""
        if self._stopped or not (self._armed or always) or self._scale_said == self._step:
            return
        if self._armed and self._steps_elsewhere():
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
        with self._together:
            if self._speaks(ends=True) is None:
                self._say_scale(scaler, always=True)
                self._train.skipped = True
            self._scalars.measured(SKIPPED_STEP, 1.0)
            self._scalars.note("the optimizer's step was skipped: a gradient is not finite")
        self._idle.after_optimizer(optimizer, None, None)

    def _settle_resumption(self, resumption: Resumption) -> None:
        """The first step of a resumed training ends: by now it is known which one it is."""
        self._resumption = None
        self._step, text = resumption.settle()
        self._scalars.resume(self._step, text)
        self._agenda.resume(self._step)
        self._quiet = 0.0

    def _end_step(self) -> None:
        with self._together:
            self._end_followed()

    def _end_followed(self) -> None:
        lanes = self._lanes
        if lanes.followed.saying is not self._scalars.saying:
            self._scalars.turn_to(lanes.followed.saying)
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
            lanes.followed.record = self._step
            self._tuned_before = self._train.root_calls > 0 and not self._in_training_mode
            lanes.followed.calls = bool(self._train.root_calls or self._asides)
            cost = self._close_train()
        elif self._agenda.typed:
            self._agenda.end(recorded=False)
        seen = self._idle.counted + 1
        once = 0.0 if cost is None else self._train.once + self._compiled.take_compiling()
        self._budget.step_ended(cost, self._agenda.ended, steps=seen, once=once)
        self._step += 1 + lanes.passed
        lanes.passed = lanes.refused = 0
        lanes.followed.waits = True
        if lanes.several:
            self._end_unfinished(lanes.prune())
        self._asides = 0
        self._in_training_mode = False
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
            or self._budget.attentive
            or self._agenda.typed
            or self._scalars.talks
            or self._called.watched
            or self._lanes.several
            or self._nested
        )
        step = self._begun = self._step
        steps = min(self._quiet - 1 - step, self._pace.steps(step))
        self._losses.follow(self._lanes.followed.helper or self._lanes.followed.thread)
        owner = None if busy else self._clock.simple
        self._idle.begin(owner or 0, int(max(steps, 0)))
        if self._stopped or self._stop_requested or self._incoming:  # another thread may say so
            self._idle.end()

    def _begin_step(self) -> None:
        plan = Plan.WAIT
        if self._step >= self._quiet:
            if self._keeps and self._kept_enough:
                self._keeps = False
                self._agenda.stop_keeping()
            plan = self._agenda.plan(self._step)
            self._quiet = self._agenda.quiet_until
            self._deferred = self._keeps or self._agenda.typed
        if self._lanes.several:
            plan = self._in_turn(plan)
        if self._begun_unseen:  # it stays due
            self._lanes.owed = self._lanes.owed or (self._lanes.several and plan is Plan.ARM)
            plan = Plan.WAIT
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
        with self._together:
            if self._lanes.several and (is_within_call(sys._getframe(1)) or not self._turn_here()):
                return False  # another thread has begun to wait within this call
            return self._decides(module, args, kwargs)

    def _decides(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
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
        with self._together:
            lane = self._speaks()
            if lane is None:
                self._tag_followed(names)
            else:
                lane.labels.update(dict.fromkeys(names))

    def _tag_followed(self, names: tuple[str, ...]) -> None:
        if self._roots.evaluating or self._roots.maybe:
            self._evaluation.tags.update(dict.fromkeys(names))
            return
        too_late = self._watched and not self._watch.waiting and not self._armed
        self._agenda.tag(names, too_late=too_late)
        self._quiet = -math.inf
        self._idle.end()

    def _on_step(self) -> None:
        """The program says that a step ends here."""
        if self._stopped:
            return
        with self._together:
            lane = self._speaks(ends=True)
            if lane is None:
                self._on_followed_step()
                return
            lane.hand.give_way()
            self._announce()
            if lane.clock.by_program():
                self._end_elsewhere(lane)

    def _on_followed_step(self) -> None:
        if self._hand.possible:
            self._hand.give_way()
            self._announce()
        if self._tracer.inside:
            self._reporter.warn("comgra.step() does nothing inside the call of a module")
        elif self._clock.by_program():
            self._stepped = True
            self._end_step()

    # -- threads that train side by side -------------------------------------------------------

    def _training_thread(self) -> int:
        lane = self._lanes.followed
        if self._lanes.several or (lane.calls and not is_called_by_module(sys._getframe(1))):
            return lane.thread
        if lane.calls:
            return here()
        if lane.calls is None and lane.thread in (0, here()):
            return here() if self._step else 0  # armed by the step before
        return 0  # whichever calls the model next

    def _turn_here(self) -> bool:
        """Follows this thread, if it is one of several that train and the others allow it."""
        lane = self._lanes.of(here()) if self._lanes.several else None
        return lane is not None and self._turn_to(lane)

    def _is_abandoned(self) -> bool:
        """Whether the thread whose step would be recorded next is gone, and this one is new."""
        gone = not self._has_begun() and self._tracer.thread not in alive()
        return gone and self._lanes.of(here()) is None

    def _has_begun(self) -> bool:
        """Whether the record of a step or of an evaluation is in progress."""
        begun = self._train.open and (len(self._train) or self._train.root_calls or self._asides)
        return bool(begun) or self._evaluation.capture.open

    def _speaks(self, *, ends: bool = False) -> Lane | None:
        """Says whose step the numbers that follow are of: that of this thread, if it trains.

        Args:
            ends: whether what this thread does now ends a step, so that a record can begin.

        Returns:
            The lane of this thread if another one is followed, and stays so.
        """
        if not self._lanes.several:
            return None
        lane = self._lanes.of(here())
        if lane is None:  # it does not train: what it says is about the one that is followed
            return None
        if lane.saying is not self._scalars.saying:
            self._scalars.turn_to(lane.saying)
        return None if self._turn_to(lane, ends=ends) else lane

    def _is_followed_now(self, losses: Any) -> bool:
        """This thread calls `backward`, so it trains."""
        followed = self._lanes.followed
        if followed.thread == 0:
            followed.thread = self._tracer.thread or here()
            self._losses.follow(followed.thread)
        if not self._takes_part(losses) and self._lanes.of(here()) is None:
            act_for(get_ident())
            self._idle.end()
            self._scalars.turn_to(followed.saying)  # what has happened until now is of that one
            self._scalars.talks = True  # what they say is told apart by where steps end
            self._called.stop()
            self._called.begin_step()
            self._lanes.add(self._new_lane(here()))
            self._announce()
            self._reporter.warn(IN_TURNS)
        return self._speaks() is None

    def _takes_part(self, losses: Any) -> bool:
        """Whether this thread goes on with a step that another one has begun, or has helped with.

        The two do one thing after the other then: they are no threads that train side by side.
        """
        several, lane, traced = self._lanes.several, self._lanes.followed, self._tracer.thread
        own = self._lanes.of(here())
        if own is not None and (several or not self._armed or traced in (0, here())):
            self._help(own)
            return True
        if self._armed and self._tracer.marks.are_behind(losses):
            if not several:  # the one before is gone, or has called no model
                lane.thread = traced
            elif self._lanes.of(traced) is None:
                return False
            self._help(self._lanes.of(traced) or lane)
            return True
        if several or self._has_begun():
            return False
        threads = alive()
        if lane.helper and (lane.helper == get_ident() or lane.helper not in threads):
            self._help(lane)  # the one that did until now is gone
            return True
        if lane.thread not in threads:
            lane.thread, lane.calls = get_ident(), None
            self._help(lane)
            return True
        return False

    def _help(self, lane: Lane) -> None:
        """Does, from now on, what this thread does for the one that a lane is of."""
        act_for(lane.thread)
        lane.helper = 0 if lane.thread == get_ident() else get_ident()
        if lane is self._lanes.followed:
            self._losses.follow(lane.helper or lane.thread)

    def _turn_to(self, lane: Lane, *, ends: bool = False) -> bool:
        """Follows a thread if no record of another one is in progress; returns whether it is."""
        lanes = self._lanes
        before = lanes.followed
        if lane is before:
            return True
        traced = self._tracer.installed and self._tracer.thread == lane.thread
        waits = self._armed and not (ends and lanes.tired())
        if not traced and (waits or self._has_begun()) and not lanes.stale:
            return False
        if self._tracer.installed and not traced:
            lanes.owed = self._armed
            self._train.drop()
            self._evaluation.close()
            self._disarm()
        before.labels, self._agenda.labels = self._agenda.labels, lane.labels
        lanes.followed = lane
        lanes.refused = 0
        if not traced:
            self._tracer.thread = lane.thread
            self._undecided.clear()
            self._evaluated.clear()
            self._asides = 0
        self._losses.follow(lane.helper or lane.thread)
        return True

    def _in_turn(self, plan: Plan) -> Plan:
        """Leaves a record that is due to the thread whose turn it is."""
        lanes = self._lanes
        self._quiet = -math.inf
        if lanes.owed and not self._keeps:
            plan = Plan.ARM
        if plan is not Plan.ARM:
            return plan
        lanes.owed = lanes.leaves()
        return Plan.WAIT if lanes.owed else plan

    def _end_unfinished(self, lanes: Iterable[Lane]) -> None:
        """Threads have ended, and the program: maybe after an update by hand."""
        for lane in lanes:
            if lane.hand.over():
                self._end_elsewhere(lane)
        self._scalars.turn_to(self._lanes.followed.saying)

    def _end_elsewhere(self, lane: Lane) -> None:
        """A step of a thread ends while one of another is recorded, or about to be."""
        lane.clock.end()
        lane.hand.end_step()
        lane.waits = True
        self._signs += 1
        number = self._step + self._lanes.passed
        if self._has_begun() or self._lanes.passed:
            self._lanes.passed += 1
            number += 1
        else:  # the other one may never begin its step: it keeps no number for it
            self._step += 1
        if lane.saying is not self._scalars.saying:
            self._scalars.turn_to(lane.saying)
        self._scalars.end_step(number, lane.labels)
        lane.labels = {}


def _classes(optimizer: Any) -> list[str]:
    return [base.__name__ for base in type(optimizer).__mro__]

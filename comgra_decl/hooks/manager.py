"""Assemble the components that trace a program, and start and stop tracing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from comgra_decl.hooks.call_routing import CallRouter
from comgra_decl.hooks.compiled.control_flow import untouched_control_flow
from comgra_decl.hooks.cross_thread import forget_all
from comgra_decl.hooks.declared import Declared, Followed
from comgra_decl.hooks.guarded import Ending, guarded
from comgra_decl.hooks.hand_updates import HandUpdates
from comgra_decl.hooks.hook_lists import Placed, after_steps, tidy
from comgra_decl.hooks.limits import Captures
from comgra_decl.hooks.listener import Listener
from comgra_decl.hooks.measuring.measured import Measured, Measurement, Surroundings
from comgra_decl.hooks.measuring.module_times import ModuleTimes
from comgra_decl.hooks.module_tree import Owners
from comgra_decl.hooks.objects import watch_freezing
from comgra_decl.hooks.optimizers import CalledModels, Optimizers
from comgra_decl.hooks.patches import run_natively, watch_mode
from comgra_decl.hooks.place import ProgramPlace
from comgra_decl.hooks.record_hooks import RecordHooks
from comgra_decl.hooks.report import Reporter
from comgra_decl.hooks.root_calls import RootCalls
from comgra_decl.hooks.scalars.automatic import AutomaticMetrics
from comgra_decl.hooks.scalars.losses import LossWatch
from comgra_decl.hooks.scalars.scalars import Saying, Scalars
from comgra_decl.hooks.scalars.shown import Shown
from comgra_decl.hooks.schedule.budget import Meter
from comgra_decl.hooks.schedule.evaluation import EvaluationPhases
from comgra_decl.hooks.schedule.idle import IdleSteps
from comgra_decl.hooks.schedule.skipped import watch_skips
from comgra_decl.hooks.schedule.unended import UNENDED, UnendedSteps
from comgra_decl.hooks.stalls import OwnWork, StallWatch
from comgra_decl.hooks.step_clock import StepClock
from comgra_decl.hooks.step_records import StepRecords
from comgra_decl.hooks.step_state import StepState
from comgra_decl.hooks.steps import Steps
from comgra_decl.hooks.tensors.capture import new_capture
from comgra_decl.hooks.tensors.slots import SlotTable
from comgra_decl.hooks.training_threads import Lane, Lanes, Turns
from comgra_decl.records import AUTOMATIC, STALLED, RawStep, ScalarBatch, SlotInfo

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from comgra_decl.hooks.probing.interventions import Recaller
    from comgra_decl.hooks.probing.perturbations import Perturbations
    from comgra_decl.hooks.probing.samples import KeptSamples
    from comgra_decl.hooks.schedule.resuming import Resumption
    from comgra_decl.spec import Spec


class HookManager:
    """Attaches to the running program and passes each recorded step to `sink`.

    Its components:

    - `Ending`: ends tracing, and handles errors in tracing itself.
    - `Declared`: the components that depend on the spec, such as the module tracer, the agenda and
      the budget.
    - `Steps`: ends training steps, and decides whether the next one is recorded.
    - `Turns`: decides which of several training threads is followed.
    - `CallRouter`: decides which record a model call belongs to.
    - `StepRecords`: closes records and emits them.
    - `RecordHooks`: installs hooks on the program while a step is recorded.
    - `StepState`: the state of the step in progress, shared by all of them.

    Args:
        spec: what to capture and when.
        sink: called with each closed record on the training thread; must be fast.
        on_fault: called once with an error in tracing itself, after tracing has stopped.
        scalars: called at intervals with the metrics and notes of all steps, in the same way as
        `sink`.
        meter: measures the cost of recording outside the training thread.
        ready: called before a step is recorded; an exception ends tracing, as an error in tracing
        does.
        ended: called on the training thread after each step; exceptions reach the program.
    """

    def __init__(
        self,
        spec: Spec,
        sink: Callable[[RawStep], None],
        *,
        on_fault: Callable[[BaseException], None],
        scalars: Callable[[ScalarBatch], None] | None = None,
        meter: Meter | None = None,
        ready: Callable[[], None] = lambda: None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        together = RLock()  # serialises tracing between concurrent training threads
        self._ending = ending = Ending(rest=self._rest, remove=self._remove, on_fault=on_fault)
        self._on_fault = fault = ending.fault
        self._reporter = reporter = Reporter(spec)
        self._scalars = Scalars(scalars, on_fault=fault)
        self._scalars.watch_losses(spec.schedule.sudden is not None)
        self._idle = idle = IdleSteps(
            self._scalars.events.append, otherwise=self._after_optimizer, on_fault=fault
        )
        self._state = state = StepState(idle.counted)

        # components that do not depend on the spec
        self._own = OwnWork()
        self._optimizers = reporter.optimizers = Optimizers(forget=self._forget)
        self._owners = Owners(on_fault=fault)
        self._owners.warn = reporter.warn
        self._roots = RootCalls(self._owners, held_in=self._optimizers.held_in)
        self._called = CalledModels(on_fault=fault)
        self._graphs = Captures(reporter.warn, on_fault=fault)
        self._unended = UnendedSteps()
        self._table = SlotTable()
        self._sink = sink

        # components that depend on the spec
        self._declared = declared = Declared(
            spec,
            meter=meter or Meter(),
            reporter=reporter,
            own=self._own,
            remark=self._scalars.remark,
        )
        reporter.price = lambda: declared.budget.price
        self._train = new_capture(spec, training=True, warn=reporter.warn, left=declared.left)
        self._evaluation = EvaluationPhases(
            new_capture(spec, training=False, warn=reporter.warn, left=declared.left),
            spec.schedule.eval,
            factor=declared.budget.factor,
        )
        self._lanes = Lanes(self._new_lane(0, saying=self._scalars.saying))

        # components that handle events
        self._losses = LossWatch(
            self._scalars.events.append if spec.kpis.loss and scalars is not None else None,
            together=together,
            on_fault=fault,
        )
        self._around = Surroundings(reporter.attach, reporter.warn, self.place)
        self._automatic = AutomaticMetrics(
            wanted=spec.kpis.automatic and scalars is not None,
            scalars=self._scalars,
            optimizers=self._optimizers,
            losses=self._losses,
            modules=ModuleTimes(self._around, on_fault=fault),
            on_fault=fault,
        )
        measurements = self._measurements(spec)
        self._measured = Measured(measurements) if measurements else None
        self._hooks = RecordHooks(
            declared,
            state,
            lanes=self._lanes,
            graphs=self._graphs,
            losses=self._losses,
            training=self._train,
            evaluation=self._evaluation,
            ending=ending,
        )
        self._owners.on_class = self._hooks.direct.note
        reporter.on_uncalled = self._hooks.direct.suspect
        self._records = StepRecords(
            sink,
            declared=declared,
            state=state,
            training=self._train,
            evaluation=self._evaluation,
            hooks=self._hooks,
            roots=self._roots,
            called=self._called,
            table=self._table,
            scalars=self._scalars,
            unended=self._unended,
            reporter=reporter,
        )
        self._turns = Turns(
            self._lanes,
            new_lane=self._new_lane,
            declared=declared,
            state=state,
            records=self._records,
            hooks=self._hooks,
            evaluation=self._evaluation,
            losses=self._losses,
            scalars=self._scalars,
            idle=idle,
            called=self._called,
            reporter=reporter,
            announce=self._announce,
        )
        self._steps = Steps(
            declared,
            state=state,
            records=self._records,
            hooks=self._hooks,
            lanes=self._lanes,
            turns=self._turns,
            training=self._train,
            evaluation=self._evaluation,
            roots=self._roots,
            optimizers=self._optimizers,
            called=self._called,
            graphs=self._graphs,
            losses=self._losses,
            scalars=self._scalars,
            automatic=self._automatic,
            measured=self._measured,
            idle=idle,
            reporter=reporter,
            ending=ending,
            together=together,
            own=self._own,
            change=self._change,
            ended=ended,
        )
        router = CallRouter(
            declared,
            state=state,
            records=self._records,
            hooks=self._hooks,
            steps=self._steps,
            turns=self._turns,
            training=self._train,
            evaluation=self._evaluation,
            roots=self._roots,
            called=self._called,
            graphs=self._graphs,
            idle=idle,
            unended=self._unended,
            reporter=reporter,
            ending=ending,
            together=together,
            ready=ready,
        )
        self._listener = Listener(
            declared,
            steps=self._steps,
            turns=self._turns,
            hooks=self._hooks,
            training=self._train,
            evaluation=self._evaluation,
            roots=self._roots,
            scalars=self._scalars,
            shown=Shown(spec, table=self._table, sink=sink, warn=reporter.warn),
            idle=idle,
            ending=ending,
            together=together,
        )
        self._losses.connect(
            on_loss=self._hooks.on_loss,
            on_done=self._steps.on_backward_done,
            on_thread=self._turns.is_followed,
        )
        self._hooks.connect(
            recording=self._listener.recording, before_loss=self._records.settle_tuning
        )
        self._followed = Followed(
            calls=router,
            owners=self._owners,
            roots=self._roots,
            direct=self._hooks.direct,
            held=self._optimizers.held,
            together=together,
            on_fault=fault,
        )
        declared.follow(self._followed, training=self._train, evaluation=self._evaluation)
        self._router = router
        self._patches = (
            watch_mode(router.on_mode, on_fault=fault),
            watch_freezing(on_fault=fault),
            watch_skips(self._steps.on_skip, before=self._steps.note_scale, on_fault=fault),
            untouched_control_flow(),
            *self._graphs.patches,
        )
        self._stalls = StallWatch(self._report_stall, naming=self._node_of)
        self._watches_stalls = spec.kpis.automatic and scalars is not None
        self._handles: list[RemovableHandle | Placed] = []

    # -- callbacks between components ------------------------------------------------------------

    def _measurements(self, spec: Spec) -> list[Measurement]:
        """Return what the spec asks to measure."""
        found: list[Measurement] = []
        if spec.profile is not None:
            from comgra_decl.hooks.measuring.profiling import Profiling

            found.append(Profiling(spec.profile.steps, self._around, losses=self._losses))
        if spec.memory is not None:
            from comgra_decl.hooks.measuring.memory import MemoryUse

            found.append(MemoryUse(spec.memory.steps, self._around))
        return found

    def _new_lane(self, thread: int, *, saying: Saying | None = None) -> Lane:
        hand = HandUpdates(held=self._are_trained)
        return Lane(thread, self._new_clock(), hand, saying or Saying())

    def _new_clock(self) -> StepClock:
        return StepClock(self._declared.spec.schedule.step, warn=self._reporter.warn)

    def _are_trained(self, leaves: list[torch.Tensor]) -> bool:
        return self._optimizers.train(leaves, models=self._models())

    def _models(self) -> list[nn.Module]:
        tops = (plan.top.module() for plan in [*self._declared.tracer.tops.values()])
        return [top for top in tops if top is not None]

    def _forget(self, optimizer: int) -> None:
        for lane in self._lanes:
            lane.clock.forget(optimizer)

    def _after_optimizer(self, optimizer: Any) -> None:
        self._steps.after_optimizer(optimizer)

    def _announce(self) -> None:
        self._steps.announce()

    def _change(self, spec: Spec) -> None:
        """Switch to a changed spec, starting with the step about to begin."""
        before = self._declared.spec
        self._table.renew()
        self._declared.change(
            spec, self._followed, training=self._train, evaluation=self._evaluation
        )
        self._scalars.watch_losses(spec.schedule.sudden is not None)
        if spec.schedule.step != before.schedule.step:
            for lane in self._lanes:
                lane.clock = self._new_clock()

    # -- starting --------------------------------------------------------------------------------

    def resume(
        self,
        slots: Iterable[SlotInfo],
        resumption: Resumption,
        *,
        samples: Mapping[str, KeptSamples | str],
    ) -> None:
        """Continue an existing run; call it before `attach`.

        Args:
            slots: the slots in the run.
            resumption: determines the step at which the training resumes.
            samples: the samples of its probes, or why they cannot be used.
        """
        self._table.resume(slots)
        if self._train.probing is not None:
            self._train.probing.resume(samples)
        self._steps.resumption = resumption
        self.begin_at(resumption.expected)

    def recall(self, recaller: Recaller) -> None:
        """Let interventions take values from records of other runs; call it before `attach`."""
        if self._train.probing is not None:
            self._train.probing.recall(recaller)

    def begin_at(self, step: int) -> None:
        """Give the first step a number other than 0; call it before `attach`."""
        self._state.number = step
        self._scalars.resume(step)
        self._declared.agenda.resume(step)

    def expect(self, model: nn.Module) -> None:
        """Record calls of a model even if it has no parameters; call it before `attach`."""
        self._declared.tracer.expected = weakref.ref(model)

    def only_evaluate(self) -> None:
        """Record all calls as evaluations, even in training mode; call it before `attach`."""
        self._roots.only_evaluated = True

    def probe_single_call(self) -> None:
        """Run the probes after the only call that is recorded; call it before `attach`."""
        if self._train.probing is not None:
            self._train.probing.single = True

    def before_models(self, function: Callable[[str, nn.Module], None]) -> None:
        """Call a function before a trained model is called in a recorded step.

        Args:
            function: receives the node and the model before any of it has run or been read. An
                exception ends tracing, as an error in tracing does.
        """
        self._declared.before_models(function, self._train)

    def attach(self) -> None:
        """Start following the program."""
        steps, owners = self._steps, self._owners
        run_natively(self._idle.after_optimizer, self._router.on_mode)
        run_natively(steps.on_skip, steps.note_scale)
        run_natively(owners.note, owners.note_parameter)
        self._handles = [
            after_steps.add(self._idle.after_optimizer),
            register_module_module_registration_hook(owners.note),
            register_module_parameter_registration_hook(owners.note_parameter),
        ]
        for patch in self._patches:
            patch.apply()
        self._losses.start()
        steps.announce()
        self._listener.start()
        steps.begin()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Follow the running call to the outermost module, during which tracing was attached.

        torch does not run hooks for a call if they are registered during that call.
        """
        if not self._steps.enter(module, args, kwargs) and self._declared.tracer.installed:
            self._enter(module, args, kwargs)

    @guarded
    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._declared.tracer.enter(module, args, kwargs)
        self._declared.beside.enter(module, args, kwargs)

    def enter_direct(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        """Follow the running direct call to `forward` during which tracing was attached.

        Returns:
            A function to call with the output (None if the call failed), or None if the call is
            not followed.
        """
        if not self._declared.tracer.installed:
            return None
        direct = self._hooks.direct
        direct.follow(module, args, kwargs)
        return lambda output: direct.followed(module, args, output)

    def emit(self, make: Callable[[SlotTable], RawStep], *, warning: str | None) -> None:
        """Store a record that is made outside of the steps.

        Args:
            make: returns the record; receives the table that assigns the ids of its slots.
            warning: what is reported about it.
        """
        if warning is not None:
            self._reporter.warn(warning)
        self._sink(make(self._table))

    @guarded
    def end_call(self) -> None:
        """End the step after a backward pass that neither an optimizer nor the program follows up.

        The gradients of the parameters are read as the backward pass left them.
        """
        if self._state.armed:
            self._declared.tracer.parameters.keep_gradients()
            self._declared.tracer.after_hand(self._train)
        self._steps.by_program()

    # -- from any thread -------------------------------------------------------------------------

    def stop(self) -> None:
        """Request the end of tracing after the current step; may be called from any thread."""
        self._ending.requested = True
        self._idle.end()

    def stop_keeping(self) -> None:
        """Stop capturing steps outside the schedule; may be called from any thread."""
        self._steps.stop_keeping()

    def replace(self, spec: Spec | None, note: str) -> None:
        """Replace the spec, starting with the next step; may be called from any thread.

        Args:
            spec: the changed declaration, which differs only in keys of `spec.live.LIVE_KEYS`;
                None to add only the note.
            note: the note to add to the run.
        """
        self._steps.replace(spec, note)

    def look(self) -> None:
        """Check that steps still end; called about once a second from another thread."""
        if self._ending.over:
            return
        number, before = self._state.number, self._unended.found
        if self._watches_stalls:
            excused = self._evaluation.open or self._roots.evaluating
            excused = excused or (self._measured is not None and self._measured.working)
            own = self._own.seconds + self._train.cost
            self._stalls.look(number, excused=excused, own=own)
        parameters = (p for model in self._models() for p in model.parameters())
        found = self._unended.look(number, parameters, signs=self._steps.signs)
        if found and before is None:
            sentence = UNENDED.format(number)
            self._reporter.warn(sentence)
            if self._state.any_ended:  # otherwise the warning is part of the next record
                self._scalars.remark(sentence)
            self._turns.hand.unseen()
            self._steps.announce()

    def _report_stall(self, seconds: float, doing: str) -> None:
        """Record that the step in progress does not end; called from another thread."""
        number = self._state.number
        text = f"step {number} has not ended for {seconds:.0f} s. The threads are running:\n{doing}"
        self._scalars.told(f"{AUTOMATIC}{STALLED}", seconds, step=number)
        self._scalars.remark(text, step=number)
        self._reporter.warn(f"step {number} has not ended for {seconds:.0f} s; see its note")

    def place(self) -> ProgramPlace:
        """Return where the program is; call it before `detach`."""
        state = self._state
        return ProgramPlace(state.number, state.armed, self._node_of, self._models)

    def _node_of(self, module: nn.Module) -> tuple[str, nn.Module] | None:
        for plan in [*self._declared.tracer.tops.values()]:
            top = plan.top.module()
            for part in plan.parts if top is not None else ():
                if part.module() is module and top is not None:
                    return plan.top.node(part.path), top
        return None

    # -- stopping --------------------------------------------------------------------------------

    def detach(self) -> None:
        """Stop following the program.

        Even if a program never takes a step, its computations are recorded.
        """
        if self._ending.over:
            self._hooks.headroom.give_back()
            tidy()  # tracing may have ended while torch was running optimizer hooks
            return
        self._finish()
        if not self._ending.over:
            self._ending.now()
        self._hooks.headroom.give_back()
        self._hooks.direct.forget()  # wrappers left on torch must not keep its classes alive

    @guarded
    def _finish(self) -> None:
        """Close the records and measurements in progress."""
        self._automatic.finish()
        if self._measured is not None:
            self._measured.finish()
        lanes, turns = self._lanes, self._turns
        self._steps.end_unfinished(lane for lane in lanes if lane is not lanes.followed)
        if self._state.is_only_undecided:
            self._records.emit_undecided()
        if self._evaluation.open:
            self._records.finish_evaluation()
        if turns.hand.over():
            self._steps.end_by_hand()
        elif turns.clock.complete:
            self._steps.end()
        for lane in lanes:
            if (sentence := lane.clock.in_vain) is not None:
                self._reporter.warn(sentence)
        self._records.finish_last(stepped=turns.clock.running)
        if self._train.probing is not None:
            self._train.probing.finish()

    @property
    def late_documents(self) -> dict[str, Any]:
        """The documents that changed after the last record; read after `detach`."""
        return self._reporter.late_documents

    def perturbations(self) -> list[dict[str, Any]]:
        """Experiment with the copies of the models, if there are any; call it after `detach`."""
        copies = self._copies
        return [] if copies is None else copies.results()

    def release_copies(self) -> None:
        """Release the copies of the models without experiments."""
        if self._copies is not None:
            self._copies.release()

    @property
    def _copies(self) -> Perturbations | None:
        probing = self._train.probing
        return None if probing is None else probing.perturbations

    def _rest(self) -> None:
        """Stop recording and drop the records in progress."""
        self._idle.end()
        self._records.drop()
        self._evaluation.capture.drop()

    def _remove(self) -> None:
        """Permanently remove all hooks, modes and wrappers from the program."""
        self._ending.over = True
        with ExitStack() as each:  # runs all callbacks, last first, even if one fails
            each.callback(tidy)  # a step in which another thread trained may have left an entry
            each.callback(forget_all)
            each.callback(self._evaluation.capture.drop)
            each.callback(self._records.drop)
            for handle in self._handles:
                each.callback(handle.remove)
            for patch in self._patches:
                each.callback(patch.restore)
            for part in (self._scalars, self._losses, self._listener):
                each.callback(part.stop)
            each.callback(self._hooks.disarm)
            if self._measured is not None:
                each.callback(self._measured.abandon)
            each.callback(self._steps.stop)
            each.callback(self._called.stop)
            each.callback(self._idle.end)
        self._handles.clear()

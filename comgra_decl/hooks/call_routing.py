"""Assign each model call to the record of a step, the record of an evaluation, or neither."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.hooks import modes
from comgra_decl.hooks.call_context import is_in_optimizer
from comgra_decl.hooks.limits import CUDA_GRAPH
from comgra_decl.hooks.module_tree import in_training
from comgra_decl.hooks.probing.seclusion import SECLUDED, is_secluded
from comgra_decl.hooks.step_state import MOST_ASIDE, Call, Room, RootCall

if TYPE_CHECKING:
    from torch import nn

    from comgra_decl.hooks.declared import Declared
    from comgra_decl.hooks.guarded import Ending
    from comgra_decl.hooks.limits import Captures
    from comgra_decl.hooks.module_tree import Top
    from comgra_decl.hooks.optimizers import CalledModels
    from comgra_decl.hooks.record_hooks import RecordHooks
    from comgra_decl.hooks.report import Reporter
    from comgra_decl.hooks.root_calls import RootCalls
    from comgra_decl.hooks.schedule.evaluation import EvaluationPhases
    from comgra_decl.hooks.schedule.idle import IdleSteps
    from comgra_decl.hooks.schedule.unended import UnendedSteps
    from comgra_decl.hooks.step_records import StepRecords
    from comgra_decl.hooks.step_state import StepState
    from comgra_decl.hooks.steps import Steps
    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.hooks.training_threads import Turns

_MANY_ASIDE = (
    "{} is called without gradients more often than is usual in a training step. Only the first "
    "{} such calls in each recorded step are recorded, in the 'no_grad' pass. If this is an "
    "evaluation, call model.eval() first, so that it is recorded as one"
)


class CallRouter:
    """Distinguishes training from evaluation by the modes of modules and the calls to models.

    Implements `tracer.Calls`, which assigns a call to a record, and handles switches of a module
    between training and evaluation mode.

    Args:
        declared: the components that depend on the spec.
        state: the state of the step in progress.
        records: closes a record that is complete or turns out to be of a different kind.
        hooks: installs and removes the hooks of a record.
        steps: ends a step once the step turns out to be over.
        turns: determines which thread is followed.
        training: the record of a training step.
        evaluation: the evaluation phases and their records.
        roots: distinguishes training from evaluation.
        called: the models called in the step in progress.
        graphs: detects the capture of CUDA graphs.
        idle: counts the steps that need no other work.
        unended: detects steps whose end cannot be observed.
        reporter: receives warnings.
        ending: whether tracing continues, and how it ends.
        together: lock held while it is decided which thread's calls are followed.
        ready: called before a step is recorded; may raise.
    """

    def __init__(
        self,
        declared: Declared,
        *,
        state: StepState,
        records: StepRecords,
        hooks: RecordHooks,
        steps: Steps,
        turns: Turns,
        training: StepCapture,
        evaluation: EvaluationPhases,
        roots: RootCalls,
        called: CalledModels,
        graphs: Captures,
        idle: IdleSteps,
        unended: UnendedSteps,
        reporter: Reporter,
        ending: Ending,
        together: AbstractContextManager[Any],
        ready: Callable[[], None],
    ) -> None:
        self._declared = declared
        self._state = state
        self._records = records
        self._hooks = hooks
        self._steps = steps
        self._turns = turns
        self._train = training
        self._evaluation = evaluation
        self._roots = roots
        self._called = called
        self._graphs = graphs
        self._idle = idle
        self._unended = unended
        self._reporter = reporter
        self._ending = ending
        self._together = together
        self._ready = ready

    def on_mode(self, module: nn.Module, training: bool) -> None:
        """Handle a module's switch to training or evaluation mode; its children switch first."""
        roots = self._roots
        settled = training and not (roots.evaluating or roots.maybe)
        if settled or self._ending.over or torch.compiler.is_compiling():
            return
        if SECLUDED and is_secluded():  # a probe's copy switches parts of itself
            return
        with self._together:
            if self._hooks.is_of_another_thread() and not self._turns.turn_here():
                return  # another thread is being followed
            self._idle.end()
            modes.sweep()
            evaluates = roots.switched(module, training)
            # Before any training, this may be an evaluation that nothing else would detect.
            if evaluates or not (training or roots.training or self._state.armed):
                self._records.begin_evaluation()

    # -- calls, from the tracer ----------------------------------------------------------------

    def entered(self) -> None:
        """Start timing a model call for the budget."""
        self._declared.budget.begin()

    def choose(self, root: nn.Module, top: Top) -> StepCapture | None:
        """Return the record for a call that is about to begin, or None if it is not recorded."""
        if self._ending.waits:
            self._ending.when_safe()
            return None
        if self._graphs.active:
            self._reporter.warn(CUDA_GRAPH)
            return None
        call = self._call(root, top)
        if call.kind is RootCall.EVALUATION:
            return self._evaluate(root, call)
        if call.kind is RootCall.TRAINING and call.parametric:
            self._begin_training(root, call)
        return self._in_step(root, top, call)

    def left(self) -> None:
        """Finish a model call, and close the record of an evaluation that is complete."""
        with self._together:
            state = self._state
            self._train.aside = False
            if not self._roots.evaluating and self._train.open and state.trained:
                # the model may have been a teacher, not the one being evaluated
                self._declared.structures.resume()
            undecided = state.evaluated and not self._roots.training
            if self._evaluation.complete and not undecided:
                self._records.finish_evaluation()
                if not state.armed:
                    self._hooks.disarm()

    def abandoned(self) -> bool:
        """Return whether this thread is new and the thread to record next has ended."""
        return self._turns.abandoned()

    # -- classifying calls ---------------------------------------------------------------------

    def _call(self, root: nn.Module, top: Top) -> Call:
        gradient, training_mode = torch.is_grad_enabled(), in_training(root)
        if self._roots.only_evaluated:
            return Call(id(root), RootCall.UNDECIDED, bool(top.parametric), gradient, False)
        kind = self._roots.kind(root, training_mode=training_mode, gradient=gradient)
        call = Call(id(root), kind, bool(top.parametric), gradient, training_mode)
        if kind is RootCall.EVALUATION and self._is_in_closure(call):
            self._roots.tunes(root)
            if not self._evaluation.capture.open:
                self._evaluation.forget()
            return call._replace(kind=RootCall.TRAINING)
        backward = "loss" in self._train.calls
        kind = self._state.kind(call, backward=backward, stepped=self._turns.clock.running)
        return call if kind is call.kind else call._replace(kind=kind)

    def _is_in_closure(self, call: Call) -> bool:
        """Return whether an optimizer makes this call in its closure, which trains the model."""
        return call.gradient and call.parametric and is_in_optimizer(sys._getframe(1))

    def _evaluate(self, root: nn.Module, call: Call) -> StepCapture | None:
        """Return the record of the evaluation in progress, or None if it accepts no more calls."""
        state = self._state
        self._declared.structures.pause()
        self._evaluation.begin(state.number, state.trained)
        if call.parametric and (call.gradient or not self._roots.training):
            state.evaluated.append(weakref.ref(root))
        return self._evaluation.enter(state.number, counts=call.parametric)

    def _begin_training(self, root: nn.Module, call: Call) -> None:
        """Handle a training call, which determines how earlier calls are recorded."""
        if self._evaluation.capture.open:
            self._records.settle_evaluation(root)
        if self._state.undecided:
            self._records.settle_undecided(root)
        if self._turns.hand.over():
            self._steps.end_by_hand()
        elif self._turns.clock.called(id(root)):
            self._steps.end()
        self._roots.evaluating = False
        if call.training_mode:
            self._state.in_training_mode = True
            self._roots.trains(root)

    def _in_step(self, root: nn.Module, top: Top, call: Call) -> StepCapture | None:
        """Return the record of the step in progress, or None if it accepts no more calls."""
        state, train = self._state, self._train
        if state.armed:
            self._called.note(root)
        self._declared.structures.resume()
        if state.open and self._is_endless():
            self._records.cut()
        if not state.open:
            return None
        enough = 0
        if call.kind is RootCall.UNDECIDED:  # possibly an evaluation
            enough = self._evaluation.calls(max(1, state.usual))
        room = state.room(call, evaluation=enough)
        if room is not Room.FREE:
            if room is Room.CROWDED:
                self._reporter.warn(_MANY_ASIDE.format(top.label, MOST_ASIDE))
            return None
        if not state.begun:
            self._ready()
        state.take(call, weakref.ref(root))
        train.aside = call.kind is not RootCall.TRAINING and not call.gradient
        return train

    def _is_endless(self) -> bool:
        """Return whether the end of the step in progress cannot be observed."""
        found = self._unended.found
        seen = found is not None and found == self._state.number
        return seen or self._state.is_endless(backward="loss" in self._train.calls)

"""Close and emit the records of training steps and evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from comgra_decl.hooks.limits import COMPILED_GRAPH, compiles_to_cuda_graphs
from comgra_decl.hooks.schedule.agenda import TRAIN
from comgra_decl.hooks.step_state import Outcome
from comgra_decl.records import (
    MODES,
    SKIPPED_STEP,
    RawStep,
    StepInfo,
)
from comgra_decl.torch_private import without_functions

if TYPE_CHECKING:
    from torch import nn

    from comgra_decl.hooks.declared import Declared
    from comgra_decl.hooks.optimizers import CalledModels
    from comgra_decl.hooks.probing.probing import Probing
    from comgra_decl.hooks.record_hooks import RecordHooks
    from comgra_decl.hooks.report import Reporter
    from comgra_decl.hooks.root_calls import RootCalls
    from comgra_decl.hooks.scalars.scalars import Scalars
    from comgra_decl.hooks.schedule.evaluation import EvaluationPhases
    from comgra_decl.hooks.schedule.unended import UnendedSteps
    from comgra_decl.hooks.step_state import StepState
    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.hooks.tensors.slots import SlotTable

_EVAL = "eval"

_CUT = (
    "only the first {} iterations of a node are recorded in each step; some nodes, such as {}, had "
    "more. To record more, raise schedule.max_iterations (null: no limit)"
)

_UNEVEN = (
    "the first dimension equals the batch size in some records and differs in others, for example "
    "for {}. Whether a series has statistics per sample or over the whole tensor is determined by "
    "its first record. To choose one of them, set batch_dim: 0 or batch_dim: null"
)

_UNENDED_STEP = (
    "step {} was not completed: backward() was called after the last optimizer step or the last "
    "comgra.step(). The losses in this step are stored, but it has no record"
)

_SURPLUS = (
    ". It has {} more losses than any earlier step: if the program has updated its parameters "
    "manually since then, call comgra.step() where a step ends"
)

_SECOND_PHASE = (
    "the evaluation after the last step is recorded (step {}). Later calls with gradients are not "
    "part of that evaluation; only their losses are stored"
)

_NEVER_STEPPED = (
    "backward() ran, but no optimizer step was seen, so training steps could not be separated, and "
    "everything until now is one record. Call comgra.step() where a step ends, for example after a "
    "manual update or a compiled optimizer step"
)

_EMPTY = "no module was called in some of the steps that were due, so these steps have no record"


class StepRecords:
    """Closes and emits the record of the step in progress, or of an evaluation.

    Args:
        sink: receives each closed record.
        declared: the components that depend on the spec.
        state: the state of the step in progress.
        training: the record of a training step.
        evaluation: the evaluation phases and their record.
        hooks: installs and removes the hooks of a record.
        roots: distinguishes training from evaluation.
        called: the models called in the step in progress.
        table: assigns the ids of slots.
        scalars: the metrics of all steps.
        unended: detects steps whose end cannot be observed.
        reporter: receives warnings.
    """

    def __init__(
        self,
        sink: Callable[[RawStep], None],
        *,
        declared: Declared,
        state: StepState,
        training: StepCapture,
        evaluation: EvaluationPhases,
        hooks: RecordHooks,
        roots: RootCalls,
        called: CalledModels,
        table: SlotTable,
        scalars: Scalars,
        unended: UnendedSteps,
        reporter: Reporter,
    ) -> None:
        self._sink = sink
        self._declared = declared
        self._state = state
        self._train = training
        self._evaluation = evaluation
        self._hooks = hooks
        self._roots = roots
        self._called = called
        self._table = table
        self._scalars = scalars
        self._unended = unended
        self._reporter = reporter
        self._facts: dict[str, Any] = {}  # of the last record, by name

    @property
    def begun(self) -> bool:
        """Whether the record of a step or of an evaluation is in progress."""
        captured = self._train.open and len(self._train) > 0
        return captured or self._state.begun or self._evaluation.capture.open

    def drop(self) -> None:
        """Drop the record of the step in progress."""
        self._state.close()
        self._train.drop()

    # -- ending a step -------------------------------------------------------------------------

    def close_step(self) -> float | None:
        """Close the record of the step that has ended.

        Returns:
            Its cost to the schedule's budget, in seconds; None for a step that was captured only
            because of `keep`.
        """
        state, train, agenda = self._state, self._train, self._declared.agenda
        keeps = self._declared.keeps
        state.usual = state.trained
        labels = [*agenda.labels]
        due = agenda.due if state.deferred else True
        cost = train.cost
        outcome = state.outcome(due=due, kept=keeps, tensors=len(train))
        if outcome is Outcome.EVALUATION:
            self.emit_undecided()
        elif outcome is Outcome.EMPTY:
            self._reporter.warn(_EMPTY)
            self._declared.tracer.recover()
        elif outcome is Outcome.RECORD:
            info = StepInfo(state.number, time.time(), labels[0] if labels else TRAIN, "train")
            if labels[1:]:
                info.extra["tags"] = labels[1:]
            if train.skipped:
                info.extra[SKIPPED_STEP] = True
            self._emit(train, info, scheduled=due)
            cost = info.cost
            if train.probing is not None:
                self._probe(train.probing, info, due=due)
        else:
            self.drop()
            self._hooks.stop_graph()
        agenda.end(recorded=due)
        return None if keeps and not due else cost

    def cut(self) -> None:
        """Close the record of a step whose end cannot be observed, and wait for the next step.

        Otherwise, the record would grow without limit, and compiled code would continue to run
        eagerly.
        """
        self._finish_unstepped()
        self._declared.agenda.end(recorded=True)
        self._hooks.disarm()

    def finish_last(self, *, stepped: bool) -> None:
        """Close the record of everything after the last step, or of everything if no step ended.

        Args:
            stepped: whether any optimizer step was observed.
        """
        state, train = self._state, self._train
        if train.open and not (state.any_ended or stepped) and len(train):
            self._finish_unstepped()
        elif self._scalars.losses or (train.open and "loss" in train.calls):
            self._finish_unended()
        elif train.open and state.aside and not state.trained:
            self.emit_undecided()  # a test run without gradients

    def _finish_unended(self) -> None:
        """Handle calls to `backward` after the last step, at the end of the program.

        If a model was trained in training mode and is now called in evaluation mode, these calls
        are an evaluation with gradients. Examples are a saliency map, an adversarial example, and
        an image that is optimised to maximise an output.
        """
        state = self._state
        tuned = self._train.open and state.trained > 0 and not state.in_training_mode
        if self._roots.evaluating or (tuned and not state.tuned_before):
            self._scalars.unended = _EVAL
            if tuned and self._evaluation.recorded == state.number:
                self._reporter.warn(_SECOND_PHASE.format(state.number))
            elif tuned:
                self._evaluation.forget()
                self.emit_undecided()
        else:
            surplus = self._scalars.surplus
            more = _SURPLUS.format(surplus) if surplus > 0 else ""
            self._reporter.warn(_UNENDED_STEP.format(state.number) + more)

    def _finish_unstepped(self) -> None:
        if self._state.is_only_undecided:
            self.emit_undecided()
            return
        backward = self._train.calls.get("loss", 0) > 0
        if backward and self._unended.found is None:
            self._reporter.warn(_NEVER_STEPPED)
        mode = "train" if backward else _EVAL
        info = StepInfo(self._state.number, time.time(), mode, mode)
        self._emit(self._train, info)
        self._probe_call(info)

    # -- evaluations ---------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        """Begin an evaluation phase, and install hooks if it is to be recorded."""
        self._declared.structures.pause()
        self._declared.tracer.rest()
        due = self._evaluation.begin(self._state.number, self._state.trained)
        if due and not self._state.armed:
            self._hooks.install()

    def finish_evaluation(self) -> None:
        """Close the record of the evaluation in progress, if there is one."""
        evaluation, capture = self._evaluation, self._evaluation.capture
        phase = evaluation.open
        if capture.open and len(capture):
            info = StepInfo(evaluation.step, time.time(), _EVAL, _EVAL)
            if evaluation.tags:
                info.extra["tags"] = [*evaluation.tags]
            self._emit(capture, info)
        evaluation.close()
        if phase:
            self._declared.budget.restart()

    def settle_evaluation(self, root: nn.Module) -> None:
        """Settle the evaluation in progress when training begins or continues.

        Models that were called before any training and are unrelated to the trained model are
        assumed to be teachers or similar models. Their calls are not recorded as an evaluation.
        """
        evaluated = [module for ref in self._state.evaluated if (module := ref()) is not None]
        if self._roots.training or self._roots.related(root, evaluated):
            self.finish_evaluation()
        else:
            self._evaluation.forget()
        self._state.evaluated.clear()
        if not self._state.armed:
            self._hooks.disarm()

    # -- calls before any training -------------------------------------------------------------

    def settle_undecided(self, root: nn.Module) -> None:
        """Decide whether the calls before any training were an evaluation.

        They were an evaluation if they called the model that is trained now, in evaluation mode.
        Otherwise, they belong to the step, as do similar calls in all later steps.
        """
        evaluated = [
            module
            for ref, in_training_mode in self._state.undecided
            if not in_training_mode and (module := ref()) is not None
        ]
        self._state.undecided.clear()
        if not self._roots.related(root, evaluated):
            return
        self._called.clear()
        self.emit_undecided()
        self._train.begin()
        self._state.reopen()
        self._hooks.follow_graph()

    def settle_tuning(self) -> None:
        """Treat undecided calls as training when `backward` is called and nothing else trained."""
        if self._state.is_only_undecided:
            for reference, _ in self._state.undecided:
                root = reference()
                if root is not None:
                    self._roots.tunes(root)
            self._state.tunes()
            self._evaluation.forget()

    def emit_undecided(self) -> None:
        """Record the computations of the step in progress as an evaluation, if one is due."""
        self._state.evaluates()
        number, tags = self._state.number, [*self._evaluation.tags]
        if not self._evaluation.begin(number, 1):
            self.drop()
            self._hooks.stop_graph()
            return
        self._evaluation.taken()
        info = StepInfo(number, time.time(), _EVAL, _EVAL)
        if tags:
            info.extra["tags"] = tags
        self._train.as_evaluation()
        self._declared.structures.as_evaluation()
        self._emit(self._train, info)
        self._probe_call(info)

    # -- emitting ------------------------------------------------------------------------------

    def _emit(self, capture: StepCapture, info: StepInfo, *, scheduled: bool = True) -> None:
        declared, training = self._declared, capture is self._train
        tracer = declared.tracer
        if training:
            self._state.close()
            tracer.finish(capture)
        tracer.settle_names()
        for name, fact in (*capture.facts.items(), (MODES, capture.modes)):
            if fact:
                info.extra[name] = self._shared(name, fact)
        # The program's modes must not see what is read of tensors here and for the report below.
        with without_functions():
            raw = capture.close(info, self._table)
            if training and info.mode == "train":
                declared.compiled.recorded(capture, info.step)
            raw.structure = declared.structures.finish(info, capture.signature(), training=training)
        if training:
            self._hooks.stop_graph()
        raw.scheduled = scheduled
        if scheduled:
            labels = [info.type, *info.extra.get("tags", ())] if training else []
            declared.budget.recorded(*labels)
        self._warn_of(capture)
        if training and compiles_to_cuda_graphs():
            self._reporter.warn(COMPILED_GRAPH)
        with without_functions():
            raw.documents = self._reporter.documents(
                tracer.called_tops, capture, info, trained=tracer.parameters.turns
            )
        self._sink(raw)

    def _shared(self, name: str, fact: Any) -> Any:
        """Return the fact of the last record if it is equal, so that records share one object.

        Facts rarely change. Until records are written, unshared ones would double the number of
        objects that wait, and with it how often Python's garbage collector visits all objects.
        """
        last = self._facts.get(name)
        if last == fact:
            return last
        self._facts[name] = fact
        return fact

    def _probe(self, probing: Probing, info: StepInfo, *, due: bool) -> None:
        """Run the probes after a scheduled step; a step that may still be dropped has none."""
        if due:
            probing.ended(info, self._table, self._sink)
            self._declared.agenda.extend(probing.following)
        probing.drop()

    def _probe_call(self, info: StepInfo) -> None:
        """Run the probes after a record that is no step, if a single call is recorded."""
        probing = self._train.probing
        if probing is not None and probing.single:
            self._probe(probing, info, due=True)

    def _warn_of(self, capture: StepCapture) -> None:
        if capture.cut:
            names = ", ".join([*capture.cut][:3])
            self._reporter.warn(_CUT.format(capture.max_iterations, names))
        if capture.uneven:
            self._reporter.warn(_UNEVEN.format(", ".join([*capture.uneven][:3])))
        if strays := self._declared.tracer.strays():
            self._reporter.warn(strays)

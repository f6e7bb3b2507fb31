"""How a record is closed and handed on: the end of a step, of an evaluation, of the program."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from comgra_decl.hooks.attachment import Attachment
from comgra_decl.hooks.limits import COMPILED_GRAPH, compiles_to_cuda_graphs
from comgra_decl.hooks.schedule.agenda import TRAIN
from comgra_decl.records import SKIPPED_STEP, StepInfo

if TYPE_CHECKING:
    import weakref

    from torch import nn

    from comgra_decl.hooks.optimizers import CalledModels
    from comgra_decl.hooks.schedule.agenda import Agenda
    from comgra_decl.hooks.schedule.unended import UnendedSteps
    from comgra_decl.hooks.tensors.capture import StepCapture

_EVAL = "eval"

_CUT = (
    "of each recorded step only the first {} iterations of a node are recorded; there were more, "
    "of {} for example. To record more of them: schedule.max_iterations (null: all)"
)

_UNEVEN = (
    "the first dimension has the size of the batch in some records and another one in others: of "
    "{} for example. Its series go on as their first record has them: per row of that dimension, "
    "or over the whole tensor. To say which: batch_dim: 0, or batch_dim: null"
)

_UNENDED_STEP = (
    "step {} has begun and not ended: backward() was called after the last step of an optimizer, "
    "or the last comgra.step(). Its losses are kept; there is no record of it"
)

_SURPLUS = (
    ". It has {} more than any step before: if the program has written its parameters itself since "
    "then, call comgra.step() where a step ends"
)

_SECOND_PHASE = (
    "the evaluation after the last step has a record (step {}); what was called with gradients "
    "after that is not in it, only its losses are kept"
)


class Closing(Attachment):
    """Closes records when it is told that something has ended; `HookManager` tells it when."""

    _agenda: Agenda
    _called: CalledModels
    _unended: UnendedSteps
    # What is called in this step before anything is trained, and whether it was in training mode.
    _undecided: list[tuple[weakref.ref[nn.Module], bool]]
    _evaluated: list[weakref.ref[nn.Module]]  # evaluated in this step, likewise, or with gradients
    _asides: int  # calls without gradient in this step
    _usual: int  # calls with gradient in the step before
    _in_training_mode: bool  # whether a model was called in training mode in this step
    _tuned_before: bool  # whether none was in the last recorded step, as far as is known
    _deferred: bool  # whether the step is decided about again at its end
    _stepped: bool  # whether an optimizer has stepped, or the program has said that a step ends

    def _finish_unended(self) -> None:
        """The program is over, and `backward` was called after the last step had ended.

        A model that is trained in training mode, and is called in the other one now, is evaluated
        with gradients: a saliency map, an adversarial example, an image made to please it.
        """
        tuned = self._train.open and self._train.root_calls > 0 and not self._in_training_mode
        if self._roots.evaluating or (tuned and not self._tuned_before):
            self._scalars.unended = _EVAL
            if tuned and self._evaluation.recorded == self._step:
                self._reporter.warn(_SECOND_PHASE.format(self._step))
            elif tuned:
                self._evaluation.forget()
                self._emit_undecided()
        else:
            surplus = self._scalars.surplus
            more = _SURPLUS.format(surplus) if surplus > 0 else ""
            self._reporter.warn(_UNENDED_STEP.format(self._step) + more)

    def _close_train(self) -> float | None:
        """Closes the record of the step that has ended; returns what it cost the schedule's budget.

        In seconds; None for a step that is captured whatever the schedule says.
        """
        self._usual = self._train.root_calls
        labels = [*self._agenda.labels]
        due = self._agenda.due if self._deferred else True
        cost = self._train.cost
        if self._undecided and not self._train.root_calls and self._evaluates():
            self._emit_undecided()
        elif len(self._train) == 0:
            self._reporter.warn(
                "in some recorded steps no module was called, so there is no record"
            )
            self._tracer.recover()
        elif due or self._keeps:
            info = StepInfo(self._step, time.time(), labels[0] if labels else TRAIN, "train")
            info.extra.update({"tags": labels[1:]} if labels[1:] else {})
            info.extra.update({SKIPPED_STEP: True} if self._train.skipped else {})
            self._emit(self._train, info, scheduled=due)
            cost = info.cost
        else:
            self._train.drop()
            self._stop_graph()
        self._agenda.end(recorded=due)
        return None if self._keeps and not due else cost

    def _finish_evaluation(self) -> None:
        capture, phase = self._evaluation.capture, self._evaluation.open
        if capture.open and len(capture):
            info = StepInfo(self._evaluation.step, time.time(), _EVAL, _EVAL)
            if self._evaluation.tags:
                info.extra["tags"] = [*self._evaluation.tags]
            self._emit(capture, info)
        self._evaluation.close()
        if phase:
            self._budget.restart()

    def _settle_evaluation(self, root: nn.Module) -> None:
        """A training goes on, or begins: an evaluation has ended, if it was one.

        What was called before anything was trained, and has nothing to do with what is trained
        now, was a teacher or the like, and no phase of evaluation.
        """
        evaluated = [module for ref in self._evaluated if (module := ref()) is not None]
        if self._roots.training or self._roots.related(root, evaluated):
            self._finish_evaluation()
        else:
            self._evaluation.forget()
        self._evaluated.clear()
        if not self._armed:
            self._disarm()

    def _settle_undecided(self, root: nn.Module) -> None:
        """It turns out what was called before anything was trained.

        If it is what is trained now, and was in evaluation mode, it was an evaluation; otherwise it
        belongs to the step, as such calls do in all later steps.
        """
        evaluated = [
            module
            for ref, in_training_mode in self._undecided
            if not in_training_mode and (module := ref()) is not None
        ]
        self._undecided.clear()
        if not self._roots.related(root, evaluated):
            return
        self._called.clear()
        self._emit_undecided()
        self._train.begin()
        self._tracer.provenance = self._structures.start()

    def _evaluates(self) -> bool:
        """Whether any model was called in evaluation mode."""
        return not all(in_training_mode for _, in_training_mode in self._undecided)

    def _settle_tuning(self) -> None:
        if self._undecided and not self._train.root_calls:
            for reference, _ in self._undecided:
                root = reference()
                if root is not None:
                    self._roots.tunes(root)
            self._train.root_calls, self._asides = self._asides, 0
            self._undecided.clear()
            self._evaluation.forget()

    def _emit_undecided(self) -> None:
        """Records as an evaluation what was computed in the step in progress."""
        self._undecided.clear()
        self._asides = 0
        tags = [*self._evaluation.tags]
        if not self._evaluation.begin(self._step, 1):
            self._train.drop()
            self._stop_graph()
            return
        self._evaluation.taken()
        info = StepInfo(self._step, time.time(), _EVAL, _EVAL)
        info.extra.update({"tags": tags} if tags else {})
        self._train.as_evaluation()
        self._structures.as_evaluation()
        self._emit(self._train, info)

    def _cut_step(self) -> None:
        """Nobody ends this step: what there is of it is a record, and the tracer waits again.

        It would else grow for ever, and compiled code would run eagerly as long.
        """
        self._finish_unstepped()
        self._agenda.end(recorded=True)
        self._disarm()

    def _finish_unstepped(self) -> None:
        if self._undecided and not self._train.root_calls:
            self._emit_undecided()
            return
        backward = self._train.calls.get("loss", 0) > 0
        if backward and self._unended.found is None:
            self._reporter.warn(
                "backward() ran but no optimizer step was seen, so steps could not be told "
                "apart; everything up to here is one record. Call comgra.step() where a step ends "
                "(an update written by hand, or an optimizer's step that is itself compiled, ends "
                "none)"
            )
        mode = "train" if backward else "eval"
        self._emit(self._train, StepInfo(self._step, time.time(), mode, mode))

    def _emit(self, capture: StepCapture, info: StepInfo, *, scheduled: bool = True) -> None:
        training = capture is self._train
        if training:
            self._tracer.finish(capture)
        self._tracer.settle_names()
        raw = capture.close(info, self._table)
        if training and info.mode == "train":
            self._compiled.recorded(capture.slots, info.step)
        with torch._C.DisableTorchFunction():
            raw.structure = self._structures.finish(info, capture.signature(), training=training)
        if training:
            self._stop_graph()
        raw.scheduled = scheduled
        if scheduled:
            self._budget.recorded(*([info.type, *info.extra.get("tags", ())] if training else []))
        if capture.cut:
            self._reporter.warn(_CUT.format(capture.max_iterations, ", ".join([*capture.cut][:3])))
        if capture.uneven:
            self._reporter.warn(_UNEVEN.format(", ".join([*capture.uneven][:3])))
        if strays := self._tracer.strays():
            self._reporter.warn(strays)
        if training and compiles_to_cuda_graphs():
            self._reporter.warn(COMPILED_GRAPH)
        raw.documents = self._reporter.documents(self._tracer.called_tops, capture, info)
        self._sink(raw)

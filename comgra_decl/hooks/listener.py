"""What the program says about itself, on its way from the annotations to those who act on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.annotations import hub
from comgra_decl.hooks.guarded import guarded
from comgra_decl.hooks.scalars.numbers import read_number
from comgra_decl.torch_private import without_functions

if TYPE_CHECKING:
    from comgra_decl.hooks.declared import Declared
    from comgra_decl.hooks.guarded import Ending
    from comgra_decl.hooks.record_hooks import RecordHooks
    from comgra_decl.hooks.root_calls import RootCalls
    from comgra_decl.hooks.scalars.scalars import Scalars
    from comgra_decl.hooks.schedule.evaluation import EvaluationPhases
    from comgra_decl.hooks.schedule.idle import IdleSteps
    from comgra_decl.hooks.steps import Steps
    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.hooks.training_threads import Turns

_is_compiling = torch.compiler.is_compiling


class Listener:
    """The listener of one session: acts on each word of the program.

    Args:
        declared: what depends on the spec.
        steps: told where steps end, and what labels they have.
        turns: knows whose step a word is about.
        hooks: knows which thread is recorded.
        training: the record of a step.
        evaluation: the phases of evaluation and their record.
        roots: knows whether the program evaluates.
        scalars: takes numbers and notes.
        idle: counts steps in which nothing happens.
        ending: whether tracing goes on.
        together: held while something of a step happens.
    """

    def __init__(
        self,
        declared: Declared,
        *,
        steps: Steps,
        turns: Turns,
        hooks: RecordHooks,
        training: StepCapture,
        evaluation: EvaluationPhases,
        roots: RootCalls,
        scalars: Scalars,
        idle: IdleSteps,
        ending: Ending,
        together: AbstractContextManager[Any],
    ) -> None:
        self._declared = declared
        self._steps = steps
        self._turns = turns
        self._hooks = hooks
        self._train = training
        self._evaluation = evaluation
        self._roots = roots
        self._scalars = scalars
        self._idle = idle
        self._ending = ending
        self._on_fault: Callable[[BaseException], None] = ending.fault
        self._together = together

    def start(self) -> None:
        """Listens from now on."""
        hub.listen(self)

    def recording(self, value: bool) -> None:
        """Whether `node` and `connect` are passed on from now on."""
        hub.set_recording(self, value)

    def stop(self) -> None:
        """Listens no longer."""
        hub.unlisten(self)

    # -- what the program says -----------------------------------------------------------------

    @guarded
    def node(self, value: Any, name: str, role: str | None, kind: str | None) -> None:
        """A tensor, or a structure of some, was given a name."""
        if _is_compiling() or self._ending.over or self._hooks.is_elsewhere():
            return
        if self._declared.beside.annotate(value, name, role, kind):
            # what leads from it to the model is part of the graph
            self._declared.structures.resume()

    @guarded
    def connect(self, source: Any, sink: Any) -> None:
        """`sink` was computed from `source`, in a way that cannot be seen."""
        if _is_compiling() or self._ending.over or self._hooks.is_elsewhere():
            return
        with without_functions():
            self._declared.structures.connect(source, sink)

    @guarded
    def tag(self, *names: str) -> None:
        """The step in progress, or the evaluation it is in, has these labels."""
        if _is_compiling():
            return
        with self._together:
            lane = self._turns.elsewhere()
            if lane is not None:
                lane.labels.update(dict.fromkeys(names))
            elif self._roots.evaluating or self._roots.maybe:
                self._evaluation.tags.update(dict.fromkeys(names))
            else:
                self._declared.agenda.tag(names, too_late=self._steps.is_too_late)
                self._steps.ask_again()

    @guarded
    def note(self, text: str) -> None:
        """A text beside the step in progress."""
        if _is_compiling():
            return
        self._idle.end()
        with self._together:
            self._turns.elsewhere()
            self._scalars.note(text)

    @guarded
    def kpi(self, name: str, value: Any) -> None:
        """A number of the step in progress."""
        if _is_compiling():
            return
        self._idle.end()
        with self._together:
            elsewhere = self._turns.elsewhere() is not None
            self._scalars.kpi(name, value)
        if self._declared.keeps and self._train.open and not elsewhere:
            number = read_number(value) if hasattr(value, "detach") else float(value)
            if number is not None:
                self._train.said[name] = number

    @guarded
    def step(self) -> None:
        """A step ends."""
        if not _is_compiling():
            self._steps.by_program()

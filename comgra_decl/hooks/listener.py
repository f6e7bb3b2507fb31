"""Dispatch annotations from the program to the components that handle them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.annotations import hub
from comgra_decl.hooks.guarded import guarded
from comgra_decl.hooks.probing.seclusion import SECLUDED, is_secluded
from comgra_decl.hooks.scalars.numbers import read_number
from comgra_decl.torch_private import without_functions

if TYPE_CHECKING:
    from comgra_decl.hooks.declared import Declared
    from comgra_decl.hooks.guarded import Ending
    from comgra_decl.hooks.record_hooks import RecordHooks
    from comgra_decl.hooks.root_calls import RootCalls
    from comgra_decl.hooks.scalars.scalars import Scalars
    from comgra_decl.hooks.scalars.shown import Shown
    from comgra_decl.hooks.schedule.evaluation import EvaluationPhases
    from comgra_decl.hooks.schedule.idle import IdleSteps
    from comgra_decl.hooks.steps import Steps
    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.hooks.training_threads import Turns

_is_compiling = torch.compiler.is_compiling


class Listener:
    """The annotation listener of one session.

    Args:
        declared: the components that depend on the spec.
        steps: receives the ends and labels of steps.
        turns: determines which thread's step an annotation belongs to.
        hooks: determines which thread is recorded.
        training: the record of a training step.
        evaluation: the evaluation phases and their records.
        roots: determines whether the program is evaluating.
        scalars: receives metrics and notes.
        shown: receives images, figures and texts.
        idle: counts the steps that need no other work.
        ending: whether tracing continues, and how it ends.
        together: lock held while an event of a step is handled.
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
        shown: Shown,
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
        self._shown = shown
        self._idle = idle
        self._ending = ending
        self._on_fault: Callable[[BaseException], None] = ending.fault
        self._together = together

    def start(self) -> None:
        """Start receiving annotations."""
        hub.listen(self)

    def recording(self, value: bool) -> None:
        """Set whether calls to `node` and `connect` are received."""
        hub.set_recording(self, value)

    def stop(self) -> None:
        """Stop receiving annotations."""
        hub.unlisten(self)

    # -- annotations ---------------------------------------------------------------------------

    @guarded
    def node(self, value: Any, name: str, role: str | None, kind: str | None) -> None:
        """Record a tensor, or a nested structure of tensors, under a name."""
        if (
            _is_compiling()
            or (SECLUDED and is_secluded())
            or self._ending.over
            or self._hooks.is_elsewhere()
        ):
            return
        if self._declared.beside.annotate(value, name, role, kind):
            # computations between it and the model are part of the graph
            self._declared.structures.resume()

    @guarded
    def connect(self, source: Any, sink: Any) -> None:
        """Add an edge from `source` to `sink` that tracing cannot detect."""
        if (
            _is_compiling()
            or (SECLUDED and is_secluded())
            or self._ending.over
            or self._hooks.is_elsewhere()
        ):
            return
        with without_functions():
            self._declared.structures.connect(source, sink)

    @guarded
    def tag(self, *names: str) -> None:
        """Add labels to the step or evaluation in progress."""
        if _is_compiling() or (SECLUDED and is_secluded()):
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
        """Add a note to the step in progress."""
        if _is_compiling() or (SECLUDED and is_secluded()):
            return
        self._idle.end()
        with self._together:
            self._turns.elsewhere()
            self._scalars.note(text)

    @guarded
    def kpi(self, name: str, value: Any) -> None:
        """Log a value for the step in progress."""
        if _is_compiling() or (SECLUDED and is_secluded()):
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
    def show(self, name: str, kind: str, value: Any) -> None:
        """Keep an image, a figure or a text for the step in progress."""
        if _is_compiling() or (SECLUDED and is_secluded()) or self._ending.over:
            return
        self._idle.end()
        with self._together:
            self._turns.elsewhere()
            self._shown.show(name, kind, value, step=self._scalars.step_of_annotation())

    @guarded
    def step(self) -> None:
        """End the step in progress."""
        if not (_is_compiling() or (SECLUDED and is_secluded())):
            self._steps.by_program()

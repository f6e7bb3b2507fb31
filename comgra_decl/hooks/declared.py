"""The components that depend on the spec, recreated when the spec changes during a run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from comgra_decl.hooks.compiled.steps import CompiledSteps
from comgra_decl.hooks.functions.beside import Beside
from comgra_decl.hooks.graph.structures import Structures
from comgra_decl.hooks.probing.probing import Probing, probes_anything
from comgra_decl.hooks.schedule.agenda import Agenda
from comgra_decl.hooks.schedule.budget import Budget
from comgra_decl.hooks.schedule.types import Labeller
from comgra_decl.hooks.tracer import ModuleTracer

if TYPE_CHECKING:
    from torch import nn

    from comgra_decl.hooks.direct_calls import DirectCalls
    from comgra_decl.hooks.module_tree import Owners
    from comgra_decl.hooks.report import Reporter
    from comgra_decl.hooks.root_calls import RootCalls
    from comgra_decl.hooks.schedule.budget import Meter
    from comgra_decl.hooks.schedule.evaluation import EvaluationPhases
    from comgra_decl.hooks.stalls import OwnWork
    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.hooks.tracer import Calls
    from comgra_decl.spec import Spec


@dataclass(frozen=True)
class Followed:
    """The components that follow the program and do not depend on the spec.

    Attributes:
        calls: decides which record a model call belongs to.
        owners: the parent of each module.
        roots: distinguishes training from evaluation.
        direct: detects direct calls to `forward`.
        held: returns the ids of the parameters held by optimizers.
        together: lock held while it is decided which thread's calls are followed.
        on_fault: called with errors in tracing itself.
    """

    calls: Calls
    owners: Owners
    roots: RootCalls
    direct: DirectCalls
    held: Callable[[], Collection[int]]
    together: AbstractContextManager[Any]
    on_fault: Callable[[BaseException], None]


class Declared:
    """Holds the components that depend on the spec.

    Args:
        spec: the declaration.
        meter: measures the cost of recording outside the training thread.
        reporter: receives choices and warnings.
        own: adds up the time that tracing takes.
        remark: adds a note to the step in progress.

    Attributes:
        spec: the declaration in effect.
        keeps: whether steps outside the schedule are captured too, to be kept or dropped later.
        budget: limits the cost of recording.
        agenda: decides which steps are recorded.
        labeller: assigns types to steps; None unless the spec sets `types.by`.
        tracer: follows module calls.
        beside: records functions and annotated tensors.
        compiled: decides how compiled code runs in a recorded step.
        structures: follows the dependency graph.
    """

    tracer: ModuleTracer
    beside: Beside
    compiled: CompiledSteps
    structures: Structures

    def __init__(
        self,
        spec: Spec,
        *,
        meter: Meter,
        reporter: Reporter,
        own: OwnWork,
        remark: Callable[[str], None],
    ) -> None:
        self.spec = spec
        self._meter = meter
        self._reporter = reporter
        self._own = own
        self._remark = remark
        self.budget = self._new_budget(spec, before=None)
        self._schedule(spec, before=None)

    def _schedule(self, spec: Spec, *, before: Agenda | None) -> None:
        self.keeps = spec.keep is not None
        self.agenda = Agenda(spec, self.budget, before=before)
        warn = self._reporter.warn
        self.labeller = None if spec.types.by is None else Labeller(spec.types, warn=warn)

    def _new_budget(self, spec: Spec, *, before: Budget | None) -> Budget:
        schedule = spec.schedule
        return Budget(
            schedule.budget,
            meter=self._meter,
            say=self._say,
            types=schedule.type_budgets,
            before=before,
        )

    def _say(self, key: str, what: str, sentence: str) -> None:
        """Report a choice, and add it to the notes of the step in progress."""
        self._reporter.say(what if key == "budget" else f"{key}.{what}", sentence)
        self._remark(f"schedule.{key}: {sentence}")

    def before_models(
        self, function: Callable[[str, nn.Module], None], training: StepCapture
    ) -> None:
        """Call a function before a trained model is called; see `HookManager.before_models`."""
        training.probing = training.probing or self._probing()
        training.probing.first = function

    def _probing(self) -> Probing:
        return Probing(
            self.spec,
            input_slot=lambda role, iteration: self.tracer.input_slot(role, iteration),
            scheduled=lambda: not self.keeps or self.agenda.due,
            warn=self._reporter.warn,
            say=self._say,
            left=self.left,
            extra=lambda: self.agenda.extra,
            tell=self._reporter.say,
            attach=self._reporter.attach,
            own=self._own,
        )

    def left(self, unseen: int) -> float | None:
        """Return the bytes that the disk budget leaves; None without a limit.

        Args:
            unseen: bytes that may have been stored since the size of the folder was last measured.
        """
        limit = self.spec.schedule.budget.bytes
        return None if limit is None else limit - max(self._meter.disk_bytes, unseen)

    def follow(
        self, followed: Followed, *, training: StepCapture, evaluation: EvaluationPhases
    ) -> None:
        """Create the components that observe the program."""
        spec, on_fault = self.spec, followed.on_fault
        self.tracer = ModuleTracer(
            spec,
            followed.owners,
            calls=followed.calls,
            direct=followed.direct,
            held=followed.held,
            together=followed.together,
            warn=self._reporter.warn,
            on_fault=on_fault,
        )
        self.beside = Beside(
            spec,
            self.tracer,
            roots=followed.roots,
            training=training,
            evaluation=evaluation,
            on_fault=on_fault,
        )
        self._reporter.beside = self.beside
        self.compiled = CompiledSteps(
            spec,
            self.tracer,
            named=lambda: self.beside.names,
            warn=self._reporter.warn,
            on_fault=on_fault,
        )
        if training.probing is None:  # a changed spec declares the same probes
            training.probing = self._probing() if probes_anything(spec) else None
        for capture in (training, evaluation.capture):
            capture.max_iterations = spec.schedule.max_iterations
        self.structures = Structures(
            self.tracer.parameter_slot,
            enabled=spec.graph,
            on_fault=on_fault,
            warn=self._reporter.warn,
        )

    def change(
        self,
        spec: Spec,
        followed: Followed,
        *,
        training: StepCapture,
        evaluation: EvaluationPhases,
    ) -> None:
        """Switch to another spec, starting with the step about to begin."""
        tracer, structures = self.tracer, self.structures
        self.spec = spec
        self.budget = self._new_budget(spec, before=self.budget)
        self._schedule(spec, before=self.agenda)
        evaluation.follow(spec.schedule.eval, factor=self.budget.factor)
        self._reporter.follow(spec)
        self.follow(followed, training=training, evaluation=evaluation)
        self.structures.go_on_from(structures)
        self.tracer.go_on_from(tracer)

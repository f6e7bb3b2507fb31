"""Record everything that is not a module: function calls and named tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from comgra_decl.hooks.functions.annotated import AnnotatedNodes
from comgra_decl.hooks.functions.functions import FunctionTracer, wants_calls
from comgra_decl.hooks.tensors.recorder import TensorRecorder

if TYPE_CHECKING:
    from torch import nn

    from comgra_decl.hooks.root_calls import RootCalls
    from comgra_decl.hooks.schedule.evaluation import EvaluationPhases
    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.hooks.tracer import ModuleTracer
    from comgra_decl.spec import Spec


class Beside:
    """Creates the recorders that a spec needs; functions are watched only if the spec selects any.

    Args:
        spec: selects what to capture.
        tracer: provides the models, and the record to which a call belongs.
        roots: determines whether the program is evaluating.
        training: the record of training steps.
        evaluation: the evaluation phases and their records.
        on_fault: called with an exception in tracing itself, which never reaches the program.
    """

    def __init__(
        self,
        spec: Spec,
        tracer: ModuleTracer,
        *,
        roots: RootCalls,
        training: StepCapture,
        evaluation: EvaluationPhases,
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._recorder = TensorRecorder(on_fault=on_fault)
        self._annotated = AnnotatedNodes(
            spec,
            tracer,
            recorder=self._recorder,
            roots=roots,
            training=training,
            evaluation=evaluation,
        )
        self._functions: FunctionTracer | None = None
        if wants_calls(spec):
            self._functions = FunctionTracer(
                spec, tracer, recorder=self._recorder, training=training, on_fault=on_fault
            )

    def install(self) -> None:
        """Attach the hooks for a step to be recorded. Idempotent."""
        self._recorder.release()
        if self._functions is not None:
            self._functions.install()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Enter a module whose hooks do not run because it began earlier or is called directly."""
        if self._functions is not None:
            self._functions.enter(module, args, kwargs)

    def leave(self, module: nn.Module, output: Any) -> None:
        """Leave a module that was called directly."""
        if self._functions is not None:
            self._functions.leave(module, output)

    def before_optimizer(self) -> None:
        """Stop recording calls while an optimizer runs."""
        if self._functions is not None:
            self._functions.before_optimizer()

    def remove(self) -> None:
        """Remove all hooks."""
        self._recorder.release()
        if self._functions is not None:
            self._functions.remove()

    def leave_training(self) -> None:
        """Stop treating calls outside modules as part of training."""
        if self._functions is not None:
            self._functions.leave_training()

    def annotate(self, value: Any, name: str, role: str | None, kind: str | None) -> bool:
        """Record the tensors of a value to which the program has just given a name.

        Returns:
            Whether the tensors are part of training, although they were named outside all models.
        """
        return self._annotated.record(value, name, role, kind)

    # -- reporting -----------------------------------------------------------------------------

    @property
    def state(self) -> tuple[int, int]:
        """A value that changes whenever the report would change."""
        fired = 0 if self._functions is None else self._functions.fired
        return fired, len(self._annotated.names)

    @property
    def names(self) -> list[str]:
        """The names given to tensors so far."""
        return self._annotated.names

    def written(self, entry: str) -> tuple[int, int, int]:
        """Return how many nodes an entry matches here, how many were called, and their series."""
        counts = [self._annotated.written(entry)]
        if self._functions is not None:
            counts.append(self._functions.written(entry))
        matched, fired, written = (sum(column) for column in zip(*counts, strict=True))
        return matched, fired, written

    def unmatched(self) -> list[str]:
        """Return one sentence for each function that does not exist or was never called."""
        return [] if self._functions is None else list(self._functions.unmatched())

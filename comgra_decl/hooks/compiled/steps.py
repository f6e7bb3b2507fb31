"""Decide how compiled code runs in a recorded step: eagerly, or as a variant with observers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from comgra_decl import torch_private
from comgra_decl.hooks.compiled.completeness import Completeness
from comgra_decl.hooks.compiled.functions import CompiledFunctions
from comgra_decl.hooks.compiled.stance import EagerStance, anything_compiled
from comgra_decl.hooks.functions.functions import wants_calls
from comgra_decl.hooks.limits import compiles_with

if TYPE_CHECKING:
    from comgra_decl.hooks.compiled.observers import Observers
    from comgra_decl.hooks.compiled.variant import Variant
    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.hooks.tracer import ModuleTracer
    from comgra_decl.spec import Spec

_EAGER = (
    "compile: {}: recorded steps run eagerly rather than compiled with observers. Reason: {}. "
    "Recorded steps take longer and round differently, as with `compile: eager`; all other steps "
    "run compiled"
)
_INCOMPLETE = (
    "compile: {}: compiled code does not expose everything that the previous eager record contains "
    "({}). Step {} is recorded without it, unless the program skipped it in this step. {}"
)
_LATER = {
    "auto": (
        "The next recorded step runs eagerly. If it is complete, all later recorded steps run "
        "eagerly too"
    ),
    "observed": "With compile: auto, recorded steps would run eagerly in this case",
}
_SHOWN_EAGERLY = (
    "compiled code did not expose all of a step, and the eager step after it was complete"
)


class CompiledSteps:
    """Chooses eager execution or the variant for each step; warns once if only eager is possible.

    The first step is recorded eagerly, to discover the model. Steps whose dependency graph is
    followed are also recorded eagerly, because calls are followed in Python. If an eager record
    contains a tensor that the next record with observers lacks, compiled code does not expose that
    tensor.

    Args:
        spec: its `compile` setting selects the mode.
        tracer: records the tensors shown.
        named: returns the names that the program has given to tensors.
        warn: called with the reason why recorded steps run eagerly.
        on_fault: called with an error in tracing itself.
    """

    def __init__(
        self,
        spec: Spec,
        tracer: ModuleTracer,
        *,
        named: Callable[[], list[str]],
        warn: Callable[[str], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._wanted = spec.compile
        self._selects_functions = wants_calls(spec)
        self._tracer = tracer
        self._functions = CompiledFunctions(warn=warn)
        if spec.compile != "eager":
            tracer.know_functions(self._functions)
        self._named = named
        self._warn = warn
        self._on_fault = on_fault
        self._given_up = spec.compile == "eager"
        self._variant: Variant | None = None
        self._completeness = Completeness()
        self.observed = False  # whether the current step runs with observers

    def begin(self, stance: EagerStance, *, followed: bool) -> None:
        """Prepare the compiled code of a step to be recorded.

        Args:
            stance: makes compiled code run eagerly, or as the variant if possible.
            followed: whether the dependency graph of this step is followed.
        """
        self.end(stance)
        if self._given_up or followed or not anything_compiled():
            return
        in_doubt = self._wanted == "auto" and self._completeness.doubted
        if in_doubt or not self._completeness.holds_for(self._tracer.tops.values()):
            return
        why = self._why_not()
        if why is not None:
            self._give_up(why)
            return
        observers = self._made().observers
        observers.begin()
        self._tracer.observe(observers)
        stance.variant = self._variant
        self.observed = True

    def end(self, stance: EagerStance) -> None:
        """Remove the observers after a recorded step."""
        if self.observed:
            self.observed = False
            stance.variant = None
            observers = self._tracer.observers
            self._tracer.observe(None)
            if observers is not None:
                observers.end()

    def take_compiling(self) -> float:
        """Return the seconds spent compiling since the last call."""
        return 0.0 if self._variant is None else self._variant.take_seconds()

    def recorded(self, capture: StepCapture, step: int) -> None:
        """Check the finished record of a step for tensors that compiled code did not show."""
        if self._given_up:
            return
        slots, tops = capture.slots, [*self._tracer.tops.values()]
        if self.observed:
            lacking = self._completeness.lacking(slots, tops)
            if lacking:
                later = _LATER[self._wanted]
                self._warn(_INCOMPLETE.format(self._wanted, lacking, step, later))
        elif self._completeness.recorded_eagerly(slots, tops) and self._wanted == "auto":
            self._give_up(_SHOWN_EAGERLY)

    def _why_not(self) -> str | None:
        try:
            from comgra_decl.hooks.compiled import variant
        except ImportError as error:  # private parts of torch's compiler
            return f"torch {torch.__version__} lacks required features ({error})"
        if self._selects_functions:
            return "the spec selects function calls, which do not exist in compiled code"
        if self._named():
            return f"the program names tensors with comgra.node, {self._named()[0]!r} for example"
        if self._functions.call_forward:
            return "it calls model.forward(), which runs no hooks; call the model itself instead"
        unsupported = variant.unsupported()
        if unsupported is not None:
            return unsupported
        if torch_private.dynamo_config.enable_compiler_collectives:
            return (
                "compiler collectives are enabled, so a rank with nothing to compile would block "
                "the others"
            )
        if compiles_with("cudagraphs"):
            return "the backend captures all code in CUDA graphs, whose replay runs no Python"
        return None

    def _give_up(self, why: str) -> None:
        if not self._given_up:
            self._given_up = True
            self._warn(_EAGER.format(self._wanted, why))

    def _made(self) -> Variant:
        """Return the variant, created on first use because its imports are slow."""
        if self._variant is None:
            from comgra_decl.hooks.compiled.observers import Observers
            from comgra_decl.hooks.compiled.variant import Variant

            observers: Observers = Observers(self._tracer, on_fault=self._on_fault)
            self._variant = Variant(observers, fail=self._give_up)
        return self._variant

"""Record the tensors that the program names with `comgra.node`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from comgra_decl.hooks.call_context import is_no_step
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.hooks.tensors.recorder import TensorRecorder, Wanted
from comgra_decl.hooks.tensors.slots import Slot
from comgra_decl.spec.calls import named_tensor
from comgra_decl.torch_private import without_functions

if TYPE_CHECKING:
    from comgra_decl.hooks.root_calls import RootCalls
    from comgra_decl.hooks.schedule.evaluation import EvaluationPhases
    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.hooks.tracer import ModuleTracer
    from comgra_decl.spec import Capture, Spec

_FROM_OUTSIDE = ("input", "target")
"""Kinds of tensors that are batches, whose first dimension is therefore the batch size."""


class AnnotatedNodes:
    """Assigns each named tensor to its node, and reads it into the corresponding record.

    Several tensors can share a node if their roles differ. If the same name and role are used again
    within a step, the tensor becomes another iteration. Names given while autograd recomputes a
    checkpoint are ignored, because they were already given in the forward pass.

    Args:
        spec: selects what to capture.
        tracer: provides the models, and the record to which a call belongs.
        recorder: reads the tensors.
        roots: determines whether the program is evaluating.
        training: the record of training steps.
        evaluation: the evaluation phases and their records.
    """

    def __init__(
        self,
        spec: Spec,
        tracer: ModuleTracer,
        *,
        recorder: TensorRecorder,
        roots: RootCalls,
        training: StepCapture,
        evaluation: EvaluationPhases,
    ) -> None:
        self._spec = spec
        self._tracer = tracer
        self._recorder = recorder
        self._roots = roots
        self._training = training
        self._evaluation = evaluation
        self._captures: dict[str, Capture | None] = {}
        self._slots: dict[tuple[str, str, int], Slot] = {}

    def record(self, value: Any, name: str, role: str | None, kind: str | None) -> bool:
        """Read the tensors of a value to which the program has just given a name.

        Returns:
            Whether the tensors are part of training, although they were named outside all models.
        """
        capture = None if is_no_step() else self._capture()
        how = self._how(name)
        if how is None or capture is None or not capture.open:
            return False
        with without_functions():
            self._read(value, (name, role or "output", kind or "computed"), capture, how)
        return capture.followed and not self._tracer.inside

    def _read(
        self, value: Any, what: tuple[str, str, str], capture: StepCapture, how: Capture
    ) -> None:
        name, role, kind = what
        wanted = Wanted(
            tensor=how.output or (kind == "parameter" and how.parameter),
            gradient=how.output_grad or (kind == "parameter" and how.parameter_grad),
        )
        graph = self._tracer.provenance if capture.followed else None
        self._tracer.know(value)
        iteration = capture.iteration(("annotated", name, role), name)
        if iteration is None:
            return
        slot_of = partial(self._slot, name, kind=kind, iteration=iteration)
        for path, tensor in tensors_in(value):
            if capture.batch_size is None and kind in _FROM_OUTSIDE and tensor.dim():
                capture.batch_size = int(tensor.shape[0])
            self._recorder.read(
                tensor,
                role + path,
                slot_of,
                capture=capture,
                how=how,
                wanted=wanted,
                graph=graph,
            )

    def _how(self, name: str) -> Capture | None:
        if name not in self._captures:
            self._captures[name] = named_tensor(self._spec, name)
        return self._captures[name]

    def _slot(self, name: str, role: str, *, kind: str, iteration: int) -> Slot:
        slot = self._slots.get((name, role, iteration))
        if slot is None:
            slot = Slot(lambda: name, role, iteration=iteration, kind=kind)
            self._slots[name, role, iteration] = slot
        return slot

    def _capture(self) -> StepCapture | None:
        """Return the record that a tensor named now belongs to."""
        if self._tracer.inside:
            return self._tracer.capture
        if self._training.open and not self._roots.evaluating:
            return self._training
        return self._evaluation.start()

    # -- reporting -----------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The names used so far."""
        return list(self._captures)

    def written(self, entry: str) -> tuple[int, int, int]:
        """Return how many names an entry selects, how many were used, and their series."""
        names = [n for n, how in self._captures.items() if how and entry in how.entries]
        slots = [slot for (name, _, _), slot in self._slots.items() if name in names]
        fired = {slot.key.node for slot in slots if slot.id >= 0 or slot.passes}
        return len(names), len(fired), _series(slots)


def _series(slots: Iterable[Slot]) -> int:
    return sum((slot.id >= 0) + len(slot.passes) for slot in slots)

"""Gradients inside reentrant checkpoints, which run their code twice.

The first run has no graph. Training computes with the tensors of that run, but gradients never
reach them. The gradients arrive in the second run, within backward. The calls in the second run are
not separate iterations, so each is matched with the corresponding call in the first run.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from comgra_decl.hooks.call_context import torch_variable
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.hooks.tensors.recorder import TensorRecorder, Wanted
from comgra_decl.torch_private import without_functions

if TYPE_CHECKING:
    from comgra_decl.hooks.plans import ModulePlan
    from comgra_decl.hooks.tensors.capture import StepCapture

_FORWARD: CodeType = CheckpointFunction.forward.__code__
_BACKWARD: CodeType = CheckpointFunction.backward.__code__
_ONLY_GRADIENT = Wanted(tensor=False, gradient=True)


class Recomputed:
    """Matches calls to modules within backward with the calls that they repeat.

    A checkpoint's forward and backward share one context object. The calls to a module below one
    context repeat in order, so they can be matched no matter how often the module is called. Below
    nested checkpoints, the order is unknown. If a module is called more than once there, no
    gradient is recorded for it.

    Args:
        recorder: reads gradients.
        on_fault: called with an error in tracing itself.
    """

    def __init__(
        self, recorder: TensorRecorder, *, on_fault: Callable[[BaseException], None]
    ) -> None:
        self._recorder = recorder
        self._on_fault = on_fault
        self._calls: dict[tuple[int, ModulePlan], deque[int]] = {}
        self.capture: StepCapture | None = None  # that the calls belong to; None without calls

    def clear(self) -> None:
        """Discard the calls in a step."""
        self._calls.clear()
        self.capture = None

    def first(self, plan: ModulePlan, iteration: int, capture: StepCapture) -> None:
        """Register a module call without a graph, which may be inside a checkpoint."""
        contexts = list(_contexts(_FORWARD))
        if contexts:
            self.capture = capture
            self._calls.setdefault((contexts[-1], plan), deque()).append(iteration)

    def read(self, module: nn.Module, plan: ModulePlan | None, output: Any) -> None:
        """Read the gradients of a module that is called again within backward."""
        capture = self.capture
        if plan is None or plan.module() is not module or capture is None or not capture.open:
            return
        try:
            found = [(path, t) for path, t in tensors_in(output) if t.requires_grad]
            iteration = self._repeated(plan) if found else None
            if iteration is not None:
                with without_functions():
                    self._read(found, plan, iteration, capture)
        except Exception as error:
            self._on_fault(error)

    def _read(
        self,
        found: list[tuple[str, torch.Tensor]],
        plan: ModulePlan,
        iteration: int,
        capture: StepCapture,
    ) -> None:
        for path, tensor in found:
            self._recorder.read(
                tensor,
                plan.role + path,
                partial(plan.slot, iteration=iteration),
                capture=capture,
                how=plan.capture,
                wanted=_ONLY_GRADIENT,
            )

    def _repeated(self, plan: ModulePlan) -> int | None:
        """Return the iteration that the current call repeats, None if unknown."""
        contexts = list(_contexts(_BACKWARD))
        calls = self._calls.get((contexts[-1], plan)) if contexts else None
        if not calls or (len(contexts) > 1 and len(calls) > 1):
            return None
        return calls.popleft()


def _contexts(code: CodeType) -> Iterator[int]:
    """Yield the id of the context of each enclosing checkpoint, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            yield id(torch_variable(frame, "ctx"))
        frame = frame.f_back

"""Install and remove everything that observes a program while a step is recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.hooks.call_context import is_backward, is_nested_step
from comgra_decl.hooks.compiled.stance import EagerStance
from comgra_decl.hooks.compiled.unused import UnusedOutputs
from comgra_decl.hooks.cross_thread import here
from comgra_decl.hooks.direct_calls import DirectCalls
from comgra_decl.hooks.guarded import Ending, guarded
from comgra_decl.hooks.hook_lists import Placed, before_steps
from comgra_decl.hooks.recursion import Headroom
from comgra_decl.torch_private import without_functions

if TYPE_CHECKING:
    from torch import nn

    from comgra_decl.hooks.declared import Declared
    from comgra_decl.hooks.limits import Captures
    from comgra_decl.hooks.scalars.losses import LossWatch
    from comgra_decl.hooks.schedule.evaluation import EvaluationPhases
    from comgra_decl.hooks.step_state import StepState
    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.hooks.training_threads import Lanes


class RecordHooks:
    """Installs hooks, modes and stand-ins on the program for a record, and removes them again.

    `arm` prepares for a training step; `install` prepares only for an evaluation. `disarm` ends
    both, except for an evaluation that is still being recorded.

    Args:
        declared: the components that depend on the spec.
        state: the state of the step in progress.
        lanes: the training threads.
        graphs: detects the capture of CUDA graphs.
        losses: observes `backward`.
        training: the record of a training step.
        evaluation: the evaluation phases and their records.
        ending: whether tracing continues, and how it ends.

    Attributes:
        direct: detects direct calls to `forward`.
        stance: makes compiled code run eagerly.
        headroom: the additional stack depth for hooks.
    """

    _recording: Callable[[bool], None]
    _before_loss: Callable[[], None]

    def __init__(
        self,
        declared: Declared,
        state: StepState,
        *,
        lanes: Lanes,
        graphs: Captures,
        losses: LossWatch,
        training: StepCapture,
        evaluation: EvaluationPhases,
        ending: Ending,
    ) -> None:
        self._declared = declared
        self._state = state
        self._lanes = lanes
        self._graphs = graphs
        self._losses = losses
        self._train = training
        self._evaluation = evaluation
        self._ending = ending
        self._on_fault = ending.fault
        self._before_step: Placed | None = None  # set only while a step is recorded
        self._unused = UnusedOutputs(quietly=self._quietly, on_fault=ending.fault)
        self.direct = DirectCalls(before=self._before_direct, after=self._after_direct)
        self.stance = EagerStance(on_call=self._unused.called)
        self.headroom = Headroom()

    def connect(
        self, *, recording: Callable[[bool], None], before_loss: Callable[[], None]
    ) -> None:
        """Set the callbacks of components that are created later.

        Args:
            recording: called when recording starts or stops, with whether anything is being
            recorded.
            before_loss: called before each `backward`, before anything is read.
        """
        self._recording, self._before_loss = recording, before_loss

    # -- installing and removing ---------------------------------------------------------------

    def arm(self, *, thread: int) -> None:
        """Start capturing a step.

        Args:
            thread: the thread whose calls are followed; 0 for the first that calls a model.
        """
        declared = self._declared
        self._train.begin()
        self._state.arm()
        declared.tracer.follow_thread(thread)
        self.install()
        followed = self.follow_graph()
        declared.compiled.begin(self.stance, followed=followed)
        if declared.compiled.observed:
            self.direct.remove()  # from the previous step: code within stand-ins is not compiled
        else:
            self.direct.install(all_classes=followed or not self._state.any_ended)
        if self._before_step is None:
            self._before_step = before_steps.add(self._before_optimizer)

    def install(self) -> None:
        """Install the hooks that an evaluation needs too. Idempotent."""
        self.headroom.take()
        self.stance.force()
        self._declared.tracer.install()
        self._declared.beside.install()
        self._losses.record(True)
        self._recording(True)

    def disarm(self) -> None:
        """Stop capturing steps; keep the hooks of an evaluation that is being recorded."""
        self._state.disarm()
        self._train.open = False
        self._unused.clear()
        with ExitStack() as each:  # runs all callbacks, last first, even if one fails
            if not self._evaluation.open or self._ending.over:
                if self._ending.error is None:  # otherwise our own frames may still be on the stack
                    each.callback(self.headroom.give_back)
                each.callback(self._recording, False)
                each.callback(self.stance.restore)
                each.callback(self._losses.record, False)
                each.callback(self._declared.beside.remove)
                each.callback(self._declared.tracer.remove)
                each.callback(self.direct.remove)
            each.callback(self.stop_graph)
            each.callback(self._declared.compiled.end, self.stance)
            each.callback(self._forget_steps)

    def _forget_steps(self) -> None:
        if self._before_step is not None:
            keep_place = self._lanes.several and not self._ending.over
            self._before_step.remove(keep_place=keep_place)
            self._before_step = None

    def follow_graph(self) -> bool:
        """Start following the dependency graph if the spec requests it; return whether it does."""
        graph = self._declared.structures.start()
        self._declared.tracer.follow_graph(graph)
        return graph is not None

    def stop_graph(self) -> None:
        """Stop following the dependency graph."""
        self._declared.structures.stop()
        self._declared.tracer.follow_graph(None)

    # -- called by torch and the program -------------------------------------------------------

    def _before_direct(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._declared.tracer.before_direct(module, args, kwargs)
        if not self.is_elsewhere():
            self._declared.beside.enter(module, args, kwargs)

    def _after_direct(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._declared.tracer.after_direct(module, args, output)
        if not self.is_elsewhere():
            self._declared.beside.leave(module, output)

    @guarded
    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Pause the graph during optimizer computations, except for a closure's model calls."""
        if self._lanes.is_beside(here()) or is_nested_step(sys._getframe(1), optimizer):
            return
        declared = self._declared
        declared.structures.pause()
        declared.beside.before_optimizer()
        if self._graphs.active:
            return
        closure = any(callable(given) for given in (*args[1:], *kwargs.values()))
        declared.tracer.before_optimizer(self._train, optimizer, closure=closure)

    def is_of_another_thread(self) -> bool:
        """Return whether the step recorded now or next belongs to another thread."""
        return self._declared.tracer.thread not in (0, here())

    def is_elsewhere(self) -> bool:
        """Return whether this thread is neither the recorded thread nor running autograd."""
        return self.is_of_another_thread() and not is_backward()

    @guarded
    def on_loss(self, loss: torch.Tensor, backwarded: torch.Tensor) -> None:
        """Read a loss before `backward` is called.

        Args:
            loss: the loss before gradient scaling.
            backwarded: the tensor on which `backward` is called.
        """
        if self._evaluation.capture.open:
            self._evaluation.capture.backwards.name()
        if not self._train.open:
            return
        self._before_loss()
        with without_functions():
            self._unused.begin(backwarded)
            self._declared.tracer.read_loss(self._train, loss, backwarded)

    def on_backward_done(self, *, whole: bool, by_hand: bool) -> None:
        """Handle the end of `backward` in a recorded step.

        Args:
            whole: whether it computed the gradients of all tensors that it reached.
            by_hand: whether the program may use the gradients in a manual update.
        """
        self._unused.end(whole=whole)
        self._train.backwards.end()
        self._evaluation.capture.backwards.end()
        if self._train.open:
            self._declared.tracer.after_backward()
        if by_hand:
            self._declared.tracer.parameters.keep_gradients()

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        captures = [c for c in (self._train, self._evaluation.capture) if c.open]
        for capture in captures:
            capture.open = False
        try:
            with self._losses.aside():
                yield
        finally:
            for capture in captures:
                capture.open = True

"""What sits on a program while a step is recorded, put on and taken off as one."""

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
    """Puts hooks, modes and stand-ins on the program for a record, and takes them off again.

    `arm` is for a step of the training, `install` for an evaluation alone; `disarm` ends both, but
    for an evaluation that is being recorded.

    Args:
        declared: what depends on the spec.
        state: the step in progress.
        lanes: the threads that train.
        graphs: knows when a CUDA graph is being captured.
        losses: looks at `backward`.
        training: the record of a step.
        evaluation: the phases of evaluation and their record.
        ending: whether tracing goes on.

    Attributes:
        direct: sees calls of `forward` alone.
        stance: has compiled code run eagerly.
        headroom: the room that hooks need on the stack.
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
        self._before_step: Placed | None = None  # only while a step is recorded
        self._unused = UnusedOutputs(quietly=self._quietly, on_fault=ending.fault)
        self.direct = DirectCalls(before=self._before_direct, after=self._after_direct)
        self.stance = EagerStance(on_call=self._unused.called)
        self.headroom = Headroom()

    def connect(
        self, *, recording: Callable[[bool], None], before_loss: Callable[[], None]
    ) -> None:
        """Names what is called of parts that are made later.

        Args:
            recording: called with whether anything is recorded from now on.
            before_loss: called when `backward` is, before anything is read.
        """
        self._recording, self._before_loss = recording, before_loss

    # -- on and off ----------------------------------------------------------------------------

    def arm(self, *, thread: int) -> None:
        """A step is captured from now on.

        Args:
            thread: the one whose calls are followed; 0: the first that calls a model.
        """
        declared = self._declared
        self._train.begin()
        self._state.arm()
        declared.tracer.follow_thread(thread)
        self.install()
        followed = self.follow_graph()
        declared.compiled.begin(self.stance, followed=followed)
        if declared.compiled.observed:
            self.direct.remove()  # of the step before: within a stand-in nothing is compiled
        else:
            self.direct.install(all_classes=followed or not self._state.any_ended)
        if self._before_step is None:
            self._before_step = before_steps.add(self._before_optimizer)

    def install(self) -> None:
        """Puts on what an evaluation needs as well; calling it twice is harmless."""
        self.headroom.take()
        self.stance.force()
        self._declared.tracer.install()
        self._declared.beside.install()
        self._losses.record(True)
        self._recording(True)

    def disarm(self) -> None:
        """No step is captured any longer; the hooks of an evaluation that is recorded stay."""
        self._state.disarm()
        self._train.open = False
        self._unused.clear()
        with ExitStack() as each:  # all of them, whatever one of them does; the last is first
            if not self._evaluation.open or self._ending.over:
                if self._ending.error is None:  # else frames of ours may lie below those of others
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
        """Follows the dependency graph from now on if it is wanted; returns whether it is."""
        graph = self._declared.structures.start()
        self._declared.tracer.follow_graph(graph)
        return graph is not None

    def stop_graph(self) -> None:
        """Follows the dependency graph no longer."""
        self._declared.structures.stop()
        self._declared.tracer.follow_graph(None)

    # -- what torch and the program call -------------------------------------------------------

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
        """The optimizer's own arithmetic is no part of the graph (a closure's model calls are)."""
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
        """Whether the step of another thread is recorded, or the next that is."""
        return self._declared.tracer.thread not in (0, here())

    def is_elsewhere(self) -> bool:
        """Whether this thread, unless it is one of autograd's, is not the one that is recorded."""
        return self.is_of_another_thread() and not is_backward()

    @guarded
    def on_loss(self, loss: torch.Tensor, backwarded: torch.Tensor) -> None:
        """`backward` is about to be called; `loss`: what it was before the gradient scale."""
        if self._evaluation.capture.open:
            self._evaluation.capture.backwards.name()
        if not self._train.open:
            return
        self._before_loss()
        with without_functions():
            self._unused.begin(backwarded)
            self._declared.tracer.read_loss(self._train, loss, backwarded)

    def on_backward_done(self, *, whole: bool, by_hand: bool) -> None:
        """`backward` has ended, while a step is recorded.

        Args:
            whole: whether it has computed the gradients of all that it came to.
            by_hand: whether the program may be about to use these gradients itself.
        """
        self._unused.end(whole=whole)
        self._train.backwards.end()
        self._evaluation.capture.backwards.end()
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

"""When to look: follows the steps of a training and switches the tracer on and off.

Between recorded steps one global optimizer hook counts steps, and nothing else is attached. The
hook that ends the step before a recorded one arms the tracer; the one that ends the recorded step
closes the record and disarms it, unless the next step is recorded too. The first step is always a
recorded one: it also discovers the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from comgra_decl.hooks.capture import StepCapture
from comgra_decl.hooks.compiled import EagerStance
from comgra_decl.hooks.evaluation import EvaluationPhases
from comgra_decl.hooks.hearing import Hearing
from comgra_decl.hooks.optimizers import StepOwner
from comgra_decl.hooks.patches import LossWatch, watch_eval
from comgra_decl.hooks.report import Reporter
from comgra_decl.hooks.slots import SlotTable
from comgra_decl.hooks.structures import Structures
from comgra_decl.hooks.tracer import ModuleTracer
from comgra_decl.hooks.tree import Owners, Top
from comgra_decl.records import RawStep, StepInfo
from comgra_decl.spec import Scheduler
from comgra_decl.stats import Reducer

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from comgra_decl.spec import Spec

_MAX_ROOT_CALLS = 2000
"""Model calls kept without an optimizer step before a record is given up (memory stays bounded)."""


class HookManager:
    """Attaches to the running program and hands each recorded step to `sink`.

    Args:
        spec: what to capture and when.
        sink: receives each closed record on the training thread; must be quick.
        on_fault: told once about an error of our own; tracing has stopped by then.
    """

    def __init__(
        self,
        spec: Spec,
        sink: Callable[[RawStep], None],
        *,
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._sink = sink
        self._on_fault = on_fault
        self._scheduler = Scheduler(spec.schedule)
        self._step = 0  # the step in progress = optimizer steps completed
        self._due: int | None = self._scheduler.next_after(-1)
        self._armed = False
        self._stopped = False
        self._stop_requested = False
        self._stepped = False
        self._owners = Owners()
        self._table = SlotTable()
        self._stance = EagerStance()
        self._train = _new_capture(spec, followed=True)
        self._evaluation = EvaluationPhases(_new_capture(spec, followed=False), self._scheduler)
        self._tracer = ModuleTracer(
            spec, self._owners, choose=self._choose, left=self._left_root, on_fault=self._fault
        )
        self._owner = StepOwner(self._tracer.takes_part)
        self._structures = Structures(
            self._tracer.parameter_slot, enabled=spec.graph, on_fault=self._fault
        )
        self._reporter = Reporter(spec)
        self._losses = LossWatch(self._on_loss)
        self._eval_patch = watch_eval(self._on_eval)
        self._hearing = Hearing(self)
        self._handles: list[RemovableHandle] = []
        self._before_step: RemovableHandle | None = None  # only while a graph is followed

    # -- lifecycle -----------------------------------------------------------------------------

    def attach(self) -> None:
        """Starts following the program."""
        self._handles = [
            register_optimizer_step_post_hook(self._after_optimizer),
            register_module_module_registration_hook(self._owners.note),
        ]
        self._eval_patch.apply()
        self._hearing.start()
        self._arm()

    def detach(self) -> None:
        """Stops following; a program that never stepped still gets what it computed recorded."""
        if self._stopped:
            return
        try:
            if self._evaluation.open:
                self._finish_evaluation()
            if self._train.open and not self._stepped and len(self._train):
                self._finish_unstepped()
        except Exception as error:
            self._fault(error)
        self._remove_everything()

    def stop(self) -> None:
        """Asks, from any thread, that tracing ends with the current step."""
        self._stop_requested = True

    def _remove_everything(self) -> None:
        self._stopped = True
        self._disarm()
        self._hearing.stop()
        self._eval_patch.restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._train.drop()
        self._evaluation.capture.drop()

    def _fault(self, error: BaseException) -> None:
        """A fault of ours never reaches the training: stop, and say so once."""
        if not self._stopped:
            self._remove_everything()
            self._on_fault(error)

    # -- arming --------------------------------------------------------------------------------

    def _arm(self) -> None:
        self._train.begin()
        self._armed = True
        self._install()
        self._tracer.provenance = self._structures.start()
        if self._tracer.provenance is not None and self._before_step is None:
            self._before_step = register_optimizer_step_pre_hook(self._before_optimizer)

    def _install(self) -> None:
        self._stance.force()
        self._tracer.install()
        self._losses.apply()
        self._hearing.recording(True)

    def _disarm(self) -> None:
        self._armed = False
        self._train.open = False
        self._stop_graph()
        if not self._evaluation.open or self._stopped:
            self._tracer.remove()
            self._losses.restore()
            self._stance.restore()
            self._hearing.recording(False)

    def _stop_graph(self) -> None:
        self._structures.stop()
        self._tracer.provenance = None
        if self._before_step is not None:
            self._before_step.remove()
            self._before_step = None

    # -- events --------------------------------------------------------------------------------

    def _before_optimizer(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """The optimizer's own arithmetic is no part of the graph (a closure's model calls are)."""
        self._structures.pause()

    def _after_optimizer(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            if self._armed:
                self._stepped = True
                parameters = (p for group in optimizer.param_groups for p in group["params"])
                self._tracer.read_parameter_gradients(self._train, parameters)
            if self._owner.ends_step(optimizer):
                self._end_step()
        except Exception as error:
            self._fault(error)

    def _end_step(self) -> None:
        if self._stop_requested:
            self._remove_everything()
            return
        if self._armed:
            self._finish_train()
            self._due = self._scheduler.next_after(self._step)
        self._step += 1
        if self._step == self._due:
            self._arm()
        elif self._armed or self._evaluation.open:
            self._finish_evaluation()
            self._disarm()

    def _on_eval(self, module: nn.Module) -> None:
        if self._stopped or torch.compiler.is_compiling():
            return
        try:
            self._structures.pause()
            if self._evaluation.begin(self._step, self._train.root_calls) and not self._armed:
                self._install()
        except Exception as error:
            self._fault(error)

    def _choose(self, root: nn.Module, top: Top) -> StepCapture | None:
        """Decides which record a root call belongs to."""
        training = root.training
        if not training and (top.trained or not torch.is_grad_enabled()):
            self._structures.pause()
            return self._evaluation.enter(self._step)
        self._structures.resume()
        top.trained = top.trained or training
        capture = self._train
        if not capture.open or capture.root_calls >= _MAX_ROOT_CALLS:
            return None
        capture.root_calls += top.parametric
        return capture

    def _left_root(self) -> None:
        if self._evaluation.complete:
            self._finish_evaluation()
            if not self._armed:
                self._disarm()

    def _on_loss(self, loss: torch.Tensor, backwarded: torch.Tensor) -> None:
        if not self._train.open:
            return
        try:
            with torch._C.DisableTorchFunction():
                self._tracer.read_loss(self._train, loss, backwarded)
        except Exception as error:
            self._fault(error)

    # -- what the program says -----------------------------------------------------------------

    def _on_annotated_node(self, value: Any, name: str, role: str | None, kind: str | None) -> None:
        """A tensor, or a structure of some, was given a name by the program."""

    def _on_connect(self, source: Any, sink: Any) -> None:
        """The program says that `sink` was computed from `source`."""

    def _on_tag(self, *names: str) -> None:
        """The program labels the step in progress."""

    def _on_step(self) -> None:
        """The program says that a step ends here."""

    def _on_note(self, text: str) -> None:
        """The program writes something down."""

    def _on_kpi(self, name: str, value: Any) -> None:
        """The program keeps a number of the step in progress."""

    # -- closing records -----------------------------------------------------------------------

    def _finish_train(self) -> None:
        if len(self._train) == 0:
            self._reporter.warn(
                "in some recorded steps no module was called, so there is no record"
            )
            self._tracer.recover()
            return
        self._emit(self._train, StepInfo(self._step, time.time(), "train", "train"))

    def _finish_evaluation(self) -> None:
        capture = self._evaluation.capture
        if capture.open and len(capture):
            self._emit(capture, StepInfo(self._evaluation.step, time.time(), "eval", "eval"))
        self._evaluation.close()

    def _finish_unstepped(self) -> None:
        backward = self._train.count("loss") > 0
        if backward:
            self._reporter.warn(
                "backward() ran but no optimizer step was seen, so steps could not be told "
                "apart; everything up to here is one record"
            )
        mode = "train" if backward else "eval"
        self._emit(self._train, StepInfo(self._step, time.time(), mode, mode))

    def _emit(self, capture: StepCapture, info: StepInfo) -> None:
        self._tracer.settle_names()
        raw = capture.close(info, self._table)
        training = capture is self._train
        raw.structure = self._structures.finish(info, capture.signature(), training=training)
        if training:
            self._stop_graph()
        raw.documents = self._reporter.documents(self._tracer.called_tops, capture, info)
        self._sink(raw)


def _new_capture(spec: Spec, *, followed: bool) -> StepCapture:
    histogram = None if spec.histogram is None else spec.histogram.elements
    return StepCapture(
        Reducer(histogram_elements=histogram, sample_count=spec.samples.count),
        max_value_elements=spec.values.max_elements,
        sample_count=spec.samples.count,
        followed=followed,
    )

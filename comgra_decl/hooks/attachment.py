"""What sits on a program while a step is recorded.

`Closing`, which is made of this, hands on what was recorded; `HookManager`, in the end, decides
when.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from comgra_decl.hooks import modes
from comgra_decl.hooks.call_context import is_backward, is_nested_step
from comgra_decl.hooks.compiled.stance import EagerStance
from comgra_decl.hooks.compiled.steps import CompiledSteps
from comgra_decl.hooks.compiled.unused import UnusedOutputs
from comgra_decl.hooks.cross_thread import here
from comgra_decl.hooks.direct_calls import DirectCalls
from comgra_decl.hooks.functions.beside import Beside
from comgra_decl.hooks.graph.structures import Structures
from comgra_decl.hooks.hook_lists import Placed, before_steps
from comgra_decl.hooks.module_tree import Owners, Top
from comgra_decl.hooks.recursion import Headroom
from comgra_decl.hooks.report import Reporter
from comgra_decl.hooks.root_calls import RootCalls
from comgra_decl.hooks.scalars.losses import LossWatch
from comgra_decl.hooks.scalars.numbers import read_number
from comgra_decl.hooks.scalars.scalars import Scalars
from comgra_decl.hooks.schedule.budget import Budget, Meter
from comgra_decl.hooks.schedule.evaluation import EvaluationPhases
from comgra_decl.hooks.schedule.idle import IdleSteps
from comgra_decl.hooks.tensors.capture import StepCapture
from comgra_decl.hooks.tensors.categories import categories
from comgra_decl.hooks.tensors.slots import SlotTable
from comgra_decl.hooks.tracer import ModuleTracer
from comgra_decl.records import RawStep, Said
from comgra_decl.stats import Reducer

if TYPE_CHECKING:
    from comgra_decl.hooks.limits import Captures
    from comgra_decl.hooks.optimizers import Optimizers
    from comgra_decl.hooks.scalars.listener import Listener
    from comgra_decl.hooks.training_threads import Lane, Lanes
    from comgra_decl.spec import Spec
    from comgra_decl.spec.schedule import ScheduleSpec

_EVERY_SAMPLE = 1 << 30


class Attachment(ABC):
    """Puts the tracer on a program and takes it off again.

    Args:
        spec: what to capture.
        sink: receives each closed record on the training thread.
        scalars: receives the numbers and notes of all steps.
        meter: what recording costs outside the training thread.
    """

    _captures: Captures
    _listener: Listener
    _lanes: Lanes
    _optimizers: Optimizers
    _stepped: bool
    _on_fault: Callable[[BaseException], None]

    def __init__(
        self,
        spec: Spec,
        sink: Callable[[RawStep], None],
        *,
        scalars: Callable[[Said], None] | None,
        meter: Meter,
    ) -> None:
        self._sink = sink
        self._together = RLock()  # threads that train side by side do one thing of ours at a time
        self._begun = 0  # the step that was in progress when steps began to be only counted
        self._armed = False
        self._stopped = False
        self._stop_requested = False
        self._ending = False  # tracing ends as soon as that is possible
        self._error: BaseException | None = None  # why
        self._owners = Owners(on_fault=self._fault)
        self._roots = RootCalls(self._owners, held_in=lambda model: self._optimizers.held_in(model))
        self._direct = DirectCalls(before=self._before_direct, after=self._after_direct)
        self._owners.on_class = self._direct.note
        self._table = SlotTable()
        self._unused = UnusedOutputs(quietly=self._quietly, on_fault=self._fault)
        self._stance = EagerStance(on_call=self._unused.called)
        self._headroom = Headroom()
        self._train = _new_capture(spec, followed=True)
        self._reporter = Reporter(spec)
        self._reporter.on_uncalled = self._direct.suspect
        self._meter = meter
        self._budget = self._new_budget(spec.schedule)
        self._reporter.price = lambda: self._budget.price
        self._evaluation = EvaluationPhases(
            _new_capture(spec, followed=False), spec.schedule.eval, factor=self._budget.factor
        )
        for capture in (self._train, self._evaluation.capture):
            training = capture is self._train
            capture.categories = categories(
                spec.samples, warn=self._reporter.warn, training=training
            )
        self._follow(spec)
        self._scalars = Scalars(scalars, on_fault=self._fault)
        self._idle = IdleSteps(
            self._scalars.events.append, otherwise=self._after_optimizer, on_fault=self._fault
        )
        self._losses = LossWatch(
            self._scalars.events.append if spec.kpis.loss and scalars is not None else None,
            on_loss=self._on_loss,
            on_done=self._on_backward_done,
            on_thread=self._is_followed_now,
            together=self._together,
            on_fault=self._fault,
        )
        self._before_step: Placed | None = None  # only while a step is recorded

    @property
    def _step(self) -> int:
        """The step in progress = steps completed."""
        return self._begun + self._idle.counted

    @_step.setter
    def _step(self, step: int) -> None:
        self._begun = step - self._idle.counted

    @abstractmethod
    def _after_optimizer(self, optimizer: Any) -> None:
        """An optimizer has stepped, and this step is not only counted."""

    @abstractmethod
    def _is_followed_now(self, losses: Any) -> bool:
        """Whether this thread, which trains, is the one whose step may be recorded."""

    @abstractmethod
    def _choose(self, root: nn.Module, top: Top) -> StepCapture | None:
        """Decides which record a root call belongs to."""

    @abstractmethod
    def _left_root(self) -> None:
        """A root call has returned."""

    @abstractmethod
    def _training_thread(self) -> int:
        """Returns the thread that trains, 0 if it is not known yet."""

    @abstractmethod
    def _is_abandoned(self) -> bool:
        """Whether the thread whose step would be recorded next is gone, and this one is new."""

    @abstractmethod
    def _remove_everything(self) -> None:
        """Takes everything of ours off the program, for good."""

    # -- ending --------------------------------------------------------------------------------

    def _fault(self, error: BaseException) -> None:
        """A fault of ours never reaches the training: nothing more is traced, and it is said."""
        if self._stopped or self._error is not None:
            return
        self._error = error
        self._stop_requested = True
        self._stop_when_safe()

    def _stop_when_safe(self) -> None:
        """A mode that is removed while it handles a call comes back when that call returns."""
        self._ending = True
        self._idle.end()
        self._train.drop()
        self._evaluation.capture.drop()
        if not modes.at_work():
            self._end_tracing()

    def _end_tracing(self) -> None:
        for _ in range(2):  # once more, if there is a fault in taking things off
            try:
                self._remove_everything()
                modes.sweep()
                break
            except Exception as error:
                self._error = self._error or error
        if self._error is not None:
            self._on_fault(self._error)

    # -- choices -------------------------------------------------------------------------------

    def _new_budget(self, schedule: ScheduleSpec, *, before: Budget | None = None) -> Budget:
        return Budget(
            schedule.budget,
            meter=self._meter,
            say=self._say,
            types=schedule.type_budgets,
            before=before,
        )

    def _say(self, key: str, what: str, sentence: str) -> None:
        """A choice was made that the person behind the program should know of."""
        self._reporter.say(what if key == "budget" else f"{key}.{what}", sentence)
        self._scalars.remark(f"schedule.{key}: {sentence}")

    def _follow(self, spec: Spec) -> None:
        """Makes everything that depends on what is selected."""
        self._tracer = ModuleTracer(
            spec,
            self._owners,
            direct=self._direct,
            entered=self._budget.begin,
            choose=self._choose,
            left=self._left_root,
            abandoned=self._is_abandoned,
            together=self._together,
            on_fault=self._fault,
        )
        self._tracer.parameters.held = lambda: self._optimizers.held()
        self._beside = Beside(
            spec,
            self._tracer,
            roots=self._roots,
            training=self._train,
            evaluation=self._evaluation,
            on_fault=self._fault,
        )
        self._reporter.beside = self._beside
        self._compiled = CompiledSteps(
            spec,
            self._tracer,
            named=lambda: self._beside.names,
            warn=self._reporter.warn,
            on_fault=self._fault,
        )
        for capture in (self._train, self._evaluation.capture):
            capture.max_iterations = spec.schedule.max_iterations
        self._spec = spec
        self._keeps = spec.keep is not None
        self._structures = Structures(
            self._tracer.parameter_slot,
            enabled=spec.graph,
            on_fault=self._fault,
            warn=self._reporter.warn,
        )

    # -- arming --------------------------------------------------------------------------------

    def _arm(self) -> None:
        self._train.begin()
        self._armed = True
        self._tracer.thread = self._training_thread()
        self._install()
        self._tracer.provenance = self._structures.start()
        followed = self._tracer.provenance is not None
        self._compiled.begin(self._stance, followed=followed)
        if self._compiled.observed:
            self._direct.remove()  # of the step before: within a stand-in nothing is compiled
        else:
            self._direct.install(all_classes=followed or not self._stepped)
        if self._before_step is None:
            self._before_step = before_steps.add(self._before_optimizer)

    def _install(self) -> None:
        self._headroom.take()
        self._stance.force()
        self._tracer.install()
        self._beside.install()
        self._losses.record(True)
        self._listener.recording(True)

    def _disarm(self) -> None:
        self._armed = False
        self._train.open = False
        self._unused.clear()
        with ExitStack() as each:  # all of them, whatever one of them does; the last is first
            if not self._evaluation.open or self._stopped:
                if self._error is None:  # else frames of ours may lie below those that follow
                    each.callback(self._headroom.give_back)
                each.callback(self._listener.recording, False)
                each.callback(self._stance.restore)
                each.callback(self._losses.record, False)
                each.callback(self._beside.remove)
                each.callback(self._tracer.remove)
                each.callback(self._direct.remove)
            each.callback(self._stop_graph)
            each.callback(self._compiled.end, self._stance)
            each.callback(self._forget_steps)

    def _forget_steps(self) -> None:
        if self._before_step is not None:
            self._before_step.remove(keep_place=self._lanes.several and not self._stopped)
            self._before_step = None

    def _stop_graph(self) -> None:
        self._structures.stop()
        self._tracer.provenance = None

    # -- events -------------------------------------------------------------------------------

    def _before_direct(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._tracer.before_direct(module, args, kwargs)
        if not self._is_elsewhere():
            self._beside.enter(module, args, kwargs)

    def _after_direct(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._tracer.after_direct(module, args, output)
        if not self._is_elsewhere():
            self._beside.leave(module, output)

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The optimizer's own arithmetic is no part of the graph (a closure's model calls are)."""
        try:
            if self._steps_elsewhere() or is_nested_step(sys._getframe(1), optimizer):
                return
            self._structures.pause()
            self._beside.before_optimizer()
            if self._captures.active:
                return
            closure = any(callable(given) for given in (*args[1:], *kwargs.values()))
            self._tracer.before_optimizer(self._train, optimizer, closure=closure)
        except Exception as error:
            self._fault(error)

    def _is_elsewhere(self) -> bool:
        """Whether this thread, unless it is one of autograd's, is not the one that is recorded."""
        return self._tracer.thread not in (0, here()) and not is_backward()

    def _steps_elsewhere(self) -> bool:
        """Whether an optimizer that steps in this thread ends no step of the one recorded."""
        lane = self._lanes.of(here())
        return lane is not None and lane is not self._lanes.followed

    def _on_loss(self, loss: torch.Tensor, backwarded: torch.Tensor) -> None:
        try:
            if self._evaluation.capture.open:
                self._evaluation.capture.backwards.name()
            if not self._train.open:
                return
            self._settle_tuning()
            with torch._C.DisableTorchFunction():
                self._unused.begin(backwarded)
                self._tracer.read_loss(self._train, loss, backwarded)
        except Exception as error:
            self._fault(error)

    @abstractmethod
    def _speaks(self) -> Lane | None:
        """Says whose step the numbers that follow are of; see `HookManager`."""

    @abstractmethod
    def _on_backward_done(self, whole: bool) -> None:
        """`backward` has ended, while a step is recorded; `whole`: for all that it came to."""

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

    @abstractmethod
    def _settle_tuning(self) -> None:
        """`backward` is called: what was called in evaluation mode may be what is trained."""

    def _on_annotated_node(self, value: Any, name: str, role: str | None, kind: str | None) -> None:
        """A tensor, or a structure of some, was given a name by the program."""
        if self._stopped or self._is_elsewhere():
            return
        if self._beside.annotate(value, name, role, kind):
            self._structures.resume()  # what leads from it to the model is part of the graph

    def _on_connect(self, source: Any, sink: Any) -> None:
        """The program says that `sink` was computed from `source`."""
        if self._stopped or self._is_elsewhere():
            return
        try:
            with torch._C.DisableTorchFunction():
                self._structures.connect(source, sink)
        except Exception as error:
            self._fault(error)

    def _on_note(self, text: str) -> None:
        """The program writes something down."""
        self._idle.end()
        with self._together:
            self._speaks()
            self._scalars.note(text)

    def _on_kpi(self, name: str, value: Any) -> None:
        """The program keeps a number of the step in progress."""
        self._idle.end()
        with self._together:
            elsewhere = self._speaks() is not None
            self._scalars.kpi(name, value)
        if self._keeps and self._train.open and not elsewhere:
            number = read_number(value) if hasattr(value, "detach") else float(value)
            if number is not None:
                self._train.said[name] = number


def _valued_samples(spec: Spec) -> int:
    """Returns of how many samples values are kept: of all, until it is known which are chosen."""
    return spec.samples.count if spec.samples.by is None else _EVERY_SAMPLE


def _new_capture(spec: Spec, *, followed: bool) -> StepCapture:
    histogram = None if spec.histogram is None else spec.histogram.elements
    capture = StepCapture(
        Reducer(histogram_elements=histogram, sample_count=_valued_samples(spec)),
        max_value_elements=spec.values.max_elements,
        sample_count=spec.samples.count,
        followed=followed,
        spare_values=followed and spec.keep is not None and spec.keep.values,
    )
    if spec.opt_in:
        from comgra_decl.hooks.tensors.opt_in_statistics import Measured

        refuse = capture.refused.setdefault
        capture.measured = Measured(spec.opt_in, refuse=refuse, complete=followed)
    return capture

"""Metrics that need no code in the program: learning rates, times and memory.

They cost nothing in most steps. At most every two seconds (at first, every half second), one step
that is not recorded is timed:
a hook that runs once sees the first model call, a wrapper sees `backward`, and two optimizer hooks
see the optimizer step. In other steps, at most every ten seconds, the calls of all modules are
timed. These times are by the host's clock; events time the same phases on a device, and are read
later. Nothing waits for a device. The memory is read at most every half second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.hooks.call_context import is_no_step, torch_variable
from comgra_decl.hooks.compiled.stance import anything_compiled
from comgra_decl.hooks.hook_lists import Placed, before_steps
from comgra_decl.hooks.memory_use import (
    device_bytes,
    device_utilization,
    host_bytes,
    reserved_bytes,
)
from comgra_decl.hooks.module_tree import in_training
from comgra_decl.hooks.pytree import first_batch_size, first_tokens
from comgra_decl.hooks.recursion import EveryCall
from comgra_decl.hooks.scalars.device_phases import BACKWARD, FORWARD, OPTIMIZER, DevicePhases
from comgra_decl.hooks.scalars.growth import Growth
from comgra_decl.records import AUTOMATIC, GROWING, GROWING_BYTES

if TYPE_CHECKING:
    from comgra_decl.hooks.measuring.module_times import ModuleTimes
    from comgra_decl.hooks.optimizers import Optimizers
    from comgra_decl.hooks.scalars.losses import LossWatch
    from comgra_decl.hooks.scalars.scalars import Scalars

INTERVAL = 2.0
"""Seconds between two timed steps."""

FIRST_INTERVAL = 0.5
"""The same between the first timed steps, so that short runs have enough of them."""

_FIRST = 6  # number of timed steps that follow each other sooner

MODULES_INTERVAL = 10.0
"""Seconds between two steps in which the calls of modules are timed; the first one comes sooner."""

FIRST_MODULES = 1.0
"""Seconds until the calls of modules are timed for the first time."""

MEMORY_INTERVAL = 0.5
"""Seconds between memory readings."""

UTILIZATION_INTERVAL = 5.0
"""Seconds between two questions to the driver of the devices."""

_MOST_RATES = 16


class Stopwatch:
    """The times within one step, in seconds of a monotonic clock.

    Attributes:
        began: when the previous step ended.
        called: when the first model call began; None before that.
        backward: the total time of `backward`.
        passes: the number of `backward` calls.
        optimizer: the total time of optimizer steps.
        batch: the batch size of the first model call.
        tokens: the number of tokens that it receives; None if it receives none.
        spoiled: whether anything else happened, such as an evaluation.
    """

    def __init__(self, now: float) -> None:
        self.began = now
        self.called: float | None = None
        self.backward = self.optimizer = 0.0
        self.passes = 0
        self.batch: int | None = None
        self.tokens: int | None = None
        self.spoiled = False
        self._backward_since: float | None = None
        self._last_backward: float | None = None
        self._step_since: float | None = None

    def around_backward(self, now: float, *, begins: bool) -> None:
        """Handle the beginning or end of a `backward` call."""
        if begins:
            self._backward_since = now
        elif self._backward_since is not None:
            self.backward += now - self._backward_since
            self.passes += 1
            self._backward_since, self._last_backward = None, now

    def step_begins(self, now: float) -> None:
        """Handle the beginning of an optimizer step."""
        self._step_since = now

    def times(self, now: float) -> dict[str, float]:
        """Return the times of the step that is ending."""
        if self.called is None or self.spoiled:
            return {}
        found = {"time/data": self.called - self.began}
        if self._last_backward is not None:
            found["time/forward"] = self._last_backward - self.called - self.backward
            found["time/backward"] = self.backward
        if self._step_since is not None:
            found["time/optimizer"] = now - self._step_since
        return found


class AutomaticMetrics:
    """Collects the automatic metrics of one training thread's steps.

    Args:
        wanted: whether the spec requests them.
        scalars: receives them.
        optimizers: the optimizers of the program.
        losses: observes `backward`.
        modules: times the calls of modules.
        on_fault: called with an error in tracing itself.
        clock: returns seconds of a monotonic clock.

    Attributes:
        timing: whether the step in progress is timed.
    """

    def __init__(
        self,
        *,
        wanted: bool,
        scalars: Scalars,
        optimizers: Optimizers,
        losses: LossWatch,
        modules: ModuleTimes,
        on_fault: Callable[[BaseException], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._wanted = wanted
        self._modules = modules
        self._scalars = scalars
        self._optimizers = optimizers
        self._losses = losses
        self._on_fault = on_fault
        self._clock = clock
        self._calls = EveryCall(self._on_call)
        self._optimizer_hook: Placed | None = None
        self._watch: Stopwatch | None = None
        self._growth: Growth | None = Growth()
        self._device = DevicePhases(lambda phase, seconds: self._tell(f"device/{phase}", seconds))
        self._timed = 0
        self._due = clock() + self._interval
        self._modules_due = clock() + FIRST_MODULES
        self._memory_due = self._utilization_due = clock()

    @property
    def _interval(self) -> float:
        return INTERVAL if self._timed >= _FIRST else min(INTERVAL, FIRST_INTERVAL)

    @property
    def timing(self) -> bool:
        """Whether the step in progress is timed."""
        return self._watch is not None or self._modules.running

    def begin_step(self, *, plain: bool) -> None:
        """Time the step that is about to begin, if a measurement is due.

        Args:
            plain: whether nothing else is attached to the step.
        """
        if not (self._wanted and plain) or self.timing:
            return
        now, due = self._clock(), min(self._due, self._modules_due)
        if now < due or anything_compiled():  # compiled code must not run with a hook on it
            return
        if due == self._modules_due:  # alone, because its hooks would lengthen the other times
            self._modules_due = now + MODULES_INTERVAL
            self._modules.begin()
            return
        self._timed += 1
        self._due = now + self._interval
        self._calls.install()
        self._losses.time(self._on_backward)
        self._optimizer_hook = before_steps.add(self._on_step)
        self._watch = Stopwatch(self._clock())
        self._device.begin()

    def end_step(self, *, recorded: bool, plain: float | None) -> None:
        """Collect the metrics of the step that is ending, before its other metrics are closed.

        Args:
            recorded: whether it was recorded, in which case its times include the cost of
                recording.
            plain: the mean duration of the last steps that were not recorded, in seconds.
        """
        if not self._wanted:
            return
        watch, now = self._watch, self._clock()
        self._modules.end(keep=not recorded)
        if self._device.ended:
            self._device.read()
        if watch is not None:
            if not (recorded or watch.spoiled):
                self._device.end()
            self.stop()
            if not recorded:
                self._tell_times(watch.times(now), watch, plain)
        if recorded or watch is not None:
            for number, rate in enumerate(self._optimizers.rates()[:_MOST_RATES]):
                self._tell(f"lr[{number}]" if number else "lr", rate)
        if now >= self._memory_due:
            self._memory_due = now + MEMORY_INTERVAL
            self._tell_memory()
        if now >= self._utilization_due:
            self._utilization_due = now + UTILIZATION_INTERVAL
            self._tell_utilization()

    def stop(self) -> None:
        """Stop timing the step in progress."""
        self._modules.end(keep=False)
        if self._watch is None:
            return
        self._watch = None
        self._device.stop()
        self._calls.remove()
        self._losses.time(None)
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()  # an unused entry would be called in every step
            self._optimizer_hook = None

    def finish(self) -> None:
        """Pass on what is left at the end of tracing."""
        self._modules.end(keep=False)
        self._modules.finish()

    def _tell_memory(self) -> None:
        host, device = host_bytes(), device_bytes()
        sizes = {"host": host, "device": device, "device_reserved": reserved_bytes()}
        for name, size in sizes.items():
            if size is not None:
                self._tell(f"memory/{name}", float(size))
        size = device or host
        if size is not None and self._growth is not None:
            try:
                grown = self._growth.look(self._scalars.saying.step, size)
            except Exception:  # it encounters every object of the program
                self._growth = None  # only these metrics end, not tracing
                return
            for gain in grown:
                self._tell((GROWING_BYTES if gain.in_bytes else GROWING) + gain.holder, gain.number)

    def _tell_utilization(self) -> None:
        if (share := device_utilization()) is not None:
            self._tell("device/utilization", share)

    def _tell_times(self, times: dict[str, float], watch: Stopwatch, plain: float | None) -> None:
        for name, seconds in times.items():
            self._tell(name, seconds)
        if plain is not None and plain > 0:
            self._tell("time/step", plain)
            if times and watch.passes == 1:
                for what, number in (("samples", watch.batch), ("tokens", watch.tokens)):
                    if number is not None:
                        self._tell(f"{what}_per_second", number / plain)

    def _tell(self, name: str, value: float) -> None:
        self._scalars.measured(AUTOMATIC + name, value)

    # -- events in a timed step ----------------------------------------------------------------

    def _on_call(self, module: Any, args: tuple[Any, ...]) -> None:
        """Handle the first module call of a timed step."""
        try:
            watch = self._watch
            if watch is None or torch.compiler.is_compiling() or is_no_step():
                return
            watch.called = self._clock()
            self._device.at(FORWARD)
            watch.spoiled = not (torch.is_grad_enabled() and in_training(module))
            kwargs = torch_variable(sys._getframe(1), "kwargs") or {}
            watch.batch = first_batch_size(args, kwargs)
            watch.tokens = first_tokens(args, kwargs)
            self._calls.remove()
        except Exception as error:
            self._on_fault(error)

    def _on_backward(self, begins: bool) -> None:
        if self._watch is not None:
            self._watch.around_backward(self._clock(), begins=begins)
            self._device.at(BACKWARD if begins else FORWARD)

    def _on_step(self, *_: Any) -> None:
        if self._watch is not None:
            self._watch.step_begins(self._clock())
            self._device.at(OPTIMIZER)

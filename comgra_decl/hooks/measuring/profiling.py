"""Runs torch's profiler for a few steps, and attributes what it measures to nodes and passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.hooks.compiled.stance import anything_compiled
from comgra_decl.hooks.guarded import guarded
from comgra_decl.hooks.hook_lists import Placed, before_steps
from comgra_decl.hooks.measuring.attribution import (
    BACKWARD,
    CALL,
    END,
    OPTIMIZER,
    OWN,
    STEP,
    STILL,
    Attribution,
    Event,
    Span,
    attribute,
)
from comgra_decl.hooks.measuring.calls import Call, ModuleCalls
from comgra_decl.hooks.measuring.measured import Measurement, Surroundings
from comgra_decl.hooks.patches import Patch
from comgra_decl.records import PROFILE, PROGRAM, TIMELINE
from comgra_decl.torch_private import Range, of_profiler, profiler_enabled

if TYPE_CHECKING:
    from comgra_decl.hooks.scalars.losses import LossWatch

_MOST_SPANS = 50_000
_DEVICE_KINDS = ("CUDA", "XPU", "PrivateUse1", "HIP")

_COMPILED = (
    "profile: the program uses compiled code, which cannot be followed, so the time is not "
    "attributed to modules"
)
_TAKEN = "profile: steps {} to {} are not profiled, because the program runs a profiler itself"
_FAILED = "profile: the profiler failed ({}), so steps {} to {} are not profiled"
_INTERRUPTED = (
    "profile: the program started a profiler in step {}, so comgra_decl stopped its own; steps {} "
    "to {} are not profiled"
)


class Profiling(Measurement):
    """The profiler.

    Only the thread that trains, and the threads in which autograd runs its operations, are
    profiled. If the program starts a profiler itself, this one stops.

    Args:
        steps: the first and the last step.
        around: the program and the run.
        losses: observes `backward`.
    """

    name = PROFILE

    def __init__(self, steps: Sequence[int], around: Surroundings, *, losses: LossWatch) -> None:
        super().__init__(steps, around)
        self._losses = losses
        self._profiler: torch.profiler.profile | None = None
        self._calls = ModuleCalls(_enter, _leave, on_fault=self.fail)
        self._before_step: Placed | None = None
        self._backward: Any = None
        self._steps: list[tuple[int, float]] = []  # number and time of each begun step
        self._patches = [
            Patch(of_profiler, name, self._taken_over)
            for name in ("_prepare_profiler", "_enable_profiler")
        ]

    @property
    def running(self) -> bool:
        """Whether the profiler runs."""
        return self._profiler is not None

    def begin(self, step: int) -> None:
        """Begin to profile a step; for the first one, start the profiler."""
        if self._profiler is None and not self._start():
            self.last = -1  # no further step is profiled
            return
        self._steps.append((step, time.time()))
        _mark(STEP)

    def end(self, step: int) -> None:
        """Handle the end of a profiled step; after the last one, stop the profiler."""
        if self._profiler is not None:
            _mark(END)
            if step >= self.last:
                self.finish()

    def finish(self) -> None:
        """Stop the profiler, and pass on what it measured in complete steps."""
        profiler = self._profiler
        self._stop()
        if profiler is None:
            return
        events = [_event(each) for each in profiler.events() or ()]
        found = attribute(events, self._calls.names(self._around.place()))
        if found.steps:
            self._around.tell(PROFILE, self._document(found))
            base = next(event.end for event in events if event.name == STEP)
            self._around.tell(TIMELINE, _timeline(found, base, self._steps[0][1]))

    # -- starting and stopping -----------------------------------------------------------------

    def _start(self) -> bool:
        if profiler_enabled():
            self._around.remark(_TAKEN.format(self.first, self.last))
            return False
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=kinds, profile_memory=True, acc_events=True)
        try:
            profiler.start()
        except RuntimeError as error:
            self._around.remark(_FAILED.format(error, self.first, self.last))
            return False
        self._profiler = profiler
        for patch in self._patches:
            patch.apply()
        self._losses.time(self._on_backward, own=lambda: Range(OWN))
        self._before_step = before_steps.add(self._on_step)
        if anything_compiled():  # compiled code must not run with hooks on it
            self._around.remark(_COMPILED)
        else:
            self._calls.install()
        return True

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        with ExitStack() as each:  # runs all callbacks, last first, even if one fails
            each.callback(profiler.stop)
            each.callback(self._calls.remove)
            each.callback(self._losses.time, None)
            if self._before_step is not None:
                each.callback(self._before_step.remove)
            for patch in self._patches:
                each.callback(patch.restore)
        self._before_step = self._backward = None

    def _taken_over(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Give way to a profiler that the program starts."""
        if self._profiler is not None:
            try:
                number = self._steps[-1][0] if self._steps else self.first
                self._around.remark(_INTERRUPTED.format(number, self.first, self.last))
                self.abandon()
            except Exception as error:
                self.fail(error)
        return original(*args, **kwargs)

    # -- ranges --------------------------------------------------------------------------------

    def _on_backward(self, begins: bool) -> None:
        if begins:
            self._backward = Range(BACKWARD)
            self._backward.__enter__()
        elif self._backward is not None:
            self._backward.__exit__(None, None, None)
            self._backward = None

    @guarded
    def _on_step(self, *_: Any) -> None:
        _mark(OPTIMIZER)

    # -- documents -----------------------------------------------------------------------------

    def _document(self, found: Attribution) -> dict[str, Any]:
        names = ("calls", "host", "host_self", "device", "device_self", "kernels", "operations",
                 "bytes")  # fmt: skip
        rows = [
            {"node": node, "pass": pass_, **{name: getattr(usage, name) for name in names}}
            for (node, pass_), usage in found.usage.items()
        ]
        return {
            "rows": rows,
            "steps": [
                {"step": step, "time": began, **times}
                for (step, began), times in zip(self._steps, found.steps, strict=False)
            ],
            "device": _device_name(),
            "waits": [_counted(key, count) for key, count in found.waits.items()],
            "copies": [_counted(key, count) for key, count in found.copies.items()],
            "kernels": _summary(found.kernel_times),
        }


def _enter(call: Call) -> Any:
    span = Range(f"{CALL if call.gradients else STILL}{call.number}")
    span.__enter__()
    return span


def _leave(span: Any) -> None:
    span.__exit__(None, None, None)


def _mark(name: str) -> None:
    span = Range(name)
    span.__enter__()
    span.__exit__(None, None, None)


def _event(each: Any) -> Event:
    """Convert an event of the profiler."""
    on_device = each.device_type.name in _DEVICE_KINDS
    is_range = bool(each.is_user_annotation)
    launches = not (on_device or is_range)  # a range contains kernels of operations
    return Event(
        each.name,
        each.time_range.start,
        each.time_range.end,
        each.thread,
        each.sequence_nr,
        each.fwd_thread or 0,
        tuple((k.name, k.duration) for k in each.kernels) if launches else (),
        0 if on_device else each.self_cpu_memory_usage + each.self_device_memory_usage,
        on_device,
        is_range,
    )


def _device_name() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else None


def _counted(key: tuple[str, str, str], count: int) -> dict[str, Any]:
    return {"node": key[0], "pass": key[1], "name": key[2], "count": count}


def _summary(times: list[float]) -> dict[str, float]:
    """Return the number of kernels, and their median and total duration in microseconds."""
    middle = median(times) if times else 0.0
    return {"count": len(times), "median": middle, "total": sum(times)}


def _timeline(found: Attribution, base: float, began: float) -> dict[str, Any]:
    """Return the longest events as columns, with times in microseconds since the first step."""
    spans = found.spans
    dropped = max(len(spans) - _MOST_SPANS, 0)
    if dropped:
        spans = sorted(spans, key=lambda span: span.event.start - span.event.end)[:_MOST_SPANS]
    names: dict[str, int] = {}
    nodes: dict[str, int] = {}
    rows = [_row(span, base, names, nodes) for span in spans]
    columns = zip(*rows, strict=True) if rows else iter([[]] * 6)
    keys = ("name", "node", "pass", "lane", "start", "duration")
    return {
        "began": began,
        "names": [*names],
        "nodes": [*nodes],
        "dropped": dropped,
        **{key: [*column] for key, column in zip(keys, columns, strict=True)},
    }


def _row(span: Span, base: float, names: dict[str, int], nodes: dict[str, int]) -> tuple[Any, ...]:
    event, node = span.event, span.owner.chain[-1]
    is_call = event.name.startswith((CALL, STILL))
    name = node if is_call else event.name
    lane = -1 if event.on_device else event.thread
    return (
        names.setdefault(name, len(names)),
        -1 if node == PROGRAM else nodes.setdefault(node, len(nodes)),
        span.owner.pass_,
        lane,
        round(event.start - base, 3),
        round(event.end - event.start, 3),
    )

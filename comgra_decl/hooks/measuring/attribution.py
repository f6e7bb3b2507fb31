"""Attributes the events of torch's profiler to nodes and passes; plain Python, without torch.

At every moment, each thread works for one owner: the innermost module call or autograd node that is
running. A module call belongs to the forward pass. An autograd node belongs to the backward pass of
the module whose call created it, which torch's sequence numbers tell: an autograd node has the
number of the operation that created it. Several operations may have this number, because it
increases only when a node is created; the last one to begin is the one that created it. A node that
accumulates a gradient has no number. The engine runs it right after the node that computed the
gradient, so it has the same owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from comgra_decl.records import PROGRAM

CALL = "comgra:call:"
"""Beginning of the name of a module call's range; the number of the module follows."""

STILL = "comgra:still:"
"""The same, for a call without gradients."""

BACKWARD = "comgra:backward"
"""Name of the range of a `backward` call."""

OWN = "comgra:own"
"""Name of the range of work that tracing does itself."""

STEP, END, OPTIMIZER = "comgra:step", "comgra:end", "comgra:optimizer"
"""Names of the marks at the beginning and end of a step, and at the beginning of an optimizer step.
"""

PHASES = ("data", "forward", "backward", "optimizer", "other")
"""The parts of a step, as `Attribution.steps` returns them."""

_ENGINE = "autograd::engine::evaluate_function"
_OF_OPTIMIZER = "Optimizer.step#"
_CONTAINERS = (_ENGINE, "torch::autograd::", "comgra:", "Optimizer.")
_MEMORY = "[memory]"
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_READS = ("aten::_local_scalar_dense", "aten::nonzero")
_COPIES = ("Memcpy HtoD", "Memcpy DtoH")


@dataclass(slots=True)
class Event:
    """An event of the profiler; times in microseconds since an arbitrary moment.

    Attributes:
        name: its name.
        start: when it began.
        end: when it ended.
        thread: number of the thread.
        sequence: autograd's sequence number; -1 if it has none.
        forward_thread: for an autograd node, the thread of the operation that created it; else 0.
        kernels: for an operation, the names and durations of the kernels that it launched.
        bytes: memory that it allocated minus memory that it freed, without operations within it.
        on_device: whether it is a kernel, copy or range on a device rather than an event on the
            host.
        is_range: whether it is a range of the program (`record_function`).
    """

    name: str
    start: float
    end: float
    thread: int = 0
    sequence: int = -1
    forward_thread: int = 0
    kernels: tuple[tuple[str, float], ...] = ()
    bytes: int = 0
    on_device: bool = False
    is_range: bool = False


class Owner(NamedTuple):
    """What a thread works for: the nodes whose calls are running, outermost first, and the pass."""

    chain: tuple[str, ...]
    pass_: str


_TRACING = Owner((PROGRAM,), "tracing")
_ENGINE_RUNS = Owner((PROGRAM,), "backward")


@dataclass(slots=True)
class Usage:
    """What one node used in one pass, summed over all profiled steps; times in microseconds.

    "self" excludes modules called within the node, and the other totals include them.
    """

    calls: int = 0
    host: float = 0.0
    host_self: float = 0.0
    device: float = 0.0
    device_self: float = 0.0
    kernels: int = 0
    operations: int = 0
    bytes: int = 0


class Span(NamedTuple):
    """An event with a known owner, for the time line."""

    event: Event
    owner: Owner


@dataclass
class Attribution:
    """What the profiled steps used.

    Attributes:
        usage: by node and pass.
        steps: for each step, the microseconds of each phase, "total", and "busy", the time in which
            a device worked.
        spans: all events except marks, with their owners.
        waits: number of calls that make the host wait for a device, by node, pass and name. Reading
            a number of a tensor on the CPU is none.
        copies: number of copies between host and device, by node, pass and name.
        kernel_times: the durations of all kernels.
    """

    usage: dict[tuple[str, str], Usage] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    waits: dict[tuple[str, str, str], int] = field(default_factory=dict)
    copies: dict[tuple[str, str, str], int] = field(default_factory=dict)
    kernel_times: list[float] = field(default_factory=list)

    def of(self, node: str, pass_: str) -> Usage:
        """Return the usage of a node in a pass."""
        return self.usage.setdefault((node, pass_), Usage())


def attribute(events: Iterable[Event], names: Sequence[str]) -> Attribution:
    """Attribute events to nodes and passes.

    Args:
        events: the profiler's events, in any order.
        names: the node of each module, by its number.
    """
    found = Attribution()
    ordered = sorted(events, key=lambda event: (event.start, -event.end))
    windows = [*_windows(ordered)]
    if not windows:
        return found
    host = [event for event in ordered if not event.on_device]
    devices = [event for event in ordered if event.on_device and _is_work(event)]
    main = next(event.thread for event in host if event.name == STEP)
    threads = dict.fromkeys(
        event.thread
        for event in host
        if event.name == STEP or event.name.startswith((CALL, STILL, _ENGINE))
    )
    created: dict[tuple[int, int], tuple[float, Owner]] = {}
    for thread in sorted(threads, key=lambda number: number != main):  # forward before backward
        own = [event for event in host if event.thread == thread]
        elsewhere = any(e.name.startswith(_ENGINE) and e.thread != thread for e in host)
        timeline = _Timeline(found, names, created, waits=elsewhere)
        for start, end in windows:
            phases: dict[str, float] = {}
            inside = [event for event in own if start <= event.start < end]
            gaps = [*_gaps(inside, start, end)] if thread == main else []
            timeline.run(_sorted([*gaps, *inside]), end, phases)
            if thread == main:
                found.steps.append(_phases(phases, end - start))
    for step, (start, end) in zip(found.steps, windows, strict=True):
        step["busy"] = _covered(devices, start, end)
    found.kernel_times += [event.end - event.start for event in devices if not _is_copy(event.name)]
    found.spans += [Span(event, Owner((PROGRAM,), "device")) for event in devices]
    return found


# -- steps -------------------------------------------------------------------------------------


def _windows(events: Iterable[Event]) -> Iterator[tuple[float, float]]:
    """Yield the beginning and end of each complete step."""
    began: float | None = None
    for event in events:
        if event.name == STEP:
            began = event.end
        elif event.name == END and began is not None:
            yield began, event.start
            began = None


class _Gap(Event):
    """The time of a step outside of calls, `backward` and optimizer steps; `name` is the phase."""


def _gaps(events: Sequence[Event], start: float, end: float) -> Iterator[Event]:
    """Yield the ranges of a step that are outside of calls and `backward`, and optimizer steps.

    The time before a model call is spent on data, unless the call follows another one within the
    same forward pass.
    """
    at, before = start, "data"
    for event in _outermost(events, end):
        kind = _kind(event)
        if event.start > at:
            yield _Gap(_gap_phase(before, kind), at, event.start)
        if kind == "optimizer":
            yield _Gap("optimizer", event.start, event.end)
        at, before = max(at, event.end), kind
    if end > at:
        yield _Gap("other" if before != "data" else "data", at, end)


def _gap_phase(before: str, after: str) -> str:
    if before == "call":
        return "forward" if after in ("call", "backward") else "other"
    if after == "call":
        return "other" if before == "optimizer" else "data"
    return "other"


def _kind(event: Event) -> str:
    if event.name == BACKWARD:
        return "backward"
    return "call" if event.name.startswith((CALL, STILL)) else "optimizer"


def _outermost(events: Sequence[Event], end: float) -> Iterator[Event]:
    """Yield the calls, `backward` calls and optimizer steps that are not within one another."""
    ends = [event for event in events if event.name.startswith(_OF_OPTIMIZER)]
    until = 0.0
    for event in events:
        if event.start < until:
            continue
        if event.name == OPTIMIZER:
            whole = (e.end for e in ends if e.start <= event.start and e.end >= event.end)
            until = min(max(whole, default=end), end)
            yield Event(event.name, event.start, until)
        elif event.name == BACKWARD or event.name.startswith((CALL, STILL)):
            until = event.end
            yield event


def _phases(times: dict[str, float], total: float) -> dict[str, float]:
    found = {phase: times.get(phase, 0.0) for phase in PHASES[:-1]}
    found["other"] = max(total - sum(found.values()), 0.0)
    return {**found, "total": total}


def _sorted(events: Sequence[Event]) -> list[Event]:
    return sorted(events, key=lambda e: (e.start, -e.end, not isinstance(e, _Gap)))


# -- owners ------------------------------------------------------------------------------------


class _Timeline:
    """Walks through the events of one thread in order, with a stack of those that are running.

    Args:
        found: receives the usage.
        names: the node of each module, by its number.
        created: when the creator of each autograd node began, and its owner.
        waits: whether autograd runs in another thread, so that `backward` only waits in this one.
    """

    def __init__(
        self,
        found: Attribution,
        names: Sequence[str],
        created: dict[tuple[int, int], tuple[float, Owner]],
        *,
        waits: bool,
    ) -> None:
        self._waits = waits
        self._found = found
        self._names = names
        self._created = created
        self._stack: list[tuple[float, Owner]] = []
        self._at = 0.0
        self._outer = 0.0  # until when the outermost operation runs
        self._last = _ENGINE_RUNS  # of the last autograd node

    def run(self, events: Sequence[Event], end: float, phases: dict[str, float]) -> None:
        """Attribute the events of one step; add the time of each pass to `phases`."""
        for event in events:
            self._advance(event.start, phases)
            owner = self._begins(event)
            if owner is not None:
                self._stack.append((min(event.end, end), owner))
                self._allocates(owner, event.bytes)
            else:
                self._operation(event)
        self._advance(end, phases)
        self._stack.clear()

    def _advance(self, until: float, phases: dict[str, float]) -> None:
        """Attribute the time up to a moment to the owners that are running."""
        while self._stack:
            ends, owner = self._stack[-1]
            here = min(ends, until)
            if here > self._at:
                self._spend(owner, here - self._at)
                phases[owner.pass_] = phases.get(owner.pass_, 0.0) + here - self._at
                self._at = here
            if ends > until:
                break
            self._stack.pop()
        self._at = max(self._at, until)

    def _spend(self, owner: Owner, time: float) -> None:
        if self._waits and owner == _ENGINE_RUNS:
            return
        for node in {*owner.chain}:
            entry = self._found.of(node, owner.pass_)
            entry.host += time
        entry = self._found.of(owner.chain[-1], owner.pass_)
        entry.host_self += time

    def _begins(self, event: Event) -> Owner | None:
        """Return the owner that begins with an event; None if the event changes nothing."""
        name, now = event.name, self._now
        if isinstance(event, _Gap):
            return Owner((PROGRAM,), name)
        if name == BACKWARD:
            return _ENGINE_RUNS
        if name == OWN:
            return _TRACING
        if name.startswith((CALL, STILL)):
            node = self._names[int(name.rpartition(":")[2])]
            within = now.chain if now.chain != (PROGRAM,) else ()
            pass_ = "no_grad" if name.startswith(STILL) else "forward"
            owner = Owner((*within, node), "backward" if now.pass_ == "backward" else pass_)
            entry = self._found.of(node, owner.pass_)
            entry.calls += 1
            self._found.spans.append(Span(event, owner))
            return owner
        if name.startswith(_ENGINE):
            known = self._created.get((event.forward_thread, event.sequence))
            if known is not None and event.sequence >= 0:
                self._last = Owner(known[1].chain, "backward")
            elif event.sequence >= 0:
                self._last = _ENGINE_RUNS
            return self._last
        return None

    @property
    def _now(self) -> Owner:
        return self._stack[-1][1] if self._stack else Owner((PROGRAM,), "other")

    def _operation(self, event: Event) -> None:
        owner, found, name = self._now, self._found, event.name
        if owner == _TRACING:
            return
        if event.sequence >= 0 and not event.forward_thread:
            key = event.thread, event.sequence
            if key not in self._created or self._created[key][0] <= event.start:
                self._created[key] = event.start, owner
        self._allocates(owner, event.bytes)
        if event.kernels:
            self._launches(owner, event.kernels)
        if name in _WAITS or (name in _READS and event.kernels):
            _count(found.waits, owner, name)
        if event.is_range or name.startswith(_CONTAINERS) or name == _MEMORY or "::" not in name:
            return
        if event.start >= self._outer:
            self._outer = event.end
            for node in {*owner.chain}:
                entry = found.of(node, owner.pass_)
                entry.operations += 1
        found.spans.append(Span(event, owner))

    def _launches(self, owner: Owner, kernels: Sequence[tuple[str, float]]) -> None:
        device = sum(time for _, time in kernels)
        for node in {*owner.chain}:
            usage = self._found.of(node, owner.pass_)
            usage.kernels += len(kernels)
            usage.device += device
        entry = self._found.of(owner.chain[-1], owner.pass_)
        entry.device_self += device
        for kernel, _ in kernels:
            if _is_copy(kernel):
                _count(self._found.copies, owner, kernel)

    def _allocates(self, owner: Owner, size: int) -> None:
        for node in {*owner.chain} if size else ():
            entry = self._found.of(node, owner.pass_)
            entry.bytes += size


def _count(where: dict[tuple[str, str, str], int], owner: Owner, name: str) -> None:
    key = owner.chain[-1], owner.pass_, name
    where[key] = where.get(key, 0) + 1


# -- devices -----------------------------------------------------------------------------------


def _is_copy(name: str) -> bool:
    return name.startswith(_COPIES)


def _is_work(event: Event) -> bool:
    """Return whether a device event is a kernel or copy rather than a range."""
    return not event.is_range and not event.name.startswith(
        ("comgra:", "Optimizer.", "ProfilerStep")
    )


def _covered(events: Iterable[Event], start: float, end: float) -> float:
    """Return how much of the time from `start` to `end` is covered by any of the events."""
    total, at = 0.0, start
    for event in events:  # in order of their beginning
        begins, ends = max(event.start, at), min(event.end, end)
        if ends > begins:
            total += ends - begins
            at = ends
    return total

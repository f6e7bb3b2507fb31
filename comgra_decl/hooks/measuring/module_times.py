"""Times the calls of modules in a few steps that are not recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from comgra_decl.hooks.call_context import is_backward
from comgra_decl.hooks.measuring.calls import Call, ModuleCalls
from comgra_decl.hooks.measuring.measured import Surroundings
from comgra_decl.hooks.other_threads import this_thread
from comgra_decl.records import MODULE_TIMES

_MOST_MODULES = 20_000
"""A program with more modules, such as one that makes new ones in every step, is not timed on."""


@dataclass(eq=False)
class _Open:
    """A call in progress: its module, when it began, and the time of the calls within it."""

    number: int
    began: float = 0.0
    inside: float = 0.0


@dataclass
class _Spent:
    calls: int = 0
    whole: float = 0.0
    own: float = 0.0


class ModuleTimes:
    """The time of each module's calls with gradients in the training thread, by the host's clock.

    Passes on the document `MODULE_TIMES` after 1, 2, 4, 8, ... timed steps and at the end.

    Args:
        around: the program and the run.
        on_fault: called with an error in tracing itself.
        clock: returns seconds of a monotonic clock.

    Attributes:
        running: whether the step in progress is timed.
    """

    def __init__(
        self,
        around: Surroundings,
        *,
        on_fault: Callable[[BaseException], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._around = around
        self._clock = clock
        self._calls = ModuleCalls(self._enter, self._leave, on_fault=on_fault)
        self._thread = 0
        self._stack: list[_Open] = []
        self._step: dict[int, _Spent] = {}
        self._total: dict[int, _Spent] = {}
        self._steps = self._told = 0
        self.running = False

    def begin(self) -> None:
        """Time the calls in the step that is about to begin."""
        if len(self._total) > _MOST_MODULES:
            return
        self._thread, self.running = this_thread.number, True
        self._stack, self._step = [], {}
        self._calls.install()

    def end(self, *, keep: bool) -> None:
        """Remove everything from the program at the end of a timed step.

        Args:
            keep: whether its times count.
        """
        if not self.running:
            return
        self.running = False
        self._calls.remove()
        if not (keep and self._step):
            return
        self._steps += 1
        for number, spent in self._step.items():
            total = self._total.setdefault(number, _Spent())
            total.calls += spent.calls
            total.whole += spent.whole
            total.own += spent.own
        if self._steps >= 2 * self._told:
            self.finish()

    def finish(self) -> None:
        """Pass on the times of all timed steps, if there are new ones."""
        if self._steps > self._told:
            self._told = self._steps
            self._around.tell(MODULE_TIMES, {"steps": self._steps, "rows": [*self._rows()]})

    def _rows(self) -> Iterator[dict[str, Any]]:
        names = self._calls.names(self._around.place())
        by_node: dict[str, _Spent] = {}
        for number, spent in self._total.items():
            known = by_node.setdefault(names[number], _Spent())
            known.calls += spent.calls
            known.whole += spent.whole
            known.own += spent.own
        for node, spent in by_node.items():
            yield {"node": node, "calls": spent.calls, "time": spent.whole, "self": spent.own}

    # -- calls ---------------------------------------------------------------------------------

    def _enter(self, call: Call) -> _Open | None:
        other = this_thread.number != self._thread
        if other or not call.gradients or is_backward():  # a checkpoint repeats the forward pass
            return None
        opened = _Open(call.number)
        self._stack.append(opened)
        opened.began = self._clock()
        return opened

    def _leave(self, opened: _Open | None) -> None:
        if opened is None or opened not in self._stack:
            return
        spent = self._clock() - opened.began
        while self._stack.pop() is not opened:
            pass
        if self._stack:
            self._stack[-1].inside += spent
        known = self._step.setdefault(opened.number, _Spent())
        known.calls += 1
        known.own += spent - opened.inside
        if all(outer.number != opened.number for outer in self._stack):
            known.whole += spent

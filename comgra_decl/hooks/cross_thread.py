"""A step whose parts run in several threads, one after the other.

A program may call its model in one thread, `backward` in another, and its optimizer in a third. The
thread that calls the model has the step; another one acts for it once it calls `backward` on what
was computed from the outputs of that model.
"""

from __future__ import annotations

import threading
from collections import deque
from threading import get_ident
from typing import Any

from comgra_decl.hooks.pytree import gradient_function, tensors_in

_MOST_NODES = 2000
"""Functions of the graph of a loss among which those of the outputs are looked for."""

_MARK = "comgra_decl"
"""Under which word a function of autograd knows that it has made an output of a model."""


class _Role(threading.local):
    """What a thread acts for; gone with the thread, whose identifier another one may be given."""

    thread = 0
    session: object = None


_role = _Role()
_session: object = object()


def here() -> int:
    """Returns the thread whose step the current one works on: its own, as a rule."""
    return _role.thread if _role.session is _session else get_ident()


def act_for(thread: int) -> None:
    """Works, from now on, on the step of another thread; or on its own."""
    _role.thread, _role.session = thread, _session


def forget_all() -> None:
    """Every thread works on its own step from now on; from any thread."""
    global _session
    _session = object()


class Marks:
    """Knows a loss that was computed from what the models of a step have returned.

    The functions of autograd themselves are marked: nothing is kept alive, and nothing is left once
    the program has let go of its graph.
    """

    def __init__(self) -> None:
        self._mark = object()

    def renew(self) -> None:
        """A step begins: what was returned before is none of it."""
        self._mark = object()

    def put_on(self, output: Any) -> None:
        """A model has returned this."""
        for _, tensor in tensors_in(output):
            function = gradient_function(tensor)
            if function is not None:
                function.metadata[_MARK] = self._mark

    def are_behind(self, losses: Any) -> bool:
        """Whether a loss was computed from marked outputs, as far as can be seen from it."""
        found = (gradient_function(tensor) for _, tensor in tensors_in(losses))
        waiting: deque[Any] = deque(function for function in found if function is not None)
        seen = set(waiting)
        for _ in range(_MOST_NODES):
            if not waiting:
                break
            function = waiting.popleft()
            if function.metadata.get(_MARK) is self._mark:
                return True
            following = {f for f, _ in function.next_functions if f is not None} - seen
            seen |= following
            waiting += following
        return False

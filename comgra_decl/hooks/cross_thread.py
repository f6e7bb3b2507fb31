"""Steps whose parts run in different threads, one after the other.

A program may call its model in one thread, `backward` in another and its optimizer in a third. The
step belongs to the thread that calls the model. Another thread is assigned to that step once it
calls `backward` on a tensor computed from the outputs of that model.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from comgra_decl.hooks.other_threads import this_thread
from comgra_decl.hooks.pytree import gradient_function, tensors_in

_MOST_NODES = 2000
"""The maximum number of autograd nodes to search behind a loss for the nodes of model outputs."""

_MARK = "comgra_decl"
"""The metadata key that marks an autograd node as having computed a model output."""


class _Role(threading.local):
    """The thread whose step the current thread works on.

    Thread-local, because the identifier of a finished thread may be reused.
    """

    thread = 0
    session: object = None


_role = _Role()
_session: object = object()


def here() -> int:
    """Return the identifier of the thread whose step this thread works on, usually its own."""
    return _role.thread if _role.session is _session else this_thread.number


def act_for(thread: int) -> None:
    """Make the current thread work on the step of `thread`, which may be the current thread."""
    _role.thread, _role.session = thread, _session


def forget_all() -> None:
    """Make every thread work on its own step again; may be called from any thread."""
    global _session
    _session = object()


class Marks:
    """Recognises losses computed from the model outputs in a step.

    The marks are stored on the autograd nodes themselves, so they keep nothing alive and disappear
    with the program's graph.
    """

    def __init__(self) -> None:
        self._mark = object()

    def renew(self) -> None:
        """Begin a step, which invalidates the marks of earlier outputs."""
        self._mark = object()

    def put_on(self, output: Any) -> None:
        """Mark the tensors in a model's output."""
        for _, tensor in tensors_in(output):
            function = gradient_function(tensor)
            if function is not None:
                function.metadata[_MARK] = self._mark

    def are_behind(self, losses: Any) -> bool:
        """Return whether a loss was computed from marked outputs.

        Searches at most `_MOST_NODES` autograd nodes.
        """
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

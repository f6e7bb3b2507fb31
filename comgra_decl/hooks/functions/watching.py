"""Observe calls to given functions, with a torch function mode and with patches.

The mode receives calls to torch's own functions, no matter how the program obtained them. It
receives neither calls made inside a function of `torch.nn.functional` nor calls to the program's
functions. Functions called in those ways are replaced by a wrapper in the modules that hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from comgra_decl.hooks import modes
from comgra_decl.hooks.functions.lookup import Found
from comgra_decl.hooks.other_threads import this_thread
from comgra_decl.hooks.patches import Patch
from comgra_decl.torch_private import without_functions


class Listener(Protocol):
    """Receives calls to watched functions."""

    def begins(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle the start of a call; return a token for `ended`, or None to ignore the call."""

    def ended(self, token: Any, result: Any) -> None:
        """Handle the result of a call for which `begins` returned a token."""


class Watching:
    """Passes every call to the watched functions to a listener, from `start` until `stop`.

    Each call is passed on only once, even if it goes through several names of the same function.

    Args:
        listener: receives the calls, with the names under which the functions were found.
        on_fault: called with exceptions raised by the listener, which never reach the program.
    """

    def __init__(self, listener: Listener, *, on_fault: Callable[[BaseException], None]) -> None:
        self._listener = listener
        self._on_fault = on_fault
        self._places: list[Patch] = []
        self._running: list[str] = []
        self._thread = 0
        self._mode = _Mode(self.call, on_fault=on_fault)
        self.on = False

    def add(self, found: Iterable[Found]) -> None:
        """Add functions to watch, from the next `start` on."""
        for each in found:
            self._mode.names.update(dict.fromkeys(each.torch_functions, each.name))
            self._places += [self._place(*place, each.name) for place in each.places]

    def _place(self, owner: Any, attribute: str, name: str) -> Patch:
        def watched(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self.call(name, original, args, kwargs)

        return Patch(owner, attribute, watched)

    def start(self, below: modes.OwnMode | None) -> None:
        """Start watching, above the mode `below`. Idempotent."""
        self.on, self._thread = True, this_thread.number
        self._running.clear()
        for place in self._places:
            place.apply()
        self.resume(below)

    def stop(self) -> None:
        """Stop watching. Idempotent."""
        if self.on:
            self.pause()
            for place in self._places:
                place.restore()
            self.on = False  # last, so that after a fault the end of tracing removes the rest

    def pause(self) -> bool:
        """Remove the mode but leave the wrappers; return whether the mode was active."""
        placed = modes.is_placed(self._mode)
        if placed:
            modes.remove(self._mode)
        return placed

    def resume(self, below: modes.OwnMode | None) -> None:
        """Insert the mode below the program's own modes and above the mode that follows the graph.

        Of two modes, the upper one receives a result last. The result is therefore already part of
        the graph when it is recorded.
        """
        if not self._mode.names or modes.is_placed(self._mode):
            return
        modes.insert_at_bottom(self._mode)
        if below is not None and modes.is_active(below):
            modes.remove(below)
            modes.insert_at_bottom(below)

    def call(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the function and report the call, unless the call is part of a reported one."""
        known = not self.on or name in self._running or this_thread.number != self._thread
        token = None
        if not known:
            try:
                with without_functions():
                    token = self._listener.begins(name, args, kwargs)
            except Exception as error:
                self._on_fault(error)
        if token is None:
            return function(*args, **kwargs)
        self._running.append(name)
        try:
            result = function(*args, **kwargs)
        finally:
            self._running.remove(name)
        try:
            with without_functions():
                self._listener.ended(token, result)
        except Exception as error:
            self._on_fault(error)
        return result


class _Mode(modes.OwnMode):
    """Passes calls to known functions to `call`."""

    def __init__(
        self, call: Callable[..., Any], *, on_fault: Callable[[BaseException], None]
    ) -> None:
        super().__init__(on_fault)
        self._call = call
        self.names: dict[Callable[..., Any], str] = {}

    def handle(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            name = self.names.get(func)
        except Exception:  # a function that cannot be hashed or compared
            name = None
        if name is None:
            return func(*args, **kwargs)
        return self._call(name, func, args, kwargs)

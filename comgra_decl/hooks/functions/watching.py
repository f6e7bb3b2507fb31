"""Sees calls of given functions: by a torch function mode, and where the functions are held.

The mode sees torch's own functions however the program came by them. It does not see what a
function of `torch.nn.functional` calls inside, nor functions of the program: those are replaced,
in the modules that hold them, by a wrapper around them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from comgra_decl.hooks import modes
from comgra_decl.hooks.functions.lookup import Found
from comgra_decl.hooks.patches import Patch
from comgra_decl.torch_private import without_functions


class Listener(Protocol):
    """Hears of calls."""

    def begins(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function is about to be called; returns what `ended` is to be given, or None."""

    def ended(self, token: Any, result: Any) -> None:
        """The call for which `begins` returned a token has returned."""


class Watching:
    """Tells a listener of every call of the functions found, while it is on.

    One call is told once, however many of its names it passes through.

    Args:
        listener: whom to tell; functions go by the name under which they were found.
        on_fault: called with what the listener raises; the program never sees it.
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
        """Watches further functions, from the next `start` on."""
        for each in found:
            self._mode.names.update(dict.fromkeys(each.torch_functions, each.name))
            self._places += [self._place(*place, each.name) for place in each.places]

    def _place(self, owner: Any, attribute: str, name: str) -> Patch:
        def watched(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self.call(name, original, args, kwargs)

        return Patch(owner, attribute, watched)

    def start(self, below: modes.OwnMode | None) -> None:
        """Begins to watch, above the mode `below`; calling it twice is harmless."""
        self.on, self._thread = True, threading.get_ident()
        self._running.clear()
        for place in self._places:
            place.apply()
        self.resume(below)

    def stop(self) -> None:
        """Ends watching; calling it twice is harmless."""
        if self.on:
            self.pause()
            for place in self._places:
                place.restore()
            self.on = False  # last: what a fault of ours has left is taken off when tracing ends

    def pause(self) -> bool:
        """Takes the mode away, but leaves the wrappers; returns whether it was there."""
        placed = modes.is_placed(self._mode)
        if placed:
            modes.remove(self._mode)
        return placed

    def resume(self, below: modes.OwnMode | None) -> None:
        """Puts the mode in its place: below the program's own modes, above ours that follows.

        Of two modes the upper one hears of a result last: what is recorded then is known to the
        graph that the lower one follows.
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
        """Calls the function and tells of it, unless that is being done already."""
        known = not self.on or name in self._running or threading.get_ident() != self._thread
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
    """Hands the calls of known functions to `call`."""

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
        except Exception:  # somebody's function that cannot be hashed or compared
            name = None
        if name is None:
            return func(*args, **kwargs)
        return self._call(name, func, args, kwargs)

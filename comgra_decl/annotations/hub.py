"""Where annotations meet whoever listens to them: module globals and nothing else.

The functions that a program calls test these globals; the tracer sets them. Neither side imports
the other, so a program that says `comgra.node` needs no torch and no session.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol


class Listener(Protocol):
    """Hears what the program says; never raises into it."""

    def node(self, value: Any, name: str, role: str | None, kind: str | None) -> None:
        """A tensor, or a structure of some, was given a name; heard only while recording."""

    def connect(self, source: Any, sink: Any) -> None:
        """`sink` depends on `source` in a way that cannot be seen; heard only while recording."""

    def tag(self, *names: str) -> None:
        """The step in progress has these labels."""

    def note(self, text: str) -> None:
        """The person behind the program wants this said beside the step in progress."""

    def kpi(self, name: str, value: Any) -> None:
        """A number of the step in progress: a float, or a tensor of one element."""

    def step(self) -> None:
        """A step ends here."""


listener: Listener | None = None
"""Whoever listens; None outside any session."""

recording: bool = False
"""Whether a step is being recorded right now."""

switches: list[Callable[[bool], None]] = []
"""Told whenever `recording` changes: a function that tests a global of its own module is faster."""

_fork_seen_to = False


def listen(to: Listener) -> None:
    """Makes `to` the listener; the one before it hears nothing more."""
    global listener, _fork_seen_to
    listener = to
    _record(False)
    if not _fork_seen_to and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget)  # a data loader's worker has no session
        _fork_seen_to = True


def unlisten(to: Listener) -> None:
    """Ends the listening of `to`; harmless if another listens by now."""
    if listener is to:
        _forget()


def set_recording(of: Listener, value: bool) -> None:
    """Says whether a step is being recorded; only the present listener is believed."""
    if listener is of:
        _record(value)


def _forget() -> None:
    global listener
    listener = None
    _record(False)


def _record(value: bool) -> None:
    global recording
    recording = value
    for switch in switches:
        switch(value)

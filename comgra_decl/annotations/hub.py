"""Module globals that connect the annotations to the session that receives them.

The annotation functions test these globals, and the tracer sets them. Neither side imports the
other, so a program can call `comgra.node` without torch and without a session.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol


class Listener(Protocol):
    """Receives the annotations of a program; its methods never raise into the program."""

    def node(self, value: Any, name: str, role: str | None, kind: str | None) -> None:
        """Name a tensor or a nested structure of tensors; called only while recording."""

    def connect(self, source: Any, sink: Any) -> None:
        """Declare that `sink` was computed from `source`; called only while recording."""

    def tag(self, *names: str) -> None:
        """Add labels to the step in progress."""

    def note(self, text: str) -> None:
        """Add a note to the step in progress."""

    def kpi(self, name: str, value: Any) -> None:
        """Log a float or a one-element tensor for the step in progress."""

    def show(self, name: str, kind: str, value: Any) -> None:
        """Keep an image, a figure or a text for the step in progress."""

    def step(self) -> None:
        """End the step in progress."""


listener: Listener | None = None
"""The active listener; None outside any session."""

recording: bool = False
"""Whether a step is being recorded."""

switches: list[Callable[[bool], None]] = []
"""Callbacks that run when `recording` changes. A module can use one to mirror the value in a global
of its own, which is faster to test.
"""

_fork_hook_registered = False


def listen(to: Listener) -> None:
    """Make `to` the active listener, replacing the previous one."""
    global listener, _fork_hook_registered
    listener = to
    _record(False)
    if not _fork_hook_registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget)  # a data loader's worker has no session
        _fork_hook_registered = True


def unlisten(to: Listener) -> None:
    """Remove `to` as the listener; do nothing if another listener has replaced it."""
    if listener is to:
        _forget()


def set_recording(of: Listener, value: bool) -> None:
    """Set whether a step is being recorded; ignored unless `of` is the active listener."""
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

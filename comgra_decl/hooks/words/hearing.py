"""What the program says about itself, on its way from the annotations to those who act on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.annotations import hub

if TYPE_CHECKING:
    from comgra_decl.hooks.manager import HookManager


class Hearing:
    """The listener of one session: passes each word on, and keeps our faults from the program."""

    def __init__(self, manager: HookManager) -> None:
        self._manager = manager

    def start(self) -> None:
        """Listens from now on."""
        hub.listen(self)

    def recording(self, value: bool) -> None:
        """Says whether `node` and `connect` are to be heard."""
        hub.set_recording(self, value)

    def stop(self) -> None:
        """Hears nothing more."""
        hub.unlisten(self)

    # -- what is heard -------------------------------------------------------------------------

    def node(self, value: Any, name: str, role: str | None, kind: str | None) -> None:
        """A tensor, or a structure of some, was given a name."""
        self._pass(self._manager._on_annotated_node, value, name, role, kind)

    def connect(self, source: Any, sink: Any) -> None:
        """An edge that cannot be seen."""
        self._pass(self._manager._on_connect, source, sink)

    def tag(self, *names: str) -> None:
        """Labels of the step in progress."""
        self._pass(self._manager._on_tag, *names)

    def note(self, text: str) -> None:
        """A text beside the step in progress."""
        self._pass(self._manager._on_note, text)

    def kpi(self, name: str, value: Any) -> None:
        """A number of the step in progress."""
        self._pass(self._manager._on_kpi, name, value)

    def step(self) -> None:
        """A step ends."""
        self._pass(self._manager._on_step)

    def _pass(self, to: Callable[..., None], *what: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            to(*what)
        except Exception as error:
            self._manager._fault(error)

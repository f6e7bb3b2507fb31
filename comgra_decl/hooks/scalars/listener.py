"""What the program says about itself, on its way from the annotations to those who act on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.annotations import hub

if TYPE_CHECKING:
    from comgra_decl.hooks.manager import HookManager


_is_compiling = torch.compiler.is_compiling


class Listener:
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
        try:
            if not _is_compiling():
                self._manager._on_annotated_node(value, name, role, kind)
        except Exception as error:
            self._manager._fault(error)

    def connect(self, source: Any, sink: Any) -> None:
        """An edge that cannot be seen."""
        try:
            if not _is_compiling():
                self._manager._on_connect(source, sink)
        except Exception as error:
            self._manager._fault(error)

    def tag(self, *names: str) -> None:
        """Labels of the step in progress."""
        try:
            if not _is_compiling():
                self._manager._on_tag(*names)
        except Exception as error:
            self._manager._fault(error)

    def note(self, text: str) -> None:
        """A text beside the step in progress."""
        try:
            if not _is_compiling():
                self._manager._on_note(text)
        except Exception as error:
            self._manager._fault(error)

    def kpi(self, name: str, value: Any) -> None:
        """A number of the step in progress."""
        try:
            if not _is_compiling():
                self._manager._on_kpi(name, value)
        except Exception as error:
            self._manager._fault(error)

    def step(self) -> None:
        """A step ends."""
        try:
            if not _is_compiling():
                self._manager._on_step()
        except Exception as error:
            self._manager._fault(error)

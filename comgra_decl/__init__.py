"""See inside a PyTorch network while it trains, by declaring what to record."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

# Imported eagerly, because they are small and have no dependencies, and because code under
# torch.compile may be the first to use them.
from comgra_decl.annotations import (
    connect,
    figure,
    image,
    kpi,
    node,
    note,
    step,
    tag,
    text,
)

if TYPE_CHECKING:
    from comgra_decl.doors.checked_spec import load_spec
    from comgra_decl.doors.look import Look, look
    from comgra_decl.doors.replay import replay
    from comgra_decl.doors.trace import trace
    from comgra_decl.errors import ComgraError, SpecError
    from comgra_decl.experiments.edit import Edited, edit
    from comgra_decl.experiments.harvest import Harvest, harvest, open_harvest
    from comgra_decl.query import Group, Run, Slot, list_runs, open_group, open_run
    from comgra_decl.record.session import Session
    from comgra_decl.rules import Finding
    from comgra_decl.spec import Spec

__version__ = "0.1.0"

__all__ = [
    "ComgraError",
    "Edited",
    "Finding",
    "Group",
    "Harvest",
    "Look",
    "Run",
    "Session",
    "Slot",
    "Spec",
    "SpecError",
    "connect",
    "edit",
    "figure",
    "harvest",
    "image",
    "kpi",
    "list_runs",
    "load_spec",
    "look",
    "node",
    "note",
    "open_group",
    "open_harvest",
    "open_run",
    "replay",
    "step",
    "tag",
    "text",
    "trace",
]

# Each part is imported on first use, so that importing the package is cheap.
_HOMES = {
    "ComgraError": "comgra_decl.errors",
    "Edited": "comgra_decl.experiments.edit",
    "Finding": "comgra_decl.rules",
    "Group": "comgra_decl.query",
    "Harvest": "comgra_decl.experiments.harvest",
    "Look": "comgra_decl.doors.look",
    "Run": "comgra_decl.query",
    "Session": "comgra_decl.record.session",
    "Slot": "comgra_decl.query",
    "Spec": "comgra_decl.spec",
    "SpecError": "comgra_decl.errors",
    "edit": "comgra_decl.experiments.edit",
    "harvest": "comgra_decl.experiments.harvest",
    "list_runs": "comgra_decl.query",
    "load_spec": "comgra_decl.doors.checked_spec",
    "look": "comgra_decl.doors.look",
    "open_group": "comgra_decl.query",
    "open_harvest": "comgra_decl.experiments.harvest",
    "open_run": "comgra_decl.query",
    "replay": "comgra_decl.doors.replay",
    "trace": "comgra_decl.doors.trace",
}


if not TYPE_CHECKING:  # type checkers would accept any attribute name

    def __getattr__(name: str) -> object:
        if name == "integrations":
            return import_module("comgra_decl.integrations")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, "integrations"])

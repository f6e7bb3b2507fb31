"""Healthy training runs in many styles: small programs that train and report what they reached.

They were written to differ from the training runs for which the rules were written, and then used
to find false alarms. `python -m benchmarks.bugs.healthy --only 'styles/*'` runs them.
"""

from __future__ import annotations

from importlib import import_module
from inspect import getmembers, isfunction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.bugs.styles.common import Training

_AREAS = (
    "generative",
    "further",
    "kinds",
    "reinforcement",
    "representations",
    "schedules",
    "transfer",
)


def trainings() -> dict[str, Training]:
    """Return the training runs by name, such as `schedules.one_cycle`."""
    found: dict[str, Training] = {}
    for area in _AREAS:
        module = import_module(f"{__name__}.{area}")
        for name, function in getmembers(module, isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                found[f"{area}.{name}"] = function
    return found

"""The programs of the zoo, by the library that their model is from: `<family>/<name>`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from types import ModuleType

from benchmarks.neutrality.program import Program

FAMILIES = {
    "torch": ("torch_nets", "torch"),
    "examples": ("examples", "hydra"),
    "transformers": ("hugging", "transformers"),
    "timm": ("timm_nets", "timm"),
    "torchvision": ("vision", "torchvision"),
}
"""Each family's module in this folder, and the package that it needs."""


def installed(family: str) -> bool:
    """Whether the package that a family needs is here."""
    return importlib.util.find_spec(FAMILIES[family][1]) is not None


def names(family: str) -> list[str]:
    """Returns the names of all programs of a family."""
    return [f"{family}/{name}" for name in _module(family).NAMES]


def builder(name: str) -> Callable[[], Program]:
    """Returns what makes the program `name`."""
    family, _, own = name.partition("/")
    return partial(_module(family).build, own)


def preload() -> None:
    """Imports what several programs need."""
    for family in FAMILIES:
        if installed(family):
            _module(family)


def _module(family: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{FAMILIES[family][0]}")

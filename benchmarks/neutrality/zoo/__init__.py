"""The programs of the zoo, named `<family>/<name>`; the family is the model's library."""

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
"""The module of each family in this folder, and the package that it needs."""


def installed(family: str) -> bool:
    """Whether the package that a family needs is installed."""
    return importlib.util.find_spec(FAMILIES[family][1]) is not None


def names(family: str) -> list[str]:
    """Return the names of all programs of a family."""
    return [f"{family}/{name}" for name in _module(family).NAMES]


def builder(name: str) -> Callable[[], Program]:
    """Return the function that builds the program `name`."""
    family, _, own = name.partition("/")
    return partial(_module(family).build, own)


def preload() -> None:
    """Import the packages that several programs need."""
    for family in FAMILIES:
        if installed(family):
            _module(family)


def _module(family: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{FAMILIES[family][0]}")

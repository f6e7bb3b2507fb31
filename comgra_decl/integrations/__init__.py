"""Callbacks and loggers for training frameworks, to enable recording in code.

They record the same data as the other entry points. Programs that use a framework can also be
recorded unmodified, through `+comgra=debug`, `python -m comgra_decl` or `COMGRA=debug`.
`comgra.integrations.lightning`, `transformers` and `accelerate` are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

_MODULES = ("accelerate", "lightning", "transformers")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])

"""Optional packages for some exports."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from comgra_decl.errors import MissingPackageError


def needed(module: str, extra: str) -> Any:
    """Import a module that belongs to an extra.

    Raises:
        MissingPackageError: the module is missing; the message says how to install it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingPackageError(
            f"the {package!r} package is required but not installed: "
            f"pip install 'comgra-decl[{extra}]'"
        ) from error

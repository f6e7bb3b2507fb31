"""Features that an installed viewer adds to runs, tensors and groups."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from comgra_decl.errors import MissingPackageError


def from_viewer(name: str) -> Any:
    """Return the function that the viewer registers under a name of `comgra_decl.viewer`.

    Raises:
        MissingPackageError: no viewer is installed.
    """
    for entry in entry_points(group="comgra_decl.viewer", name=name):
        return entry.load()
    raise MissingPackageError(
        "no viewer is installed: install the package, not only its files (pip install .)"
    )

"""Make the presets available to every Hydra application: `+comgra=debug`.

Hydra imports this file in every application on the machine, from the namespace package
`hydra_plugins`, which the installation extends. The file must therefore not import large modules.
"""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class ComgraSearchPath(SearchPathPlugin):
    """Adds the shipped presets after the application's own configs."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder of presets to `search_path`."""
        search_path.append(provider="comgra_decl", path="pkg://comgra_decl.configs")

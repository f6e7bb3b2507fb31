"""The application's own Hydra config, in the form in which it is saved with a run."""

from __future__ import annotations

from enum import Enum
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from comgra_decl.launch.masking import masked

_NOT_THE_APPS = ("hydra", "comgra")
"""Top-level keys that are Hydra's or ours."""


def saved_config(config: DictConfig) -> dict[str, Any]:
    """Returns the application's part of a composed config, as JSON can hold it.

    Interpolations are replaced by their values, except those that read the environment, which may
    hold secrets, and those that have no value: they stay as they are written. So does all of a
    config that contains itself.
    """
    written = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    assert isinstance(written, dict)
    written = {str(key): value for key, value in written.items() if key not in _NOT_THE_APPS}
    try:
        plain = _plain(OmegaConf.create(_quoted(written)))
    except RecursionError:
        plain = written
    content = masked(plain)
    assert isinstance(content, dict)
    return content


def _quoted(written: Any) -> Any:
    """Returns the config with interpolations of the environment turned into ordinary text."""
    if isinstance(written, dict):
        return {key: _quoted(value) for key, value in written.items()}
    if isinstance(written, list):
        return [_quoted(value) for value in written]
    if isinstance(written, str) and "oc.env:" in written:
        return written.replace("${", r"\${")
    return written


def _plain(node: Any) -> Any:
    if isinstance(node, DictConfig):
        return {str(key): _entry(node, key) for key in node}
    if isinstance(node, ListConfig):
        return [_entry(node, index) for index in range(len(node))]
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    return node.name if isinstance(node, Enum) else str(node)


def _entry(node: DictConfig | ListConfig, key: Any) -> Any:
    try:
        return _plain(node[key])
    except OmegaConfBaseException:
        written: Any = OmegaConf.to_container(node, resolve=False)
        return written[key]

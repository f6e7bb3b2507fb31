"""Reads the text of a YAML file, and refuses one that is small but means a mountain.

A spec may lie in a run's folder, which may come from anywhere, and OmegaConf copies what an alias
stands for: nine lines that name each other ten times would fill the memory.
"""

from __future__ import annotations

from pathlib import Path

import yaml

_BYTES = 1 << 20
_VALUES = 100_000
"""Most values that a spec may hold with all aliases written out; a long one has hundreds."""


def read_yaml_text(path: Path) -> str:
    """Returns the text of a YAML file.

    Raises:
        ValueError: it is longer than a megabyte, or its aliases stand for too much.
        yaml.YAMLError: it is no YAML.
        OSError: it cannot be read.
        UnicodeError: it is not text.
    """
    with path.open("rb") as file:
        content = file.read(_BYTES + 1)
    if len(content) > _BYTES:
        raise ValueError(f"it is longer than {_BYTES} bytes")
    text = content.decode()
    if "&" in text and _written_out(yaml.compose(text, yaml.SafeLoader)) > _VALUES:
        raise ValueError(f"with its aliases written out it has more than {_VALUES} values")
    return text


def _written_out(root: yaml.Node | None) -> int:
    """Returns how many values there are with every alias written out.

    Raises:
        ValueError: an alias stands for something that holds the alias.
    """
    known: dict[int, int] = {}
    open_: set[int] = set()

    def count(node: yaml.Node) -> int:
        if id(node) in open_:
            raise ValueError("an alias stands for something that holds the alias itself")
        if id(node) not in known:
            open_.add(id(node))
            known[id(node)] = 1 + sum(map(count, _inner(node)))
            open_.discard(id(node))
        return known[id(node)]

    return 0 if root is None else count(root)


def _inner(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []

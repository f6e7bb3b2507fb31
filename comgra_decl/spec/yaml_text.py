"""Read the text of a YAML file, rejecting small files that expand to huge content.

A spec may come from the folder of an untrusted run, and OmegaConf copies the value to which an
alias refers. A file of nine lines, each referring to the previous one ten times, would exhaust
memory.
"""

from __future__ import annotations

from pathlib import Path

import yaml

_BYTES = 1 << 20
_VALUES = 100_000
"""Maximum number of values in a spec after all aliases are expanded. Even a long spec has only
hundreds."""


def read_yaml_text(path: Path) -> str:
    """Return the text of a YAML file.

    Raises:
        ValueError: it is longer than a megabyte, or expands to too many values.
        yaml.YAMLError: it is not valid YAML.
        OSError: it cannot be read.
        UnicodeError: it is not text.
    """
    with path.open("rb") as file:
        content = file.read(_BYTES + 1)
    if len(content) > _BYTES:
        raise ValueError(f"it must be at most {_BYTES} bytes long")
    text = content.decode()
    if "&" in text and _written_out(yaml.compose(text, yaml.SafeLoader)) > _VALUES:
        raise ValueError(f"with its aliases expanded it has more than {_VALUES} values")
    return text


def _written_out(root: yaml.Node | None) -> int:
    """Return the number of values with every alias expanded.

    Raises:
        ValueError: an alias refers to a value that contains the alias.
    """
    known: dict[int, int] = {}
    open_: set[int] = set()

    def count(node: yaml.Node) -> int:
        if id(node) in open_:
            raise ValueError("an alias refers to a value that contains the alias itself")
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

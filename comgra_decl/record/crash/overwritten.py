"""Find which operation needed a tensor that was overwritten before its backward pass.

torch reports only the shape and version of such a tensor. The graph of the loss still holds it, and
the parameters next to the operation that saved it reveal which module called that operation.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from comgra_decl.hooks.pytree import gradient_function
from comgra_decl.torch_private import RAW_SAVED

_PATTERN = re.compile(
    r"modified by an inplace operation: \[\S+ \[(?P<shape>[\d, ]*)\]\].* is at version "
    r"(?P<version>\d+); expected version \d+"
)
_MOST_NODES = 50_000
_NEAR = 200  # nodes to search for the nearest parameters
_MOST_FOUND = 8


class Need:
    """An operation whose backward pass needs the overwritten tensor.

    Attributes:
        operation: the name of its autograd function, such as "AddmmBackward0".
        value: the saved value that was overwritten, such as "mat1".
        leaves: the parameters that the operation uses itself.
        before: the parameters from which the operation's other inputs were computed, nearest first.
        traceback: where the program called it; "" unless anomaly detection was enabled.
    """

    def __init__(self, operation: Any, value: str) -> None:
        self.operation = str(operation.name())
        self.value = value
        self.leaves = [*parameters_near(operation, depth=2)]
        self.before = [] if self.leaves else [*parameters_near(operation, depth=_NEAR)][:2]
        self.traceback = "".join(operation.metadata.get("traceback_", ()))


def needs(message: str, outputs: Any) -> list[Need]:
    """Return the operations that need the tensor named in an error from the backward pass.

    Runs none of the program's code: saved tensors are compared by shape and version without
    unpacking them. Empty for other errors, and for torch versions that do not show saved tensors.

    Args:
        message: the message of the error.
        outputs: the tensors on which `backward` was called.
    """
    found = _PATTERN.search(message)
    if found is None:
        return []
    shape = [int(size) for size in re.findall(r"\d+", found["shape"])]
    version = int(found["version"])
    result: list[Need] = []
    for node in graph_nodes([gradient_function(t) for t in outputs if isinstance(t, Tensor)]):
        for name in dir(node):
            if name.startswith(RAW_SAVED) and _is_it(getattr(node, name), shape, version):
                result.append(Need(node, name.removeprefix(RAW_SAVED)))
                if len(result) == _MOST_FOUND:
                    return result
    return result


def _is_it(saved: Any, shape: list[int], version: int) -> bool:
    kept = getattr(saved, "data", None)
    return isinstance(kept, Tensor) and [*kept.shape] == shape and kept._version == version


def graph_nodes(roots: list[Any], most: int = _MOST_NODES) -> Iterator[Any]:
    """Yield at most about `most` nodes of a graph, nearest to the roots first."""
    waiting: deque[Any] = deque(node for node in roots if node is not None)
    seen: set[Any] = set()
    while waiting and len(seen) < most:
        node = waiting.popleft()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(before for before, _ in node.next_functions if before is not None)


def parameters_near(node: Any, *, depth: int) -> Iterator[Tensor]:
    """Yield the parameters at most `depth` nodes away; 2: as they are, or transposed."""
    if depth > 2:
        near = graph_nodes([node], depth)
    else:
        direct = [before for before, _ in node.next_functions if before is not None]
        turned = [
            b for each in direct if each.name() == "TBackward0" for b, _ in each.next_functions
        ]
        near = iter([*direct, *turned])
    for each in near:
        leaf = getattr(each, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf

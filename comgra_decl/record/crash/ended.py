"""Find the operations that had ended before an error, with the modules that called them.

Nothing is attached to the calls of an ordinary step. What they computed is therefore read from
autograd's graph of the tensors in the frames of the error: which operation used which parameters,
and which outputs are still alive or were saved for the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from comgra_decl.hooks.frames import Visit, variables
from comgra_decl.hooks.names import Names
from comgra_decl.hooks.pytree import gradient_function
from comgra_decl.record.crash import tensors
from comgra_decl.record.crash.overwritten import graph_nodes, parameters_near
from comgra_decl.stats.quiet import quiet
from comgra_decl.torch_private import RAW_SAVED

_MOST = 12  # operations
_MOST_NODES = 400  # searched for them
_NEAR = 100  # nodes to search for the last module
_LONG = 256  # entries of a container that is not searched for tensors
_OWN = ("result", "output")  # names under which operations save their output
_GIVEN = {"self": 0, "input": 0, "mat1": 1}  # and an input, with its place among all inputs


def ended_before(frames: list[Visit], names: Names) -> list[dict[str, Any]]:
    """Return the operations that had ended before an error, the last ones first.

    Args:
        frames: the frames of the error.
        names: names the parameters; must know the models.

    Returns:
        For each operation, its autograd function (`operation`), the module whose parameters it used
        (`node`) or, if it used none, the last module before it (`after`), and facts about its
        `output`; each None if it is unknown. Empty without gradients.
    """
    with quiet():
        alive = [*_tensors_in_use(frames)]
        outputs = {gradient_function(tensor): tensor for tensor in reversed(alive)}
        roots = dict.fromkeys(gradient_function(tensor) for tensor in alive)
        nodes = [n for n in graph_nodes([*roots], _MOST_NODES) if not _is_parameter(n)]
        nodes.sort(key=lambda node: -int(node._sequence_nr()))
        for node in nodes:
            for known, output in _saved(node):
                outputs.setdefault(known, output)
    return [_fact(node, outputs.get(node), names) for node in nodes[:_MOST]]


def _tensors_in_use(frames: list[Visit]) -> Iterator[Tensor]:
    """Yield the tensors in the module calls in progress or in the failing line, innermost first."""
    begins = [at for at, visit in enumerate(frames) if visit.calls_module][:1]
    own = [at for at, visit in enumerate(frames) if not (visit.in_torch or visit.is_plumbing)][-1:]
    first = (begins or own or [0])[0]
    for visit in reversed(frames[first:]):
        words = visit.words if [visit] == frames[first : first + 1] and not begins else None
        yield from variables(visit.frame, lambda known, only=words: _tensors_of(known, only)) or []  # type: ignore[misc]


def _tensors_of(known: Mapping[str, Any], only: frozenset[str] | None) -> list[Tensor]:
    found = []
    for name, value in [*known.items()]:
        long = isinstance(value, (list, tuple, dict)) and len(value) > _LONG
        if not long and (only is None or name in only):
            found += [tensor for _, tensor in tensors.in_value(name, value)]
    return [tensor for tensor in found if gradient_function(tensor) is not None]


def _saved(node: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yield an operation and the one before it with their outputs, as far as it has saved them.

    Saved tensors are not unpacked, which could run hooks of the program.
    """
    for name in _OWN:
        output = _raw(node, name)
        if output is not None:
            yield node, output
    for name, place in _GIVEN.items():
        before = node.next_functions[place][0] if place < len(node.next_functions) else None
        given = _raw(node, name)
        if before is not None and given is not None and not _is_parameter(before):
            yield before, given


def _is_parameter(node: Any) -> bool:
    """Return whether a node stands for a parameter, or for its transposition by a linear layer."""
    if node.name() == "TBackward0":
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), Tensor)


def _raw(node: Any, name: str) -> Tensor | None:
    try:
        kept = getattr(getattr(node, RAW_SAVED + name, None), "data", None)
    except RuntimeError:  # the backward pass has freed it
        return None
    return kept if isinstance(kept, Tensor) else None


def _fact(node: Any, output: Tensor | None, names: Names) -> dict[str, Any]:
    own = [names.parameter(leaf) for leaf in parameters_near(node, depth=2)]
    used = next(filter(None, own), None)
    before = [] if used else [names.parameter(leaf) for leaf in parameters_near(node, depth=_NEAR)]
    after = next(filter(None, before), None)
    return {
        "operation": str(node.name()),
        "node": None if used is None else used.rpartition(".")[0],
        "after": None if after is None else after.rpartition(".")[0],
        "output": None if output is None else tensors.describe("output", output),
    }

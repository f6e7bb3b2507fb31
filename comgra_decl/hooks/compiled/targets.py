"""Find targets in the traced graph of a compiled function, and show them when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.node import map_arg

from comgra_decl.hooks.tensors.targets import Targets

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

_OURS = "comgra_decl."


def show_targets(module: GraphModule) -> None:
    """Make the graph of a compiled function show its targets before they are used.

    Our function modes do not observe the calls made by compiled code. The compiler's graph lists
    those calls, with an example tensor without data for each result, so the same rules find the
    targets in the graph.
    """
    found = [*_targets(module)]
    for user, target in found:
        with module.graph.inserting_before(user):
            module.graph.call_function(torch.ops.comgra_decl.target.default, (target,))
    if found:
        module.recompile()


def _targets(module: GraphModule) -> Iterator[tuple[Node, Node]]:
    """Yield pairs of (user of a target, target)."""
    targets = Targets(on_fault=_raise)
    depth = 0  # of nested model calls, which are not searched
    for node in module.graph.nodes:
        args, kwargs = map_arg(node.args, _value), map_arg(node.kwargs, _value)
        if str(node.target).startswith(_OURS):
            deeper = _deeper(node, args)
            depth += deeper
            if deeper:
                know = targets.give if deeper > 0 else targets.know
                know(args[0])
        elif not depth and node.op in ("call_function", "call_method"):
            for tensor in targets.met(_called(node), args, kwargs, _value(node)):
                used = (given for given in node.all_input_nodes if _value(given) is tensor)
                yield from ((node, given) for given in [*used][:1])


def _deeper(node: Node, args: Any) -> int:
    """Return how one of our operators changes the depth of model calls: 1, -1 or 0."""
    name = str(node.target).removeprefix(_OURS).partition(".")[0]
    of_model = name in ("enter", "leave") and args[-1]
    return (1 if name == "enter" else -1) if of_model else 0


def _called(node: Node) -> Any:
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target), node.target)
    return node.target


def _value(node: Node) -> Any:
    return node.meta.get("example_value")


def _raise(error: BaseException) -> None:
    raise error

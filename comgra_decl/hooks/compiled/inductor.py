"""Move the reading of tensors to the end of code that inductor compiles for a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.hooks.compiled.operators import operator_of
from comgra_decl.torch_private import inductor_passes

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule, Node


class LateReading(inductor_passes.CustomGraphPass):  # type: ignore[misc]
    """Moves the operators that show tensors to the end of a graph, in order.

    For a CPU, inductor generates one piece of C++ for all kernels between two calls into Python,
    and most of the compile time is spent on the C++. If all calls into Python are at the end, there
    are as few pieces as without the calls. The drawback is that the shown tensors remain in memory
    until the end.

    A call to a model in a compiled function stays in place, as does everything shown before it,
    because the buffers read there may change later.
    """

    def __call__(self, graph: Graph) -> None:
        """Reorder a graph in place."""
        shows = [node for node in graph.nodes if operator_of(node).startswith("comgra_decl.")]
        calls = [i for i, node in enumerate(shows) if "comgra_decl.entered" in operator_of(node)]
        late = shows[calls[-1] + 1 :] if calls else shows
        end = next(node for node in graph.nodes if _ends(node))
        for node in late:
            end.prepend(node)
            for user in [*node.users]:
                if not _ends(user):  # unpacks its results
                    end.prepend(user)

    def uuid(self) -> Any:
        """Return a hash of this pass for compiler caches."""
        return inductor_passes.get_hash_for_files((__file__,))


def settings(graph: GraphModule) -> dict[str, Any]:
    """Return the inductor settings that apply this pass and keep its order.

    Empty for other devices, where each kernel is compiled separately and memory is more limited.
    """
    from comgra_decl.torch_private import inductor_config as config

    values = (node.meta.get("example_value") for node in graph.graph.nodes)
    if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in values):
        return {}
    theirs = inductor_passes.get_custom_graph_passes(config.post_grad_custom_post_pass)
    return {
        "post_grad_custom_post_pass": [*theirs, LateReading()],
        "reorder_for_peak_memory": False,  # would move the operators back
    }


def _ends(node: Node) -> bool:
    """Whether a node only passes results on: the output, or the update of an input."""
    if node.op == "output" or "_sink_tokens" in str(node.target):
        return True
    changed: Any = node.args[0] if node.args else None
    return node.target is torch.ops.aten.copy_.default and changed.op == "placeholder"

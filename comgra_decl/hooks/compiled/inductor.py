"""Where code that inductor compiles for a CPU is read: behind all that it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.hooks.compiled.operators import operator_of
from comgra_decl.torch_private import inductor_passes

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule, Node


class LateReading(inductor_passes.CustomGraphPass):  # type: ignore[misc]
    """Moves what shows tensors to the end of a graph, in order.

    For a CPU inductor makes one piece of C++ of all kernels between two calls of Python, and the
    C++ compiler is what takes most of the time. With all such calls at the end there are as few
    pieces as without. In return what is shown is kept until then.

    A call of a model in a compiled function stays where it is, and all that was shown before: the
    buffers that are read there may change later.
    """

    def __call__(self, graph: Graph) -> None:
        """Changes a graph."""
        shows = [node for node in graph.nodes if operator_of(node).startswith("comgra_decl.")]
        calls = [i for i, node in enumerate(shows) if "comgra_decl.entered" in operator_of(node)]
        late = shows[calls[-1] + 1 :] if calls else shows
        end = next(node for node in graph.nodes if _ends(node))
        for node in late:
            end.prepend(node)
            for user in [*node.users]:
                if not _ends(user):  # what takes its results apart
                    end.prepend(user)

    def uuid(self) -> Any:
        """Tells caches what it does."""
        return inductor_passes.get_hash_for_files((__file__,))


def settings(graph: GraphModule) -> dict[str, Any]:
    """Returns the settings of inductor with which a graph is changed so, and stays so.

    None for other devices: there each kernel is compiled by itself, and memory is scarcer.
    """
    from comgra_decl.torch_private import inductor_config as config

    values = (node.meta.get("example_value") for node in graph.graph.nodes)
    if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in values):
        return {}
    theirs = inductor_passes.get_custom_graph_passes(config.post_grad_custom_post_pass)
    return {
        "post_grad_custom_post_pass": [*theirs, LateReading()],
        "reorder_for_peak_memory": False,  # it would move them back
    }


def _ends(node: Node) -> bool:
    """Whether a node only hands out what was computed: results, changes of what was given."""
    if node.op == "output" or "_sink_tokens" in str(node.target):
        return True
    changed: Any = node.args[0] if node.args else None
    return node.target is torch.ops.aten.copy_.default and changed.op == "placeholder"

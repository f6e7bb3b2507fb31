"""Layers that use a native kernel in evaluation, unless a torch function mode is active.

Many training programs contain a frozen encoder in evaluation mode. The native kernel rounds
differently from the layers it replaces. To preserve the choice of kernel, our modes are removed
while it may run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from comgra_decl.hooks import modes
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.torch_private import without_functions

if TYPE_CHECKING:
    from comgra_decl.hooks.graph.provenance import Provenance

_LAYERS = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


def may_run_natively(module: nn.Module, *given: Any) -> bool:
    """Return whether a module, called with `given`, may choose a native kernel.

    This is possible in evaluation mode if nothing requires a gradient.
    """
    if not isinstance(module, _LAYERS) or module.training:
        return False
    if not torch.is_grad_enabled():
        return True
    inputs = (tensor for _, tensor in tensors_in(given))
    return not any(t.requires_grad for t in (*module.parameters(), *inputs))


class NativeCalls:
    """Removes the graph's mode while a native kernel may run, and connects the kernel's output."""

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._given: tuple[Any, ...] = ()

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], graph: Provenance
    ) -> None:
        """Remove the mode before a module is called, if the module may use a native kernel."""
        if may_run_natively(module, args, kwargs) and modes.is_active(graph):
            modes.remove(graph)
            self._module, self._given = module, (args, kwargs)

    def leave(self, module: nn.Module, output: Any, graph: Provenance) -> None:
        """Restore the mode after a module has returned `output`, or None if it failed."""
        if self._module is not module:
            return
        given, self._module, self._given = self._given, None, ()
        modes.insert_at_bottom(graph)
        if output is not None:
            with without_functions():
                graph.connect([given, list(module.parameters())], output)

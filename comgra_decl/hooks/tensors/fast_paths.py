"""Layers that compute in one native kernel in evaluation, unless a torch function mode is active.

A frozen encoder in evaluation mode is a part of many trainings. The kernel rounds differently from
the layers it stands for, so our modes are taken away while it may run.
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
    """Returns whether a module, called with `given`, may choose a native kernel by itself.

    They do so in evaluation mode where nothing needs a gradient.
    """
    if not isinstance(module, _LAYERS) or module.training:
        return False
    if not torch.is_grad_enabled():
        return True
    inputs = (tensor for _, tensor in tensors_in(given))
    return not any(t.requires_grad for t in (*module.parameters(), *inputs))


class NativeCalls:
    """Takes the graph's mode away while a native kernel may run, and connects what comes out."""

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._given: tuple[Any, ...] = ()

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], graph: Provenance
    ) -> None:
        """A module is about to be called."""
        if may_run_natively(module, args, kwargs) and modes.is_active(graph):
            modes.remove(graph)
            self._module, self._given = module, (args, kwargs)

    def leave(self, module: nn.Module, output: Any, graph: Provenance) -> None:
        """A module has returned `output`, or None if it failed."""
        if self._module is not module:
            return
        given, self._module, self._given = self._given, None, ()
        modes.insert_at_bottom(graph)
        if output is not None:
            with without_functions():
                graph.connect([given, list(module.parameters())], output)

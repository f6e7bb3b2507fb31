"""What cannot be recorded of a program, why, and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

    from comgra_decl.hooks.plans import ModulePlan

_SHOWN = 5

CUDA_GRAPH = (
    "a CUDA graph is being captured (torch.cuda.graph, make_graphed_callables): what is computed "
    "in it is not recorded, neither now nor when it is replayed, because a replay runs no Python. "
    "To see inside, train without the graph"
)


def is_capturing() -> bool:
    """Whether what is computed now becomes part of a CUDA graph; reading it would break that."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def why_silent(plans: Iterable[ModulePlan]) -> list[str]:
    """Returns sentences about modules that were selected and have not been called: `plans`.

    A module whose parameters have a gradient was used without being called: no hook of a module
    runs in `module.forward(x)`, nor where its parent takes its weights.
    """
    silent = [(plan.node(), module) for plan in plans if (module := plan.module()) is not None]
    scripted = [name for name, module in silent if isinstance(module, torch.jit.ScriptModule)]
    used = [name for name, module in silent if name not in scripted and _has_gradient(module)]
    unused = [name for name, _ in silent if name not in scripted and name not in used]
    return [
        sentence.format(_listed(names), len(names))
        for names, sentence in ((unused, _UNUSED), (used, _USED), (scripted, _SCRIPTED))
        if names
    ]


_UNUSED = (
    "selected but never called in this step: {} ({} in all); what is not called, or only lends its "
    "weights, has no output of its own"
)
_USED = (
    "selected but never called in this step, though their parameters have gradients: {} ({} in "
    "all). Either .forward() is called directly, which runs no hooks: write module(x) instead; or "
    "the parent uses their weights itself: name its tensors with comgra.node(tensor, name)"
)
_SCRIPTED = (
    "selected but never called in this step: {} ({} in all), scripted modules; no hook runs within "
    "TorchScript. What the outermost scripted module takes and returns is recorded; to see inside, "
    "train the module without scripting it"
)


def _has_gradient(module: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in module.parameters(recurse=False))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")

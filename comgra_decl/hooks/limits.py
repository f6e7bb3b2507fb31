"""Detect what cannot be recorded, and report why and what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.hooks.module_tree import named_modules
from comgra_decl.hooks.patches import Patch
from comgra_decl.torch_private import loaded

if TYPE_CHECKING:
    from torch import nn

    from comgra_decl.hooks.plans import ModulePlan

_SHOWN = 5

CUDA_GRAPH = (
    "a CUDA graph is being captured (torch.cuda.graph, make_graphed_callables). Its computations "
    "are recorded neither during capture nor on replay, because a replay runs no Python. To "
    "record them, train without the graph"
)


COMPILED_GRAPH = (
    "the compiled code uses CUDA graphs (mode='reduce-overhead' or 'max-autotune', or "
    "triton.cudagraphs). Recorded steps run without CUDA graphs, either eagerly or (with compile: "
    "observed) compiled. They take longer and round differently, as always under torch.compile; "
    "all other steps are unaffected"
)
_GRAPHED = "make_graphed_callables"


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured; reading a tensor would break the capture."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def compiles_to_cuda_graphs() -> bool:
    """Return whether the program has compiled anything in a mode that uses CUDA graphs."""
    backends = _backends()
    if not backends:
        return False  # runs for every record, and reading inductor's settings is slow
    inductor = loaded("inductor_config")
    always = bool(getattr(getattr(inductor, "triton", None), "cudagraphs", False))
    return any(_makes_cuda_graphs(backend, always=always) for backend in backends)


def compiles_with(name: str) -> bool:
    """Return whether the program has compiled anything with the torch backend of that name."""
    return any(getattr(backend, "compiler_name", "") == name for backend in _backends())


def _backends() -> list[Any]:
    known = getattr(loaded("eval_frame"), "cached_backends", None) or {}
    return [backend for backend in [*known.values()] if backend is not None]


def _makes_cuda_graphs(backend: Any, *, always: bool) -> bool:
    name, config = getattr(backend, "compiler_name", ""), getattr(backend, "config", None)
    if name == "inductor" and isinstance(config, dict):
        return bool(config.get("triton.cudagraphs", always))
    return bool(name == "cudagraphs")


class Captures:
    """Detects and reports when the program captures CUDA graphs, including between recorded steps.

    Args:
        warn: called with a warning that explains the consequences.
        on_fault: called with errors in tracing itself.
    """

    def __init__(
        self, warn: Callable[[str], None], *, on_fault: Callable[[BaseException], None]
    ) -> None:
        self._warn = warn
        self._on_fault = on_fault
        self._making = 0  # depth of make_graphed_callables calls, which warm up before capturing
        self.patches = (
            Patch(torch.cuda.graph, "__enter__", self._entering),
            Patch(torch.cuda, _GRAPHED, self._make),
        )

    @property
    def active(self) -> bool:
        """Whether the program is capturing a CUDA graph or warming up for a capture."""
        return self._making > 0 or is_capturing()

    def _entering(self, original: Callable[..., Any], context: Any) -> Any:
        try:
            self._warn(COMPILED_GRAPH if _is_called_by_compiler() else CUDA_GRAPH)
        except Exception as error:
            self._on_fault(error)
        return original(context)

    def _make(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._making += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._making -= 1


def _is_called_by_compiler() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and "_inductor" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


def why_silent(plans: Iterable[ModulePlan], models: Iterable[nn.Module]) -> list[str]:
    """Return sentences that explain why selected modules were not called.

    If the parameters of such a module have gradients, the module was used without being called. No
    hooks run if the program calls `linear.forward(x)`, or if the parent uses the module's weights
    directly.

    Args:
        plans: the plans of the modules that were not called.
        models: the models that contain them.
    """
    # `nn.MultiheadAttention` never calls its own part of this class, but uses the weights.
    uncalled = torch.nn.modules.linear.NonDynamicallyQuantizableLinear
    silent = [
        (plan, module)
        for plan in plans
        if (module := plan.module()) is not None and not isinstance(module, uncalled)
    ]
    graphed = {id(part) for model in models for part in _graphed_parts(model)}
    found: dict[str, list[str]] = {why: [] for why in (_UNUSED, _USED, _REPLAYED, _SCRIPTED)}
    for plan, module in silent:
        found[_why(module, graphed)].append(plan.node())
    return [why.format(_listed(names), len(names)) for why, names in found.items() if names]


def is_used_uncalled(module: nn.Module) -> bool:
    """Return whether a module has gradients although it was not called."""
    return not isinstance(module, torch.jit.ScriptModule) and _has_gradient(module)


def _why(module: nn.Module, graphed: set[int]) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return _SCRIPTED
    if id(module) in graphed:
        return _REPLAYED
    return _USED if is_used_uncalled(module) else _UNUSED


def _graphed_parts(top: nn.Module) -> Iterable[nn.Module]:
    """Yield the submodules of a model that replay a CUDA graph instead of running."""
    for _, module in named_modules(top):
        if _GRAPHED in getattr(vars(module).get("forward"), "__qualname__", ""):
            yield from module.modules()


_UNUSED = (
    "selected but not called in this step: {} ({} in all). If a module is not called, or its "
    "weights are used directly, it has no output to record"
)
_USED = (
    "selected but not called in this step, although their parameters have gradients: {} ({} in "
    "all). If the parent uses their weights directly, or they run inside torch.cond, scan or map, "
    "name the tensors with comgra.node(tensor, name). If the program calls .forward() on a torch "
    "layer, which runs no hooks, the layer is recorded from the next record on; call module(x) to "
    "record it from the first"
)
_REPLAYED = (
    "selected but not called in this step: {} ({} in all). They are inside a CUDA graph made by "
    "torch.cuda.make_graphed_callables, whose replay runs no Python. The inputs and outputs of the "
    "graphed module are recorded; to record its parts, train without the graph"
)
_SCRIPTED = (
    "selected but not called in this step: {} ({} in all). They are scripted modules, and "
    "TorchScript runs no hooks. The inputs and outputs of the outermost scripted module are "
    "recorded; to record its parts, train the module without scripting it"
)


def _has_gradient(module: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in module.parameters(recurse=False))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")

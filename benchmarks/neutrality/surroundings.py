"""Process-wide state of a program: global hooks, modes, flags, functions."""

from __future__ import annotations

import gc
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

_C: Any = torch._C

_PATCHABLE = (
    torch.Tensor,
    torch.nn.Parameter,
    nn.Module,
    torch.optim.Optimizer,
    torch.optim.LBFGS,
    torch.autograd.Function,
    torch.amp.GradScaler,
    torch.utils.data.DataLoader,
)
_IGNORED = frozenset({"__warningregistry__", "__annotations__", "__doc__"})
_COMPILED = ("__compiled_fn_", "__resume_at_", "__builtins_dict__", "__import_")
"""Names that Dynamo adds to the globals of compiled functions, including torch's."""


def surroundings() -> dict[str, Any]:
    """Return the state that tracing must not change: names, with counts or identities."""
    found = {f"global hooks: {name}": value for name, value in _global_hooks()}
    found |= {f"modes: {name}": value for name, value in _modes()}
    found |= {f"torch: {name}": value for name, value in _flags()}
    found |= {f"process: {name}": value for name, value in _process()}
    return found


def functions() -> dict[str, int]:
    """Return the identities of everything that a wrapper could have replaced.

    These are the members of torch's modules and classes and of the modules that define models.
    """
    found: dict[str, int] = {}
    loaded: list[tuple[str, Any]] = list(sys.modules.items())
    for name, module in loaded:
        if _is_watched(name) and isinstance(module, ModuleType):
            found |= _members(name, module)
    for owner in _PATCHABLE:
        found |= _members(f"{owner.__module__}.{owner.__qualname__}", owner)
    return found


def _is_watched(name: str) -> bool:
    roots = ("torch", "transformers", "timm", "torchvision", "benchmarks.neutrality.zoo")
    return name in roots or name.startswith(tuple(f"{root}." for root in roots))


def _members(prefix: str, owner: Any) -> dict[str, int]:
    return {
        f"{prefix}.{name}": id(value)
        for name, value in list(vars(owner).items())
        if callable(value) and name not in _IGNORED and not name.startswith(_COMPILED)
    }


def _global_hooks() -> Iterator[tuple[str, int]]:
    for owner in (modules, optimizers):
        for name, value in vars(owner).items():
            if name.startswith("_global_") and hasattr(value, "__len__"):
                yield name, len(value)
    yield "saved tensors", bool(_C._autograd._top_saved_tensors_default_hooks(True))


def _modes() -> Iterator[tuple[str, Any]]:
    yield "function modes", _C._len_torch_function_stack()
    yield "dispatch modes", _C._len_torch_dispatch_stack()
    yield "function enabled", _C._is_torch_function_enabled()
    yield "grad", torch.is_grad_enabled()
    yield "inference", torch.is_inference_mode_enabled()
    yield "autocast", (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    yield "autocast cache", torch.is_autocast_cache_enabled()
    yield "anomaly", torch.is_anomaly_enabled()
    yield "multithreading", _C._is_multithreading_enabled()
    yield "view replay", _C._is_view_replay_enabled()


def _flags() -> Iterator[tuple[str, Any]]:
    yield "default dtype", torch.get_default_dtype()
    yield "default device", str(torch.get_default_device())
    yield "threads", (torch.get_num_threads(), torch.get_num_interop_threads())
    yield "deterministic", torch.are_deterministic_algorithms_enabled()
    yield "matmul precision", torch.get_float32_matmul_precision()
    yield "fast path of attention", torch.backends.mha.get_fastpath_enabled()
    yield "oneDNN", torch.backends.mkldnn.enabled
    yield "compiler stance", _stance()


def _stance() -> Any:
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return None if frames is None else str(getattr(frames, "_stance", None))


def _process() -> Iterator[tuple[str, Any]]:
    yield "threads", sorted(t.name for t in threading.enumerate())
    yield "tracer", (sys.gettrace() is None, sys.getprofile() is None, sys.excepthook)
    yield "collector", (gc.isenabled(), gc.get_threshold(), gc.get_debug())
    yield "warnings", (len(warnings.filters), warnings.showwarning)
    yield "root logger", (logging.root.level, len(logging.root.handlers))
    yield "signals", [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    yield "recursion limit", sys.getrecursionlimit()

"""All private names of torch that this package uses, which torch may change without notice.

Many of a program's actions can be observed only through private names in torch. These names appear
only in this file, which `tests/test_torch_private.py` checks. A new torch version can therefore be
checked against this file.

- `SEEN` lists the imported names with the versions that have them: 2.6 is the oldest supported
  torch version, 2.13 the newest tested one. If an older version lacks a name, `available` returns
  False, and features that need it are disabled.
- `ATTRIBUTES` lists the attributes of torch objects, which are accessed where the objects are used.
  Local variables of torch's running functions are read in `hooks/call_context.py`, which returns
  None for variables that a torch version does not have.

Names are imported on first access, because torch imports its compiler lazily as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

# The types of the functions called most often; the others have no types in torch either.
graph_task: Callable[[], int]
tracing_state: Callable[[], object]
function_modes: Callable[[], int]
dispatch_modes: Callable[[], int]
without_dispatch_modes: Callable[[], AbstractContextManager[Any]]
without_functions: Callable[[], AbstractContextManager[None]]
with_functions: Callable[[], AbstractContextManager[None]]
is_functorch_wrapped: Callable[[torch.Tensor], bool]

SINCE_2_6 = "2.6 to 2.13"
SINCE_2_13 = "2.13"

SEEN = {
    # torch._C: thread-local state, and guards that change it
    "without_functions": ("torch._C.DisableTorchFunction", SINCE_2_6),
    "with_functions": ("torch._C._EnableTorchFunction", SINCE_2_6),
    "without_keys": ("torch._C._ExcludeDispatchKeyGuard", SINCE_2_6),
    "inference_mode": ("torch._C._InferenceMode", SINCE_2_6),
    "DispatchKey": ("torch._C.DispatchKey", SINCE_2_6),
    "DispatchKeySet": ("torch._C.DispatchKeySet", SINCE_2_6),
    "graph_task": ("torch._C._current_graph_task_id", SINCE_2_6),
    "tracing_state": ("torch._C._get_tracing_state", SINCE_2_6),
    "function_modes": ("torch._C._len_torch_function_stack", SINCE_2_6),
    "function_mode_at": ("torch._C._get_function_stack_at", SINCE_2_6),
    "pop_function_mode": ("torch._C._pop_torch_function_stack", SINCE_2_6),
    "push_function_mode": ("torch._C._push_on_torch_function_stack", SINCE_2_6),
    "dispatch_modes": ("torch._C._len_torch_dispatch_stack", SINCE_2_6),
    "without_dispatch_modes": (
        "torch.utils._python_dispatch._disable_current_modes",
        SINCE_2_6,
    ),
    "DeviceMode": ("torch.utils._device.DeviceContext", SINCE_2_6),
    "no_own_dispatch": ("torch._C._disabled_torch_dispatch_impl", SINCE_2_6),
    "transforms_active": ("torch._C._are_functorch_transforms_active", SINCE_2_6),
    "functorch": ("torch._C._functorch", SINCE_2_6),
    "is_functorch_wrapped": ("torch._C._functorch.is_functorch_wrapped_tensor", SINCE_2_6),
    "TensorBase": ("torch._C.TensorBase", SINCE_2_6),
    "ScriptFunction": ("torch._C.ScriptFunction", SINCE_2_6),
    "ScriptMethod": ("torch._C.ScriptMethod", SINCE_2_6),
    "ParameterDict": ("torch._C.ParameterDict", SINCE_2_6),
    "BufferDict": ("torch._C.BufferDict", SINCE_2_6),
    "ModuleDict": ("torch._C.ModuleDict", SINCE_2_6),
    # operators, tensor classes, transforms
    "copy_all": ("torch._foreach_copy_", SINCE_2_6),
    "negate_all": ("torch._foreach_neg_", SINCE_2_6),
    "add_all": ("torch._foreach_add_", SINCE_2_6),
    "OperatorBase": ("torch._ops.OperatorBase", SINCE_2_6),
    "OpOverloadPacket": ("torch._ops.OpOverloadPacket", SINCE_2_6),
    "SingleLevelFunction": ("torch.autograd.function._SingleLevelFunction", SINCE_2_6),
    "FunctionalTensor": ("torch._subclasses.functional_tensor.FunctionalTensor", SINCE_2_6),
    "of_vmap": ("torch._functorch.vmap", SINCE_2_6),
    "of_transforms": ("torch._functorch.eager_transforms", SINCE_2_6),
    "place_of_shard": (
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
        SINCE_2_6,
    ),
    "BatchNorm": ("torch.nn.modules.batchnorm._BatchNorm", SINCE_2_6),
    "torch_pytree": ("torch.utils._pytree", SINCE_2_6),
    # module calls
    "module_call": ("torch.nn.Module._call_impl", SINCE_2_6),
    # the profiler
    "Range": ("torch._C._profiler._RecordFunctionFast", SINCE_2_6),
    "profiler_enabled": ("torch.autograd._profiler_enabled", SINCE_2_6),
    "of_profiler": ("torch.autograd.profiler", SINCE_2_6),
    # saved tensors
    "top_saved_hooks": ("torch._C._autograd._top_saved_tensors_default_hooks", SINCE_2_13),
    # the compiler
    "of_evaluation": ("torch._C._dynamo.eval_frame", SINCE_2_6),
    "fx_tracing": ("torch.fx._symbolic_trace", SINCE_2_6),
    "control_flow": ("torch._higher_order_ops.utils", SINCE_2_6),
    "convert_frame": ("torch._dynamo.convert_frame", SINCE_2_6),
    "dynamo_config": ("torch._dynamo.config", SINCE_2_6),
    "dynamo_decorators": ("torch._dynamo.decorators", SINCE_2_6),
    "dynamo_types": ("torch._dynamo.types", SINCE_2_6),
    "eval_frame": ("torch._dynamo.eval_frame", SINCE_2_6),
    "pgo": ("torch._dynamo.pgo", SINCE_2_6),
    "AotAutograd": ("torch._dynamo.backends.common.AotAutograd", SINCE_2_6),
    "functorch_config": ("torch._functorch.config", SINCE_2_6),
    "inductor_config": ("torch._inductor.config", SINCE_2_6),
    "InductorBackend": ("torch._TorchCompileInductorWrapper", SINCE_2_6),
    "EffectType": ("torch._library.effects.EffectType", SINCE_2_13),
    "graph_compile": ("torch._functorch._aot_autograd.graph_compile", SINCE_2_13),
    "inductor_passes": ("torch._inductor.custom_graph_pass", SINCE_2_6),
    "effectful_operator": ("torch.library._register_effectful_op", SINCE_2_13),
}
"""The names used here, with the torch name and the versions that have it."""

ATTRIBUTES = {
    "_parameters": "torch.nn.Module",
    "_buffers": "torch.nn.Module",
    "_modules": "torch.nn.Module",
    "_non_persistent_buffers_set": "torch.nn.Module",
    "_forward_hooks": "torch.nn.Module",
    "_forward_pre_hooks": "torch.nn.Module",
    "_forward_pre_hooks_with_kwargs": "torch.nn.Module",
    "_compiled_call_impl": "torch.nn.Module",
    "_version": "torch.Tensor",
    "_base": "torch.Tensor",
    "_sequence_nr": "autograd's nodes",
    "_backward_hooks": "torch.Tensor",
    "_register_hook_dict": "autograd's nodes",
    "_MultiProcessingDataLoaderIter": "torch.utils.data.dataloader",
    "_workers": "iterators of data loaders with workers",
    "_task_info": "iterators of data loaders with workers",
    "_rcvd_idx": "iterators of data loaders with workers",
    "_dataset": "iterators of data loaders with workers",
    "_is_zerotensor": "torch.Tensor",
    "_cdata": "torch.UntypedStorage",
    "_offsets": "nested tensors with the jagged layout",
    "_ragged_idx": "nested tensors with the jagged layout",
    "_scale": "torch.amp.GradScaler",
    "_is_fx_tracing_flag": "torch.fx._symbolic_trace",
    "_global_optimizer_pre_hooks": "torch.optim.optimizer",
    "_global_optimizer_post_hooks": "torch.optim.optimizer",
    "_global_forward_hooks": "torch.nn.modules.module",
    "_global_forward_pre_hooks": "torch.nn.modules.module",
    "_add_batch_dim": "torch._functorch.vmap",
    "_remove_batch_dim": "torch._functorch.vmap",
    "_wrap_for_grad": "torch._functorch.eager_transforms",
    "_unwrap_for_grad": "torch._functorch.eager_transforms",
    "_set_compilation_env": "torch._higher_order_ops.utils",
    "_set_stance": "torch._dynamo.eval_frame",
    "_stance": "torch._dynamo.eval_frame",
    "_callback_from_stance": "torch._dynamo.eval_frame",
    "_next_isolate_recompiles_id": "torch._dynamo.eval_frame, 2.13",
    "_CODE_STATE": "torch._dynamo.pgo",
    "_raw_saved_self": "autograd's nodes for products and quotients",
    "_raw_saved_other": "autograd's nodes for products and quotients",
    "_clone_with_backend": "callables that torch._dynamo.convert_frame creates for a backend",
    "_torchdynamo_orig_backend": "the same, 2.13",
    "_FrameAction": "torch._C._dynamo.eval_frame",
    "_FrameExecStrategy": "torch._C._dynamo.eval_frame",
    "dtensor_spec": "gradient functions of DTensor.to_local",
    "_prepare_profiler": "torch.autograd.profiler",
    "_enable_profiler": "torch.autograd.profiler",
    "_orig_mod": "modules compiled with torch.compile",
    "_fsdp_wrapped_module": "torch.distributed.fsdp.FullyShardedDataParallel",
    "_checkpoint_wrapped_module": "the wrapper that torch's checkpoint_wrapper creates",
}
"""The attributes, with the objects that have them; in 2.6 to 2.13 unless stated otherwise."""

RAW_SAVED = "_raw_saved_"
"""Prefix of the autograd node attributes that hold saved tensors; 2.6 to 2.13."""

ENGINE_CALL = "_engine_run_backward"
"""Name of the function in `torch.autograd.graph` that calls the engine; 2.6 to 2.13."""

WITHOUT_A_DEVICE = {"raw_stream": ("torch._C._cuda_getCurrentRawStream", SINCE_2_6)}
"""Names that are missing from a torch build without CUDA."""


def _named(path: str) -> Any:
    """Return the object with the given dotted name, importing only the modules on its path."""
    parts = path.split(".")
    found: Any = torch
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            import_module(".".join(parts[:number]))
        found = getattr(found, part)
    return found


def __getattr__(name: str) -> Any:
    """Resolve a listed name on first access, and cache it as a module global."""
    known = SEEN.get(name) or WITHOUT_A_DEVICE.get(name)
    if known is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = _named(known[0])
    return found


def available(name: str) -> bool:
    """Return whether this torch version has the object listed under a name."""
    try:
        __getattr__(name)
    except (ImportError, AttributeError):
        return False
    return True


def loaded(name: str) -> ModuleType | None:
    """Return a torch module if it has already been imported, else None.

    Args:
        name: a key of `SEEN`, such as "eval_frame".
    """
    return sys.modules.get(SEEN[name][0])

"""Isolate torch operations from the program's modes and settings, and vice versa.

A reduction may run inside the program's autocast, inference mode, `torch.device` context, function
or dispatch modes, or inside a functorch transform. None of these may affect the results or observe
the operations. Two guards ensure this. One switches off `__torch_function__` (modes and
subclasses). The other removes the dispatch keys behind everything else, including autograd.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from comgra_decl.torch_private import (
    DispatchKey,
    DispatchKeySet,
    inference_mode,
    without_functions,
    without_keys,
)

_PREFIXES = ("Autograd", "Autocast", "FuncTorch")
_NAMES = (
    "ADInplaceOrView",
    "Functionalize",
    "PreDispatch",
    "Python",
    "PythonDispatcher",
    "PythonTLSSnapshot",
)


def _hidden_keys() -> Any:
    """Return the dispatch keys that a reduction must bypass, as named in this torch version."""
    keys = DispatchKeySet(DispatchKey.AutogradFunctionality)
    for name in dir(DispatchKey):
        if name.startswith(_PREFIXES) or name in _NAMES:
            keys = keys | DispatchKeySet(getattr(DispatchKey, name))
    return keys


HIDDEN_KEYS = _hidden_keys()

_ADDRESS = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value
copy_memory: Callable[[int, int, int], None] = ctypes.PYFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(_ADDRESS or 0)
"""Copies bytes (to, from, size) while holding the interpreter's lock, unlike `ctypes.memmove`."""


class quiet:  # noqa: N801 - a context manager, named like those of torch
    """Run torch operations without autograd, autocast, modes and transforms (this thread only).

    The reducer uses `without_functions` and `without_keys` directly, for each tensor of a step.
    """

    __slots__ = ("_functions", "_keys")

    def __enter__(self) -> None:
        self._functions, self._keys = without_functions(), without_keys(HIDDEN_KEYS)
        self._functions.__enter__()
        self._keys.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._keys.__exit__(kind, error, trace)
        self._functions.__exit__(kind, error, trace)


def copied_to_host(tensor: Tensor) -> tuple[Tensor, Any]:
    """Start the copy to pinned memory; return the copy and the event that completes it."""
    host = buffer(*tensor.shape, dtype=tensor.dtype, device=torch.device("cpu"), pinned=True)
    host.copy_(tensor, non_blocking=True)
    module: Any = getattr(torch, tensor.device.type)
    event = module.Event()
    event.record(module.current_stream(tensor.device))
    return host, event


def buffer(*shape: int, dtype: torch.dtype, device: torch.device, pinned: bool = False) -> Tensor:
    """Return an uninitialised tensor that remains writable outside inference mode."""
    with quiet(), inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)

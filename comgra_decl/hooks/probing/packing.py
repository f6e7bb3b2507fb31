"""Describe arguments, optimizer states and generators as JSON, with their tensors stored apart."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from comgra_decl.errors import DamagedRunError, ProbeError

_EXACT = frozenset(
    dtype
    for name in (
        "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
        "complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz"
    ).split()
    if (dtype := getattr(torch, name, None)) is not None
)
"""The dtypes that the store keeps bit by bit."""

_MAPPINGS = (dict, OrderedDict, defaultdict)
_KEYS = (str, int, float, bool)


def check_exact(name: str, tensor: torch.Tensor) -> None:
    """Raise ProbeError if the store would not keep every bit of a tensor."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_quantized or tensor.dtype not in _EXACT:
        what = f"{type(tensor).__name__}, {tensor.dtype}, {tensor.layout}"
        raise ProbeError(f"{name} cannot be stored without changing it ({what})")


def with_packed_weights(module: nn.Module) -> str | None:
    """Return the first part of a model whose weights are no parameters; None if there is none.

    These are layers of `torch.ao.quantization`. They have no gradients, either.
    """
    for path, part in module.named_modules():
        if any(isinstance(value, torch.ScriptObject) for value in vars(part).values()):
            return path.removesuffix("._packed_params") or "the model"
    return None


def packed(value: object, where: str, put: Callable[[str, torch.Tensor], None]) -> Any:
    """Return a JSON-serialisable description of a value, from which `unpacked` makes an equal one.

    Args:
        value: numbers, strings, dtypes, devices and tensors, in lists, tuples and dicts.
        where: the name of the value, from which tensors have theirs.
        put: called with the name and the tensor for each tensor.

    Raises:
        ProbeError: the value contains something else.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, torch.Tensor):
        check_exact(where, value)
        put(where, value)
        return {"tensor": where, **_form(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (list, tuple)) and kind in (list, tuple, torch.Size):
        items = [packed(each, f"{where}.{i}", put) for i, each in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if isinstance(value, _MAPPINGS) and kind in _MAPPINGS and all(type(k) in _KEYS for k in value):
        return {"dict": [[k, packed(each, f"{where}.{k}", put)] for k, each in value.items()]}
    raise ProbeError(f"{where} contains an object of the class {kind.__name__}")


def _form(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what a kernel may depend on besides the values of a tensor."""
    form: dict[str, Any] = {
        "shape": [*tensor.shape],
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
    if not tensor.is_contiguous():
        form["stride"] = [*tensor.stride()]
    if tensor.device.type != "cpu":
        form["device"] = str(tensor.device)
    if tensor.requires_grad and tensor.is_leaf:
        form["requires_grad"] = True
    return form


def unpacked(found: Any, get: Callable[[str], torch.Tensor]) -> Any:
    """Return the value that `packed` has described.

    Args:
        found: the description, which is not trusted.
        get: returns the tensor of a name, with the dtype and shape it had, on the CPU.

    Raises:
        DamagedRunError: it is no description.
    """
    try:
        return _unpacked(found, get)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DamagedRunError(f"what a step needs to be replayed is damaged: {error}") from error


def _unpacked(found: Any, get: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(found, list):
        return [_unpacked(each, get) for each in found]
    if not isinstance(found, dict):
        return found
    if "tensor" in found:
        return _tensor(found, get)
    ((kind, content),) = found.items()
    if kind == "dict":
        return {key: _unpacked(each, get) for key, each in content}
    if kind == "tuple":
        return tuple(_unpacked(each, get) for each in content)
    if kind == "float":
        return float(content)
    if kind == "dtype":
        return _dtype(content)
    if kind == "device":
        return torch.device(content)
    raise ValueError(f"no kind {kind!r}")


def _tensor(found: Mapping[str, Any], get: Callable[[str], torch.Tensor]) -> torch.Tensor:
    shape = tuple(map(int, found["shape"]))
    if 0 in shape:  # there is nothing to store
        tensor = torch.empty(shape, dtype=_dtype(found["dtype"]))
    else:
        tensor = get(found["tensor"])
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{found['tensor']} has the shape {tuple(tensor.shape)}, not {shape}")
    if "device" in found:
        tensor = tensor.to(found["device"])
    if "stride" in found:
        # an expanded tensor has strides of 0, to which nothing can be written: it becomes dense
        dense = 0 not in found["stride"]
        if dense:
            spread = torch.empty_strided(
                shape, found["stride"], dtype=tensor.dtype, device=tensor.device
            )
            tensor = spread.copy_(tensor)
    return tensor.requires_grad_() if found.get("requires_grad") else tensor


def _dtype(name: object) -> torch.dtype:
    dtype = getattr(torch, str(name))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {name!r}")
    return dtype

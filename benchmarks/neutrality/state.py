"""The state of a training run as plain data that is equal only if every bit is equal."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.neutrality.program import Program

State = dict[str, Any]
"""Maps names, which begin with a kind and a colon, to the bits of the item."""


def bits(tensor: Tensor) -> tuple[str, tuple[int, ...], str]:
    """Return the dtype and shape of a tensor of any layout, and a digest of its elements."""
    plain = tensor.detach()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    if plain.is_quantized:
        plain = plain.int_repr()
    data = plain.contiguous().view(-1).view(torch.uint8) if plain.numel() else plain.new_empty(0)
    digest = hashlib.blake2b(data.cpu().numpy().tobytes(), digest_size=16).hexdigest()
    return str(tensor.dtype), tuple(tensor.shape), digest


def state_of(program: Program) -> State:
    """Return the whole state of a program: tensors, flags, hooks, optimizers, generators."""
    state = dict(_generators())
    for number, model in enumerate(program.models):
        state |= {f"{kind}:{number}.{name}": value for kind, name, value in _model(model)}
    for number, optimizer in enumerate(program.optimizers):
        state |= {f"optimizer:{number}{path}": v for path, v in leaves(optimizer.state_dict())}
        state |= {f"hooks:optimizer{number}.{n}": v for n, v in _hooks(optimizer)}
    return state | {f"held:{path}": value for path, value in leaves(program.held)}


def gradients_and_parameters(program: Program) -> State:
    """Return the state that changes within a step, to locate the step where runs diverge."""
    kinds = ("parameter", "gradient", "buffer")
    return {
        f"{kind}:{number}.{name}": value
        for number, model in enumerate(program.models)
        for kind, name, value in _tensors(model)
        if kind in kinds
    }


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of a nested state: tensors as `bits`, numbers by their `repr`."""
    if isinstance(value, Tensor):
        yield path, bits(value)
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from leaves(child, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield from leaves(child, f"{path}[{index}]")
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        yield path, repr(value)
    else:
        yield path, type(value).__qualname__


def _generators() -> Iterator[tuple[str, Any]]:
    yield "generator:python", hash(random.getstate())
    kind, keys, *rest = np.random.get_state(legacy=True)
    yield "generator:numpy", (kind, np.asarray(keys).tobytes(), *rest)
    yield "generator:torch", bits(torch.get_rng_state())


def _model(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    yield from _tensors(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield "flags", name, (parameter.requires_grad, parameter.is_leaf, type(parameter).__name__)
        yield "hooks", name, dict(_hooks(parameter))
        yield "attributes", name, sorted(vars(parameter))
    for name, module in model.named_modules():
        yield "mode", name, module.training
        yield "hooks", f"{name} (module)", dict(_hooks(module))
        yield "attributes", f"{name} (module)", [type(module).__qualname__, *vars(module)]
    yield "attributes", "state_dict", list(model.state_dict())


def _tensors(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    for name, parameter in model.named_parameters():
        yield "parameter", name, bits(parameter)
        yield "gradient", name, None if parameter.grad is None else bits(parameter.grad)
    for name, buffer in model.named_buffers():
        yield "buffer", name, bits(buffer)


def _hooks(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the number of hooks of each kind on an object, whatever torch calls their dict."""
    for name in dir(type(owner)) if isinstance(owner, Tensor) else vars(owner):
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
            held = getattr(owner, name, None)
            if held is None or hasattr(held, "__len__"):
                yield name, len(held or ())

"""Observe what a program's modules return in its first step, independently of comgra_decl."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from benchmarks.neutrality.program import Program

_NUMBERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass
class Seen:
    """What hooks observed in one step.

    Attributes:
        called: paths of modules that returned at least one tensor.
        means: mean of the first tensor returned by a module's first call, by path; only for finite,
            non-empty floating-point tensors.
    """

    called: set[str] = dataclasses.field(default_factory=set)
    means: dict[str, float] = dataclasses.field(default_factory=dict)


def first_step(program: Program) -> Seen:
    """Run the first step with a global torch hook, which does not disable native kernels.

    The program's own hooks may replace outputs; their modules get another hook that runs later.
    """
    seen = Seen()
    named = list(program.models[0].named_modules())
    hooked = [(path, module) for path, module in named if module._forward_hooks]
    late = {id(module): path for path, module in hooked}
    paths = {id(module): path for path, module in named if id(module) not in late}
    handles = [module.register_forward_hook(partial(_note, seen, late)) for _, module in hooked]
    handles.append(register_module_forward_hook(partial(_note, seen, paths)))
    try:
        program.step(0)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _note(seen: Seen, paths: dict[int, str], module: nn.Module, _args: Any, output: Any) -> None:
    path = paths.get(id(module))
    if path is None or path in seen.called or torch._C._current_graph_task_id() != -1:
        return
    first = next(_tensors(output), None)
    if first is None:
        return
    seen.called.add(path)
    if first.dtype in _NUMBERS and first.layout == torch.strided and not first.is_nested:
        mean = first.detach().double().mean().item() if first.numel() else float("nan")
        if mean - mean == 0:
            seen.means[path] = mean


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth < 8:
        for child in _children(value):
            yield from _tensors(child, depth + 1)


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return []

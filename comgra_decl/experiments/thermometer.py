"""The mean and standard deviation of each layer's input and output in one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from comgra_decl.query import Run
    from comgra_decl.query.arrays import Rows


@dataclass(frozen=True)
class Reading:
    """One call to a layer; fields are None if the call has no floating-point tensor.

    `mean` and `std` are over all values of the first such tensor; std uses N, not N - 1.
    """

    node: str
    module_class: str
    shape: tuple[int, ...]
    in_mean: float | None
    in_std: float | None
    out_mean: float | None
    out_std: float | None


@contextmanager
def reading(readings: list[Reading], end: Callable[[], BaseException]) -> Iterator[None]:
    """Read all layers without submodules until the first optimizer step, which raises `end()`."""
    from torch.nn.modules.module import (
        register_module_forward_hook,
        register_module_forward_pre_hook,
    )
    from torch.optim.optimizer import register_optimizer_step_post_hook

    names: dict[int, str] = {}
    depth = 0

    def enter(module: Any, _: Any) -> None:
        nonlocal depth
        if depth == 0:
            names.update({id(m): name or type(m).__name__ for name, m in module.named_modules()})
        depth += 1

    def leave(module: Any, args: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1
        if next(module.children(), None) is None:
            name = names.get(id(module), type(module).__name__)
            readings.append(_read(name, type(module).__name__, args, output))

    def stop(*_: Any) -> None:
        raise end()

    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=False),
        register_optimizer_step_post_hook(stop),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def readings_of(run: Run, step: int | None = None) -> list[Reading]:
    """Return the readings of a recorded step, by default the first.

    The list is empty if no training step was recorded.

    The mean and standard deviation are over all values of a tensor. The variance is the mean of the
    samples' variances plus the variance of the samples' means, because all samples have the same
    number of values.
    """
    if step is None and not len(run.steps):
        return []
    at = int(run.steps[0]) if step is None else step
    slots, row, spread = run.slots, run.arrays.row(at), run.arrays.row(at, over_batch="std")
    found: dict[int, Reading] = {}
    forward = slots[(slots["pass"] == "forward") & (slots["iteration"] == 0)]
    for node, part in forward.groupby("node", sort=False):
        roles = dict(zip(part["role"], part.index, strict=True))
        out = roles.get("output")
        if out is None or part.loc[out, "kind"] != "computed":
            continue
        into = next((index for role, index in roles.items() if role.startswith("input")), None)
        given = (None, None) if into is None else _numbers(row, spread, into)
        shape = tuple(int(n) for n in part.loc[out, "shape"])
        name = str(part["module_class"][out] or "")
        numbers = _numbers(row, spread, out)
        found[int(out)] = Reading(str(node), name, shape, *given, *numbers)
    return [found[out] for out in sorted(found)]  # in the order of the calls


def _numbers(row: Rows, spread: Rows, slot: Any) -> tuple[float | None, float | None]:
    if slot not in row.ids or "mean" not in row.names or "std" not in row.names:
        return None, None
    mean, std = row.names.index("mean"), row.names.index("std")
    one, other = row.values[row.ids == slot][0], spread.values[spread.ids == slot][0]
    return float(one[mean]), math.hypot(one[std], other[std], other[mean])


def _read(node: str, name: str, args: Any, output: Any) -> Reading:
    into, out = _first(args), _first(output)
    shape = () if out is None else tuple(out.shape)
    return Reading(node, name, shape, *_moments(into), *_moments(out))


def _first(thing: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor in the inputs or outputs of a module."""
    import torch

    from comgra_decl.torch_private import torch_pytree as _pytree

    leaves, _ = _pytree.tree_flatten(thing)
    return next(
        (x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel()),
        None,
    )


def _moments(tensor: torch.Tensor | None) -> tuple[float | None, float | None]:
    if tensor is None:
        return None, None
    values = tensor.detach().double()
    return float(values.mean()), float(values.std(correction=0))

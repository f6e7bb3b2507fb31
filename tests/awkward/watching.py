"""Compares recorded module outputs with those that plain torch hooks see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.support.recording import Recording, recording

Key = tuple[str, int]
"""The path of a module, and the number of the call."""


@dataclass
class Watched:
    """Copies of outputs and their gradients; subclasses that are not plain tensors are omitted."""

    outputs: dict[Key, Tensor] = field(default_factory=dict)
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    _calls: dict[str, int] = field(default_factory=dict)

    def note(self, path: str, output: Any) -> None:
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        if isinstance(output, Tensor):
            self.outputs[path, call] = output.detach().clone()
            if output.requires_grad:
                output.register_hook(lambda g: self._add(path, call, g))

    def _add(self, path: str, call: int, gradient: Tensor) -> None:
        self.gradients[path, call] = gradient.detach().clone()


@contextmanager
def watched(model: nn.Module) -> Iterator[Watched]:
    """Hooks every module of a model; paths are those of `named_modules`."""
    seen = Watched()

    def hook(path: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _m, _a, output: seen.note(path, output)

    handles = [m.register_forward_hook(hook(path)) for path, m in model.named_modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def step_of(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> None:
    """Takes one step of gradient descent on what `call` returns."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    call(model).backward()
    optimizer.step()


def both(
    make: Callable[[], nn.Module], call: Callable[[nn.Module], Tensor], **spec: Any
) -> tuple[Watched, Recording]:
    """Builds a model twice from one seed and takes one step with each: one hooked, one traced."""
    torch.manual_seed(0)
    model = make()
    with watched(model) as seen:
        step_of(model, call)
    torch.manual_seed(0)
    model = make()
    with recording(**spec) as traced:
        step_of(model, call)
    assert traced.faults == []
    return seen, traced


def assert_recorded(
    seen: Watched, traced: Recording, *, root: str, step: int = 0, gradients: bool = True
) -> None:
    """Asserts that every recorded output and gradient has exactly the values that the hooks saw."""
    assert seen.outputs, "the oracle saw nothing"
    for (path, call), value in seen.outputs.items():
        where = {"iteration": call, "step": step}
        assert_same(traced.value(path or root, **where), value, f"{path}, call {call}")
        _assert_sums(traced.rows(path or root, **where), value)
    for (path, call), value in seen.gradients.items() if gradients else ():
        got = traced.value(path or root, iteration=call, step=step, pass_="grad")
        assert_same(got, value, f"gradient of {path}, call {call}")


def assert_same(got: NDArray[Any], value: Tensor, what: str) -> None:
    """Asserts that recorded values [samples, ...] are the first samples of `value`, or all."""
    expected = as_numpy(value)
    if got.shape == (1, *expected.shape):
        got = got[0]
    elif expected.ndim:
        expected = expected[: len(got)]
    np.testing.assert_array_equal(got, expected, err_msg=what)
    assert got.shape == expected.shape, what


def as_numpy(value: Tensor) -> NDArray[Any]:
    """Returns the elements of a tensor of any layout; bfloat16 as float32, which is exact."""
    value = value.detach()
    dense = value if value.layout == torch.strided else value.to_dense()
    if dense.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        dense = dense.float()
    return dense.resolve_conj().resolve_neg().numpy()


def _assert_sums(rows: NDArray[np.float64], value: Tensor) -> None:
    """Asserts that the sums of all samples combine to those of the whole tensor."""
    from comgra_decl.records import Raw

    dense = value if value.layout == torch.strided else value.to_dense()
    flat = (dense.abs() if dense.is_complex() else dense).double().flatten().numpy()
    elements = len(flat) / max(len(rows), 1)
    total = (rows[:, Raw.SUM] + rows[:, Raw.PIVOT] * elements).sum()
    scale = max(float(np.abs(flat).sum()), 1e-12)
    assert abs(total - flat.sum()) <= 1e-5 * scale
    if len(flat):
        assert rows[:, Raw.MIN].min() == np.float64(flat.min())
        assert rows[:, Raw.MAX].max() == np.float64(flat.max())


def refused(traced: Recording) -> Mapping[str, str]:
    """Returns what the report lists as not recorded, with the reasons."""
    found: Mapping[str, str] = traced.report["refused"]
    return found

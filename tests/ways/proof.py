"""Proves a way of training: bit-identical with and without tracing, and recorded correctly.

A training function receives a `Told`. In the plain run, this stores what the program itself holds
at each moment, using nothing but torch; in the traced run, it does nothing. The records are thereby
compared with what an untraced program saw.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, get_args

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from comgra_decl.spec.nodes import CaptureName
from tests.support.recording import Recording, recording

FULL: dict[str, Any] = {
    "nodes": {"all": {"select": "**", "capture": list(get_args(CaptureName)), "values": True}},
    "schedule": {"first": 1_000_000},
    "samples": {"count": 64},
}
"""Captures everything of every module, with its values, at every step."""

SPARSE: dict[str, Any] = {**FULL, "schedule": {"first": 1, "every": 3}}

Key = tuple[int, str, str, int, str]


class Told:
    """What the program itself observes in each step."""

    def __init__(self, *, listening: bool) -> None:
        self._listening = listening
        self.step = 0
        self.values: dict[Key, torch.Tensor] = {}
        self._handles: list[Any] = []

    def __call__(
        self,
        node: str,
        tensor: torch.Tensor | None,
        role: str = "output",
        *,
        iteration: int = 0,
        pass_: str = "forward",
    ) -> None:
        """Stores a copy of a tensor."""
        if self._listening:
            assert tensor is not None, (node, role)
            key = (self.step, node, role, iteration, pass_)
            assert key not in self.values, key
            self.values[key] = tensor.detach().clone()

    def parameters(self, model: nn.Module, what: str = "grad", **renamed: str) -> None:
        """Stores every parameter (`forward`) or every gradient (`grad`, `grad:raw`) of a model."""
        for name, parameter in model.named_parameters():
            node, _, role = name.rpartition(".")
            tensor = parameter.grad if what.startswith("grad") else parameter
            if tensor is not None:
                node = renamed.get("prefix", "") + (node or type(model).__name__)
                self(node, tensor, role, pass_=what)

    def gradient(self, node: str, tensor: torch.Tensor, **where: Any) -> None:
        """Stores the gradient of a tensor from the next backward."""
        if self._listening:
            where.setdefault("pass_", "grad")
            tensor.register_hook(lambda gradient: self(node, gradient, **where))

    def modules(self, model: nn.Module, *names: str, prefix: str = "") -> None:
        """Stores, until the step ends, the outputs of modules and their gradients."""
        for name in names if self._listening else ():
            hook = partial(self._returned, prefix + name, count())
            self._handles.append(model.get_submodule(name).register_forward_hook(hook))

    def _returned(
        self, node: str, calls: Iterator[int], _module: nn.Module, _args: Any, output: torch.Tensor
    ) -> None:
        iteration = next(calls)
        self(node, output, iteration=iteration)
        if output.requires_grad:
            self.gradient(node, output, iteration=iteration)

    def end(self) -> None:
        """Ends an optimizer step."""
        self.step += 1
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


@dataclass
class Outcome:
    """Everything that a training run leaves behind."""

    losses: list[float] = field(default_factory=list)
    tensors: dict[str, torch.Tensor | None] = field(default_factory=dict)
    settings: list[Any] = field(default_factory=list)
    models: tuple[nn.Module, ...] = ()
    random: list[Any] = field(default_factory=list)

    @property
    def flags(self) -> list[Any]:
        """The current state of the modules, which have our hooks while a step is recorded."""
        return [_flags(module) for model in self.models for module in model.modules()]


def outcome(
    losses: Iterable[float],
    *models: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    **more: torch.Tensor,
) -> Outcome:
    """Collects what a training run leaves behind."""
    found = Outcome(list(losses), dict(more), models=models)
    for number, model in enumerate(models):
        for name, tensor in model.state_dict(keep_vars=True).items():
            found.tensors[f"{number}.{name}"] = tensor.detach()
            found.tensors[f"{number}.{name}.grad"] = tensor.grad if tensor.is_leaf else None
    for number, optimizer in enumerate(optimizers):
        for name, value in _flat(optimizer.state_dict(), f"optimizer{number}"):
            is_tensor = isinstance(value, torch.Tensor)
            found.tensors.update({name: value} if is_tensor else {})
            found.settings += [] if is_tensor else [(name, value)]
    return found


def _flags(module: nn.Module) -> Any:
    parameters = [
        (name, p.requires_grad, p.is_leaf, p.dtype, len(p._backward_hooks or ()))
        for name, p in module.named_parameters(recurse=False)
    ]
    hooks = [len(module._forward_hooks), len(module._forward_pre_hooks)]
    return type(module).__name__, module.training, hooks, parameters, sorted(vars(module))


def _flat(value: Any, path: str) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _flat(child, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for key, child in enumerate(value):
            yield from _flat(child, f"{path}.{key}")
    else:
        yield path, value


def seeded(training: Callable[[Told], Outcome], told: Told) -> Outcome:
    """Trains from a fixed state of all random generators."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    found = training(told)
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    found.random = [torch.get_rng_state().tolist(), random.getstate(), repr(state)]
    return found


def attached() -> list[Any]:
    """Returns everything that tracing attaches to torch itself."""
    return [
        len(torch_module._global_forward_hooks),
        len(torch_module._global_forward_pre_hooks),
        len(torch_module._global_module_registration_hooks),
        len(torch_module._global_backward_hooks),
        len(torch_optimizer._global_optimizer_post_hooks),
        len(torch_optimizer._global_optimizer_pre_hooks),
        torch._C._len_torch_function_stack(),
        torch.autograd.backward,
        torch.autograd.grad,
        torch.autograd.Function.apply.__func__,  # type: ignore[attr-defined]
        nn.Module.train,
        nn.Module.__call__,
        torch.amp.GradScaler.scale,
        torch.amp.GradScaler.step,
        torch.compile,
        torch.nn.functional.softmax,
    ]


def same(one: Outcome, other: Outcome) -> None:
    """Asserts that two training runs left the same bits behind."""
    assert one.losses == other.losses or str(one.losses) == str(other.losses)  # NaN equals NaN
    assert one.flags == other.flags
    assert one.settings == other.settings
    assert one.random == other.random
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert equal(tensor, other.tensors[name]), name


def equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors have the same bits; -0 differs from 0, and NaN equals NaN."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[one.element_size()]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


def prove(
    training: Callable[[Told], Outcome],
    *,
    records: int | None = None,
    truth: Callable[[Told], Outcome] | None = None,
) -> Recording:
    """Asserts that tracing changes nothing and records the truth; returns the run.

    Args:
        training: trains from scratch and reports what it observes.
        records: the expected number of training records; None: as many as the program reported.
        truth: reports what must have been recorded but `training` itself cannot observe.
    """
    told, other = Told(listening=True), Told(listening=True)
    plain = seeded(training, told)
    if truth is not None:
        seeded(truth, other)
        told = other
    before = attached()
    for spec in (SPARSE, FULL):
        with recording(spec) as traced:
            found = seeded(training, Told(listening=False))
        same(plain, found)
        assert traced.faults == []
        assert attached() == before
    expected = told.step if records is None else records
    assert len([s for s in traced.steps if s.info.mode == "train"]) == expected
    verify(traced, told)
    return traced


def verify(traced: Recording, told: Told) -> None:
    """Asserts that everything the program observed was recorded unchanged."""
    assert told.values
    index = {step.info.step: i for i, step in enumerate(traced.steps) if step.info.mode == "train"}
    for (step, node, role, iteration, pass_), tensor in told.values.items():
        what = f"step {step}: {node} {role} {iteration} {pass_}"
        where = {"step": index[step], "iteration": iteration, "pass_": pass_}
        assert traced.has(node, role, **where), f"{what} is missing from {known(traced)}"
        value = as_tensor(traced.value(node, role, **where), tensor.dtype)
        assert equal(value.reshape(tensor.shape), tensor), what


def as_tensor(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """Returns a recorded array as a tensor; numpy itself does not support bfloat16."""
    array = np.array(value)
    if dtype is torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def known(traced: Recording) -> list[str]:
    """Returns the names of everything that was recorded."""
    return [f"{k.node} {k.role} {k.iteration} {k.pass_}" for k in traced.slots]

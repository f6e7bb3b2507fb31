"""The slots of a run so far, with columns for selection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from math import prod, sqrt
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import SlotInfo, SlotKey
from comgra_decl.rules.finding import Place

T = TypeVar("T")
Mask = NDArray[np.bool_]

RECTIFIERS = ("ReLU", "ReLU6", "Threshold", "Hardtanh", "Hardswish", "SquaredReLU")
"""Module classes that return zero for a whole range of inputs."""


class SlotTable:
    """All slots by number. Immutable; `extended` returns a longer table."""

    def __init__(self, infos: Sequence[SlotInfo] = ()) -> None:
        self.infos = list(infos)
        self._remembered: dict[object, Any] = {}

    def remembered(self, key: object, make: Callable[[SlotTable], T]) -> T:
        """Return `make(self)`, computed only once per key."""
        if key not in self._remembered:
            self._remembered[key] = make(self)
        found: T = self._remembered[key]
        return found

    def __len__(self) -> int:
        return len(self.infos)

    def extended(self, new: Iterable[SlotInfo]) -> SlotTable:
        """Return a table with additional slots, whose numbers must follow the existing ones."""
        infos = list(self.infos)
        for info in new:
            if info.id == len(infos):
                infos.append(info)
        return SlotTable(infos)

    def where(self, wanted: Callable[[SlotInfo], bool]) -> Mask:
        """Return a bool mask [n] of the slots that satisfy a predicate."""
        return np.fromiter((wanted(info) for info in self.infos), np.bool_, len(self))

    def place(self, slot: int) -> Place:
        """Return the place of a slot in the form used by findings."""
        key = self.infos[slot].key
        return Place(key.node, key.role, key.iteration, key.pass_)

    @cached_property
    def by_key(self) -> dict[SlotKey, int]:
        """Slot numbers by key."""
        return {info.key: info.id for info in self.infos}

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Execution order of each slot's node within a step, int64 [n].

        Gradients and parameters have the order of their node.
        """
        ran: dict[tuple[str, int], int] = {}
        node: dict[str, int] = {}
        for info in self.infos:
            if info.key.pass_ == "forward" and info.kind not in ("parameter", "buffer"):
                ran.setdefault((info.key.node, info.key.iteration), info.id)
                node.setdefault(info.key.node, info.id)
        places = [
            ran.get((i.key.node, i.key.iteration), node.get(i.key.node, i.id)) for i in self.infos
        ]
        return np.array(places, np.int64)

    @cached_property
    def tensors(self) -> NDArray[np.int64]:
        """Index of each slot's tensor, int64 [n]; the same for all iterations of a tensor."""
        numbers: dict[SlotKey, int] = {}
        keys = (info.key._replace(iteration=0) for info in self.infos)
        return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)

    @cached_property
    def forward(self) -> NDArray[np.int64]:
        """Slot of the same tensor in the forward pass, int64 [n]; -1 if there is none."""
        found = [self.by_key.get(i.key._replace(pass_="forward"), -1) for i in self.infos]
        return np.array(found, np.int64)

    @cached_property
    def floating(self) -> Mask:
        """Which slots contain floating-point tensors."""
        return self.where(lambda info: "float" in info.dtype)

    @cached_property
    def computed(self) -> Mask:
        """Which slots contain values computed by the model in its forward pass."""
        return self.where(lambda i: i.kind == "computed" and i.key.pass_ == "forward")

    @cached_property
    def outputs(self) -> Mask:
        """Which computed slots are floating-point outputs of modules, or named tensors."""
        return self.computed & self.floating & self.where(lambda i: not _is_input(i.key.role))

    @cached_property
    def output_gradients(self) -> Mask:
        """Which slots are gradients of computed tensors."""
        return self.where(lambda i: i.kind == "computed" and is_gradient(i.key.pass_))

    @cached_property
    def backward(self) -> Mask:
        """Which slots are gradients or updates."""
        return self.where(lambda i: is_gradient(i.key.pass_) or i.key.pass_ == "update")

    @cached_property
    def parameters(self) -> Mask:
        """Which slots are parameters."""
        return self.where(lambda i: i.kind == "parameter" and i.key.pass_ == "forward")

    @cached_property
    def weights(self) -> Mask:
        """Which slots are parameters with at least two dimensions."""
        return self.parameters & self.where(lambda info: len(info.shape) > 1)

    @cached_property
    def parameter_gradients(self) -> Mask:
        """Which slots are gradients of parameters as used by the optimizer."""
        return self.where(lambda i: i.kind == "parameter" and i.key.pass_ == "grad")

    @cached_property
    def weight_gradients(self) -> Mask:
        """Which slots are gradients of weights, except raw ones (`grad:raw`)."""
        return self.where(
            lambda i: (
                i.kind == "parameter"
                and is_gradient(i.key.pass_)
                and i.key.pass_ != "grad:raw"
                and len(i.shape) > 1
            )
        )

    @cached_property
    def layer_gradients(self) -> Mask:
        """Which slots are gradients of computed tensors or, if there are none, of weights."""
        outputs = self.output_gradients & self.where(lambda info: info.key.pass_ == "grad")
        return outputs if outputs.any() else self.weight_gradients

    @cached_property
    def targets(self) -> Mask:
        """Which slots are targets with a batch dimension."""
        return self.where(
            lambda i: i.kind == "target" and i.key.pass_ == "forward" and i.batch_dim is not None
        )

    @cached_property
    def scalar_targets(self) -> Mask:
        """Which slots are targets with one value per sample."""
        return self.targets & self.where(lambda info: len(info.shape) == 1)


def weights_beside(table: SlotTable) -> dict[str, list[int]]:
    """Return the gradients of each module's weights, by node, as used by the optimizer.

    A weight may be computed from a parameter of a submodule (`torch.nn.utils.parametrizations`) or
    from several parameters (`torch.nn.utils.weight_norm`).
    """
    found: dict[str, list[int]] = {}
    for slot in np.flatnonzero(table.parameter_gradients & table.weight_gradients).tolist():
        node = table.infos[slot].key.node.partition(".parametrizations.")[0]
        found.setdefault(node, []).append(slot)
    return found


def is_gradient(pass_: str) -> bool:
    """Return whether a pass is a gradient."""
    return pass_ == "grad" or pass_.startswith("grad:")


def _is_input(role: str) -> bool:
    return role.partition(".")[0].partition("[")[0] == "input"


def elements_of(info: SlotInfo) -> int:
    """Return the number of elements per sample of a slot, at least 1."""
    return max(1, prod(n for at, n in enumerate(info.shape) if at != info.batch_dim))


def usual_norm(info: SlotInfo) -> float:
    """Return the l2 norm of a weight of this shape after PyTorch's default initialization.

    Embeddings have a standard deviation of 1. Other weights are distributed uniformly between
    -1 / sqrt(fan-in) and 1 / sqrt(fan-in), so their root mean square is 1 / sqrt(3 * fan-in)
    (`torch.nn.Linear.reset_parameters`).
    """
    fan_in = max(1, prod(info.shape[1:]))
    size = 1.0 if "Embedding" in info.module_class else 1 / sqrt(3 * fan_in)
    return size * sqrt(prod(info.shape))


def samples_of(info: SlotInfo) -> int:
    """Return the number of samples in the batch of a slot; 1 without a batch dimension."""
    dim = info.batch_dim
    return 1 if dim is None or dim >= len(info.shape) else info.shape[dim]

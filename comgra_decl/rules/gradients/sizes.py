"""Which gradients are compared with each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.memory import Slots
from comgra_decl.rules.table import Mask, SlotTable, is_gradient


def gradients(table: SlotTable) -> Mask:
    """Returns the gradients of computed tensors; where there are none, those of weights."""
    outputs = table.output_gradients & table.where(lambda info: info.key.pass_ == "grad")
    return outputs if outputs.any() else weight_gradients(table)


def weight_gradients(table: SlotTable) -> Mask:
    """Returns the gradients of parameters with at least two dimensions."""
    return table.where(
        lambda i: i.kind == "parameter" and is_gradient(i.key.pass_) and len(i.shape) > 1
    ) & table.where(lambda i: i.key.pass_ != "grad:raw")


def largest_of_node(table: SlotTable, at: Slots, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns, for each column, the largest size of all iterations of its tensor, [k, slots]."""
    group = table.remembered((largest_of_node, len(at)), lambda t: _group(t, at))
    if group.max(initial=-1) == len(group) - 1:
        return sizes
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    largest = np.fmax.reduceat(sizes[:, order], starts, axis=1)
    return np.asarray(largest[:, group], np.float64)


def _group(table: SlotTable, at: Slots) -> Slots:
    """Numbers the tensors, all iterations of one alike."""
    names = [(table.infos[slot].key.node, table.infos[slot].key.role) for slot in at.tolist()]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], np.int64)

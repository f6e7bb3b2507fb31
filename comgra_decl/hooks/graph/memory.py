"""Track tensors kept from earlier steps, such as hidden states and replay buffers.

Calls are not followed between recorded steps. A tensor is therefore tracked only if it was created
in a followed step and still exists when a later followed step uses it. They are recognised by their
storage, because `h = h.detach()` between two steps creates a new tensor on the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch.multiprocessing.reductions import StorageWeakRef

from comgra_decl.hooks.graph.lineage import storage_id
from comgra_decl.hooks.tensors.slots import Slot
from comgra_decl.records import EARLIER_STEP

if TYPE_CHECKING:
    import torch

_MAX_KEPT = 10_000


class Memory:
    """The slots to which the surviving tensors from earlier steps belonged."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[StorageWeakRef, tuple[Slot, ...]]] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def of(self, tensor: torch.Tensor) -> tuple[Slot, ...]:
        """Return the slots that a tensor belonged to in an earlier step; empty if unknown."""
        known = self._kept.get(storage_id(tensor))
        return known[1] if known is not None and not known[0].expired() else ()

    def keep(self, survivors: Iterable[tuple[torch.Tensor, tuple[Slot, ...]]]) -> None:
        """Store the tensors that outlive a step, and drop those that no longer exist."""
        self._kept = {key: kept for key, kept in self._kept.items() if not kept[0].expired()}
        for tensor, slots in survivors:
            key = storage_id(tensor)
            if key and slots and len(self._kept) < _MAX_KEPT:
                self._kept[key] = (StorageWeakRef(tensor.untyped_storage()), slots)

    def forget(self) -> None:
        """Discard all stored tensors."""
        self._kept.clear()


class EarlierSlots:
    """The slots that represent tensors from earlier steps in a step's graph."""

    def __init__(self) -> None:
        self._slots: dict[Slot, Slot] = {}

    def of(self, slot: Slot) -> Slot:
        """Return the slot that represents a slot from an earlier step."""
        known = self._slots.get(slot)
        if known is None:
            role = slot.role if slot.role.endswith(EARLIER_STEP) else slot.role + EARLIER_STEP
            known = self._slots[slot] = Slot(
                slot.node,
                role,
                iteration=slot.iteration,
                kind="input",
                module_class=slot.module_class,
            )
        return known

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots.values())

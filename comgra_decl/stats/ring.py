"""Ring of slots, one per step, into which small tensors are copied.

All groups on the host have the same number of slots. The training thread copies into the current
slot; a `Batch` covers the preceding slots whose steps have the same form. A slot is reused
only after its batch has settled.
"""

from __future__ import annotations

from time import monotonic

import torch

from comgra_decl.stats.batch import Batch
from comgra_decl.stats.memory import Memory
from comgra_decl.stats.trie import Form, Group, Node

STEP_BYTES = 16 << 20
"""Maximum number of bytes copied per step; later tensors are reduced immediately."""
RING_BYTES = 8 << 20
"""Memory for steps that are reduced together, if more than one step fits."""
MOST_SLOTS = 64
MOST_BYTES = 64 << 20
"""Size limit of the groups. If it is exceeded, because shapes change in every step, all groups are
dropped."""
SETTLE_SECONDS = 0.1
"""Approximate maximum age of results in seconds. Slow steps are reduced as they arrive."""


class Ring:
    """Groups of rows, and the batch that covers the slots in use."""

    def __init__(self, host: torch.device) -> None:
        self._host = host
        self._groups: dict[tuple[int, torch.dtype, torch.device], Group] = {}
        self._slots = 1
        self.slot = 0
        self.nbytes = 0
        """Total size of all groups, in bytes."""
        self._memory = Memory()
        self._batch: Batch | None = None
        self._opened = 0.0

    def place(self, node: Node, dtype: torch.dtype) -> None:
        """Assign a place to the rows of a new node, for this and all later steps with its form."""
        key = (node.shape.elements, dtype, node.device)
        group = self._groups.get(key)
        local = node.device == self._host
        if group is None:
            device = torch.device("cpu") if local else node.device
            group = Group(node.shape.elements, dtype, device, self._slots if local else 1)
            self._groups[key] = group
        node.place(group)
        needed = node.used[group]
        if needed > group.capacity:
            if local:
                self.close()
            capacity = max(needed, group.capacity * 3 // 2)
            group.resize(group.slots, capacity, keep=self.slot if local else 0)
            self._weigh()

    def batch_for(self, form: Form) -> Batch:
        """Return the batch that the step in the current slot extends."""
        if self._batch is None or self._batch.form is not form:
            self.close()
            most = self._slots - self.slot
            self._batch = Batch(form, self._host, self.slot, most=most, memory=self._memory)
            self._opened = monotonic()
        return self._batch

    def advance(self, form: Form) -> None:
        """End the step in the current slot."""
        batch = self._batch
        assert batch is not None
        assert batch.form is form
        batch.finished += 1
        self.slot += 1
        if self.slot == self._slots:
            self.close()
            self.slot = 0
        elif batch.finished == batch.capacity:
            self.close()
        elif monotonic() - self._opened > SETTLE_SECONDS:
            batch.settle()
        form.repeats += 1
        if form.repeats == 2:
            self._fit()

    def close(self) -> None:
        """Complete all results; the next step starts a new batch."""
        if self._batch is not None:
            self._batch.settle()
            self._batch = None

    def forget(self) -> None:
        """Free all groups."""
        self.close()
        self._groups.clear()
        self.nbytes = 0
        self._slots, self.slot = 1, 0

    def _fit(self) -> None:
        """Set the number of slots once steps appear to repeat."""
        local = [g for (_, _, device), g in self._groups.items() if device == self._host]
        per_step = sum(g.nbytes for g in local) // self._slots
        slots = max(1, min(MOST_SLOTS, RING_BYTES // max(per_step, 1)))
        if slots > self._slots or 2 * slots < self._slots:
            self.close()
            self._slots, self.slot = slots, 0
            for group in local:
                group.resize(slots, group.capacity)
            self._weigh()

    def _weigh(self) -> None:
        self.nbytes = sum(group.nbytes for group in self._groups.values())

"""Track which traced tensors each tensor of a step was computed from, through views and writes.

Tensors can share memory, so a write through one tensor changes the values of the others. Two views
of the same tensor also share a gradient path, but a detached alias has none in common with them.
Writes are therefore tracked per storage, and gradient paths per root (the base tensor of the
views). A clock distinguishes ancestors determined before a write from those determined after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from comgra_decl.torch_private import transforms_active


class Sources(NamedTuple):
    """Nearest traced ancestors: all of them, and those reached along a gradient path."""

    all: frozenset[int]
    grad: frozenset[int]


NO_SOURCES = Sources(frozenset(), frozenset())


def merged(found: Iterable[Sources]) -> Sources:
    """Return the union of several sets of ancestors."""
    distinct = [sources for sources in found if sources is not NO_SOURCES]
    if len(distinct) < 2:
        return distinct[0] if distinct else NO_SOURCES
    return Sources(
        frozenset().union(*(s.all for s in distinct)),
        frozenset().union(*(s.grad for s in distinct)),
    )


class _Written:
    """A storage that was written to, and the ancestors of its values since the first write."""

    __slots__ = ("all", "grads", "overwritten", "storage", "time", "whole")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        # A weak reference prevents reuse of the id, but does not keep the memory alive.
        self.storage = StorageWeakRef(storage)
        self.time = 0
        self.overwritten = 0  # the time at which its whole content was last replaced
        self.all: frozenset[int] = frozenset()
        self.whole = False  # `all` covers the entire storage, not only a part
        self.grads: dict[int, tuple[weakref.ref[torch.Tensor], frozenset[int]]] = {}

    def grad(self, root: torch.Tensor) -> frozenset[int] | None:
        """Return the gradient ancestors of a root since it was written; None if it was not."""
        known = self.grads.get(id(root))
        return known[1] if known is not None and known[0]() is root else None


class Lineage:
    """The nearest traced ancestors of every tensor of a step.

    Args:
        origin: returns the ancestors of a tensor that no call created, such as a parameter or
            buffer.
    """

    def __init__(self, origin: Callable[[torch.Tensor], Sources]) -> None:
        self._origin = origin
        self._tensors: dict[int, tuple[weakref.ref[torch.Tensor], Sources, int]] = {}
        self._written: dict[int, _Written] = {}
        self._clock = 0

    def clear(self) -> None:
        """Discard all ancestors."""
        self._tensors.clear()
        self._written.clear()

    def of(self, tensor: torch.Tensor) -> Sources:
        """Return the nearest traced ancestors of a tensor's current values."""
        known = self._tensors.get(id(tensor))
        if known is not None and known[0]() is tensor:
            sources, time = known[1], known[2]
        else:
            sources, time = self._origin(tensor), 0
        if time < self._clock:  # some tensor was written to since then
            written = self._written.get(storage_id(tensor))
            if written is not None and written.time > time:
                return _since(written, tensor, sources, time)
        return sources

    def seen(self, tensor: torch.Tensor) -> bool:
        """Whether the call that created the tensor was observed."""
        known = self._tensors.get(id(tensor))
        return known is not None and known[0]() is tensor

    def union(self, tensors: Iterable[torch.Tensor]) -> Sources:
        """Return the union of the ancestors of several tensors."""
        return merged([self.of(tensor) for tensor in tensors])

    def set(self, tensor: torch.Tensor, sources: Sources, *, recomputed: bool = False) -> None:
        """Set the ancestors of a tensor; gradient paths end where autograd does not track it.

        Under a `torch.func` transform, a wrapper does not show whether autograd tracks the wrapped
        tensor. Code that the backward pass runs again (`recomputed`) is not tracked by autograd
        now, but will be when it runs again. In both cases, the final result determines whether
        there is a gradient path.
        """
        if sources.grad and not tensor.requires_grad:
            real = tensor.is_floating_point() or tensor.is_complex()
            if not real or not (recomputed or transforms_active()):
                sources = Sources(sources.all, frozenset())
        self._tensors[id(tensor)] = (weakref.ref(tensor), sources, self._clock)

    def write(
        self, target: torch.Tensor, inputs: Sources, *, overwrite: bool, recomputed: bool = False
    ) -> None:
        """Record a write to `target`, which affects all tensors on the same storage.

        Autograd builds the root's new history from its old history and from the inputs. It does not
        include the history of the view through which the write was made.
        """
        root = target if target._base is None else target._base
        if overwrite and root is target:
            new = inputs
        elif root is target:
            new = merged((self.of(root), inputs))
        else:
            old, own = self.of(root), self.of(target)
            new = Sources(old.all | own.all | inputs.all, old.grad | inputs.grad)
        if new.grad and not root.requires_grad and not recomputed:
            new = Sources(new.all, frozenset())
        self._clock += 1
        self._note(root, new, overwritten=overwrite and root is target)
        self._tensors[id(root)] = (weakref.ref(root), new, self._clock)
        if root is not target:
            self._tensors[id(target)] = (weakref.ref(target), new, self._clock)

    def _note(self, root: torch.Tensor, new: Sources, *, overwritten: bool) -> None:
        try:
            storage = root.untyped_storage()
        except (RuntimeError, NotImplementedError, ValueError):  # sparse, opaque, lazy: not shared
            return
        written = self._written.get(storage._cdata)
        if written is None:
            written = self._written[storage._cdata] = _Written(storage)
        written.time = self._clock
        written.whole = root.nbytes == storage.nbytes()
        written.all = new.all if written.whole else written.all | new.all
        if overwritten and written.whole:
            written.overwritten = self._clock
        written.grads[id(root)] = (weakref.ref(root), new.grad)

    def replace(self, tensor: torch.Tensor, own: Sources) -> None:
        """Make a tensor the only ancestor of itself and of its views that were written to."""
        self._tensors[id(tensor)] = (weakref.ref(tensor), own, self._clock)
        written = self._written.get(storage_id(tensor)) if self._written else None
        if written is not None and written.grad(tensor) is not None:
            written.grads[id(tensor)] = (weakref.ref(tensor), own.grad)
            written.all = own.all if written.whole else written.all | own.all

    def reference(self, tensor: torch.Tensor) -> weakref.ref[torch.Tensor]:
        """Return the stored weak reference to a tensor whose ancestors are known."""
        return self._tensors[id(tensor)][0]

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Whether anything was written to the tensor's memory in this step."""
        return storage_id(tensor) in self._written

    def living(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that were created by calls and still exist."""
        for reference, _, _ in list(self._tensors.values()):
            tensor = reference()
            if tensor is not None:
                yield tensor


def _since(written: _Written, tensor: torch.Tensor, known: Sources, time: int) -> Sources:
    """Return the ancestors of a tensor whose storage was written to after `time`."""
    root = tensor if tensor._base is None else tensor._base
    grad = written.grad(root)
    replaced = written.overwritten > time or (written.whole and grad is not None)
    values = written.all if replaced else known.all | written.all
    if not tensor.requires_grad:
        return Sources(values, frozenset())
    return Sources(values, known.grad if grad is None else grad)


def storage_id(tensor: torch.Tensor) -> int:
    """Return an id of a tensor's memory, valid while the memory exists; 0 without a storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, opaque, lazy: no storage
        return 0

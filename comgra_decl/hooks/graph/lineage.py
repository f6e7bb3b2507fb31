"""Tracks which traced tensors each tensor of a step was computed from, through views and writes.

Tensors share memory, so a write through one name changes the values of the others. Two views of the
same tensor also share a gradient path; a detached alias does not. Writes are therefore tracked per
storage, and gradient paths per root (the base tensor of the views). A clock separates what was
known before a write from what was learned after it.
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
    """Returns the union of several sets of ancestors."""
    distinct = [sources for sources in found if sources is not NO_SOURCES]
    if len(distinct) < 2:
        return distinct[0] if distinct else NO_SOURCES
    return Sources(
        frozenset().union(*(s.all for s in distinct)),
        frozenset().union(*(s.grad for s in distinct)),
    )


class _Written:
    """A storage that was written to, and the ancestors of its values since then."""

    __slots__ = ("all", "grads", "overwritten", "storage", "time", "whole")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        # A weak reference keeps the id from being reused by another storage, but not the memory.
        self.storage = StorageWeakRef(storage)
        self.time = 0
        self.overwritten = 0  # when its whole content was last replaced
        self.all: frozenset[int] = frozenset()
        self.whole = False  # `all` covers the entire storage, not only a part
        self.grads: dict[int, tuple[weakref.ref[torch.Tensor], frozenset[int]]] = {}

    def grad(self, root: torch.Tensor) -> frozenset[int] | None:
        """Returns the gradient ancestors of a root since it was written to, None if it was not."""
        known = self.grads.get(id(root))
        return known[1] if known is not None and known[0]() is root else None


class Lineage:
    """The nearest traced ancestors of every tensor of a step.

    Args:
            origin: returns the ancestors of a tensor that no call made, such as a parameter or
                buffer.
    """

    def __init__(self, origin: Callable[[torch.Tensor], Sources]) -> None:
        self._origin = origin
        self._tensors: dict[int, tuple[weakref.ref[torch.Tensor], Sources, int]] = {}
        self._written: dict[int, _Written] = {}
        self._clock = 0

    def clear(self) -> None:
        """Forgets all ancestors."""
        self._tensors.clear()
        self._written.clear()

    def of(self, tensor: torch.Tensor) -> Sources:
        """Returns the nearest traced ancestors of a tensor's current values."""
        known = self._tensors.get(id(tensor))
        if known is not None and known[0]() is tensor:
            sources, time = known[1], known[2]
        else:
            sources, time = self._origin(tensor), 0
        if time < self._clock:  # something was written since
            written = self._written.get(storage_id(tensor))
            if written is not None and written.time > time:
                return _since(written, tensor, sources, time)
        return sources

    def seen(self, tensor: torch.Tensor) -> bool:
        """Whether the call that made the tensor was seen."""
        known = self._tensors.get(id(tensor))
        return known is not None and known[0]() is tensor

    def union(self, tensors: Iterable[torch.Tensor]) -> Sources:
        """Returns the union of the ancestors of several tensors."""
        return merged([self.of(tensor) for tensor in tensors])

    def set(self, tensor: torch.Tensor, sources: Sources, *, recomputed: bool = False) -> None:
        """Sets the ancestors of a tensor; gradient paths end where autograd does not follow.

        Under a transform of `torch.func`, a wrapper does not reveal whether autograd follows the
        wrapped tensor. In code that the backward pass runs again (`recomputed`), autograd will
        follow although it does not now. In both cases the final result decides.
        """
        if sources.grad and not tensor.requires_grad:
            real = tensor.is_floating_point() or tensor.is_complex()
            if not real or not (recomputed or transforms_active()):
                sources = Sources(sources.all, frozenset())
        self._tensors[id(tensor)] = (weakref.ref(tensor), sources, self._clock)

    def write(
        self, target: torch.Tensor, inputs: Sources, *, overwrite: bool, recomputed: bool = False
    ) -> None:
        """Records a write into `target`, which affects every tensor on the same storage.

        Autograd builds the root's new history from its old one and from the inputs. The history of
        the view that was written through is not part of it.
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
        """Makes a tensor its own only ancestor, also for views of it that were written before."""
        self._tensors[id(tensor)] = (weakref.ref(tensor), own, self._clock)
        written = self._written.get(storage_id(tensor)) if self._written else None
        if written is not None and written.grad(tensor) is not None:
            written.grads[id(tensor)] = (weakref.ref(tensor), own.grad)
            written.all = own.all if written.whole else written.all | own.all

    def reference(self, tensor: torch.Tensor) -> weakref.ref[torch.Tensor]:
        """Returns the stored weak reference to a tensor whose ancestors are known."""
        return self._tensors[id(tensor)][0]

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Whether anything was written into the tensor's memory in this step."""
        return storage_id(tensor) in self._written

    def living(self) -> Iterator[torch.Tensor]:
        """Yields the tensors that were made by calls and still exist."""
        for reference, _, _ in list(self._tensors.values()):
            tensor = reference()
            if tensor is not None:
                yield tensor


def _since(written: _Written, tensor: torch.Tensor, known: Sources, time: int) -> Sources:
    """Returns the ancestors of a tensor whose storage was written to after `time`."""
    root = tensor if tensor._base is None else tensor._base
    grad = written.grad(root)
    replaced = written.overwritten > time or (written.whole and grad is not None)
    values = written.all if replaced else known.all | written.all
    if not tensor.requires_grad:
        return Sources(values, frozenset())
    return Sources(values, known.grad if grad is None else grad)


def storage_id(tensor: torch.Tensor) -> int:
    """Returns an id of a tensor's memory, valid while it lives; 0 if it has no storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, opaque, lazy: no storage
        return 0

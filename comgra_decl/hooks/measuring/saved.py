"""Counts the tensors that autograd saves for the backward pass, by the modules that are running."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import RLock, local
from typing import Any
from weakref import WeakSet

import torch
from torch.autograd.graph import saved_tensors_hooks

from comgra_decl.stats.quiet import quiet
from comgra_decl.stats.support import is_readable
from comgra_decl.torch_private import available


@dataclass
class Held:
    """What one module holds, in bytes; `self` excludes modules within it.

    Attributes:
        activations: saved for the backward pass when the model returns.
        activations_self: the same, saved by operations of the module itself.
        peak: the largest size of the saved tensors at any time.
        allocated: growth of the device's allocated memory during its calls.
        inputs: the arguments of the calls whose tensors are in `activations`, which a checkpoint
            would have to keep.
        calls: number of calls.
    """

    activations: int = 0
    activations_self: int = 0
    peak: int = 0
    allocated: int = 0
    inputs: int = 0
    calls: int = 0


@dataclass
class Storage:
    """A storage of which autograd has saved tensors.

    Attributes:
        size: its size in bytes.
        chain: the numbers of the modules whose calls were running, outermost first.
        holders: number of saved tensors that are alive.
    """

    size: int
    chain: tuple[int, ...]
    holders: int = 0


@dataclass
class StepUse:
    """The measurement of one step.

    Attributes:
        held: what each module holds, by its number.
        live: the bytes that are saved now, by the number of the module.
        own: the same, saved by operations of the module itself.
        inputs: the bytes of the arguments of its calls since nothing was saved.
        storages: the storages of saved tensors, by address.
        changes: how much the saved bytes of a module itself grew or shrank, in order of time, as
            its number and bytes; changes of the same module that follow each other are one.
        dropped: those whose saved tensors were dropped since the last call of `subtract`.
    """

    held: dict[int, Held] = field(default_factory=dict)
    live: dict[int, int] = field(default_factory=dict)
    own: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    storages: dict[int, Storage] = field(default_factory=dict)
    changes: list[tuple[int, int]] = field(default_factory=list)
    dropped: deque[Storage] = field(default_factory=deque)

    def of(self, number: int) -> Held:
        """Return what a module holds."""
        return self.held.setdefault(number, Held())

    def count(self, number: int) -> None:
        """Count a call of a module."""
        module = self.of(number)
        module.calls += 1

    def begin(self, model: int) -> None:
        """Handle the beginning of a call to a model, which may follow a backward pass."""
        self.subtract()
        if not self.live.get(model):
            self.inputs = {n: size for n, size in self.inputs.items() if self.live.get(n)}

    def enter(self, number: int, size: int) -> None:
        """Handle the beginning of a call, whose arguments have `size` bytes."""
        self.inputs[number] = self.inputs.get(number, 0) + size

    def returned(self, numbers: Iterable[int]) -> None:
        """Handle the end of a call to a model, during which these modules were called."""
        self.subtract()
        for number in numbers:
            held, live = self.of(number), self.live.get(number, 0)
            held.activations_self = max(held.activations_self, self.own.get(number, 0))
            inputs = self.inputs.get(number, 0)
            if live > held.activations:
                held.activations, held.inputs = live, inputs
            elif live == held.activations:
                held.inputs = max(held.inputs, inputs)

    def save(self, address: int, size: int, chain: tuple[int, ...]) -> Storage:
        """Count a saved tensor's storage, unless another saved tensor has the same one."""
        self.subtract()
        known = self.storages.get(address)
        if known is None or not known.holders:
            known = self.storages[address] = Storage(size, chain)
            self._grow(known)
        known.holders += 1
        return known

    def _grow(self, storage: Storage) -> None:
        for number in storage.chain:
            live = self.live[number] = self.live.get(number, 0) + storage.size
            held = self.of(number)
            held.peak = max(held.peak, live)
        if storage.chain:
            innermost = storage.chain[-1]
            self.own[innermost] = self.own.get(innermost, 0) + storage.size
            self._change(innermost, storage.size)

    def _change(self, number: int, size: int) -> None:
        last, known = self.changes[-1] if self.changes else (-1, 0)
        if last == number and (known > 0) == (size > 0):
            self.changes[-1] = number, known + size
        else:
            self.changes.append((number, size))

    def subtract(self) -> None:
        """Subtract what autograd has dropped since the last call."""
        while self.dropped:
            storage = self.dropped.popleft()
            storage.holders -= 1
            if not storage.holders:
                for number in storage.chain:
                    self.live[number] -= storage.size
                if storage.chain:
                    self.own[storage.chain[-1]] -= storage.size
                    self._change(storage.chain[-1], -storage.size)


class Saved:
    """A saved tensor, which tells when autograd drops it.

    Any thread may drop it, even while another one is counting, so that it only joins a queue.
    """

    __slots__ = ("_dropped", "_storage", "tensor")

    def __init__(self, tensor: torch.Tensor, storage: Storage, step: StepUse) -> None:
        self.tensor = tensor
        self._storage = storage
        self._dropped = step.dropped

    def __del__(self) -> None:
        self._dropped.append(self._storage)


class ThreadUse:
    """The model call that runs in one thread.

    Attributes:
        stack: the numbers of the modules whose calls are running, outermost first.
        called: the numbers of all modules called within the outermost one.
        hooks: the hooks for saved tensors that are active in the thread.
    """

    def __init__(self) -> None:
        self.stack: list[int] = []
        self.called: set[int] = set()
        self.hooks: saved_tensors_hooks | None = None

    def take_off(self) -> None:
        """Remove the hooks, from the thread itself."""
        hooks, self.hooks = self.hooks, None
        if hooks is not None:
            take_off(hooks)


class Threads(local):
    """`here` is the state of the thread that reads it; it lives as long as the thread."""

    def __init__(self, known: WeakSet[ThreadUse], together: RLock) -> None:
        self.here = ThreadUse()
        with together:
            known.add(self.here)


# -- hooks for saved tensors -------------------------------------------------------------------


def are_hooks_free() -> bool:
    """Return whether the program has no hooks for saved tensors of its own."""
    if not available("top_saved_hooks"):
        return False
    from comgra_decl.torch_private import top_saved_hooks

    return top_saved_hooks(True) is None


def take_off(hooks: saved_tensors_hooks) -> None:
    """Remove a pair of hooks from this thread, even if the program has added others since."""
    from comgra_decl.torch_private import top_saved_hooks

    above: list[saved_tensors_hooks] = []
    while (top := top_saved_hooks(True)) is not None and top[0] is not hooks.pack_hook:
        above.append(saved_tensors_hooks(*top))
        above[-1].__exit__()
    if top is not None:
        hooks.__exit__()
    for each in reversed(above):
        each.__enter__()


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same numbers that does not keep the given one alive.

    Autograd keeps what a hook returns. If that were an operation's result, which keeps autograd's
    node alive, neither would ever be freed without a backward pass.
    """
    if not is_readable(tensor):  # a subclass; torch itself detaches it like this
        return tensor.detach()
    with quiet():
        return tensor.detach()


def unpack(saved: Any) -> torch.Tensor:
    """Return the tensor of a `Saved`, or the tensor itself."""
    tensor: torch.Tensor = saved.tensor if isinstance(saved, Saved) else saved
    return tensor

"""Measures what holds memory: saved activations, parameters, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from comgra_decl.hooks.call_context import is_backward
from comgra_decl.hooks.compiled.stance import anything_compiled
from comgra_decl.hooks.guarded import guarded
from comgra_decl.hooks.hook_lists import Placed, before_steps
from comgra_decl.hooks.measuring.calls import ModuleCalls
from comgra_decl.hooks.names import Names
from comgra_decl.hooks.patches import Patch
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.records import MEMORY, PROGRAM
from comgra_decl.stats.support import is_readable
from comgra_decl.torch_private import available

if TYPE_CHECKING:
    from comgra_decl.hooks.place import ProgramPlace

_COMPILED = (
    "memory: the program uses compiled code, whose saved tensors cannot be followed, so "
    "activations are not measured"
)
_TAKEN = (
    "memory: the program uses hooks for saved tensors itself (or this torch version cannot tell), "
    "so activations are not measured"
)
_REFUSED = (
    "memory: the model uses functions that do not allow tensors to be followed ({}), so its "
    "activations are only measured up to there"
)


@dataclass
class _Storage:
    """A storage of which autograd has saved tensors.

    Attributes:
        size: its size in bytes.
        chain: the numbers of the modules whose calls were running, outermost first.
        holders: number of saved tensors that are alive.
    """

    size: int
    chain: tuple[int, ...]
    holders: int = 0


class _Saved:
    """A saved tensor, which tells when autograd drops it."""

    __slots__ = ("_dropped", "storage", "tensor")

    def __init__(
        self, tensor: torch.Tensor, storage: _Storage, dropped: Callable[[_Storage], None]
    ) -> None:
        self.tensor = tensor
        self.storage = storage
        self._dropped = dropped

    def __del__(self) -> None:
        self._dropped(self.storage)


@dataclass
class Held:
    """What one module holds, in bytes; `self` excludes modules within it.

    Attributes:
        activations: saved for the backward pass when the model returns.
        activations_self: the same, saved by operations of the module itself.
        peak: the largest size of the saved tensors at any time.
        allocated: growth of the device's allocated memory during its calls.
        inputs: its arguments, which a checkpoint would have to keep.
        calls: number of calls.
    """

    activations: int = 0
    activations_self: int = 0
    peak: int = 0
    allocated: int = 0
    inputs: int = 0
    calls: int = 0


@dataclass
class _Step:
    """The measurement of one step."""

    held: dict[int, Held] = field(default_factory=dict)
    live: dict[int, int] = field(default_factory=dict)  # saved bytes now, by module
    storages: dict[int, _Storage] = field(default_factory=dict)  # by address

    def of(self, number: int) -> Held:
        return self.held.setdefault(number, Held())


class MemoryUse:
    """The memory in the steps from `first` to `last`.

    Autograd's hooks for saved tensors are active within calls of models. They see every tensor that
    an operation saves for the backward pass, except within checkpoints, which save nothing but
    their inputs. They do not change the tensors.

    Args:
        first: the first step.
        last: the last step.
        tell: receives the document.
        remark: receives the reason if something cannot be measured.
        place: returns where the program is.
        on_fault: called with an error in tracing itself.
    """

    def __init__(
        self,
        first: int,
        last: int,
        *,
        tell: Callable[[str, Any], None],
        remark: Callable[[str], None],
        place: Callable[[], ProgramPlace],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self.first = first
        self.last = last
        self._tell = tell
        self._remark = remark
        self._place = place
        self._on_fault = on_fault
        self._calls = ModuleCalls(self._enter, self._leave, on_fault=on_fault, given=self._given)
        self._running = False
        self._step = _Step()
        self._steps: list[int] = []
        self._most: dict[int, Held] = {}
        self._stack: list[int] = []
        self._hooks: saved_tensors_hooks | None = None
        self._weights: set[int] = set()  # storages of parameters and buffers
        self._rows: dict[str, dict[str, int]] = {}
        self._device = 0
        self._optimizers: dict[int, Any] = {}
        self._before_step: Placed | None = None
        self._patch = Patch(torch.autograd.graph, "disable_saved_tensors_hooks", self._refused)

    @property
    def running(self) -> bool:
        """Whether it is attached to the program."""
        return self._running

    def begin(self, step: int) -> None:
        """Begin to measure a step."""
        if not self._running:
            self._running = True
            self._before_step = before_steps.add(self._on_step)
            self._patch.apply()
            if anything_compiled():  # compiled code must not run with hooks on it
                self._remark(_COMPILED)
            else:
                self._calls.install()
        self._steps.append(step)
        self._step = _Step()
        self._optimizers.clear()

    def end(self, step: int) -> None:
        """Handle the end of a measured step."""
        for number, held in self._step.held.items():
            known = vars(self._most.get(number, Held()))
            largest = {name: max(size, known[name]) for name, size in vars(held).items()}
            self._most[number] = Held(**largest)
        self._take_stock()
        if step >= self.last:
            self.finish()

    def finish(self) -> None:
        """Stop, and pass on what was measured."""
        rows = [*self._document()] if self._rows or self._most else []
        self._stop()
        if rows:
            exact = torch.cuda.is_initialized()
            content = {"rows": rows, "steps": self._steps, "exact": exact, "device": self._device}
            self._tell(MEMORY, content)

    def abandon(self) -> None:
        """Stop, and drop what was measured."""
        self._stop()
        self.last = -1

    def _stop(self) -> None:
        if not self._running:
            return
        self._running = False
        with ExitStack() as each:  # runs all callbacks, last first, even if one fails
            each.callback(self._calls.remove)
            each.callback(self._patch.restore)
            if self._before_step is not None:
                each.callback(self._before_step.remove)
            each.callback(self._pop)
        self._step, self._before_step = _Step(), None
        self._optimizers.clear()

    # -- module calls --------------------------------------------------------------------------

    def _given(self, number: int, args: Any) -> None:
        held = self._step.of(number)
        held.inputs += sum(_size(tensor) for _, tensor in tensors_in(args))

    def _enter(self, number: int, gradients: bool) -> tuple[int, int | None]:
        if is_backward():  # a checkpoint repeats the forward pass
            return -1, None
        if not self._stack and gradients:
            self._push()
        self._stack.append(number)
        entry = self._step.of(number)
        entry.calls += 1
        return number, _allocated()

    def _leave(self, state: tuple[int, int | None]) -> None:
        number, before = state
        if number < 0 or number not in self._stack:
            return
        while self._stack.pop() != number:
            pass
        after, step = _allocated(), self._step
        if before is not None and after is not None:
            entry = step.of(number)
            entry.allocated += max(after - before, 0)
            self._device = max(self._device, after)
        if not self._stack:
            self._pop()
            for module, size in step.live.items():
                entry = step.of(module)
                entry.activations = max(step.of(module).activations, size)

    def _push(self) -> None:
        if self._hooks is None and not _are_hooks_free():
            self._remark(_TAKEN)  # the innermost hooks replace all others
        elif self._hooks is None:
            self._weights = {_address(tensor) for tensor in self._own_tensors()}
            hooks = saved_tensors_hooks(self._pack, _unpack)
            try:
                hooks.__enter__()
            except RuntimeError as error:  # the program does not allow them here
                self._remark(_REFUSED.format(error))
                return
            self._hooks = hooks

    def _pop(self) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()
        self._stack.clear()

    def _refused(self, original: Callable[..., Any], message: str) -> Any:
        """Give way to functions that raise if such hooks are active."""
        if self._hooks is not None:
            hooks, self._hooks = self._hooks, None
            hooks.__exit__()
            self._remark(_REFUSED.format(message))
        return original(message)

    # -- saved tensors -------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Any:
        try:
            if not self._running or not is_readable(tensor):
                return tensor
            address = _address(tensor)
            if address in self._weights or not address:
                return tensor
            step, chain = self._step, tuple(dict.fromkeys(self._stack))
            known = step.storages.get(address)
            if known is None or not known.holders:
                size = tensor.untyped_storage().nbytes()
                known = step.storages[address] = _Storage(size, chain)
                self._grow(step, known)
            known.holders += 1
            return _Saved(tensor, known, lambda storage: self._drop(step, storage))
        except Exception as error:
            self._on_fault(error)
            return tensor

    def _grow(self, step: _Step, storage: _Storage) -> None:
        for number in storage.chain:
            live = step.live[number] = step.live.get(number, 0) + storage.size
            held = step.of(number)
            held.peak = max(held.peak, live)
        if storage.chain:
            entry = step.of(storage.chain[-1])
            entry.activations_self += storage.size

    def _drop(self, step: _Step, storage: _Storage) -> None:
        storage.holders -= 1
        if not storage.holders:
            for number in storage.chain:
                step.live[number] -= storage.size

    # -- everything else -----------------------------------------------------------------------

    @guarded
    def _on_step(self, optimizer: Any, *_: Any) -> None:
        self._optimizers[id(optimizer)] = optimizer

    def _own_tensors(self) -> Iterator[torch.Tensor]:
        for model in self._calls.outermost():
            yield from model.parameters()
            yield from model.buffers()

    def _take_stock(self) -> None:
        """Read the sizes of parameters, gradients and optimizer states after a step."""
        names, rows = Names(self._place().naming), self._rows
        rows.clear()
        owners: dict[int, list[str]] = {}
        for model in self._calls.outermost():
            nodes = {module: names.module(module, within=model) for module in model.modules()}
            for module, chain in _chains(model, nodes):
                for tensor in (*module._parameters.values(), *module._buffers.values()):
                    if tensor is not None and id(tensor) not in owners:
                        owners[id(tensor)] = chain
                        gradient = tensor.grad if tensor.is_leaf else None
                        sizes = {"parameters": _size(tensor)}
                        sizes["gradients"] = 0 if gradient is None else _size(gradient)
                        self._add(chain, sizes)
        for optimizer in self._optimizers.values():
            for parameter, state in [*optimizer.state.items()]:
                found = sum(_size(t) for _, t in tensors_in(state))
                self._add(owners.get(id(parameter), [PROGRAM]), {"optimizer": found})
        self._device = max(self._device, _allocated() or 0)

    def _add(self, chain: list[str], sizes: dict[str, int]) -> None:
        for node in dict.fromkeys(chain):
            row = self._rows.setdefault(node, {"parameters": 0, "gradients": 0, "optimizer": 0})
            for name, size in sizes.items():
                row[name] += size

    def _document(self) -> Iterator[dict[str, Any]]:
        nodes = self._calls.names(self._place())
        by_node: dict[str, Held] = {}
        for number, held in self._most.items():
            known = vars(by_node.get(nodes[number], Held()))
            total = {name: size + known[name] for name, size in vars(held).items()}
            by_node[nodes[number]] = Held(**total)
        nothing = {"parameters": 0, "gradients": 0, "optimizer": 0}
        for node in dict.fromkeys((*by_node, *self._rows)):
            held = by_node.get(node, Held())
            yield {"node": node, **vars(held), **self._rows.get(node, nothing)}


def _are_hooks_free() -> bool:
    """Return whether the program has no hooks for saved tensors of its own."""
    if not available("top_saved_hooks"):
        return False
    from comgra_decl.torch_private import top_saved_hooks

    return top_saved_hooks(True) is None


def _unpack(saved: Any) -> torch.Tensor:
    tensor: torch.Tensor = saved.tensor if isinstance(saved, _Saved) else saved
    return tensor


def _chains(model: nn.Module, nodes: dict[nn.Module, str]) -> Iterator[tuple[nn.Module, list[str]]]:
    """Yield each module with the nodes of the modules that contain it and its own."""
    paths = dict(model.named_modules())
    for path, module in paths.items():
        parts = path.split(".") if path else []
        above = (".".join(parts[:length]) for length in range(len(parts) + 1))
        yield module, [nodes[paths[prefix]] for prefix in above if prefix in paths]


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr()) if is_readable(tensor) else 0


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _allocated() -> int | None:
    return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else None

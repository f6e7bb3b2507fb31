"""Measures what holds memory: saved activations, parameters, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from comgra_decl.hooks.call_context import is_backward
from comgra_decl.hooks.compiled.stance import anything_compiled
from comgra_decl.hooks.guarded import guarded
from comgra_decl.hooks.hook_lists import Placed, before_steps
from comgra_decl.hooks.measuring.calls import Call, ModuleCalls
from comgra_decl.hooks.measuring.measured import Measurement, Surroundings
from comgra_decl.hooks.measuring.saved import (
    Held,
    Saved,
    StepUse,
    Threads,
    ThreadUse,
    are_hooks_free,
    detached,
    unpack,
)
from comgra_decl.hooks.names import Names
from comgra_decl.hooks.patches import Patch
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.records import MEMORY, OTHER, PROGRAM
from comgra_decl.stats.support import is_readable

_DEVICE = "cuda"

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


_MOST_MOMENTS = 400
"""Most moments of a step that are kept; more are joined, several at a time."""


class _Entered(NamedTuple):
    """A module call; the device's allocated memory when it began is None without a device."""

    number: int
    allocated: int | None


class MemoryUse(Measurement):
    """The memory.

    Autograd's hooks for saved tensors are active within calls of models, in every thread that calls
    one. They see every tensor that an operation saves for the backward pass, except within
    checkpoints, which save nothing but their inputs. They do not change the tensors.

    Args:
        steps: the first and the last step.
        around: the program and the run.
    """

    name = MEMORY

    def __init__(self, steps: Sequence[int], around: Surroundings) -> None:
        super().__init__(steps, around)
        self._calls = ModuleCalls(self._enter, self._leave, on_fault=self.fail, keywords=True)
        self._running = False
        self._step = StepUse()
        self._steps: list[int] = []
        self._most: dict[int, Held] = {}
        self._known_threads: WeakSet[ThreadUse] = WeakSet()
        self._together = RLock()  # held by the only thread that may change counts
        self._threads = Threads(self._known_threads, self._together)
        self._weights: set[int] = set()  # storages of parameters and buffers
        self._rows: dict[str, dict[str, int]] = {}
        self._totals: list[dict[str, int]] = []
        self._fullest = 0, list[tuple[int, int]]()
        self._gradients_before: int | None = None
        self._device = 0
        self._beyond: int | None = None
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
                self._around.remark(_COMPILED)
            else:
                self._calls.install()
        self._steps.append(step)
        self._step = StepUse()
        self._gradients_before = None
        self._optimizers.clear()

    def end(self, step: int) -> None:
        """Handle the end of a measured step."""
        with self._together:
            self._step.subtract()
            for number, held in self._step.held.items():
                known = vars(self._most.get(number, Held()))
                largest = {name: max(size, known[name]) for name, size in vars(held).items()}
                self._most[number] = Held(**largest)
        self._sum_up(step, self._take_stock())
        if step >= self.last:
            self.finish()

    def finish(self) -> None:
        """Stop, and pass on what was measured."""
        rows = [*self._document()] if self._rows or self._most else []
        moments = self._moments()
        self._stop()
        if rows:
            exact = _allocated() is not None  # whether there is a device
            content = {"rows": rows, "steps": self._steps, "exact": exact, "device": self._device}
            self._around.tell(MEMORY, {**content, "totals": self._totals, "moments": moments})

    def _stop(self) -> None:
        if not self._running:
            return
        self._running = False
        with ExitStack() as each:  # runs all callbacks, last first, even if one fails
            each.callback(self._let_go)
            if self._before_step is not None:
                each.callback(self._before_step.remove)
            each.callback(self._threads.here.take_off)
        self._step, self._before_step = StepUse(), None
        self._optimizers.clear()

    def _let_go(self) -> None:
        """Stop following calls, unless the hooks of another thread are still in place.

        Only that thread can remove them, at the end of the call that it is in.
        """
        with self._together:
            followed = any(thread.hooks is not None for thread in self._known_threads)
        if not followed:
            self._calls.remove()
            self._patch.restore()

    # -- module calls --------------------------------------------------------------------------

    def _enter(self, call: Call) -> _Entered | None:
        if not self._running or is_backward():  # a checkpoint repeats the forward pass
            return None
        here, number = self._threads.here, call.number
        if not here.stack:
            here.called.clear()
            if call.gradients:
                self._push(here)
                self._note_gradients()
        here.stack.append(number)
        here.called.add(number)
        with self._together:
            if len(here.stack) == 1:
                self._step.begin(number)
            self._step.count(number)
            if call.gradients:
                # self-attention gets one tensor three times
                sizes = {id(tensor): _size(tensor) for _, tensor in tensors_in(call.inputs)}
                self._step.enter(number, sum(sizes.values()))
        return _Entered(number, _allocated())

    def _leave(self, entered: _Entered | None) -> None:
        here = self._threads.here
        if entered is None or entered.number not in here.stack:
            return
        while here.stack.pop() != entered.number:
            pass
        if not here.stack:
            here.take_off()
        if not self._running:
            self._let_go()
            return
        with self._together:
            self._count(entered, here)

    def _count(self, entered: _Entered, here: ThreadUse) -> None:
        """Count the memory at the end of a call."""
        after, step = _allocated(), self._step
        if entered.allocated is not None and after is not None:
            use = step.of(entered.number)
            use.allocated += max(after - entered.allocated, 0)
            self._device = max(self._device, after)
        if not here.stack:
            step.returned(here.called)

    def _push(self, here: ThreadUse) -> None:
        if here.hooks is not None:
            return
        if not are_hooks_free():
            self._around.remark(_TAKEN)  # the innermost hooks replace all others
            return
        self._weights = {_address(tensor) for tensor in self._own_tensors()}
        hooks = saved_tensors_hooks(self._pack, unpack)
        try:
            hooks.__enter__()
        except RuntimeError as error:  # the program does not allow them here
            self._around.remark(_REFUSED.format(error))
            return
        here.hooks = hooks

    def _refused(self, original: Callable[..., Any], message: str) -> Any:
        """Give way to functions that raise if such hooks are active."""
        try:
            here = self._threads.here
            if here.hooks is not None:
                here.take_off()
                self._around.remark(_REFUSED.format(message))
        except Exception as error:
            self.fail(error)
        return original(message)

    # -- saved tensors -------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Any:
        kept = tensor
        try:
            kept = detached(tensor)
            address = _address(tensor)
            if not self._running or not address or address in self._weights:
                return kept
            size = tensor.untyped_storage().nbytes()
            chain = tuple(dict.fromkeys(self._threads.here.stack))
            with self._together:
                step = self._step
                return Saved(kept, step.save(address, size, chain), step)
        except Exception as error:
            self.fail(error)
            return kept

    # -- everything else -----------------------------------------------------------------------

    @guarded
    def _on_step(self, optimizer: Any, *_: Any) -> None:
        self._optimizers[id(optimizer)] = optimizer

    def _own_tensors(self) -> Iterator[torch.Tensor]:
        for model in self._calls.outermost():
            yield from model.parameters()
            yield from model.buffers()

    def _note_gradients(self) -> None:
        """Note the size of the gradients before the first model call of a step."""
        if self._gradients_before is None:
            kept = (tensor.grad for tensor in self._own_tensors() if tensor.is_leaf)
            self._gradients_before = sum(_size(grad) for grad in kept if grad is not None)

    def _sum_up(self, step: int, total: dict[str, int]) -> None:
        """Keep the totals of a step, and the changes within the fullest one."""
        held = most = 0
        for _, size in self._step.changes:
            held += size
            most = max(most, held)
        if most >= self._fullest[0]:
            self._fullest = most, self._step.changes
        before = self._gradients_before or 0
        self._totals.append({"step": step, "activations": most, "gradients_before": before} | total)

    def _moments(self) -> dict[str, Any]:
        """Return how the activations change within the fullest step.

        `nodes` are names; `changes` are triples: the number of a moment, the place in `nodes`, and
        by how many bytes its saved tensors grow or shrink.
        """
        peak, changes = self._fullest
        names = self._calls.names(self._around.place()) if changes else []
        nodes: dict[str, int] = {}
        every = -(-len(changes) // _MOST_MOMENTS)
        joined: dict[tuple[int, int], int] = {}
        for i, (number, size) in enumerate(changes):
            key = i // every, nodes.setdefault(names[number], len(nodes))
            joined[key] = joined.get(key, 0) + size
        totals = [total["step"] for total in self._totals if total["activations"] == peak]
        return {
            "step": totals[-1] if totals else None,
            "nodes": [*nodes],
            "changes": [[*key, size] for key, size in joined.items()],
        }

    def _take_stock(self) -> dict[str, int]:
        """Read the sizes of parameters, gradients and optimizer states after a step.

        Returns the sum of each, and on a device what is left.
        """
        total = {"parameters": 0, "gradients": 0, "optimizer": 0}
        names, rows = Names(self._around.place().naming), self._rows
        rows.clear()
        owners: dict[int, list[str]] = {}
        known: list[torch.Tensor] = []
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
                        for name, size in sizes.items():
                            total[name] += size
                        known += [tensor] if gradient is None else [tensor, gradient]
        for optimizer in self._optimizers.values():
            for parameter, state in [*optimizer.state.items()]:
                states = [tensor for _, tensor in tensors_in(state)]
                chain = owners.get(id(parameter), [PROGRAM])
                size = sum(map(_size, states))
                self._add(chain, {"optimizer": size})
                total["optimizer"] += size
                known += states
        self._device = max(self._device, _allocated() or 0)
        requested = _requested()
        if requested is not None:
            rest = max(requested - _on_devices(known), 0)
            self._beyond = max(self._beyond or 0, rest)
            total["other"] = rest
        return total

    def _add(self, chain: list[str], sizes: dict[str, int]) -> None:
        for node in dict.fromkeys(chain):
            row = self._rows.setdefault(node, {"parameters": 0, "gradients": 0, "optimizer": 0})
            for name, size in sizes.items():
                row[name] += size

    def _document(self) -> Iterator[dict[str, Any]]:
        nodes = self._calls.names(self._around.place())
        by_node: dict[str, Held] = {}
        for number, held in self._most.items():
            known = vars(by_node.get(nodes[number], Held()))
            total = {name: size + known[name] for name, size in vars(held).items()}
            by_node[nodes[number]] = Held(**total)
        nothing = {"parameters": 0, "gradients": 0, "optimizer": 0}
        for node in dict.fromkeys((*by_node, *self._rows)):
            held = by_node.get(node, Held())
            yield {"node": node, **vars(held), **self._rows.get(node, nothing)}
        if self._beyond is not None:
            yield {"node": OTHER, **vars(Held(allocated=self._beyond)), **nothing}


# -- sizes -------------------------------------------------------------------------------------


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


def _requested() -> int | None:
    """Return the bytes in use on all CUDA devices, without rounding; None if unknown."""
    if not torch.cuda.is_initialized():
        return None
    total = 0
    for device in range(torch.cuda.device_count()):
        size = torch.cuda.memory_stats(device).get("requested_bytes.all.current")
        if size is None:  # another allocator
            return None
        total += int(size)
    return total


def _on_devices(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages on CUDA devices, each counted once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        if tensor.device.type == _DEVICE and (address := _address(tensor)):
            storages[address] = tensor.untyped_storage().nbytes()
    return sum(storages.values())

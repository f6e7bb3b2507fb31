"""Watch a script from outside: its state after each step, or its activity in each step.

With `SCRIPTS_WATCH=bits`, writes digests of everything on which an optimizer step may depend. It
does so in the same way in plain and traced processes, and attaches nothing else. With
`SCRIPTS_WATCH=calls`, in a separate process that is never traced, torch hooks count what a complete
record must contain.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import json
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

_DETAILED = 60
"""Number of optimizer steps observed with all numbers; later steps have only calls and losses."""

_DRAWN = 3
"""Number of backward passes whose autograd graph is followed."""

_NUMBERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def begin() -> None:
    """Seed the generators and start watching; called after the import of torch."""
    seed = int(os.environ.get("SCRIPTS_SEED", "1"))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    watcher = _made()
    watcher.attach()
    _Writer(watcher).keep()


def _made() -> Bits | Calls:
    return Calls() if os.environ["SCRIPTS_WATCH"] == "calls" else Bits()


class _Writer:
    """Writes the observations when this process, or one forked from it, ends."""

    def __init__(self, watcher: Bits | Calls) -> None:
        self._watcher = watcher

    def keep(self) -> None:
        """Register the write for every way in which the process can end."""
        atexit.register(self._write)
        util.Finalize(None, self._write, exitpriority=0)  # for multiprocessing, which skips atexit
        util.register_after_fork(self, _Writer._forked)
        self._owner = self._first = os.getpid()

    def _forked(self) -> None:
        self._watcher.forget()
        self._owner = os.getpid()
        util.Finalize(None, self._write, exitpriority=0)

    def _write(self) -> None:
        first = self._owner == self._first
        if os.getpid() == self._owner and (first or self._watcher.anything):
            path = Path(os.environ["SCRIPTS_ANSWER"]) / f"{self._owner}.json"
            answer = self._watcher.answer()
            used = os.times()
            answer["used"] = used.user + used.system + used.children_user + used.children_system
            path.write_text(json.dumps(answer))


class _Stop:
    """Interrupts the program like Ctrl-C after `SCRIPTS_STOP` optimizer steps.

    The interrupt comes when the next step begins, after all other hooks of the last step have run.
    """

    def __init__(self) -> None:
        self._left = int(os.environ.get("SCRIPTS_STOP", "0"))
        if (
            self._left and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        ):  # background processes ignore it
            signal.signal(signal.SIGINT, signal.default_int_handler)

        if self._left:
            register_optimizer_step_pre_hook(lambda *_: self._count())

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            signal.raise_signal(signal.SIGINT)


# -- bits: the same in a plain and in a traced process ---------------------------------------------


class Bits:
    """Digests of the state after each optimizer step."""

    def __init__(self) -> None:
        self._steps: list[list[Any]] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[Optimizer] = []
        self._seconds = 0.0
        _Stop()

    def attach(self) -> None:
        """Register a hook that takes the digests after each step."""
        register_optimizer_step_post_hook(lambda optimizer, *_: self._take(optimizer))

    @property
    def anything(self) -> bool:
        """Whether any optimizer has stepped."""
        return bool(self._steps)

    def forget(self) -> None:
        """Discard all observations, in a forked process."""
        self._steps, self._seconds = [], 0.0

    def _take(self, optimizer: Optimizer) -> None:
        began = time.thread_time()
        if id(optimizer) not in self._numbers:
            self._numbers[id(optimizer)] = len(self._kept)
            self._kept.append(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        parts = (
            parameters,
            [p.grad for p in parameters],
            [optimizer.state.get(p) for p in parameters],
            [random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state()],
        )
        digests = [_digest(part) for part in parts]
        self._steps.append([self._numbers[id(optimizer)], *digests])
        self._seconds += time.thread_time() - began

    def answer(self) -> dict[str, Any]:
        """Return the digests of all steps and of the final state, and the seconds spent on them."""
        began = time.thread_time()
        held = [t for o in gc.get_objects() if issubclass(type(o), nn.Module) for t in _own(o)]
        final = hashlib.sha256("".join(sorted({_digest(t) for t in held})).encode()).hexdigest()
        self._seconds += time.thread_time() - began
        return {"steps": self._steps, "final": final[:16], "seconds": self._seconds}


def _own(module: nn.Module) -> list[Tensor]:
    held = [*module._parameters.values(), *module._buffers.values()]
    return [tensor for tensor in held if tensor is not None]


def _digest(value: Any) -> str:
    found = hashlib.sha256()
    for piece in _pieces(value):
        found.update(piece)
    return found.hexdigest()[:16]


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        if value.numel() and not value.is_meta and not isinstance(value, _UNREADABLE):
            plain = value.detach()
            plain = plain if plain.layout == torch.strided else plain.to_dense()
            yield plain.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for key in value:
            yield str(key).encode()
            yield from _pieces(value[key])
    elif isinstance(value, (list, tuple, deque)):
        for child in value:
            yield from _pieces(child)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield repr(value).encode()


_UNREADABLE = (nn.UninitializedParameter, nn.UninitializedBuffer)


# -- calls: what a complete record must contain
# -------------------------------------------------------


class Calls:
    """What the script does between optimizer steps, as observed by torch hooks.

    Each optimizer step ends a segment. The last segment contains what follows the last step.
    """

    def __init__(self) -> None:
        self._modules: dict[int, int] = {}
        self._kept: list[nn.Module] = []
        self._above: dict[int, list[tuple[nn.Module, str]]] = {}
        self._holders: dict[int, list[tuple[nn.Module, str]]] = {}
        self._ancestors: dict[int, list[tuple[int, str]]] = {}
        self._owners: dict[int, list[tuple[int, str]]] = {}
        self._tensors: list[Any] = []
        self._optimizers: dict[int, int] = {}
        self._classes: list[str] = []
        self._segments: list[dict[str, Any]] = [_segment()]
        self._depth = threading.local()
        self._made: dict[Any, list[int]] = {}
        self._edges: set[tuple[int, int]] = set()
        self._to_loss: set[int] = set()
        self._drawn = 0
        self._closure = False
        self._begun = False  # whether a module that has parameters was called
        _Stop()

    def attach(self) -> None:
        """Attach torch hooks and a wrapper around backward."""
        modules.register_module_forward_pre_hook(self._enter)
        modules.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(lambda optimizer, *_: self._after(optimizer))
        torch.autograd.backward = self._backward(torch.autograd.backward)

    @property
    def anything(self) -> bool:
        """Whether a module or backward was called."""
        return len(self._segments) > 1 or bool(self._kept or self._segments[0]["losses"])

    def forget(self) -> None:
        """Discard all observations, in a forked process."""
        self._segments = [_segment()]

    # calls to modules

    def _enter(self, module: nn.Module, _args: Any) -> None:
        depth = getattr(self._depth, "value", 0)
        if depth == 0 and id(module) not in self._above:
            self._scan()  # only here: modules created within a call are not part of a model
        if depth == 0 and not self._begun:
            self._begun = next(module.parameters(), None) is not None
        self._depth.value = depth + 1

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._depth.value = max(getattr(self._depth, "value", 1) - 1, 0)
        if torch._C._current_graph_task_id() != -1 or torch.compiler.is_compiling():
            return  # the recomputation of a checkpoint
        first = next(_found_tensors(output), None)
        if first is None:
            return
        number = self._number(module)
        now = self._segments[-1]
        grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        call = now["calls"].setdefault(number, dict(_UNCALLED))
        call["grad" if grad else "plain"] += 1
        call["eval"] += not module.training
        if self._depth.value == 0:
            given = next(_found_tensors([args, kwargs]), None) is not None
            call["fed"] = call["fed"] or (given and first.requires_grad)
            mine = [module.training, grad, first.requires_grad]
            roots = now["roots"].setdefault(number, [])
            if mine not in roots:
                roots.append(mine)
        known = id(module) in self._above  # otherwise it was created in this very call
        if grad and module.training and self._begun and known:
            if call["mean"] is None:
                call["mean"] = self._mean(first)
            if first.requires_grad and call["trained"] is None:
                call["trained"] = self._mean(first)
        if self._drawn < _DRAWN and first.grad_fn is not None:
            given_by = [t.grad_fn for t in _found_tensors([args, kwargs])]
            if first.grad_fn not in given_by:  # an identity computes nothing
                self._made.setdefault(first.grad_fn, []).append(number)

    def _mean(self, tensor: Tensor) -> list[float] | None:
        if len(self._segments) > _DETAILED or tensor.dtype not in _NUMBERS or not tensor.numel():
            return None
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
            return None
        if torch._C._functorch.maybe_current_level() is not None:
            return None
        values = tensor.detach().double()
        return [float(values.mean()), float(values.abs().mean())]

    def _number(self, module: nn.Module) -> int:
        number = self._modules.get(id(module))
        if number is None:
            number = self._modules[id(module)] = len(self._kept)
            self._kept.append(module)
        if number not in self._ancestors:
            self._name(module, number)
        return number

    def _name(self, module: nn.Module, number: int) -> None:
        """Find all modules that contain this one, with the paths to it."""
        found: list[tuple[int, str]] = []
        self._ancestors[number] = found
        waiting: list[tuple[nn.Module, str]] = [(module, "")]
        while waiting and len(found) < 200:
            holder, path = waiting.pop(0)
            found.append((self._plain_number(holder), path))
            for above, name in self._above.get(id(holder), ()):
                waiting.append((above, f"{name}.{path}".rstrip(".")))

    def _plain_number(self, module: nn.Module) -> int:
        if id(module) not in self._modules:
            self._modules[id(module)] = len(self._kept)
            self._kept.append(module)
        return self._modules[id(module)]

    def _scan(self) -> None:
        """Record which modules and parameters each existing module contains."""
        self._above.clear()
        self._holders.clear()
        for held in gc.get_objects():
            if issubclass(type(held), nn.Module) and "_modules" in vars(held):
                self._above.setdefault(id(held), [])
                for name, child in held._modules.items():
                    if child is not None:
                        self._above.setdefault(id(child), []).append((held, name))
                for name, parameter in held._parameters.items():
                    if parameter is not None:
                        self._holders.setdefault(id(parameter), []).append((held, name))

    # parameters and optimizers

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._closure = any(callable(a) for a in (*args[1:2], kwargs.get("closure")))
        if not self._closure:
            self._note_gradients(optimizer)

    def _note_gradients(self, optimizer: Optimizer) -> None:
        grads = self._segments[-1]["grads"]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._note_gradient(grads, parameter)

    def _note_gradient(self, grads: dict[int, Any], parameter: Tensor) -> None:
        norm = None
        if len(self._segments) <= _DETAILED and parameter.grad is not None:
            grad = parameter.grad.detach()
            grad = grad if grad.layout == torch.strided else grad.to_dense()
            norm = float(grad.double().norm()) if not grad.is_complex() else None
        grads[self._parameter(parameter)] = norm

    def _parameter(self, parameter: Tensor) -> int:
        if id(parameter) not in self._owners:
            if id(parameter) not in self._holders:
                self._scan()
            held = self._holders.setdefault(id(parameter), [])
            self._tensors.append(parameter)
            number = len(self._tensors) - 1
            owners = [(self._number(module), name) for module, name in held]
            self._owners[id(parameter)] = [(number, ""), *owners]
        return self._owners[id(parameter)][0][0]

    def _after(self, optimizer: Optimizer) -> None:
        if self._closure:  # the step itself called backward
            self._note_gradients(optimizer)
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = len(self._classes)
            self._classes.append(type(optimizer).__name__)
            self._tensors.append(optimizer)
        self._segments[-1]["optimizer"] = self._optimizers[id(optimizer)]
        self._segments.append(_segment())
        if self._drawn >= _DRAWN:
            self._made.clear()

    # losses and the graph

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            values = [float(t.detach().double().sum()) for t in listed if not t.is_meta]
            losses = self._segments[-1]["losses"]
            if len(losses) < 1000:
                losses.append(values[0] if len(values) == 1 else None)
            leaves: list[Tensor] = []
            if self._drawn < _DRAWN:
                self._drawn += 1
                for tensor in listed:
                    self._follow(tensor, leaves)
            result = original(tensors, *args, **kwargs)
            after = self._segments[-1]["leaves"]
            for leaf in leaves:
                after.append(self._parameter(leaf))
            return result

        return backward

    def _follow(self, loss: Tensor, leaves: list[Tensor]) -> None:
        """Follow the autograd graph to find which module outputs are computed from which others."""
        waiting: list[tuple[Any, int | None]] = [(loss.grad_fn, None)]
        done: set[tuple[int, int | None]] = set()
        while waiting:
            node, sink = waiting.pop()
            if node is None or (id(node), sink) in done or len(done) > 200_000:
                continue
            done.add((id(node), sink))
            variable = getattr(node, "variable", None)
            if variable is not None:
                leaves.append(variable)
                continue
            here = self._made.get(node)
            if here is not None:
                # The first of several modules that return the same tensor computed it; its
                # containers only pass it on.
                if sink is None:
                    self._to_loss.add(here[0])
                else:
                    self._edges.add((here[0], sink))
                sink = here[0]
            waiting += [(above, sink) for above, _ in node.next_functions]

    def answer(self) -> dict[str, Any]:
        """Return all observations as JSON-compatible data."""
        self._scan()
        for number, found in list(self._ancestors.items()):
            if len(found) == 1:  # perhaps created in a call and kept
                self._name(self._kept[number], number)
        for number in [n for segment in self._segments for n in segment["calls"]]:
            self._number(self._kept[number])
        parameters = [
            [list(owner) for owner in owners[1:]]
            for owners in sorted(self._owners.values(), key=lambda o: o[0][0])
        ]
        numbers = [owners[0][0] for owners in sorted(self._owners.values(), key=lambda o: o[0][0])]
        return {
            "segments": self._segments,
            "optimizers": self._classes,
            "modules": [
                {
                    "class": type(module).__name__,
                    "parameters": _names(module),
                    "above": self._ancestors.get(number, []),
                }
                for number, module in enumerate(self._kept)
            ],
            "parameters": dict(zip(map(str, numbers), parameters, strict=True)),
            "edges": sorted(self._edges),
            "to_loss": sorted(self._to_loss),
        }


_UNCALLED = {"grad": 0, "plain": 0, "eval": 0, "mean": None, "trained": None, "fed": False}


def _segment() -> dict[str, Any]:
    empty: dict[str, Any] = {"calls": {}, "roots": {}, "losses": [], "grads": {}, "leaves": []}
    return empty | {"optimizer": None}


def _names(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters, including those in a `ParameterDict`."""
    kept = [c for c in module._modules.values() if isinstance(c, nn.ParameterDict)]
    return [n for m in (module, *kept) for n, p in m._parameters.items() if p is not None]


def _found_tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth < 6:
        if isinstance(value, Mapping):
            children = list(value.values())
        elif isinstance(value, (list, tuple)):
            children = list(value)
        elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
            children = [getattr(value, name, None) for name in value.__dataclass_fields__]
        else:
            children = []
        for child in children:
            yield from _found_tensors(child, depth + 1)

"""Clean copies of a model: nothing that happens to the copy reaches the program."""

from __future__ import annotations

import copy
import io
import queue
import threading
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from comgra_decl.errors import ProbeError
from comgra_decl.hooks.module_tree import named_modules, wrapped
from comgra_decl.hooks.other_threads import this_thread

_COMPUTING = "torch.nn.utils."
"""The package whose pre-hooks compute parameters (weight norm, spectral norm, pruning)."""

_OF_FRAMEWORKS = ("_trainer", "_fabric")
"""Attributes through which a Lightning module refers to its trainer; the copy shares them."""

_ENGINES = ("FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
"""Classes, or base classes, of models whose parameters are distributed over processes."""


_STATEFUL = (Iterator, threading.local, queue.SimpleQueue, ContextVar)
"""Objects that Python cannot copy and that `forward` may change, so that sharing them with a copy
would change the training."""

_LOCKS: dict[type, Callable[[], Any]] = {
    type(threading.Lock()): threading.Lock,
    type(threading.RLock()): threading.RLock,
}
"""Locks, for which a copy gets new ones, because the program may hold its own."""

_NAMES = (type, FunctionType, BuiltinFunctionType, ModuleType)
"""Objects that `deepcopy` shares as well, or would have to."""

_ATOMS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Generator)
"""Objects that `deepcopy` does not copy, or that take no memory worth counting."""

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)

_OBJECT = 256
"""Bytes for which each object counts: itself, and what `deepcopy` remembers about it."""


class NotReadyError(ProbeError):
    """The model cannot be copied yet, because it creates its parameters in its first call."""


class Watch(Protocol):
    """Observes the calls to a copy's modules."""

    def before(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Handle the beginning of a call; return other arguments, or None for the same ones."""

    def after(self, path: str, module: nn.Module, output: Any) -> Any:
        """Return the output of a call, or a replacement for it."""


class CleanCopy:
    """A copy of a model, with its own parameters, buffers, generators and plain attributes.

    If Python cannot copy a module, its parts are copied one by one, and objects in its attributes
    that cannot be copied are shared with the program, except those that `forward` may change.

    It has none of the program's hooks, except those from `torch.nn.utils` that compute parameters.
    Its modules call `watch` and bypass all global module hooks, unless they are `traceable`. Tied
    parameters stay tied. Compiled models run eagerly.

    Args:
        root: the model, or a wrapper (DDP, `torch.compile`) around it; the wrapped model is copied.
        paths: the path of each module, by its `id`.
        host: whether to copy the model to the CPU.
        traceable: whether the modules call global hooks like other modules, so that they can be
            traced; `watch` is then not called.

    Attributes:
        module: the copy.
        device: the device that the copy is on.
        moved: whether the copy is on the CPU as asked, or because the device had too little memory.
        shared: the types of the objects that the copy shares with the program.
        watch: while it is set, observes the calls to modules.

    Raises:
        NotReadyError: the model has not created its parameters yet.
        ProbeError: the model cannot be copied; the message states why.
    """

    def __init__(
        self,
        root: nn.Module,
        paths: Mapping[int, str],
        *,
        host: bool = False,
        traceable: bool = False,
    ) -> None:
        inner = unwrapped(root)
        check_whole(root, inner)
        self.moved = host
        self._traceable = traceable
        self.watch: Watch | None = None
        self.shared: list[str] = []
        try:
            memo = self._copy(inner, _on_the_host if host else torch.Tensor.clone)
        except torch.OutOfMemoryError:
            self.moved = True
            memo = self._copy(inner, _on_the_host)
        self.module: nn.Module = memo[id(inner)]
        self._originals = {id(each): weakref.ref(each) for each in inner.modules()}
        originals = {id(memo[key]): path for key, path in paths.items() if key in memo}
        self.paths = {id(m): originals.get(id(m), name) for name, m in named_modules(self.module)}
        copied = [value for value in memo.values() if isinstance(value, nn.Module)]
        self._modules = list({id(m): m for m in [*self.module.modules(), *copied]}.values())
        self.device = next((t.device for t in _tensors_of(self.module)), torch.device("cpu"))
        for module in self._modules:
            _remove_hooks(module)
            module._compiled_call_impl = None
            if not traceable:
                self._take_over(module)

    def _copy(
        self, inner: nn.Module, clone: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[int, Any]:
        """Copy a model; return what `deepcopy` has made of each object, by its `id`."""
        memo = _prepared(inner, clone)
        try:
            made = copy.deepcopy(inner, memo)
            if not {*made.modules()} & {*inner.modules()}:  # as a `__deepcopy__` may return
                return {**memo, id(inner): made}
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever the program's classes raise
            pass
        memo = _prepared(inner, clone)
        self.shared = _share(inner, memo)
        try:
            _copy_by_parts(inner, memo)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ProbeError(
                f"{type(inner).__name__} cannot be copied ({type(error).__name__}: {error}). Keep "
                "objects that cannot be copied and that `forward` changes, such as a generator, "
                "outside the model"
            ) from error
        return memo

    def _take_over(self, module: nn.Module) -> None:
        computing = list(module._forward_pre_hooks.values())
        path = self.paths.get(id(module))
        module._compiled_call_impl = partial(self._call, module, path, computing)

    def _call(
        self,
        module: nn.Module,
        path: str | None,
        computing: list[Callable[..., Any]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call a module in the copy, in place of `Module.__call__`."""
        watch = None if path is None else self.watch
        if watch is not None and path is not None:
            args, kwargs = watch.before(path, module, args, kwargs) or (args, kwargs)
        for hook in computing:
            hook(module, args)
        output = module.forward(*args, **kwargs)
        return output if watch is None or path is None else watch.after(path, module, output)

    def adopt(self, path: str, module: nn.Module, *, host: nn.Module, name: str) -> None:
        """Add a module to the copy, whose calls are observed like those of the others.

        Args:
            path: its path.
            module: the module.
            host: the module of the copy to which it belongs.
            name: its name there.
        """
        host._modules[name] = module  # assignment would call the program's registration hooks
        self.paths[id(module)] = path
        self._modules.append(module)
        if not self._traceable:
            self._take_over(module)

    def set_mode(self, training: bool | None) -> None:
        """Set the mode of every module, without calling `train`, which programs override.

        Args:
            training: None to leave every module in the mode in which it was copied.
        """
        if training is not None:
            for module in self._modules:
                module.training = training

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, watch: Watch | None = None
    ) -> Any:
        """Return the output of the copy; `watch` observes the calls to its modules."""
        self.watch = watch
        try:
            with self.apart():
                return self.module(*args, **kwargs)
        finally:
            self.watch = None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Refuse calls to the program's own modules in this thread.

        A `forward` that reaches modules through a closure or a weak reference reaches those of the
        program, because functions are not copied. They would see the calls and change.

        Raises:
            ProbeError: such a module was called.
        """
        thread = this_thread.number

        def refuse(module: nn.Module, _args: Any) -> None:
            known = self._originals.get(id(module))
            if known is not None and known() is module and this_thread.number == thread:
                raise ProbeError(
                    f"`forward` of the copy calls the program's own {type(module).__name__}, for "
                    "example through a closure, a bound method or a weak reference; reach modules "
                    "through `self`, as in a `forward` that is a method of the class"
                )

        handle = register_module_forward_pre_hook(refuse)
        try:
            yield
        finally:
            handle.remove()

    def close(self) -> None:
        """Release the memory now, rather than when Python looks for cycles."""
        for module in self._modules:
            module._compiled_call_impl = None
        self._modules.clear()
        del self.module


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers."""
    inner = wrapped(module)
    return module if inner is None else unwrapped(inner)


def check_whole(root: nn.Module, inner: nn.Module) -> None:
    """Check that this process holds a whole model, in a form that can be copied.

    Args:
        root: the model, possibly in wrappers.
        inner: the model without wrappers.

    Raises:
        NotReadyError: the model has not created its parameters yet.
        ProbeError: its parameters are distributed over processes, or it is scripted.
    """
    for module in [root, *inner.modules()]:
        kind = type(module).__name__
        if {base.__name__ for base in type(module).__mro__} & {*_ENGINES}:
            raise ProbeError(f"the parameters of {kind} are distributed over processes")
        if isinstance(module, torch.jit.ScriptModule):
            raise ProbeError(f"{kind} is scripted, and scripted modules cannot be copied cleanly")
    for name, parameter in inner.named_parameters():
        if is_lazy(parameter):
            raise NotReadyError(f"{name} is not initialised until the first call")
        if hasattr(parameter, "placements") or hasattr(parameter, "ds_id"):
            raise ProbeError(f"{name} is distributed over processes")


def is_larger_copy(root: nn.Module, most: int) -> bool:
    """Return whether a copy of a model would take more than a number of bytes.

    Everything that `CleanCopy` would copy counts, wherever it is: in plain attributes, lists, dicts
    and objects, bound methods and `functools.partial`. Functions are shared, so what their closures
    hold does not count. An object that defines how it is copied counts with all its attributes.

    Args:
        root: the model, without wrappers.
        most: the number of bytes. The count stops there, so a large model takes no longer.
    """
    known, modules = {id(each) for each in _kept_out(root)}, {id(m) for m in root.modules()}
    size, storages = 0, set[int]()
    waiting: list[Any] = [root]
    for tensor in _tensors_of(root):
        if id(tensor) not in known and type(tensor) in (torch.Tensor, nn.Parameter):
            size += tensor.numel() * tensor.element_size()
            known.add(id(tensor))
    seen: list[Any] = []  # keeps them alive, so that no other object has the same `id`
    while waiting and size <= most:
        value = waiting.pop()
        if id(value) in known or isinstance(value, (*_ATOMS, *_NAMES)):
            continue
        known.add(id(value))
        seen.append(value)
        size += _OBJECT
        if isinstance(value, torch.Tensor):
            size += _bytes_of(value, storages)
            waiting.append(value.grad if value.is_leaf else None)
        elif isinstance(value, nn.Module):
            if id(value) in modules:  # those of other modules are copied
                known.update(id(hooks) for _, hooks in _hooks_of(value))
            waiting += vars(value).values()
        else:
            size += _own_bytes(value)
            if size <= most:
                waiting += _parts(value) or [*getattr(value, "__dict__", {}).values()]
                is_array = isinstance(value, np.ndarray) and value.dtype.hasobject
                waiting += value.ravel().tolist() if is_array else ()
    return size > most


def _bytes_of(tensor: torch.Tensor, storages: set[int]) -> int:
    """Return the size of a tensor's storage, which `deepcopy` copies whole; 0 if it is known."""
    try:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
    except Exception:  # a tensor without a storage, such as a sparse one
        return tensor.numel() * tensor.element_size()
    if address in storages:
        return 0
    storages.add(address)
    return size


def _own_bytes(value: Any) -> int:
    """Return the size of an array, a buffer of bytes, or the entries of a container."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, (bytearray, array)):
        return memoryview(value).nbytes
    return 8 * len(value) if isinstance(value, _CONTAINERS) else 0


def _kept_out(root: nn.Module) -> Iterator[Any]:
    """Yield the objects in attributes of modules that a copy does not copy but share."""
    for module in root.modules():
        for name, value in vars(module).items():
            if name in _OF_FRAMEWORKS:
                yield value
            elif not isinstance(value, torch.Generator):
                yield from _optimizers_in(value)


def _prepared(root: nn.Module, clone: Callable[[torch.Tensor], torch.Tensor]) -> dict[int, Any]:
    """Return a memo for `deepcopy` with objects that it copies wrongly or must not copy."""
    memo: dict[int, Any] = {id(each): each for each in _kept_out(root)}
    for module in root.modules():
        for name, hooks in _hooks_of(module):
            keep = _computing(hooks) if name == "_forward_pre_hooks" else {}
            memo[id(hooks)] = OrderedDict((k, copy.deepcopy(h, memo)) for k, h in keep.items())
        for name, value in vars(module).items():
            if isinstance(value, torch.Generator) and name not in _OF_FRAMEWORKS:
                generator = memo[id(value)] = torch.Generator(value.device)
                generator.set_state(value.get_state())
    for tensor in _tensors_of(root):
        if id(tensor) not in memo and type(tensor) in (torch.Tensor, nn.Parameter):
            memo[id(tensor)] = _copied(tensor, clone)
    return memo


def _copy_by_parts(root: nn.Module, memo: dict[int, Any]) -> None:
    """Copy a model as `deepcopy` does, but ignore how its modules say that they are copied."""
    for module in root.modules():
        memo[id(module)] = object.__new__(type(module))
    for module in root.modules():
        own = {name: v for name, v in vars(module).items() if name != "_compiled_call_impl"}
        made = memo[id(module)]
        vars(made).update(copy.deepcopy(own, memo))


def _share(root: nn.Module, memo: dict[int, Any]) -> list[str]:
    """Add the objects that a copy shares with the program to a memo; return their types."""
    kinds: set[str] = set()
    waiting: list[Any] = [value for module in root.modules() for value in vars(module).values()]
    seen: dict[int, Any] = {}  # keeps them alive, so that no other object has the same `id`
    while waiting:
        value = waiting.pop()
        if id(value) in seen or id(value) in memo:
            continue
        seen[id(value)] = value
        parts = _parts(value)
        if parts is not None:
            waiting += parts
        elif type(value) in _LOCKS:
            memo[id(value)] = _LOCKS[type(value)]()
        elif isinstance(value, io.IOBase) or not isinstance(value, _STATEFUL):
            memo[id(value)] = value
            if not isinstance(value, _NAMES):
                kinds.add(type(value).__name__)
    return sorted(kinds)


def _parts(value: Any) -> Iterable[Any] | None:
    """Return what `deepcopy` copies in order to copy an object; None if it cannot copy it."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, (str, bytes, int, float, nn.Module)) or hasattr(value, "__deepcopy__"):
        return ()
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # whatever the program's classes raise
        return None
    if isinstance(reduced, str):
        return ()
    arguments, state, *items = (*reduced[1:], None, None)[:4]
    return [arguments, state, *(each for part in items for each in part or ())]


def _optimizers_in(value: Any, depth: int = 3) -> Iterator[Any]:
    """Yield the optimizers and learning rate schedulers in an attribute of a module.

    A copy of an optimizer may replace the `step` of its class, as torch does where it finds one
    that it has not prepared. The steps of the program would then run hooks twice.
    """
    if isinstance(value, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
        yield value
    elif depth and type(value) in (list, tuple, set, dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _optimizers_in(each, depth - 1)


def _copied(tensor: torch.Tensor, clone: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a tensor without its history and gradient, which `deepcopy` rejects or also copies."""
    data = clone(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    leaf = tensor.is_leaf and tensor.requires_grad
    return data.requires_grad_() if leaf else data


def _on_the_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)


def _tensors_of(root: nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters, buffers, and tensors that are plain attributes of modules."""
    for module in root.modules():
        held = (module._parameters, module._buffers, vars(module))
        for tensor in (value for values in held for value in values.values()):
            if isinstance(tensor, torch.Tensor):
                yield tensor


def _hooks_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield all hook tables of a module, with their names."""
    for name, value in vars(module).items():
        if "_hooks" in name and isinstance(value, dict):
            yield name, value


def _remove_hooks(module: nn.Module) -> None:
    """Remove all hooks except those that compute parameters."""
    for name, hooks in _hooks_of(module):
        kept = _computing(hooks) if name == "_forward_pre_hooks" else {}
        hooks.clear()
        hooks.update(kept)


def _computing(hooks: Mapping[int, Any]) -> dict[int, Any]:
    return {k: h for k, h in hooks.items() if f"{type(h).__module__}.".startswith(_COMPUTING)}

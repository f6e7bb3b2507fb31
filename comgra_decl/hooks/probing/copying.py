"""Clean copies of a model: nothing that happens to the copy reaches the program."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from comgra_decl.errors import ProbeError
from comgra_decl.hooks.module_tree import named_modules, wrapped

_COMPUTING = "torch.nn.utils."
"""The package whose pre-hooks compute parameters (weight norm, spectral norm, pruning)."""

_OF_FRAMEWORKS = ("_trainer", "_fabric")
"""Attributes through which a Lightning module refers to its trainer; the copy shares them."""

_ENGINES = ("FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
"""Classes, or base classes, of models whose parameters are distributed over processes."""


class NotReadyError(ProbeError):
    """The model cannot be copied yet, because it creates its parameters in its first call."""


class Watch(Protocol):
    """Observes the calls to a copy's modules."""

    def before(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Handle the beginning of a call."""

    def after(self, path: str, module: nn.Module, output: Any) -> Any:
        """Return the output of a call, or a replacement for it."""


class CleanCopy:
    """A copy of a model, with its own parameters, buffers, generators and plain attributes.

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
        self.watch: Watch | None = None
        try:
            memo = _prepared(inner, _on_the_host if host else torch.Tensor.clone)
            self.module: nn.Module = copy.deepcopy(inner, memo)
        except torch.OutOfMemoryError:
            self.moved = True
            memo = _prepared(inner, _on_the_host)
            self.module = copy.deepcopy(inner, memo)
        except Exception as error:
            raise ProbeError(
                f"{type(inner).__name__} cannot be copied ({type(error).__name__}: {error}). Keep "
                "objects that cannot be copied, such as an open file or a lock, outside the model"
            ) from error
        originals = {id(memo[key]): path for key, path in paths.items() if key in memo}
        self.paths = {id(m): originals.get(id(m), name) for name, m in named_modules(self.module)}
        copied = [value for value in memo.values() if isinstance(value, nn.Module)]
        self._modules = list({id(m): m for m in [*self.module.modules(), *copied]}.values())
        if {id(m) for m in self._modules} & {id(m) for m in inner.modules()}:
            raise ProbeError(
                f"{type(inner).__name__} cannot be copied, because a copy shares modules with it. "
                "A `__deepcopy__` of a module must return a new module"
            )
        self.device = next((t.device for t in _tensors_of(self.module)), torch.device("cpu"))
        for module in self._modules:
            _remove_hooks(module)
            module._compiled_call_impl = None
            if not traceable:
                self._take_over(module)

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
            watch.before(path, module, args, kwargs)
        for hook in computing:
            hook(module, args)
        output = module.forward(*args, **kwargs)
        return output if watch is None or path is None else watch.after(path, module, output)

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
            return self.module(*args, **kwargs)
        finally:
            self.watch = None

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


def _prepared(root: nn.Module, clone: Callable[[torch.Tensor], torch.Tensor]) -> dict[int, Any]:
    """Return a memo for `deepcopy` with objects that it copies wrongly or must not copy."""
    memo: dict[int, Any] = {}
    for module in root.modules():
        for name, hooks in _hooks_of(module):
            keep = _computing(hooks) if name == "_forward_pre_hooks" else {}
            memo[id(hooks)] = OrderedDict((k, copy.deepcopy(h, memo)) for k, h in keep.items())
        for name, value in vars(module).items():
            if isinstance(value, torch.Generator):
                generator = memo[id(value)] = torch.Generator(value.device)
                generator.set_state(value.get_state())
            elif name in _OF_FRAMEWORKS:
                memo[id(value)] = value
            else:
                memo.update((id(each), each) for each in _optimizers_in(value))
    for tensor in _tensors_of(root):
        if id(tensor) not in memo and type(tensor) in (torch.Tensor, nn.Parameter):
            memo[id(tensor)] = _copied(tensor, clone)
    return memo


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

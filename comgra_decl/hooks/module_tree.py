"""The tree of modules: parents, outermost modules, wrappers, and the names of nodes."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from comgra_decl.hooks.objects import instances_of
from comgra_decl.hooks.probing.seclusion import SECLUDED, is_secluded
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.hooks.tensors.shards import class_of

T = TypeVar("T")

_is_compiling = torch.compiler.is_compiling

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
"""The attributes under which wrappers of torch and Lightning Fabric hold the wrapped module."""

_WRAPPER_CLASSES = ("DistributedDataParallel", "DataParallel")
"""Wrappers that hold the wrapped module as `module`, a name that other modules use for ordinary
children."""

_FROZEN = (
    "gc.freeze() was called before tracing began. Python {}.{} does not reveal which modules "
    "contain a frozen module, so if {} is part of a larger module, its node names lack the path "
    "to it. Start tracing before gc.freeze(), keep the model in a variable of the main module, or "
    "use Python 3.13 or newer"
)


class _ByModule(Generic[T]):
    """A mapping from modules, compared by identity and held weakly, to values.

    A module class may define `==` (torchmetrics does, and builds modules in it). Each recorded step
    makes several lookups. A lookup takes 0.2 us here and 2 us in torch's `WeakIdKeyDictionary`.
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[weakref.ref[nn.Module], T]] = {}

    def __setitem__(self, module: nn.Module, value: T) -> None:
        number, items = id(module), self._items

        def forget(reference: weakref.ref[nn.Module]) -> None:
            known = items.get(number)
            if known is not None and known[0] is reference:  # otherwise the id has been reused
                del items[number]

        items[number] = weakref.ref(module, forget), value

    def __contains__(self, module: nn.Module) -> bool:
        return self.get(module) is not None

    def get(self, module: nn.Module) -> T | None:
        known = self._items.get(id(module))
        return known[1] if known is not None and known[0]() is module else None


class Owners:
    """Tracks the parent of every module, so that a child called directly keeps its full name.

    A training script often calls `self.net(x)`, where `self` is a larger module that is never
    called itself, as in Lightning. A link from a module to its parent is stored when the module is
    assigned. For modules built before tracing was attached, the links are found by a single scan of
    the garbage collector's objects, when one of the modules is first called.

    Args:
        on_fault: called with errors in tracing itself.
    """

    def __init__(self, *, on_fault: Callable[[BaseException], None]) -> None:
        self._on_fault = on_fault
        # called with the classes of new modules
        self.on_class: Callable[[type], None] = lambda _: None
        # called with a warning if a module's parent may be hidden from the search for it
        self.warn: Callable[[str], None] = lambda _: None
        self._parents: _ByModule[weakref.ref[nn.Module]] = _ByModule()
        self._built: _ByModule[bool] = _ByModule()
        self._scanned = False
        self.version = 0  # counts assignments of modules and parameters to modules

    def note(self, parent: nn.Module, _name: str, child: nn.Module | None) -> None:
        """Store the parent of a newly assigned module; called by torch's registration hook."""
        if _is_compiling() or (
            SECLUDED and is_secluded()
        ):  # otherwise this function would become part of the compiled code
            return
        try:
            self.version += 1
            self._built[parent] = True
            self.on_class(type(parent))
            if child is not None:
                self.on_class(type(child))
                self._parents[child] = weakref.ref(parent)
        except Exception as error:
            self._on_fault(error)

    def note_parameter(self, module: nn.Module, _name: str, _parameter: object) -> None:
        """Count a new parameter of a module; called by torch's registration hook."""
        if _is_compiling() or (SECLUDED and is_secluded()):
            return
        try:
            self.version += 1
            self.on_class(type(module))
        except Exception as error:
            self._on_fault(error)

    def know(self, top: nn.Module) -> None:
        """Store the parents of all modules below a module."""
        for parent in top.modules():
            for child in parent._modules.values():
                if child is not None and child not in self._parents:
                    self._parents[child] = weakref.ref(parent)

    def top_of(self, module: nn.Module) -> nn.Module:
        """Return the outermost module that currently contains `module`."""
        if (self._scanned or module in self._built) and self._parent(module) is None:
            return module  # the usual case: the model itself
        *_, top = self.and_above(module)
        return top

    def and_above(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield a module and the modules that contain it, the outermost last."""
        if not self._scanned and module not in self._built and has_parameters(module):
            self._scan(module)
        seen = {id(module)}
        yield module
        while (parent := self._parent(module)) is not None and id(parent) not in seen:
            seen.add(id(parent))
            module = parent
            yield module

    def _parent(self, module: nn.Module) -> nn.Module | None:
        link = self._parents.get(module)
        parent = link() if link is not None else None
        if parent is None or all(child is not module for child in parent._modules.values()):
            return None
        return parent

    def _scan(self, called: nn.Module) -> None:
        self._scanned = True
        found = False
        for candidate in instances_of(nn.Module):
            found = found or candidate is called
            for child in candidate.__dict__.get("_modules", {}).values():
                if isinstance(child, nn.Module) and child not in self._parents:
                    self._parents[child] = weakref.ref(candidate)
        if found or called in self._parents or sys.version_info >= (3, 13):
            return
        if gc.get_freeze_count():
            self.warn(_FROZEN.format(*sys.version_info[:2], type(called).__name__))


class Top:
    """An outermost module: the model, or one of several, as in adversarial training.

    Args:
        module: the module itself.
        prefixed: returns whether the names of its nodes begin with its label.
        number: its number among the outermost modules of its class, counting from 1; included in
            the label from 2 on.
    """

    def __init__(
        self, module: nn.Module, prefixed: Callable[[Top], bool], *, number: int = 1
    ) -> None:
        self.module = weakref.ref(module)
        name = unwrapped_class(module)
        self.label = name if number == 1 else f"{name}#{number}"
        self.parametric = self.takes_part = False
        self.look(module)
        self.marks: dict[str, str] = {}  # names that `@comgra.node` assigns to modules, by path
        self.prefixed = prefixed

    def become(self, module: nn.Module) -> None:
        """Replace a module that no longer exists with another of the same class."""
        self.module = weakref.ref(module)
        self.look(module)

    def look(self, module: nn.Module) -> None:
        """Update whether the module has parameters; some modules create them in the first call."""
        self.parametric = self.parametric or has_parameters(module)
        self.takes_part = self.takes_part or self.parametric

    def joins(self, args: Any, kwargs: Any) -> bool:
        """Return whether the module is part of the model, given the arguments of a call.

        A module without parameters is part of the model only if gradients can flow through it. This
        is the case for a loss module, but not for a transform that a data loader applies to every
        sample.
        """
        if not self.takes_part:
            self.takes_part = any(t.requires_grad for _, t in tensors_in((args, kwargs)))
        return self.takes_part

    def node(self, path: str) -> str:
        """Return the node name of the module at a path below this one."""
        name = self.marks.get(path, path)
        if not name:
            return self.label
        return f"{self.label}.{name}" if self.prefixed(self) else name


def has_parameters(module: nn.Module) -> bool:
    """Return whether a module or any of its submodules has parameters.

    Runs at each call to a model; `parameters()` would take ten times as long to find the first one.
    """
    waiting, seen = [module], {id(module)}
    while waiting:
        current = waiting.pop()
        if any(parameter is not None for parameter in current._parameters.values()):
            return True
        for child in current._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return False


def trains_beside(top: nn.Module, part: nn.Module, held: Collection[int]) -> bool:
    """Return whether `top` trains parameters that do not belong to `part`.

    If not, `top` only wraps that part, for example to add a loss or an averaged copy of the
    weights, or to adapt it to another framework.

    Args:
        top: the containing module.
        part: the module inside it.
        held: the ids of the parameters held by optimizers; empty if there are no optimizers.
    """
    own = {id(parameter) for parameter in part.parameters()}
    beside = (p for p in top.parameters() if p.requires_grad and id(p) not in own)
    return any(not held or id(p) in held for p in beside)


def unwrapped_class(module: nn.Module) -> str:
    """Return the class name of a module without its wrappers (DDP, `torch.compile`)."""
    return class_of(_unwrapped(module)).__name__


def in_training(module: nn.Module) -> bool:
    """Return whether a module, or the module that it wraps, is in training mode.

    Programs often switch only the wrapped module: Lightning never switches its DDP wrapper.
    """
    # a frozen scripted module has no such attribute
    return getattr(_unwrapped(module), "training", False)


def _unwrapped(module: nn.Module) -> nn.Module:
    inner = wrapped(module)
    return module if inner is None else _unwrapped(inner)


def wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module inside a wrapper; None if `module` is not a wrapper."""
    name = type(module).__name__
    if any(parameter is not None for parameter in module._parameters.values()):
        return None  # FSDP: `module` holds the wrapped module's flattened parameters
    # `_modules` of a scripted module is not a dict, but has `items`
    for known, child in module._modules.items():
        if known in _WRAPPED or (known == "module" and name in _WRAPPER_CLASSES):
            return child
    return None


def named_modules(top: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) for a module and its submodules, without wrappers, each module once."""
    yield from _named(top, "", set())


def _named(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    inner = wrapped(module)
    if inner is None:
        yield path, module
    else:
        yield from _named(inner, path, seen)
    for name, child in module._modules.items():
        if child is not None:
            below = "" if name in _WRAPPED else name
            yield from _named(child, ".".join(filter(None, (path, below))), seen)

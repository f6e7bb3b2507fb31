"""Who owns which module, and what its nodes are called."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from comgra_decl.hooks.objects import instances_of
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.hooks.tensors.shards import class_of

T = TypeVar("T")

_is_compiling = torch.compiler.is_compiling

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
"""What wrappers call the module that they wrap: those of torch, and of Lightning's Fabric."""

_WRAPPER_CLASSES = ("DistributedDataParallel", "DataParallel")
"""Those that call it `module`, as many modules call a part of theirs."""


class _ByModule(Generic[T]):
    """Keeps a value for each module as long as the module lives, by identity.

    A module class may define `==` (torchmetrics does, and builds modules in it). Lookups are made
    several times in each recorded step: one here takes 0.2 us, one in torch's
    `WeakIdKeyDictionary` 2 us.
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[weakref.ref[nn.Module], T]] = {}

    def __setitem__(self, module: nn.Module, value: T) -> None:
        number, items = id(module), self._items

        def forget(reference: weakref.ref[nn.Module]) -> None:
            known = items.get(number)
            if known is not None and known[0] is reference:  # else the number is another's by now
                del items[number]

        items[number] = weakref.ref(module, forget), value

    def __contains__(self, module: nn.Module) -> bool:
        return self.get(module) is not None

    def get(self, module: nn.Module) -> T | None:
        known = self._items.get(id(module))
        return known[1] if known is not None and known[0]() is module else None


class Owners:
    """Knows the parent of every module, so that a child called on its own keeps its full name.

    A training script often calls `self.net(x)` of a larger module that is never called itself
    (Lightning does). Links are noted as modules are assigned; modules built before we attached
    are found by one scan of the garbage collector's objects, the first time one is called.

    Args:
        on_fault: told about an error of our own.
    """

    def __init__(self, *, on_fault: Callable[[BaseException], None]) -> None:
        self._on_fault = on_fault
        self.on_class: Callable[[type], None] = lambda _: None  # told the class of what is built
        self._parents: _ByModule[weakref.ref[nn.Module]] = _ByModule()
        self._built: _ByModule[bool] = _ByModule()
        self._scanned = False
        self.version = 0  # counts what was given to modules: others, and parameters

    def note(self, parent: nn.Module, _name: str, child: nn.Module | None) -> None:
        """The registration hook: `parent.name = child` has just happened."""
        if _is_compiling():  # a module is built in compiled code, of which this would become a part
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
        """The registration hook: a module has just been given a parameter, maybe a late one."""
        if _is_compiling():
            return
        try:
            self.version += 1
            self.on_class(type(module))
        except Exception as error:
            self._on_fault(error)

    def know(self, top: nn.Module) -> None:
        """Learns who owns what below a module."""
        for parent in top.modules():
            for child in parent._modules.values():
                if child is not None and child not in self._parents:
                    self._parents[child] = weakref.ref(parent)

    def top_of(self, module: nn.Module) -> nn.Module:
        """Returns the outermost module that (still) contains `module`."""
        if (self._scanned or module in self._built) and self._parent(module) is None:
            return module  # nearly always: the model itself
        *_, top = self.and_above(module)
        return top

    def and_above(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yields a module and those that contain it, the outermost last."""
        if not self._scanned and module not in self._built and has_parameters(module):
            self._scan()
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

    def _scan(self) -> None:
        self._scanned = True
        for candidate in instances_of(nn.Module):
            for child in candidate.__dict__.get("_modules", {}).values():
                if isinstance(child, nn.Module) and child not in self._parents:
                    self._parents[child] = weakref.ref(candidate)


class Top:
    """One outermost module: the model, or one of several (adversarial training, a loss module).

    Args:
        module: the module itself.
        prefixed: whether the names of its nodes begin with its label.
        number: which one of its class it is, from 1; from the second on it is part of the label.
    """

    def __init__(
        self, module: nn.Module, prefixed: Callable[[Top], bool], *, number: int = 1
    ) -> None:
        self.module = weakref.ref(module)
        name = unwrapped_class(module)
        self.label = name if number == 1 else f"{name}#{number}"
        self.parametric = self.takes_part = False
        self.look(module)
        self.marks: dict[str, str] = {}  # names that `@comgra.node` gives to modules, by path
        self.prefixed = prefixed

    def become(self, module: nn.Module) -> None:
        """Another module of the class takes the place of one that is gone."""
        self.module = weakref.ref(module)
        self.look(module)

    def look(self, module: nn.Module) -> None:
        """Sees whether it has parameters by now; some modules make them in their first call."""
        self.parametric = self.parametric or has_parameters(module)
        self.takes_part = self.takes_part or self.parametric

    def joins(self, args: Any, kwargs: Any) -> bool:
        """Whether it is part of the model, being called with these arguments.

        One without parameters is if gradient can flow through it. A loss module's can; a transform
        that a data loader applies to every sample has none.
        """
        if not self.takes_part:
            self.takes_part = any(t.requires_grad for _, t in tensors_in((args, kwargs)))
        return self.takes_part

    def node(self, path: str) -> str:
        """Returns the node name of a module path below this top."""
        name = self.marks.get(path, path)
        if not name:
            return self.label
        return f"{self.label}.{name}" if self.prefixed(self) else name


def has_parameters(module: nn.Module) -> bool:
    """Whether a module, or one within it, has parameters.

    Asked at each call of a model: `parameters()` takes ten times as long to say that it has some.
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
    """Whether `top` trains parameters that do not belong to its part.

    If it does not, it only wraps that part: for a loss, for a task with an average of the weights,
    for another framework.

    Args:
        top: holds the other one.
        part: may be all that is trained.
        held: the ids of the parameters that optimizers hold; empty if there are none.
    """
    own = {id(parameter) for parameter in part.parameters()}
    beside = (p for p in top.parameters() if p.requires_grad and id(p) not in own)
    return any(not held or id(p) in held for p in beside)


def unwrapped_class(module: nn.Module) -> str:
    """Returns the class name of a module below its wrappers (DDP, `torch.compile`)."""
    return class_of(_unwrapped(module)).__name__


def in_training(module: nn.Module) -> bool:
    """Whether a module, or what it wraps, is in training mode.

    What is switched is often the module within (Lightning never switches its wrapper for DDP).
    """
    # a frozen scripted one has no such attribute
    return getattr(_unwrapped(module), "training", False)


def _unwrapped(module: nn.Module) -> nn.Module:
    inner = wrapped(module)
    return module if inner is None else _unwrapped(inner)


def wrapped(module: nn.Module) -> nn.Module | None:
    """Returns the module that another one only wraps; None if that is a module of its own."""
    name = type(module).__name__
    if any(parameter is not None for parameter in module._parameters.values()):
        return None  # it holds those of what it wraps, flattened (FSDP)
    # those of a scripted module are no dictionary, though they can be gone through as one
    for known, child in module._modules.items():
        if known in _WRAPPED or (known == "module" and name in _WRAPPER_CLASSES):
            return child
    return None


def named_modules(top: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields (path, module) below a top, wrappers left out, each module once."""
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

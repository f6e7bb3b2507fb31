"""Which traced tensors each tensor was computed from: the dependency graph of one step.

A torch function mode sees every torch call of the step, also those autograd does not follow
(detached, integer, without gradients). For each tensor it keeps the set of *nearest* traced
ancestors; when a traced tensor appears, that set becomes its incoming edges and the tensor its
own only ancestor. Autograd only decides whether an edge carries gradient.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from comgra_decl.hooks.nested import tensors_in
from comgra_decl.records import SlotKey, Structure

if TYPE_CHECKING:
    from comgra_decl.hooks.slots import Slot

_NO_VALUES = frozenset(
    "size stride dim ndimension numel nelement storage_offset is_floating_point is_complex "
    "is_contiguous element_size data_ptr untyped_storage storage register_hook backward "
    "requires_grad_ retain_grad __len__ __repr__ __format__ __hash__ get_device type".split()
)
"""Calls that read facts about a tensor, not its values."""

_NO_DEPENDENCE = ("_like", "new_")  # results that take only shape and dtype from the argument
_CUTS = frozenset("item tolist numpy __array__ __int__ __float__ __bool__ __index__".split())
_IN_PLACE_OPERATORS = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __ipow__ __imod__ "
    "__iand__ __ior__ __ixor__ __imatmul__".split()
)
_OVERWRITES = frozenset("copy_ fill_ zero_ normal_ uniform_ bernoulli_ random_".split())


class Sources(NamedTuple):
    """Nearest traced ancestors: all of them, and those reached along a gradient."""

    all: frozenset[int]
    grad: frozenset[int]


_NONE = Sources(frozenset(), frozenset())


class Provenance(TorchFunctionMode):
    """Collects the dependency graph of one step while it is active."""

    def __init__(
        self,
        parameter_node: Callable[[torch.Tensor], Slot | None],
        *,
        on_fault: Callable[[BaseException], None],
    ) -> None:
        super().__init__()
        self._parameter_node = parameter_node
        self._on_fault = on_fault
        self._tensors: dict[int, tuple[weakref.ref[torch.Tensor], Sources]] = {}
        self._storages: dict[int, tuple[Any, Sources]] = {}
        self._nodes: dict[Slot, int] = {}
        self._edges: dict[tuple[int, int], bool] = {}
        self._cuts: dict[str, None] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "__get__":  # a property: `.shape`, `.T`, `.data`
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if name not in _NO_VALUES:
            try:
                self._follow(name, args, kwargs or {}, result)
            except Exception as error:
                self._on_fault(error)
        return result

    def _follow(self, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        inputs = [tensor for _, tensor in tensors_in((args, kwargs))]
        if not inputs or any(part in name for part in _NO_DEPENDENCE):
            return
        sources = self._union(inputs)
        if name in _CUTS:
            self._cut(name, sources)
        elif name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")):
            self._mutate(inputs[0], self._mutation_sources(name, inputs, sources))
        else:
            for _, tensor in tensors_in(result):
                self._set(tensor, sources)
            if kwargs.get("out") is not None:
                for _, tensor in tensors_in(kwargs["out"]):
                    self._mutate(tensor, self._union(t for t in inputs if t is not tensor))

    def _mutation_sources(self, name: str, inputs: list[torch.Tensor], sources: Sources) -> Sources:
        whole = inputs and name in _OVERWRITES and inputs[0]._base is None
        return self._union(inputs[1:]) if whole else sources

    def _union(self, tensors: Iterable[torch.Tensor]) -> Sources:
        found = [source for tensor in tensors if (source := self.of(tensor)) is not _NONE]
        if len(found) < 2:
            return found[0] if found else _NONE
        return Sources(
            frozenset().union(*(s.all for s in found)), frozenset().union(*(s.grad for s in found))
        )

    def of(self, tensor: torch.Tensor) -> Sources:
        """Returns the nearest traced ancestors of a tensor."""
        known = self._tensors.get(id(tensor))
        sources = known[1] if known is not None and known[0]() is tensor else _NONE
        if sources is _NONE and tensor.is_leaf:
            slot = self._parameter_node(tensor)
            if slot is not None:
                index = frozenset((self._node(slot),))
                sources = Sources(index, index if tensor.requires_grad else frozenset())
                self._remember(tensor, sources)
        mutated = self._storages.get(_storage_id(tensor)) if self._storages else None
        if mutated is not None:
            sources = Sources(sources.all | mutated[1].all, sources.grad | mutated[1].grad)
        return sources

    def _set(self, tensor: torch.Tensor, sources: Sources) -> None:
        if not tensor.requires_grad and sources.grad:
            sources = Sources(sources.all, frozenset())
        if sources is not _NONE:
            self._remember(tensor, sources)

    def _remember(self, tensor: torch.Tensor, sources: Sources) -> None:
        self._tensors[id(tensor)] = (weakref.ref(tensor), sources)

    def _mutate(self, target: torch.Tensor, sources: Sources) -> None:
        """A write through any view is seen by every tensor on the same storage."""
        if (key := _storage_id(target)) and sources is not _NONE:
            # Holding the storage object keeps its id from being given to another one.
            self._storages[key] = (target.untyped_storage(), sources)
        self._set(target, sources)

    def _cut(self, name: str, sources: Sources) -> None:
        for node in sources.all:
            self._cuts.setdefault(f"{node} .{name}()")

    def _node(self, slot: Slot) -> int:
        return self._nodes.setdefault(slot, len(self._nodes))

    def trace(
        self, slot: Slot, tensor: torch.Tensor, fallback: Iterable[torch.Tensor] = ()
    ) -> None:
        """Declares `tensor` to be the traced tensor of `slot`: edges end and start here.

        `fallback` are the inputs of the module it came from, used when nothing is known about
        the tensor itself (scripted code, custom C++ calls, numpy inside).
        """
        node = self._node(slot)
        sources = self.of(tensor)
        if sources is _NONE:
            inputs = self._union(fallback)
            sources = inputs if tensor.requires_grad else Sources(inputs.all, frozenset())
        for source in sources.all - {node}:
            carries = source in sources.grad
            self._edges[source, node] = self._edges.get((source, node), False) or carries
        own = frozenset((node,))
        self._remember(tensor, Sources(own, own if tensor.requires_grad else frozenset()))
        self._storages.pop(_storage_id(tensor), None)

    def finish(self) -> Structure:
        """Returns the graph; called when the slots of the step have their names."""
        slots = list(self._nodes)
        keys = [slot.key for slot in slots]
        edges = sorted((s, t, grad) for (s, t), grad in self._edges.items())
        cuts = [_name_cut(cut, keys) for cut in self._cuts]
        kinds = [slot.kind for slot in slots]
        return Structure(_stable_hash(keys, kinds, edges), keys, kinds, edges, cuts)


def _storage_id(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse, opaque: no storage to share
        return 0


def _name_cut(cut: str, keys: list[SlotKey]) -> str:
    node, _, call = cut.partition(" ")
    return f"{keys[int(node)].node}{call}"


def _stable_hash(keys: list[SlotKey], kinds: list[str], edges: list[tuple[int, int, bool]]) -> str:
    """Equal for equal graphs in any process: by names, never by Python's `hash`."""
    digest = hashlib.blake2b(digest_size=8)
    for line in sorted(_lines(keys, kinds, edges)):
        digest.update(line.encode())
    return digest.hexdigest()


def _lines(
    keys: list[SlotKey], kinds: list[str], edges: list[tuple[int, int, bool]]
) -> Iterator[str]:
    yield from (f"{tuple(key)} {kind}\n" for key, kind in zip(keys, kinds, strict=True))
    yield from (f"{tuple(keys[s])} -> {tuple(keys[t])} {grad}\n" for s, t, grad in edges)

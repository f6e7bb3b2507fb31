"""Capture the dependency graph of one step: which tensors each tensor was computed from.

A torch function mode receives every torch call of the step, including calls that autograd does not
track, such as calls on detached or integer tensors and calls with gradients disabled. For each
tensor, the lineage stores its *nearest* traced ancestors. When a traced tensor appears, its
ancestors become its incoming edges, and the tensor becomes its own only ancestor. Autograd only
determines whether an edge carries a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.hooks import modes
from comgra_decl.hooks.call_context import is_traced
from comgra_decl.hooks.graph.call_lineage import Follower
from comgra_decl.hooks.graph.calls import Call, meaning
from comgra_decl.hooks.graph.lineage import NO_SOURCES, Lineage, Sources, storage_id
from comgra_decl.hooks.graph.memory import EarlierSlots, Memory
from comgra_decl.hooks.graph.opaque import OpaqueCalls
from comgra_decl.hooks.graph.structure_hash import stable_hash
from comgra_decl.hooks.other_threads import this_thread
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.records import SlotKey, Structure
from comgra_decl.torch_private import without_functions

if TYPE_CHECKING:
    from comgra_decl.hooks.graph.attended import Attended
    from comgra_decl.hooks.graph.telling import Telling
    from comgra_decl.hooks.tensors.slots import Slot


MOST_EDGES = 100_000
"""Maximum number of edges in a graph that is followed. Each part of a residual stream depends on
all earlier parts, so a network with a few hundred parts comes close to the limit, and one with
thousands of parts would have millions of edges."""


class Provenance(modes.OwnMode):
    """Collects the dependency graph of one step while it is active.

    Args:
        leaf_slot: returns the slot of a traced parameter or buffer, None for any other tensor.
        opaque: follows the calls that do not reach any function mode.
        on_fault: called with an error in tracing itself.
        memory: the tensors kept from earlier steps.
    """

    def __init__(
        self,
        leaf_slot: Callable[[torch.Tensor], Slot | None],
        *,
        opaque: OpaqueCalls,
        on_fault: Callable[[BaseException], None],
        memory: Memory,
    ) -> None:
        super().__init__(on_fault)
        self._leaf_slot = leaf_slot
        self._memory = memory
        self._earlier = EarlierSlots()
        self._lineage = Lineage(self._origin)
        self._follower = Follower(self._lineage, cut=self._cut)
        self._opaque = opaque
        self._nodes: dict[Slot, int] = {}
        self._given: set[int] = set()  # those of inputs and targets
        self._edges: dict[tuple[int, int], bool] = {}
        self._own: dict[int, tuple[Any, int, Slot]] = {}  # id of a traced tensor -> it, its node
        self._expected: set[int] = set()  # nodes whose module has hooks that have not run yet
        self._outside: set[int] = set()  # storages that entered the step from outside
        self._named: dict[tuple[str, str], None] = {}  # edges declared by node names
        self._cuts: dict[tuple[int, str], None] = {}
        self.attended: Attended | None = None  # collects facts about attention, in a few steps
        self.telling: Telling | None = None  # collects facts about calls, in the same steps
        self.overflown = False  # whether the graph was discarded because it had too many edges

    def handle(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call and track which arguments its results depend on."""
        result = func(*args, **kwargs)
        if self.thread != this_thread.number or self.overflown:
            return result
        try:
            name, call = meaning(func)
            if call is not Call.IGNORED and not is_traced():
                with without_functions():
                    self._follower.follow(name, call, args, kwargs, result)
                    if self.attended is not None:
                        self.attended.see(name, args, kwargs, result)
                    if self.telling is not None:
                        self.telling.see(name, args, kwargs, result)
        except Exception as error:
            self._on_fault(error)
        return result

    def begin(self) -> None:
        """Start following the calls that do not reach any function mode."""
        self._opaque.apply(self._lineage, self._follower)

    def end(self) -> None:
        """Stop following these calls."""
        self._opaque.restore()

    # -- sources -------------------------------------------------------------------------------

    def of(self, tensor: torch.Tensor) -> Sources:
        """Return the nearest traced ancestors of a tensor."""
        return self._lineage.of(tensor)

    def is_computed(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor depends on a model, and not only on its inputs and targets."""
        return bool(self.computed_sources(tensor))

    def computed_sources(self, tensor: torch.Tensor) -> frozenset[int]:
        """Return the sources of a tensor that are neither inputs nor targets."""
        return self._lineage.of(tensor).all - self._given

    def enters(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor enters the step from outside: no call in the step computed it."""
        sources = self._lineage.of(tensor).all
        return sources <= {self._nodes[slot] for slot in self._earlier if slot in self._nodes}

    def _origin(self, tensor: torch.Tensor) -> Sources:
        """Return the sources of a tensor that no call in this step created."""
        slot = self._leaf_slot(tensor) if tensor.is_leaf else None
        if slot is not None:
            index = frozenset((self._node(slot),))
            return Sources(index, index if tensor.requires_grad else frozenset())
        if self._memory:
            found = frozenset(self._node(self._earlier.of(s)) for s in self._memory.of(tensor))
            return Sources(found, frozenset()) if found else NO_SOURCES
        return NO_SOURCES

    def _node(self, slot: Slot) -> int:
        number = self._nodes.setdefault(slot, len(self._nodes))
        if slot.kind in ("input", "target"):
            self._given.add(number)
        return number

    def _cut(self, name: str, sources: Sources) -> None:
        if not self._opaque.inside:
            for node in sorted(sources.all):
                self._cuts.setdefault((node, name))

    # -- traced tensors ------------------------------------------------------------------------

    def trace(
        self, slot: Slot, tensor: torch.Tensor, fallback: Iterable[torch.Tensor] = ()
    ) -> None:
        """Declare `tensor` to be the traced tensor of `slot`: edges end and start here.

        `fallback` holds the inputs of the module that returned the tensor. They are used if the
        call that created the tensor was not observed, as in custom C++ code or numpy.
        """
        if self.overflown:
            return
        node = self._node(slot)
        again = self._follower.recomputed > 0 and tensor.is_floating_point()
        follows = tensor.requires_grad or again
        own = {node}
        self._settle(node, tensor)
        twin = self._twin(slot, tensor)
        if twin is None:
            self._connect(self._sources(tensor, fallback, follows=follows), node)
        else:  # one tensor in two roles of an output: parallel nodes, not a chain
            own |= self._lineage.of(tensor).all
            known = [(s, grad) for (s, sink), grad in self._edges.items() if sink == twin]
            self._edges |= {(source, node): grad for source, grad in known}
        if slot.kind != "computed":
            self._outside.add(storage_id(tensor))
        nodes = frozenset(own)
        self._lineage.replace(tensor, Sources(nodes, nodes if follows else frozenset()))
        self._own[id(tensor)] = (self._lineage.reference(tensor), node, slot)

    def expect(
        self, slot: Slot, tensor: torch.Tensor, fallback: Iterable[torch.Tensor] = ()
    ) -> None:
        """Trace a tensor before the hooks run, because they may compute from it or replace it."""
        self.trace(slot, tensor, fallback)
        self._expected.add(self._node(slot))

    def _settle(self, node: int, tensor: torch.Tensor) -> None:
        """Remove the edges of an expected tensor if another tensor has replaced it."""
        if node in self._expected:
            self._expected.discard(node)
            if node not in self._lineage.of(tensor).all:
                self._edges = {edge: grad for edge, grad in self._edges.items() if edge[1] != node}

    def _sources(
        self, tensor: torch.Tensor, fallback: Iterable[torch.Tensor], *, follows: bool
    ) -> Sources:
        sources = self._lineage.of(tensor)
        if sources is not NO_SOURCES or self._lineage.seen(tensor):
            return sources
        inputs = list(fallback)
        if any(given is tensor for given in inputs):
            return sources
        found = self._lineage.union(inputs)
        return found if follows else Sources(found.all, frozenset())

    def _twin(self, slot: Slot, tensor: torch.Tensor) -> int | None:
        """Return the node already created for this tensor in the same module call, else None."""
        known = self._own.get(id(tensor))
        if known is None or known[0]() is not tensor:
            return None
        _, node, other = known
        same = other.iteration == slot.iteration and other.node() == slot.node()
        return node if same and other is not slot and node in self._lineage.of(tensor).all else None

    def _connect(self, sources: Sources, node: int) -> None:
        for source in sources.all - {node}:
            known = self._edges.get((source, node), False)
            self._edges[source, node] = known or source in sources.grad
        if len(self._edges) > MOST_EDGES:
            self.overflown = True
            self._edges.clear()
            self._lineage.clear()

    def connect(self, source: Any, sink: Any, *, gradient: bool = False) -> None:
        """Add a dependency that no torch call reveals, without a gradient unless `gradient` is set.

        Args:
            source: a tensor, anything containing tensors, or the name of a node.
            sink: the same; a name if and only if `source` is a name. If it is a traced tensor, it
            gets an incoming edge. Otherwise, tensors later computed from it depend on the source.
            gradient: whether gradients flow along the edge, if the source has one.
        """
        if self.overflown:
            return
        if isinstance(source, str):
            self._named.setdefault((source, sink))
            return
        given = self._lineage.union(tensor for _, tensor in tensors_in(source))
        reached = given.grad if gradient else frozenset[int]()
        for _, tensor in tensors_in(sink):
            traced = self._own.get(id(tensor))
            if traced is not None and traced[0]() is tensor:
                self._connect(Sources(given.all, reached), traced[1])
            else:
                known = self._lineage.of(tensor)
                self._lineage.set(tensor, Sources(known.all | given.all, known.grad | reached))

    def as_evaluation(self) -> None:
        """Move 'no_grad' slots to the forward pass, because the step was an evaluation."""
        for slot, number in [*self._nodes.items()]:
            if slot.forward is not None and slot.forward not in self._nodes:
                del self._nodes[slot]
                self._nodes[slot.forward] = number

    # -- the result ----------------------------------------------------------------------------

    def finish(self) -> Structure:
        """Return the graph. Must be called after the slots of the step have their names."""
        slots = sorted(self._nodes, key=self._nodes.__getitem__)
        keys = [slot.key for slot in slots]
        kinds = [slot.kind for slot in slots]
        for source, sink in self._by_name(keys):
            self._edges.setdefault((source, sink), False)
        cuts = [f"{keys[node].node}.{name}()" for node, name in self._cuts if kinds[node] != "loss"]
        shown = self._shown()
        place = {node: at for at, node in enumerate(shown)}
        edges = sorted((place[s], place[t], grad) for (s, t), grad in self._edges.items())
        keys, kinds = [keys[node] for node in shown], [kinds[node] for node in shown]
        name = stable_hash(keys, kinds, edges)
        return Structure(name, keys, kinds, edges, list(dict.fromkeys(cuts)))

    def _shown(self) -> list[int]:
        """Return the nodes in the graph, without unused tensors from earlier steps."""
        used = {node for edge in self._edges for node in edge}
        unused = {self._nodes[slot] for slot in self._earlier if slot in self._nodes} - used
        return [node for node in range(len(self._nodes)) if node not in unused]

    def _by_name(self, keys: list[SlotKey]) -> Iterator[tuple[int, int]]:
        """Yield the edges declared by name; if the nodes share iterations, only within those."""
        for source_name, sink_name in self._named:
            sources = [i for i, key in enumerate(keys) if key.node == source_name]
            sinks = [i for i, key in enumerate(keys) if key.node == sink_name]
            common = {keys[i].iteration for i in sources} & {keys[i].iteration for i in sinks}
            for source in sources:
                for sink in sinks:
                    together = keys[source].iteration == keys[sink].iteration
                    if source != sink and (together or not common):
                        yield source, sink

    def unknown_names(self) -> list[str]:
        """Return the names passed to `connect` for which this step has no node."""
        present = {slot.node() for slot in self._nodes}
        return sorted({name for pair in self._named for name in pair} - present)

    def leave_behind(self) -> None:
        """Store which tensors outlive this step, and what they were computed from."""
        slots = sorted(self._nodes, key=self._nodes.__getitem__)
        self._memory.keep(
            (tensor, self._computed_from(tensor, slots))
            for tensor in self._lineage.living()
            if storage_id(tensor) not in self._outside or self._lineage.was_written(tensor)
        )

    def _computed_from(self, tensor: torch.Tensor, slots: list[Slot]) -> tuple[Slot, ...]:
        sources = (slots[index] for index in sorted(self._lineage.of(tensor).all))
        return tuple(slot for slot in sources if slot.kind == "computed")

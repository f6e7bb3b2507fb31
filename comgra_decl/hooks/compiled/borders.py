"""Gradients of tensors that cross the border of a piece of compiled code.

The gradient of a tensor is the sum of the contributions of all its users. The backward of compiled
code covers the users inside that code, and autograd covers those outside. For an input of compiled
code, the gradient is therefore complete only outside. For an output that the code also uses, it is
complete only inside. This module decides where to read each gradient.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.hooks import unserializable_hook

from comgra_decl.hooks.pytree import gradient_function
from comgra_decl.torch_private import graph_task

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule, Node

Arrival = Callable[[torch.Tensor], None]
"""A function that receives a gradient."""

NOWHERE = -1
"""The place of a tensor that is not an input of the piece of compiled code."""

_OURS = "comgra_decl."
_WATCHED = 5  # position of this argument in calls to `show`
_DROPOUTS = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
)
_TRAINING = 2  # position of this argument in calls to dropout operators
_SEVERAL = 2  # results; if there is only one, a backward pass reaches all results or none


class _Waiting(NamedTuple):
    """A pending gradient of an input: read outside if `outside` is true, otherwise inside."""

    place: int
    arrivals: list[Arrival]
    outside: bool


class Border:
    """One call to a piece of compiled code.

    Args:
        given: all arguments of the call.
        code: the piece of compiled code.
    """

    def __init__(self, given: Sequence[Any], *, code: Callable[..., Any]) -> None:
        self.code = code
        self._given = given
        self._versions = [_version(value) for value in given]
        self._waiting: list[_Waiting] = []
        self._handed_out: list[tuple[int, list[Arrival]]] = []
        self._returned: list[tuple[int, list[Arrival]]] = []
        self._reached: set[int] = set()
        self._arrived: dict[int, int] = {}  # the last backward that reached each result
        self._changes = False  # whether the call modified a tensor that gradients flow through

    def arrival_at(self, reached: Sequence[int] | None) -> Callable[[], bool]:
        """Return a function that checks whether the current backward reached one of the results.

        Compiled code computes the backward of all results together. Results on which the loss does
        not depend receive zeros, although autograd would not reach them at all.
        """
        self._reached.update(reached or ())

        def arrives() -> bool:
            task = graph_task()
            come = (self._arrived.get(position) == task for position in reached or ())
            return reached is None or self._changes or any(come)

        return arrives

    def _hook_outside(self, returned: Any, hook: Callable[[torch.Tensor, Arrival], None]) -> None:
        """Register hooks for results not used inside; they run before the program's own hooks."""
        used = {position for position, _ in self._handed_out}
        for position, arrivals in self._returned:
            if position not in used:
                for arrival in arrivals:
                    hook(returned[position], arrival)
            if position not in used or _is_made_outside(returned[position]):
                arrivals.clear()

    def _track_reached(self, returned: Any) -> None:
        for position in self._reached:
            if returned[position].requires_grad:
                noted = unserializable_hook(partial(self._note, position))
                returned[position].register_hook(noted)

    def _note(self, position: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # autograd passes None when it reaches another result
            self._arrived[position] = graph_task()

    def given(self, place: int) -> Any:
        """Return the argument at this place."""
        return self._given[place]

    def flows(self, place: int) -> bool:
        """Whether gradients reach the argument at this place."""
        return bool(self._given[place].requires_grad)

    def wait(self, place: int, arrivals: list[Arrival], *, outside: bool) -> None:
        """Register `arrivals` for the gradient of the argument at this place."""
        self._waiting.append(_Waiting(place, arrivals, outside))

    def hand_out(self, position: int, arrivals: list[Arrival]) -> None:
        """Register a result whose complete gradient is available inside, for `arrivals`."""
        self._handed_out.append((position, arrivals))

    def result(self, position: int, arrivals: list[Arrival]) -> None:
        """Register `arrivals` inside for the gradient of the result at this position."""
        self._returned.append((position, arrivals))

    def leave(
        self, returned: Any, inner: InnerGradients, hook: Callable[[torch.Tensor, Arrival], None]
    ) -> None:
        """End the call and register the outside arrivals with `hook`.

        A modified argument has two versions, one before and one after the call, and a returned view
        is recreated outside from its base. For these two kinds of tensors, the complete gradient is
        not available anywhere.
        """
        changed = [
            before is not None and before != _version(value)
            for before, value in zip(self._versions, self._given, strict=True)
        ]
        self._changes = any(changed)
        self._track_reached(returned)
        for waiting in self._waiting:
            if changed[waiting.place]:
                waiting.arrivals.clear()
            elif waiting.outside:
                for arrival in waiting.arrivals:
                    hook(self._given[waiting.place], arrival)
        for value, is_changed in zip(self._given, changed, strict=True):
            if is_changed:
                inner.know(value, None)
        for position, arrivals in self._handed_out:
            whole = not _is_made_outside(returned[position])
            inner.know(returned[position], arrivals if whole else None)
        self._hook_outside(returned, hook)


class InnerGradients:
    """Tensors whose gradients are complete only inside compiled code, or nowhere."""

    def __init__(self) -> None:
        self._known: dict[
            int, tuple[weakref.ref[torch.Tensor], int | None, list[Arrival] | None]
        ] = {}

    def clear(self) -> None:
        """Forget all tensors at the end of the step."""
        self._known.clear()

    def know(self, tensor: Any, arrivals: list[Arrival] | None) -> None:
        """Send later requests for a tensor's gradient to `arrivals`; None discards them."""
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            self._known[id(tensor)] = weakref.ref(tensor), tensor._version, arrivals

    def take(self, tensor: torch.Tensor, arrival: Arrival) -> bool:
        """Take over an arrival; return False if its complete gradient is available outside."""
        if not self._known:
            return False
        ref, version, arrivals = self._known.get(id(tensor), (None, None, None))
        if ref is None or ref() is not tensor or version != tensor._version:
            return False
        if arrivals is not None:
            arrivals.append(arrival)
        return True


def mark_borders(graph: GraphModule) -> None:
    """Pass the places of inputs to the operators in a graph; expose the gradients of results."""
    parts = [graph, *(body for _, body in _checkpoints(graph))]
    for branch in _branches(graph, parts):
        _show_nothing(branch)
    for part in parts:
        _remove_idle_dropouts(part)
    marks = _Marks(graph, parts)
    for part in parts:
        for node in part.graph.nodes:
            if str(node.target).startswith(_OURS):
                marks.mark(node)
    marks.hand_out()
    for part in parts:
        part.recompile()


def _checkpoints(graph: GraphModule) -> Iterator[tuple[Node, GraphModule]]:
    """Yield the calls to `torch.utils.checkpoint` with their bodies, outermost first."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            body = getattr(graph, str(node.args[0].target))
            yield node, body
            yield from _checkpoints(body)


def _branches(graph: GraphModule, parts: Sequence[GraphModule]) -> Iterator[GraphModule]:
    """Yield the branches that operators such as `torch.cond` and `scan` call."""
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule) and not any(module is part for part in parts):
            yield module


def _show_nothing(branch: GraphModule) -> None:
    """Remove our operators, because branches are not observed in eager code either."""
    for node in [*branch.graph.nodes]:
        if str(node.target).startswith(_OURS):
            branch.graph.erase_node(node)
    branch.recompile()


def _remove_idle_dropouts(graph: GraphModule) -> None:
    """Remove dropouts that do not drop anything.

    In eager code, such dropouts return their input tensor itself. In traced code, they return a
    copy, and the gradient of the input would lack the contributions computed from the copy.
    """
    for node in [node for node in graph.graph.nodes if _is_idle_dropout(node)]:
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)


def _is_idle_dropout(node: Node) -> bool:
    if node.target not in _DROPOUTS or not isinstance(node.args[0], torch.fx.Node):
        return False
    training = node.args[2] if len(node.args) > _TRAINING else node.kwargs.get("training", True)
    return training is False


class _Marks:
    """Identifies the nodes in one graph that represent the same tensor.

    Args:
        graph: the graph.
        parts: the graph and its subgraphs.
    """

    def __init__(self, graph: GraphModule, parts: Sequence[GraphModule]) -> None:
        self._graph = graph.graph
        self._same: dict[object, Any] = {}  # node -> the same tensor's node in another graph
        for call, body in _checkpoints(graph):
            self._join(call, body)
        self._places: dict[object, int] = {}
        self._all_places: dict[object, int] = {}  # with tensors that pass no gradients
        for place, node in enumerate(_given(self._graph)):
            self._all_places.setdefault(self._identity(node), place)
            if _flows(node):
                self._places.setdefault(self._identity(node), place)
        self._results: dict[object, int] = {}
        for position, node in enumerate(_returned(self._graph)):
            if _flows(node) and self._identity(node) not in self._places:
                self._results.setdefault(self._identity(node), position)
        self._bits = self._find_reached(parts)
        self._used: set[object] = set()
        for part in parts:
            for node in part.graph.nodes:
                if node.op != "output" and not str(node.target).startswith(_OURS):
                    self._used.update(map(self._identity, node.all_input_nodes))

    def _find_reached(self, parts: Sequence[GraphModule]) -> dict[object, int]:
        """Return the results whose gradients flow back to each node, as a bit set per node."""
        found: dict[object, int] = {}
        for position, node in enumerate(_returned(self._graph)):
            if _flows(node):
                found[node] = found.get(node, 0) | 1 << position
        if len(found) < _SEVERAL:
            return {}
        nodes = [node for part in parts for node in part.graph.nodes if not _stops(node)]
        uses: dict[object, list[Any]] = {node: [*node.users] for node in nodes}
        for node, same in self._same.items():
            uses.setdefault(same, []).append(node)
        shared: dict[object, int] = {}  # by storage, for tensors modified in place
        before = None
        while found != before:
            before = dict(found)
            for node in reversed(nodes):
                bits = found.get(node, 0)
                for user in uses[node]:
                    bits |= found.get(user, 0)
                storage = _changed_storage(node)
                if storage is not None:
                    bits = shared[storage] = bits | shared.get(storage, 0)
                found[node] = bits
        return found

    def _reached(self, node: Any) -> list[int] | None:
        if not self._bits:
            return None
        bits = self._bits.get(node, 0)
        return [position for position in range(bits.bit_length()) if bits >> position & 1]

    def _join(self, call: Node, body: GraphModule) -> None:
        """Map the inputs and results of a checkpoint's body to those of its call."""
        for inner, outer in zip(_given(body.graph), call.args[1:], strict=False):
            self._same[inner] = outer
        for user in call.users:
            if user.target is operator.getitem:
                self._same[user] = _returned(body.graph)[user.args[1]]

    def _identity(self, node: Any) -> object:
        """Return an object shared by all nodes of a tensor: its example value or a node."""
        while node in self._same:
            node = self._same[node]
        value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
        return id(value) if isinstance(value, torch.Tensor) else node

    def mark(self, node: Node) -> None:
        """Add the places of the arguments to one of our operators."""
        name = str(node.target).removeprefix(_OURS).partition(".")[0]
        if name == "show" and node.args[_WATCHED] is True:
            result = self._results.get(self._identity(node.args[0]), NOWHERE)
            reached = self._reached(node.args[0])
            node.args = (*node.args, self._place(node.args[0]), result, reached)
        elif name == "enter":
            tensors: Any = node.args[0]
            places = [self._all_places.get(self._identity(tensor), NOWHERE) for tensor in tensors]
            node.args = (*node.args, places)

    def _place(self, node: Any) -> int:
        return self._places.get(self._identity(node), NOWHERE)

    def hand_out(self) -> None:
        """Add an operator for each result that the graph also uses itself."""
        returned = _returned(self._graph)
        for identity, position in self._results.items():
            if identity in self._used:
                with self._graph.inserting_before(self._graph.output_node()):
                    operator_ = torch.ops.comgra_decl.hand_out.default
                    node = returned[position]
                    self._graph.call_function(operator_, (node, position, self._reached(node)))


def _given(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _returned(graph: Graph) -> Any:
    return graph.output_node().args[0]


def _flows(node: Any) -> bool:
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and value.requires_grad


def _stops(node: Node) -> bool:
    """Whether no gradient flows through a node because its tensor does not require one."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and not value.requires_grad


def _changed_storage(node: Node) -> object:
    """Return the storage of a tensor if it was modified in place there, else None."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()._cdata if value._version else None


def _is_made_outside(result: torch.Tensor) -> bool:
    return type(gradient_function(result)).__name__ != "CompiledFunctionBackward"


def _version(value: Any) -> int | None:
    flows = isinstance(value, torch.Tensor) and value.requires_grad
    return value._version if flows else None

"""Gradients of tensors that lie on the border of a piece of compiled code.

The gradient of a tensor is the sum of what all its users send back. Compiled code sees what is
used within it, and autograd outside sees the rest. So the gradient of a tensor that is given to a
piece of compiled code is whole outside only, and that of one that it returns and uses as well is
whole within only. Whoever reads either of them has to be told where to listen.
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
"""Is handed a gradient."""

NOWHERE = -1
"""The place of a tensor that is not given to the piece of code."""

_OURS = "comgra_decl."
_WATCHED = 5  # where this argument of `show` is
_DROPOUTS = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
)
_TRAINING = 2  # where this argument of theirs is
_SEVERAL = 2  # results: with one alone, a backward comes to it or not at all


class _Waiting(NamedTuple):
    """Who waits for the gradient of a tensor that is given: there if `outside`, else within."""

    place: int
    arrivals: list[Arrival]
    outside: bool


class Border:
    """One call of a piece of compiled code.

    Args:
        given: all that it is called with.
        code: the piece.
    """

    def __init__(self, given: Sequence[Any], *, code: Callable[..., Any]) -> None:
        self.code = code
        self._given = given
        self._versions = [_version(value) for value in given]
        self._waiting: list[_Waiting] = []
        self._handed_out: list[tuple[int, list[Arrival]]] = []
        self._returned: list[tuple[int, list[Arrival]]] = []
        self._reached: set[int] = set()
        self._arrived: dict[int, int] = {}  # the backward that has come to each result, last
        self._changes = False  # whether it has changed what gradients flow through

    def arrival_at(self, reached: Sequence[int] | None) -> Callable[[], bool]:
        """Returns what tells in a backward whether it has come to any of some results.

        Code is compiled for all of them: to those that the loss does not depend on, a backward
        comes with zeros, where autograd would not have come at all.
        """
        self._reached.update(reached or ())

        def arrives() -> bool:
            task = graph_task()
            come = (self._arrived.get(position) == task for position in reached or ())
            return reached is None or self._changes or any(come)

        return arrives

    def _let_out(self, returned: Any, hook: Callable[[torch.Tensor, Arrival], None]) -> None:
        """What it only returns is listened to outside, before hooks of the program's own."""
        used = {position for position, _ in self._handed_out}
        for position, arrivals in self._returned:
            if position not in used:
                for arrival in arrivals:
                    hook(returned[position], arrival)
            if position not in used or _is_made_outside(returned[position]):
                arrivals.clear()

    def _listen(self, returned: Any) -> None:
        for position in self._reached:
            if returned[position].requires_grad:
                noted = unserializable_hook(partial(self._note, position))
                returned[position].register_hook(noted)

    def _note(self, position: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # autograd hands over None where it comes for another result
            self._arrived[position] = graph_task()

    def given(self, place: int) -> Any:
        """Returns what it was called with there."""
        return self._given[place]

    def flows(self, place: int) -> bool:
        """Whether gradients reach what it was given there."""
        return bool(self._given[place].requires_grad)

    def wait(self, place: int, arrivals: list[Arrival], *, outside: bool) -> None:
        """Somebody waits for the gradients of what it was given there."""
        self._waiting.append(_Waiting(place, arrivals, outside))

    def hand_out(self, position: int, arrivals: list[Arrival]) -> None:
        """What it returns there has its whole gradient within, and hands it to `arrivals`."""
        self._handed_out.append((position, arrivals))

    def result(self, position: int, arrivals: list[Arrival]) -> None:
        """Somebody waits within for the gradient of what it returns there."""
        self._returned.append((position, arrivals))

    def leave(
        self, returned: Any, inner: InnerGradients, hook: Callable[[torch.Tensor, Arrival], None]
    ) -> None:
        """It has returned: those who wait outside are told, by `hook`.

        What it has changed has two parts, before and after, and a view that it returns is made
        anew outside from what it is a view of. No gradient of these is whole anywhere.
        """
        changed = [
            before is not None and before != _version(value)
            for before, value in zip(self._versions, self._given, strict=True)
        ]
        self._changes = any(changed)
        self._listen(returned)
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
        self._let_out(returned, hook)


class InnerGradients:
    """Tensors whose gradients are whole within compiled code alone, or nowhere."""

    def __init__(self) -> None:
        self._known: dict[
            int, tuple[weakref.ref[torch.Tensor], int | None, list[Arrival] | None]
        ] = {}

    def clear(self) -> None:
        """The step is over."""
        self._known.clear()

    def know(self, tensor: Any, arrivals: list[Arrival] | None) -> None:
        """Whoever waits for the gradient of a tensor is added to `arrivals`; None: it has none."""
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            self._known[id(tensor)] = weakref.ref(tensor), tensor._version, arrivals

    def take(self, tensor: torch.Tensor, arrival: Arrival) -> bool:
        """Whether the gradient of a tensor is no matter of the autograd outside."""
        if not self._known:
            return False
        ref, version, arrivals = self._known.get(id(tensor), (None, None, None))
        if ref is None or ref() is not tensor or version != tensor._version:
            return False
        if arrivals is not None:
            arrivals.append(arrival)
        return True


def mark_borders(graph: GraphModule) -> None:
    """Tells the operators in a graph which tensors are given to it, and lets out those returned."""
    parts = [graph, *(body for _, body in _checkpoints(graph))]
    for branch in _branches(graph, parts):
        _show_nothing(branch)
    for part in parts:
        _leave_out_dropouts(part)
    marks = _Marks(graph, parts)
    for part in parts:
        for node in part.graph.nodes:
            if str(node.target).startswith(_OURS):
                marks.mark(node)
    marks.hand_out()
    for part in parts:
        part.recompile()


def _checkpoints(graph: GraphModule) -> Iterator[tuple[Node, GraphModule]]:
    """Yields the calls of `torch.utils.checkpoint`, and what each computes; outer ones first."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            body = getattr(graph, str(node.args[0].target))
            yield node, body
            yield from _checkpoints(body)


def _branches(graph: GraphModule, parts: Sequence[GraphModule]) -> Iterator[GraphModule]:
    """Yields what `torch.cond`, `scan` and the like call."""
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule) and not any(module is part for part in parts):
            yield module


def _show_nothing(branch: GraphModule) -> None:
    """Takes our operators out: nothing is shown there in eager code either."""
    for node in [*branch.graph.nodes]:
        if str(node.target).startswith(_OURS):
            branch.graph.erase_node(node)
    branch.recompile()


def _leave_out_dropouts(graph: GraphModule) -> None:
    """Takes those out that drop nothing.

    Eagerly each returns the very tensor that it was given. Traced, it returns a copy, and what is
    computed from the copy would be missing in the gradient.
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
    """What is known of the tensors of one graph: which are one and the same.

    Args:
        graph: a graph.
        parts: it, and those in it.
    """

    def __init__(self, graph: GraphModule, parts: Sequence[GraphModule]) -> None:
        self._graph = graph.graph
        self._same: dict[object, Any] = {}  # nodes that stand for one in another graph
        for call, body in _checkpoints(graph):
            self._join(call, body)
        self._places: dict[object, int] = {}
        self._all_places: dict[object, int] = {}  # also of what no gradient flows to
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
        """Returns of each node, as bits, the results that gradients flow back to it from."""
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
        shared: dict[object, int] = {}  # by storage, where something was changed in place
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
        """What a checkpoint is called with is what is computed with in it, and so is its result."""
        for inner, outer in zip(_given(body.graph), call.args[1:], strict=False):
            self._same[inner] = outer
        for user in call.users:
            if user.target is operator.getitem:
                self._same[user] = _returned(body.graph)[user.args[1]]

    def _identity(self, node: Any) -> object:
        """Returns what nodes share that are one and the same tensor: the compiler's stand-in."""
        while node in self._same:
            node = self._same[node]
        value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
        return id(value) if isinstance(value, torch.Tensor) else node

    def mark(self, node: Node) -> None:
        """Adds to one of our operators the places of what it is called with."""
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
        """Adds an operator for each result that the graph uses itself as well."""
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
    """Whether no gradient flows through a node: what it gives is a tensor that needs none."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and not value.requires_grad


def _changed_storage(node: Node) -> object:
    """Returns where a tensor lies that was changed in place, itself or another one there."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()._cdata if value._version else None


def _is_made_outside(result: torch.Tensor) -> bool:
    return type(gradient_function(result)).__name__ != "CompiledFunctionBackward"


def _version(value: Any) -> int | None:
    flows = isinstance(value, torch.Tensor) and value.requires_grad
    return value._version if flows else None

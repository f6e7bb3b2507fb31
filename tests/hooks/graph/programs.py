"""Short random programs of tensor operations, run for real and followed by independent oracles.

The values that a variable holds are followed in the program's text: every block of memory has one
set of nearest traced ancestors, and every variable refers to a block. Gradient flow is read from
the autograd graph, cut at the traced tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from comgra_decl.hooks.graph.memory import Memory
from comgra_decl.hooks.graph.opaque import OpaqueCalls
from comgra_decl.hooks.graph.provenance import Provenance
from comgra_decl.hooks.modes import insert_at_bottom, remove
from comgra_decl.hooks.tensors.slots import Slot

Node = torch.autograd.graph.Node
Edges = dict[tuple[int, int], bool]

WIDTH = 4
LEAVES = 3  # the last of them requires no gradient


class Line(NamedTuple):
    """One operation on earlier variables, given by their numbers modulo the number of variables."""

    op: str
    left: int
    right: int


Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

NEW: dict[str, Operation] = {
    "add": lambda a, b: a + b.sum(),
    "multiply": lambda a, b: b.mean() * a,
    "stack": lambda a, b: torch.stack([a.mean(), b.mean()]),
    "where": lambda a, b: torch.where(a > 0, b.sum(), a),
    "mask": lambda a, b: (a > 0).float() + b.sum(),
    "no_grad": torch.no_grad()(lambda a, b: a * b.sum()),
    "rounded": lambda a, b: a.long().float() + b.detach().sum(),
}
SAME_MEMORY: dict[str, Operation] = {
    "rows": lambda a, _: a[:1],
    "flat": lambda a, _: a.view(-1),
    "detach": lambda a, _: a.detach(),
    "data": lambda a, _: a.data,
}
WRITE: dict[str, Operation] = {
    "add_": lambda a, b: a.add_(b.sum()),
    "item": lambda a, b: a.select(0, 0).mul_(b.sum()),
    "fill": lambda a, b: a.masked_fill_(b.sum() > 0, 1.0),
}
OPERATIONS = (*NEW, *SAME_MEMORY, *WRITE, "trace", "overwrite")


class Program:
    """Runs a program under the function mode, along with both oracles."""

    def __init__(self) -> None:
        self.found: Edges = {}
        self.expected: Edges = {}
        self._variables: list[torch.Tensor] = []
        self._memory: list[int] = []  # of each variable
        self._sources: list[frozenset[int]] = []  # of each block of memory
        self._traced: dict[Node, int] = {}
        self._count = 0
        self._errors: list[BaseException] = []
        fault = self._errors.append
        opaque = OpaqueCalls(on_fault=fault)
        self._mode = Provenance(lambda _: None, opaque=opaque, on_fault=fault, memory=Memory())

    def run(self, lines: list[Line]) -> Program:
        """Runs all lines; afterwards, `found` and `expected` can be compared."""
        torch.manual_seed(0)
        leaves = [torch.rand(WIDTH, WIDTH, requires_grad=i < LEAVES - 1) for i in range(LEAVES)]
        insert_at_bottom(self._mode)
        try:
            for leaf in leaves:
                self._trace(leaf, frozenset())
            for line in lines:
                self._step(line)
        finally:
            remove(self._mode)
        assert self._errors == []
        structure = self._mode.finish()
        names = [int(key.node) for key in structure.keys]
        self.found = {(names[s], names[t]): grad for s, t, grad in structure.edges}
        return self

    def _step(self, line: Line) -> None:
        i, j = line.left % len(self._variables), line.right % len(self._variables)
        a, b = self._variables[i], self._variables[j]
        from_a, from_b = (self._sources[self._memory[k]] for k in (i, j))
        if line.op == "trace":
            self._trace(a, from_a)
        elif line.op in NEW:
            self._add(NEW[line.op](a, b), from_a | from_b)
        elif line.op in SAME_MEMORY:
            self._add(SAME_MEMORY[line.op](a, b), memory=self._memory[i])
        elif a.is_leaf and a.requires_grad:
            return  # torch refuses to write to a view whose base later came to require a gradient
        elif line.op in WRITE:
            WRITE[line.op](a, b)
            self._sources[self._memory[i]] = from_a | from_b
        elif a._base is None and a.numel() == a.untyped_storage().nbytes() // 4:
            a.copy_(b.sum())
            self._sources[self._memory[i]] = from_b

    def _add(
        self, value: torch.Tensor, sources: frozenset[int] = frozenset(), memory: int = -1
    ) -> None:
        if memory < 0:
            memory = len(self._sources)
            self._sources.append(sources)
        self._variables.append(value)
        self._memory.append(memory)

    def _trace(self, value: torch.Tensor, sources: frozenset[int]) -> None:
        """A traced tensor is a new one: it has its own gradient function."""
        value, number = value.clone(), self._count
        slot = Slot(lambda: str(number), "output")
        with torch._C.DisableTorchFunction():
            flows = _reached(value.grad_fn, self._traced)
            self.expected |= {(source, number): source in flows for source in sources}
            self._mode.trace(slot, value)
            if value.grad_fn is not None:
                self._traced[value.grad_fn] = number
        self._count += 1
        self._add(value, frozenset((number,)))


def _reached(start: Node | None, traced: dict[Node, int]) -> set[int]:
    """Returns the traced tensors that a gradient from `start` reaches first on each path."""
    found: set[int] = set()
    waiting = [] if start is None else [start]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        nodes = [following for following, _ in node.next_functions]
        if node.name().endswith("CopyBackwards"):
            nodes = nodes[1:]  # the values that were replaced receive a gradient of zeros
        for following in nodes:
            if following is None or following in seen:
                continue
            seen.add(following)
            if following in traced:
                found.add(traced[following])
            else:
                waiting.append(following)
    return found

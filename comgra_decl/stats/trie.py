"""Layouts of a step's rows, learned from previous steps.

The tensors in one step arrive in nearly the same order every time. `Node`s form a tree over these
sequences: the path from the root is the sequence so far. The position of a tensor's rows depends
only on the tensors before it. A node therefore knows that position, and keeps the view into which
to copy. The first step builds the path; later ones only follow it. The node at which a step ends
has a `Form`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comgra_decl.stats.kernel import Kernel
from comgra_decl.stats.moments import KEPT, MOST_ROWS
from comgra_decl.stats.quiet import buffer
from comgra_decl.stats.sampling import sample_stride


class Group:
    """Memory for rows of a given length and precision on one device: [slots, capacity, length].

    Each slot holds one step, so that several steps can be reduced together. `version` changes
    when the memory is replaced.
    """

    def __init__(self, length: int, dtype: torch.dtype, device: torch.device, slots: int) -> None:
        self.length, self.dtype, self.device = length, dtype, device
        self.version = 0
        self.rows = buffer(slots, 0, length, dtype=dtype, device=device)

    @property
    def slots(self) -> int:
        """Number of steps it has space for."""
        return self.rows.shape[0]

    @property
    def capacity(self) -> int:
        """Rows per step."""
        return self.rows.shape[1]

    @property
    def nbytes(self) -> int:
        """Size of its memory in bytes."""
        return self.rows.numel() * self.rows.element_size()

    def resize(self, slots: int, capacity: int, keep: int | None = None) -> None:
        """Replace the memory; only the rows of slot `keep` survive."""
        old = self.rows
        self.rows = buffer(slots, capacity, self.length, dtype=self.dtype, device=self.device)
        self.version += 1
        if keep is not None:
            self.rows[keep, : old.shape[1]].copy_(old[keep])


class PutOff(Enum):
    """Whether reading an accelerator's tensor may be deferred."""

    UNKNOWN = auto()
    SEEN = auto()  # seen once; read both immediately and later next time
    SAFE = auto()  # both reads gave the same numbers
    NEVER = auto()


class Shape(NamedTuple):
    """A tensor as rows, one per sample, after moving the batch dim to the front."""

    full: tuple[int, ...]
    batch_dim: int | None
    samples: int
    elements: int


def shape_of(tensor: Tensor, batch_dim: int | None) -> Shape:
    """Return how `tensor` splits into samples; without a batch dim it is one sample."""
    full = tuple(tensor.shape)
    if batch_dim is None:
        return Shape(full, None, 1, prod(full))
    batch_dim %= len(full)
    return Shape(full, batch_dim, full[batch_dim], prod(full[:batch_dim] + full[batch_dim + 1 :]))


class Node:
    """One tensor of a step, identified by all tensors before it."""

    __slots__ = (
        "_views",
        "addresses",
        "bytes",
        "children",
        "copied",
        "count",
        "device",
        "direct",
        "dtype",
        "following",
        "form",
        "full",
        "given",
        "group",
        "holder",
        "index",
        "kept",
        "kernel",
        "kind",
        "parent",
        "put_off",
        "row",
        "shape",
        "size",
        "stride",
        "used",
        "version",
    )

    def __init__(self, parent: Node | None = None) -> None:
        self.parent = parent
        self.children: dict[Hashable, Node] = {}
        self.following: Node | None = None  # the child that came last, if it is `copied`
        self.form: Form | None = None
        self.index: int = -1 if parent is None else parent.index + 1
        self.used: dict[Group, int] = {} if parent is None else parent.used
        self.bytes: int = 0 if parent is None else parent.bytes
        self.group: Group | None = None
        self.direct = False  # a plain copy into the host's group suffices
        self.copied = 0  # bytes, if a contiguous tensor's memory equals its rows
        self.full: torch.Size | None = None  # what `copied` applies to: a strided tensor of this
        self.dtype: torch.dtype | None = None  # shape and dtype on the host, added with this
        self.given: int | None = None  # batch dim
        self.kernel: Kernel | None = None  # reads contiguous tensors in place
        self.put_off = PutOff.UNKNOWN
        self.holder: Any = None  # the `DeviceStep` that may defer the tensor
        self.size: Any = None  # `fused.Rows`, on an accelerator
        self.kind: Hashable = None  # tensors that share a launch have equal kinds
        self.row = self.stride = self.count = 0
        self.kept = 0  # number of leading samples with a row of raw sums each
        self._views: list[Tensor] = []
        self.addresses: list[int] = []  # of its rows in each slot, if the group has this `version`
        self.version = -1

    def describe(
        self, tensor: Tensor, batch_dim: int | None, *, device: torch.device, histogram: int | None
    ) -> None:
        """Fill in facts that depend on the tensor alone, and the device that reduces it."""
        self.shape = shape_of(tensor, batch_dim)
        samples = self.shape.samples
        self.kept = KEPT if samples > MOST_ROWS and self.shape.elements else samples
        self.device = device
        if histogram is not None:
            self.stride, self.count = sample_stride(tensor.numel(), self.shape.elements, histogram)

    @property
    def is_pooled(self) -> bool:
        """Whether there are more samples than rows, so that `moments` cover all samples."""
        return self.kept < self.shape.samples

    def place(self, group: Group) -> None:
        """Place the rows after those of the same group earlier in this step."""
        self.group = group
        self.row = self.used.get(group, 0)
        self.used = {**self.used, group: self.row + self.shape.samples}
        self.bytes += self.shape.samples * group.length * group.rows.element_size()

    def view(self, slot: int) -> Tensor:
        """Return the memory of this tensor's rows in one slot, in the shape of the tensor."""
        group = self.group
        assert group is not None
        if self.version != group.version:
            self._views = [self._shaped(group.rows[s]) for s in range(group.rows.shape[0])]
            self.addresses = [view.data_ptr() for view in self._views]
            self.version = group.version
        return self._views[slot]

    def _shaped(self, rows: Tensor) -> Tensor:
        full, batch_dim, samples, _ = self.shape
        mine = rows[self.row : self.row + samples]
        if batch_dim is None:
            return mine.view(full)
        rest = full[:batch_dim] + full[batch_dim + 1 :]
        return mine.view(samples, *rest).movedim(0, batch_dim)

    def path(self) -> list[Node]:
        """Return the nodes of the step that ends here, in order."""
        nodes = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class Pick(NamedTuple):
    """Histogram elements to copy from an arena: rows of a group -> a range of the samples."""

    group: Group
    row: int
    rows: int
    stride: int
    start: int
    stop: int


@dataclass(eq=False)
class Part:
    """One device's rows in a form: those of its groups, then those reduced immediately."""

    device: torch.device
    groups: list[tuple[Group, int, int]] = field(default_factory=list)  # group, rows, first row
    nodes: list[Node] = field(default_factory=list)
    start: int = 0  # first row reduced immediately
    stop: int = 0


class Form:
    """The layout of a whole step's rows, reused by later steps with the same form."""

    def __init__(self, signature: int, nodes: list[Node], host: torch.device) -> None:
        self.signature = signature
        self.nodes = nodes
        self.repeats = 0
        self.samples = _ints(n.shape.samples for n in nodes)
        self.kept = _ints(n.kept for n in nodes)
        self.elements = _ints(n.shape.elements for n in nodes)
        self.batched = np.array([n.shape.batch_dim is not None for n in nodes], dtype=np.bool_)
        self.shapes = [n.shape.full for n in nodes]
        self.histogram_starts = _ints([0, *np.cumsum([n.count for n in nodes])])
        self.starts = np.zeros(len(nodes), np.int64)
        self.parts: dict[torch.device, Part] = {}
        self.rows = self._place(host)
        self.picks = list(self._picks(host))
        for shared in (
            self.starts,
            self.samples,
            self.kept,
            self.elements,
            self.histogram_starts,
        ):
            shared.setflags(write=False)

    def _place(self, host: torch.device) -> int:
        self.parts[host] = Part(host)
        for node in self.nodes:
            self.parts.setdefault(node.device, Part(node.device)).nodes.append(node)
        row = 0
        for part in self.parts.values():
            row = self._place_part(part, row)
        return row

    def _place_part(self, part: Part, row: int) -> int:
        first: dict[Group, int] = {}
        for node in part.nodes:
            if node.group is not None:
                first.setdefault(node.group, 0)
                first[node.group] += node.shape.samples
        for group, rows in first.items():
            part.groups.append((group, rows, row))
            first[group] = row
            row += rows
        part.start = row
        for node in part.nodes:
            if node.group is not None:
                self.starts[node.index] = first[node.group] + node.row
            else:
                self.starts[node.index] = row
                row += node.kept
        part.stop = row
        return row

    def _picks(self, host: torch.device) -> list[Pick]:
        """Return the elements to copy from the host's groups; merge neighbours where possible."""
        picks: list[Pick] = []
        for node in self.parts[host].nodes:
            if node.group is None or not node.count:
                continue
            start = int(self.histogram_starts[node.index])
            new = Pick(
                node.group, node.row, node.shape.samples, node.stride, start, start + node.count
            )
            last = picks[-1] if picks else None
            if last is not None and _joins(last, new):
                picks[-1] = last._replace(rows=last.rows + new.rows, stop=new.stop)
            else:
                picks.append(new)
        return picks


def _joins(last: Pick, new: Pick) -> bool:
    """Whether two picks cover all elements of neighbouring rows."""
    return (
        last.group is new.group
        and last.stride == new.stride == 1
        and last.row + last.rows == new.row
        and last.stop == new.start
    )


def _ints(values: Iterable[int]) -> NDArray[np.int64]:
    return np.array(list(values), dtype=np.int64)

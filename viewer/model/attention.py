"""Attention weights of the run: their tensors, one sample's matrices, and its tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError
from comgra_decl.query import Preview
from comgra_decl.records import Axis
from comgra_decl.spec.axes import RECOMPUTED
from comgra_decl.viewer.model.drawing import numbers
from comgra_decl.viewer.model.runview import RunView, Slot
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.tokens import has_tokens, label, labels

_PAIR = ("query", "key")
_SIDES = (("input", "input.query"), ("input[1]", "input.key"))
"""Roles that the queries may have, and those that the keys may have."""

_HEADS, _SMALL = 32, 24
"""Maximum number of drawn heads, and of rows and columns in a thumbnail."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention weights of one sample in one tensor.

    Attributes:
        weights: [heads, queries, keys]; NaN where they are not finite.
        queries: Label of each row.
        keys: Label of each column.
        facts: What is shown, such as the number of heads and the size of the matrices.
        step: The step of the weights. It is another one if only some records have a preview.
    """

    weights: Floats
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    facts: str
    step: int


def layers(view: RunView) -> list[Slot]:
    """Return the slots that contain attention weights, in execution order.

    A module that is a softmax itself and the function that it calls count as one.
    """

    def find() -> list[Slot]:
        found = [slot for slot in view.slots.values() if _is_attention(view, slot)]
        return [slot for slot in found if not any(_is_inside(other, slot) for other in found)]

    return view.now("attention", find)


def _is_inside(inner: Slot, outer: Slot) -> bool:
    """Return whether a softmax module returns what a function inside it has returned."""
    same = (inner.shape, inner.iteration) == (outer.shape, outer.iteration)
    return same and outer.module_class == "Softmax" and inner.node.rpartition(".")[0] == outer.node


def _is_attention(view: RunView, slot: Slot) -> bool:
    if slot.pass_ != "forward" or slot.kind != "computed" or slot.batch_dim is None:
        return False
    return view.run.arrays.axes(slot.id)[-2:] == _PAIR


def layer_at(view: RunView, at: Selection) -> Slot | None:
    """Return the attention tensor that is selected or nearest to the selected node; None if none.

    Of several, the one whose path begins with most parts of the node's path is the nearest, such as
    `blocks.1.attn` to `blocks.1.mlp`.
    """
    path = (at.node or "").split(".")

    def shared(slot: Slot) -> tuple[int, bool, bool]:
        other = slot.node.split(".")
        same = next((i for i, (a, b) in enumerate(zip(path, other, strict=False)) if a != b), None)
        parts = min(len(path), len(other)) if same is None else same
        return parts, slot.node == at.node and slot.role == at.role, slot.iteration == at.iteration

    return max(layers(view), key=shared, default=None)


def attention(view: RunView, slot: Slot, at: Selection) -> Attention | None:
    """Return the weights of the selected sample, or of the first; None if there are none."""
    if at.step is None:
        return None
    try:
        preview = view.preview(slot, at.step, at.type)
    except ComgraError:
        return None
    sample = at.sample or 0
    if sample >= len(preview.values) or preview.values.ndim not in (3, 4):
        return None
    whole = numbers(preview.values)[sample]
    weights = whole.reshape(-1, *whole.shape[-2:]).astype(np.float32)
    rows, columns = preview.meanings[-2:]
    then = replace(at, step=preview.step)
    words = tokens(view, then, sample, max(rows.size, columns.size))
    heads = weights.shape[0]
    many = f"{heads} heads" if heads != 1 else "1 head"
    return Attention(
        weights[:_HEADS],
        _labels(rows, weights.shape[1], words),
        _labels(columns, weights.shape[2], words),
        f"{many} \u00b7 {weights.shape[1]}\u00d7{weights.shape[2]}{_of(preview, sample)}"
        f"{'' if preview.step == at.step else f', preview of step {preview.step}'}",
        preview.step,
    )


@dataclass(frozen=True, eq=False, slots=True)
class Neurons:
    """The query and key vectors of a head, from whose products its weights are computed.

    Attributes:
        head: the number of the head.
        query: [queries, width].
        key: [keys, width].
    """

    head: int
    query: Floats
    key: Floats


def has_neurons(view: RunView, slot: Slot) -> bool:
    """Return whether the queries and keys of fused attention may have been recorded."""
    return len(_vectors(view, slot)) == len(_SIDES)


def neurons(view: RunView, slot: Slot, at: Selection, head: int) -> Neurons | None:
    """Return the queries and keys of a head of the selected sample; None if there are none.

    If several heads share a key (grouped queries), each of them has it.
    """
    if at.step is None or not has_neurons(view, slot):
        return None
    found = []
    for each in _vectors(view, slot):
        try:
            values = numbers(view.value(each, at.step, at.type))
        except ComgraError:
            return None
        if (at.sample or 0) >= len(values) or values.ndim < 3:
            return None
        own = values[at.sample or 0]
        found.append(own.reshape(-1, *own.shape[-2:]).astype(np.float32))
    query, key = found
    if head >= len(query) or len(query) % len(key):
        return None
    return Neurons(head, query[head], key[head // (len(query) // len(key))])


def _vectors(view: RunView, slot: Slot) -> list[Slot]:
    """Return the slots of the queries and keys of recomputed attention; fewer if some lack."""
    if slot.role != RECOMPUTED:
        return []
    roles = view.roles(slot.node)
    names = (next((name for name in side if name in roles), None) for side in _SIDES)
    found = (None if name is None else _at(view, slot, name) for name in names)
    return [each for each in found if each is not None]


def _at(view: RunView, slot: Slot, role: str) -> Slot | None:
    return view.passes(slot.node, role, slot.iteration).get("forward")


def _of(preview: Preview, sample: int) -> str:
    means = any(axis.how == "mean" for axis in preview.meanings)
    sizes = "\u00d7".join(str(axis.size) for axis in preview.meanings[-2:])
    return f", means of {sizes} \u00b7 sample {sample}" if means else f" \u00b7 sample {sample}"


def tokens(view: RunView, at: Selection, sample: int, length: int) -> tuple[str, ...]:
    """Return the tokens of a sample, from the integers in an input of this length; or ().

    Inputs whose tokens are declared come first. Without a declaration, bytes are shown as letters,
    and other numbers unchanged.
    """
    slots = sorted(view.slots.values(), key=lambda slot: not has_tokens(view, slot))
    for slot in slots:
        fits = slot.kind == "input" and slot.pass_ == "forward" and slot.shape[1:] == (length,)
        if not fits or slot.batch_dim != 0 or "int" not in slot.dtype or at.step is None:
            continue
        ids = _ids(view, slot, at)
        if ids is None or sample >= len(ids):
            continue
        if has_tokens(view, slot):
            return tuple(labels(view, ids[sample]).tolist())
        letters = slot.dtype == "uint8"
        return tuple(label(chr(i) if letters else str(i)) for i in ids[sample].tolist())
    return ()


def _ids(view: RunView, slot: Slot, at: Selection) -> NDArray[Any] | None:
    """Return the recorded integers [samples, positions]; of a preview, if that has them all."""
    assert at.step is not None
    try:
        return view.value(slot, at.step, at.type)
    except ComgraError:
        pass
    try:
        found = view.preview(slot, at.step, at.type)
    except ComgraError:
        return None
    same = found.step == at.step and found.values.shape[1:] == slot.shape[1:]
    return found.values if same and not any(a.how == "mean" for a in found.meanings) else None


def _labels(axis: Axis, count: int, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the label of each entry: its token, or the range of tokens for which it stands."""
    if axis.how != "mean":
        return words[:count] if len(words) >= count else tuple(map(str, range(count)))
    ends = [(i * axis.size // count, -(-(i + 1) * axis.size // count) - 1) for i in range(count)]
    return tuple(f"{a}\u2013{b}" if b > a else str(a) for a, b in ends)


def thumbnails(found: Attention) -> Floats:
    """Return the largest weight of each block of cells, [heads, rows, columns], for small maps."""
    heads, rows, columns = found.weights.shape
    down, across = (-(-n // _SMALL) for n in (rows, columns))
    padded = np.full((heads, -(-rows // down) * down, -(-columns // across) * across), -np.inf)
    padded[:, :rows, :columns] = np.nan_to_num(found.weights, nan=0.0)
    blocks = padded.reshape(heads, -1, down, padded.shape[2] // across, across)
    largest: Floats = blocks.max((2, 4)).astype(np.float32)
    return largest

"""Slots: the named series of recorded tensors, with dense ids in order of appearance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from comgra_decl.hooks.tensors.shards import shard_of
from comgra_decl.records import SlotInfo, SlotKey
from comgra_decl.stats import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from comgra_decl.records import Piece
    from comgra_decl.spec.images import ImageSpec


class Slot:
    """One series of one tensor; its id and node name are fixed when its first record closes.

    The name is determined late, because a name may need the class of the root module as a prefix.
    All root modules are known only after the first step.
    """

    __slots__ = (
        "axes",
        "batch_dim",
        "dtype",
        "forward",
        "id",
        "image",
        "iteration",
        "kind",
        "module_class",
        "names",
        "node",
        "pass_",
        "passes",
        "piece",
        "role",
        "shape",
    )

    def __init__(
        self,
        node: Callable[[], str],
        role: str,
        *,
        iteration: int = 0,
        pass_: str = "forward",
        kind: str = "computed",
        module_class: str = "",
        names: Callable[[], tuple[str, ...]] = tuple,
        axes: tuple[str, ...] = (),
        image: ImageSpec | None = None,
    ) -> None:
        self.node = node
        self.role = role
        self.iteration = iteration
        self.pass_ = pass_
        self.kind = kind
        self.module_class = module_class
        self.names = names
        self.axes = axes  # names of the value dims, from the spec
        self.image = image  # how images were normalised, from the spec
        self.id = -1
        self.shape: tuple[int, ...] = ()
        self.dtype = ""
        self.batch_dim: int | None = None
        self.piece: Piece | None = None
        self.passes: dict[str, Slot] = {}
        self.forward: Slot | None = None  # the slot of the forward pass, if this is another pass

    @property
    def key(self) -> SlotKey:
        """The slot's public key."""
        return SlotKey(self.node(), self.role, self.iteration, self.pass_)

    def describe(self, tensor: torch.Tensor, batch_dim: int | None) -> None:
        """Store the shape, dtype and batch dimension of the first tensor seen."""
        self.shape = tuple(tensor.shape)
        self.dtype = dtype_name(tensor)
        self.batch_dim = batch_dim
        shard = shard_of(tensor)
        forward = self.forward
        if shard is not None:
            self.piece, self.shape = shard
        elif (
            forward is not None and forward.piece is not None and forward.piece.shape == self.shape
        ):
            self.piece, self.shape = forward.piece, forward.shape  # the gradient of a part
        else:
            self.piece = None

    def take_form_of(self, other: Slot) -> None:
        """Copy the shape and dtype of the slot to which a tensor was initially assigned."""
        if not self.dtype:
            self.shape, self.dtype = other.shape, other.dtype
            self.batch_dim, self.piece = other.batch_dim, other.piece

    def in_pass(self, pass_: str) -> Slot:
        """Return the slot of the same tensor in another pass, such as `grad` or `update`."""
        slot = self.passes.get(pass_)
        if slot is None:
            slot = self.passes[pass_] = Slot(
                lambda: self.node(),  # evaluated late, because the name may get a number
                self.role,
                iteration=self.iteration,
                pass_=pass_,
                kind=self.kind,
                module_class=self.module_class,
                names=self.names,
                axes=self.axes,
            )
            slot.forward = self
        return slot


class SlotTable:
    """Assigns the dense ids."""

    def __init__(self) -> None:
        self._next = 0
        self._keys: dict[SlotKey, int] = {}
        self._former: dict[SlotKey, int] = {}  # ids not reused yet since all slots were recreated

    def renew(self) -> None:
        """Prepare for slots to be recreated: those with the same name keep their ids."""
        self._former = dict(self._keys)

    def resume(self, slots: Iterable[SlotInfo]) -> None:
        """Take over the slots in a resumed run: those with the same name keep their ids."""
        self._keys = {slot.key: slot.id for slot in slots}
        self._former = dict(self._keys)
        self._next = len(self._keys)

    def settle(self, slots: Iterable[Slot]) -> list[SlotInfo]:
        """Assign ids to slots that have none, and return the new lines of the table."""
        settled = [self._settle(slot) for slot in slots if slot.id < 0]
        return [info for info in settled if info is not None]

    def _settle(self, slot: Slot) -> SlotInfo | None:
        key = self._unique(slot.key)
        slot.node = lambda node=key.node: node  # type: ignore[misc]
        known = self._former.pop(key, None)
        if known is not None:
            slot.id = known
            return None
        slot.id = self._keys[key] = self._next
        self._next += 1
        return SlotInfo(
            id=slot.id,
            key=key,
            kind=slot.kind,
            dtype=slot.dtype,
            shape=slot.shape,
            batch_dim=slot.batch_dim,
            module_class=slot.module_class,
            names=slot.names(),
            piece=slot.piece,
            axes=slot.axes,
            image=None if slot.image is None else slot.image.normalised,
        )

    def _unique(self, key: SlotKey) -> SlotKey:
        """Add a number to a name that is taken, for example by a second model of the same class."""
        unique, number = key, 2
        while unique in self._keys and unique not in self._former:
            unique = key._replace(node=f"{key.node}#{number}")
            number += 1
        return unique

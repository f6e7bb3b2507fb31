"""The operators by which compiled code shows a tensor, and its gradient, to Python.

A hook that the compiler traces calls `show`. It returns nothing, so what the module returns stays
what it is: no copy, no view, nothing that a change in place could meet. When AOTAutograd takes
`show` apart, it becomes `read`, and a tensor hook that autograd runs while the backward is traced:
so `gradient` becomes a part of the backward.

Both are declared effects, in order: nothing removes or reorders them, and no buffer is needed that
forward and backward would have to share.

Compiled code is cached on disk under what the compiler was given, calls of `show` among it. So one
that comes to do something else needs another name.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch._library.effects import EffectType

NO_TICKET = -1
"""What a tensor has whose gradient nobody waits for."""


class Shown(NamedTuple):
    """Which tensor it is that is shown: of a module, given to it or returned.

    Attributes:
        module: the number of the module.
        path: where in the value the tensor lies.
        position: which one of the value's tensors it is; 0 begins a call.
        entering: whether the module was given it.
        watched: whether its gradient will be shown, too.
    """

    module: int
    path: str
    position: int
    entering: bool
    watched: bool


class Reader(Protocol):
    """Is shown tensors while compiled code runs; must not raise."""

    def read(self, tensor: torch.Tensor, shown: Shown) -> int:
        """Reads a tensor; returns a number by which its gradient will be known."""

    def gradient(self, tensor: torch.Tensor, ticket: int) -> None:
        """Reads the gradient of a tensor that was read before."""


reader: Reader | None = None
"""Whoever is shown what compiled code computes; None where nothing is recorded."""


def _read(
    x: torch.Tensor, module: torch.Tensor, path: str, index: int, entering: bool, watched: bool
) -> torch.Tensor:
    ticket = NO_TICKET
    if reader is not None:
        ticket = reader.read(x, Shown(int(module), path, index, entering, watched))
    return torch.tensor(ticket)


def _ticket_shape(*_: Any) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)


def _gradient(gradient: torch.Tensor, ticket: torch.Tensor) -> None:
    if reader is not None:
        reader.gradient(gradient, int(ticket))


def _no_shape(*_: Any) -> None:
    pass


def _show(
    x: torch.Tensor, module: torch.Tensor, path: str, index: int, entering: bool, watched: bool
) -> None:
    watched = watched and x.requires_grad
    ticket = torch.ops.comgra_decl.read(x.detach(), module, path, index, entering, watched)
    if watched:
        x.register_hook(lambda gradient: _arrived(gradient, ticket))


def _arrived(gradient: torch.Tensor | None, ticket: torch.Tensor) -> None:
    if gradient is not None:  # autograd hands over None where a function has none for this result
        torch.ops.comgra_decl.gradient(gradient, ticket)


def _define() -> torch.library.Library:
    """Makes the operators; they last as long as the library that is returned."""
    library = torch.library.Library("comgra_decl", "DEF")
    shown = "Tensor x, Tensor module, str path, int index, bool entering, bool watched"
    library.define(f"show({shown}) -> ()")
    library.define(f"read({shown}) -> Tensor")
    library.define("gradient(Tensor gradient, Tensor ticket) -> ()")
    library.impl("show", _show, "CompositeImplicitAutograd")
    library.impl("read", _read, "CompositeExplicitAutograd")
    library.impl("gradient", _gradient, "CompositeExplicitAutograd")
    torch.library.register_fake("comgra_decl::read", _ticket_shape, lib=library)
    torch.library.register_fake("comgra_decl::gradient", _no_shape, lib=library)
    for name in ("read", "gradient"):
        torch.library._register_effectful_op(f"comgra_decl::{name}", EffectType.ORDERED)
    torch.fx.has_side_effect(torch.ops.comgra_decl.show.default)
    return library


_library = _define()

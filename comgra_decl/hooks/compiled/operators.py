"""The operators by which compiled code shows a tensor, and its gradient, to Python.

A hook that the compiler traces calls `show`. It returns nothing, so what the module returns stays
what it is: no copy, no view, nothing that a change in place could meet. When AOTAutograd takes
`show` apart, it becomes `read`, and a tensor hook that autograd runs while the backward is traced:
so `gradient` becomes a part of the backward.

A compiled function that calls a model shows more: `enter` and `leave` say where the outermost call
of a module begins and ends, which no Python sees there.

All are declared effects, in order: nothing removes or reorders them, and no buffer is needed that
forward and backward would have to share.

Compiled code is cached on disk under what the compiler was given, calls of `show` among it. So one
that comes to do something else needs another name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


class Given(NamedTuple):
    """With what an outermost module is called within a compiled function.

    Attributes:
        module: the number of the module.
        paths: where in the arguments the tensors lie, line by line; keyword arguments begin with a
            point.
        leaves: of each tensor, whether autograd knows nothing that it was computed from.
        flows: of each, whether gradient can flow through it.
        enabled: whether gradient can flow at all.
    """

    module: int
    paths: str
    leaves: list[bool]
    flows: list[bool]
    enabled: bool


class Reader(Protocol):
    """Is shown tensors while compiled code runs; must not raise."""

    def read(self, tensor: torch.Tensor, shown: Shown) -> int:
        """Reads a tensor; returns a number by which its gradient will be known."""

    def gradient(self, tensor: torch.Tensor, ticket: int, index: int) -> None:
        """Reads the gradient of a tensor that was read before, or of one of several."""

    def enter(self, tensors: list[torch.Tensor], given: Given) -> int:
        """An outermost module is called; returns a number for the gradients of what it is given."""

    def leave(self) -> None:
        """That module has returned."""

    def target(self, tensor: torch.Tensor) -> None:
        """A compiled function compares what a model has computed with this."""


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


def _gradient(gradient: torch.Tensor, ticket: torch.Tensor, index: int = 0) -> None:
    if reader is not None:
        reader.gradient(gradient, int(ticket), index)


def _entered(
    tensors: list[torch.Tensor],
    module: torch.Tensor,
    paths: str,
    leaves: list[bool],
    flows: list[bool],
    enabled: bool,
) -> torch.Tensor:
    ticket = NO_TICKET
    if reader is not None:
        ticket = reader.enter(tensors, Given(int(module), paths, leaves, flows, enabled))
    return torch.tensor(ticket)


def _left(_: torch.Tensor) -> None:
    if reader is not None:
        reader.leave()


def _target(tensor: torch.Tensor) -> None:
    if reader is not None:
        reader.target(tensor)


def _no_shape(*_: Any) -> None:
    pass


def _show(
    x: torch.Tensor, module: torch.Tensor, path: str, index: int, entering: bool, watched: bool
) -> None:
    watched = watched and x.requires_grad
    ticket = torch.ops.comgra_decl.read(x.detach(), module, path, index, entering, watched)
    if watched:
        x.register_hook(partial(_arrived, ticket=ticket))


def _enter(
    tensors: list[torch.Tensor],
    module: torch.Tensor,
    paths: str,
    leaves: list[bool],
    flows: list[bool],
    enabled: bool,
    _: bool,
) -> None:
    given = [tensor.detach() for tensor in tensors]
    ticket = torch.ops.comgra_decl.entered(given, module, paths, leaves, flows, enabled)
    for i, tensor in enumerate(tensors):
        if enabled and leaves[i] and tensor.requires_grad:
            tensor.register_hook(partial(_arrived, ticket=ticket, index=i))


def _leave(_: list[torch.Tensor], module: torch.Tensor, __: bool) -> None:
    torch.ops.comgra_decl.left(module)


def _arrived(gradient: torch.Tensor | None, ticket: torch.Tensor, index: int = 0) -> None:
    if gradient is not None:  # autograd hands over None where a function has none for this result
        torch.ops.comgra_decl.gradient(gradient, ticket, index)


def _define() -> torch.library.Library:
    """Makes the operators; they last as long as the library that is returned."""
    library = torch.library.Library("comgra_decl", "DEF")
    shown = "Tensor x, Tensor module, str path, int index, bool entering, bool watched"
    library.define(f"show({shown}) -> ()")
    library.define(f"read({shown}) -> Tensor")
    given = "Tensor[] tensors, Tensor module, str paths, bool[] leaves, bool[] flows, bool enabled"
    library.define(f"enter({given}, bool of_model) -> ()")
    library.define(f"entered({given}) -> Tensor")
    library.define("leave(Tensor[] tensors, Tensor module, bool of_model) -> ()")
    library.define("left(Tensor module) -> ()")
    library.define("target(Tensor tensor) -> ()")
    library.define("gradient(Tensor gradient, Tensor ticket, int index=0) -> ()")
    for name, taken_apart in (("show", _show), ("enter", _enter), ("leave", _leave)):
        library.impl(name, taken_apart, "CompositeImplicitAutograd")
        torch.fx.has_side_effect(getattr(torch.ops.comgra_decl, name).default)
    effects: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
        ("read", _read, _ticket_shape),
        ("entered", _entered, _ticket_shape),
        ("left", _left, _no_shape),
        ("target", _target, _no_shape),
        ("gradient", _gradient, _no_shape),
    )
    for name, does, shape in effects:
        library.impl(name, does, "CompositeExplicitAutograd")
        torch.library.register_fake(f"comgra_decl::{name}", shape, lib=library)
        torch.library._register_effectful_op(f"comgra_decl::{name}", EffectType.ORDERED)
    return library


_library = _define()

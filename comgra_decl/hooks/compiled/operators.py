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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from comgra_decl.hooks.call_context import is_backward
from comgra_decl.hooks.compiled.borders import NOWHERE
from comgra_decl.hooks.pytree import gradient_function
from comgra_decl.torch_private import EffectType, FunctionalTensor, effectful_operator

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
        place: as which argument the piece of compiled code was given it; -1: as none.
        outside: whether its gradient arrives there, and will not be shown.
        result: as which result the piece returns it; -1: as none.
        reached: as which results what is computed from it is returned; None: it does not matter.
    """

    module: int
    path: str
    position: int
    entering: bool
    watched: bool
    place: int = NOWHERE
    outside: bool = False
    result: int = NOWHERE
    reached: Sequence[int] | None = None


class Given(NamedTuple):
    """With what an outermost module is called within a compiled function.

    Attributes:
        module: the number of the module.
        paths: where in the arguments the tensors lie, line by line; keyword arguments begin with a
            point.
        leaves: of each tensor, whether autograd knows nothing that it was computed from.
        flows: of each, whether gradient can flow through it.
        enabled: whether gradient can flow at all.
        places: as which arguments the compiled function was given them; -1: as none.
    """

    module: int
    paths: str
    leaves: list[bool]
    flows: list[bool]
    enabled: bool
    places: list[int]


class Reader(Protocol):
    """Is shown tensors while compiled code runs; must not raise."""

    def read(self, tensor: torch.Tensor, shown: Shown) -> int:
        """Reads a tensor; returns a number by which its gradient will be known."""

    def gradient(self, tensor: torch.Tensor, ticket: int) -> None:
        """Reads the gradient of a tensor that was read before."""

    def enter(self, tensors: list[torch.Tensor], given: Given) -> None:
        """An outermost module is called."""

    def leave(self) -> None:
        """That module has returned."""

    def target(self, tensor: torch.Tensor) -> None:
        """A compiled function compares what a model has computed with this."""

    def hand_out(self, position: int, reached: Sequence[int] | None) -> int:
        """A tensor is returned by a piece of code that uses it; returns a number for gradients."""


reader: Reader | None = None
"""Whoever is shown what compiled code computes; None where nothing is recorded."""


def _read(x: torch.Tensor, module: torch.Tensor, path: str, index: int, *how: Any) -> torch.Tensor:
    ticket = NO_TICKET
    if reader is not None:
        ticket = reader.read(x, Shown(int(module), path, index, *how))
    return torch.tensor(ticket)


def _ticket_shape(*_: Any) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)


def _gradient(gradient: torch.Tensor, ticket: torch.Tensor) -> None:
    if reader is not None:
        reader.gradient(gradient, int(ticket))


def _entered(
    tensors: list[torch.Tensor],
    module: torch.Tensor,
    paths: str,
    leaves: list[bool],
    flows: list[bool],
    enabled: bool,
    places: list[int],
) -> None:
    if reader is not None:
        reader.enter(tensors, Given(int(module), paths, leaves, flows, enabled, places))


def _left(_: torch.Tensor) -> None:
    if reader is not None:
        reader.leave()


def _target(tensor: torch.Tensor) -> None:
    if reader is not None:
        reader.target(tensor)


def _handed_out(
    _: torch.Tensor, position: int, reached: Sequence[int] | None = None
) -> torch.Tensor:
    return torch.tensor(NO_TICKET if reader is None else reader.hand_out(position, reached))


def _no_shape(*_: Any) -> None:
    pass


def _show(
    x: torch.Tensor,
    module: torch.Tensor,
    path: str,
    index: int,
    entering: bool,
    watched: bool,
    place: int = NOWHERE,
    result: int = NOWHERE,
    reached: Sequence[int] | None = None,
) -> None:
    """Gradients of what is given to a piece of code are heard outside: others may use it as well.

    Where it is not known which argument it is, they are not heard at all.
    """
    if is_backward() and not _is_traced(x):
        return  # a checkpoint computes again what autograd has listened to
    outside = _is_given(x)
    watched = watched and x.requires_grad and not (outside and place == NOWHERE)
    ends = (result, reached) if _is_traced(x) else (NOWHERE, None)
    how = (entering, watched, place, outside, *ends)
    ticket = torch.ops.comgra_decl.read(x.detach(), module, path, index, *how)
    if watched and not outside:
        x.register_hook(partial(_arrived, ticket=ticket))


def _is_given(x: torch.Tensor) -> bool:
    """Whether a tensor is what a piece of code is given, while its backward is traced.

    Those that were computed before it have a function that only raises an error.
    """
    return x.is_leaf or type(gradient_function(x)).__name__ == "Error"


def _is_traced(x: torch.Tensor) -> bool:
    """Whether a backward is traced; else this is the tensor itself, and autograd knows it all."""
    return isinstance(x, FunctionalTensor)


def _hand_out(x: torch.Tensor, position: int, reached: Sequence[int] | None = None) -> None:
    if x.requires_grad and _is_traced(x) and not _is_given(x):
        ticket = torch.ops.comgra_decl.handed_out(x.detach(), position, reached)
        x.register_hook(partial(_arrived, ticket=ticket))


def _enter(
    tensors: list[torch.Tensor],
    module: torch.Tensor,
    paths: str,
    leaves: list[bool],
    flows: list[bool],
    enabled: bool,
    _: bool,
    places: Sequence[int] = (),
) -> None:
    given = [tensor.detach() for tensor in tensors]
    torch.ops.comgra_decl.entered(given, module, paths, leaves, flows, enabled, places)


def _leave(_: list[torch.Tensor], module: torch.Tensor, __: bool) -> None:
    torch.ops.comgra_decl.left(module)


def _arrived(gradient: torch.Tensor | None, ticket: torch.Tensor) -> None:
    if gradient is not None:  # autograd hands over None where a function has none for this result
        torch.ops.comgra_decl.gradient(gradient, ticket)


def operator_of(node: torch.fx.Node) -> str:
    """Returns the name of the operator whose effect a node has; empty for those without effect."""
    if node.target is torch.ops.higher_order.with_effects:
        return str(node.args[1])
    return ""


def _define() -> torch.library.Library:
    """Makes the operators; they last as long as the library that is returned."""
    library = torch.library.Library("comgra_decl", "DEF")
    shown = "Tensor x, Tensor module, str path, int index, bool entering, bool watched"
    ends = "int result=-1, int[]? reached=None"
    library.define(f"show({shown}, int place=-1, {ends}) -> ()")
    library.define(f"read({shown}, int place, bool outside, {ends}) -> Tensor")
    library.define("hand_out(Tensor x, int position, int[]? reached=None) -> ()")
    library.define("handed_out(Tensor x, int position, int[]? reached=None) -> Tensor")
    given = "Tensor[] tensors, Tensor module, str paths, bool[] leaves, bool[] flows, bool enabled"
    library.define(f"enter({given}, bool of_model, int[] places=[]) -> ()")
    library.define(f"entered({given}, int[] places) -> ()")
    library.define("leave(Tensor[] tensors, Tensor module, bool of_model) -> ()")
    library.define("left(Tensor module) -> ()")
    library.define("target(Tensor tensor) -> ()")
    library.define("gradient(Tensor gradient, Tensor ticket) -> ()")
    parts = (("show", _show), ("enter", _enter), ("leave", _leave), ("hand_out", _hand_out))
    for name, taken_apart in parts:
        library.impl(name, taken_apart, "CompositeImplicitAutograd")
        torch.fx.has_side_effect(getattr(torch.ops.comgra_decl, name).default)
    effects: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
        ("read", _read, _ticket_shape),
        ("entered", _entered, _no_shape),
        ("left", _left, _no_shape),
        ("target", _target, _no_shape),
        ("handed_out", _handed_out, _ticket_shape),
        ("gradient", _gradient, _no_shape),
    )
    for name, does, shape in effects:
        library.impl(name, does, "CompositeExplicitAutograd")
        torch.library.register_fake(f"comgra_decl::{name}", shape, lib=library)
        effectful_operator(f"comgra_decl::{name}", EffectType.ORDERED)
    return library


_library = _define()

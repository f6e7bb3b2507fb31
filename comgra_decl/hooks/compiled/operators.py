"""The operators through which compiled code passes tensors and gradients to Python.

The compiler traces a hook that calls `show`. `show` returns nothing, so the module's output is
unchanged. In particular, there is no copy or view that a later in-place change could affect.
AOTAutograd decomposes `show` into `read` and a tensor hook that autograd runs while the backward is
traced, so `gradient` becomes part of the backward.

A compiled function that calls a model also uses `enter` and `leave`, which mark the start and end
of an outermost module's call, because Python code cannot observe calls inside compiled code.

All operators are declared as ordered effects, so they are never removed or reordered, and the
forward and the backward need no shared buffer.

Compiled code is cached on disk under a key made from the compiler's input, which includes the calls
to `show`. An operator whose behaviour changes therefore needs a new name.
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
"""The ticket of a tensor whose gradient is not needed."""


class Shown(NamedTuple):
    """Identifies a shown tensor: an input or output of a module.

    Attributes:
        module: the number of the module.
        path: the position of the tensor in the value that contains it.
        position: the index of the tensor among those of the value; 0 begins a call.
        entering: whether it is an input of the module.
        watched: whether its gradient will also be shown.
        place: its index among the arguments of the compiled code; -1 if it is not an argument.
        outside: whether its gradient arrives outside and will not be shown.
        result: its index among the results of the compiled code; -1 if it is not a result.
        reached: the results that depend on it; None if this does not matter.
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
    """The arguments of an outermost module's call within a compiled function.

    Attributes:
        module: the number of the module.
        paths: the positions of the tensors in the arguments, one per line; keyword arguments start
            with a dot.
        leaves: for each tensor, whether it is a leaf of the autograd graph.
        flows: for each tensor, whether gradients can flow through it.
        enabled: whether gradients are enabled.
        places: for each tensor, which argument of the compiled function it is; -1 if it is not one.
    """

    module: int
    paths: str
    leaves: list[bool]
    flows: list[bool]
    enabled: bool
    places: list[int]


class Reader(Protocol):
    """Receives tensors while compiled code runs; must not raise."""

    def read(self, tensor: torch.Tensor, shown: Shown) -> int:
        """Read a tensor; return the ticket that identifies its gradient."""

    def gradient(self, tensor: torch.Tensor, ticket: int) -> None:
        """Read the gradient of a tensor that was read before."""

    def enter(self, tensors: list[torch.Tensor], given: Given) -> None:
        """Begin the call to an outermost module."""

    def leave(self) -> None:
        """End the call to that module."""

    def target(self, tensor: torch.Tensor) -> None:
        """Read a tensor that a compiled function compares with a model's output."""

    def hand_out(self, position: int, reached: Sequence[int] | None) -> int:
        """Register an output that the code also uses; return the ticket of its gradient."""


reader: Reader | None = None
"""The receiver of the tensors that compiled code shows; None while nothing is recorded."""


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
    """Read a tensor, and its gradient if it is not an input of the piece of code.

    The gradients of inputs are read outside, because inputs may have other users there. If it is
    unknown which argument a tensor corresponds to, its gradient is not read at all.
    """
    if is_backward() and not _is_traced(x):
        return  # a checkpoint recomputes a tensor that already has its hook
    outside = _is_given(x)
    watched = watched and x.requires_grad and not (outside and place == NOWHERE)
    ends = (result, reached) if _is_traced(x) else (NOWHERE, None)
    how = (entering, watched, place, outside, *ends)
    ticket = torch.ops.comgra_decl.read(x.detach(), module, path, index, *how)
    if watched and not outside:
        x.register_hook(partial(_arrived, ticket=ticket))


def _is_given(x: torch.Tensor) -> bool:
    """Whether a tensor is an input of the piece of code whose backward is being traced.

    If an input was computed before the piece, its gradient function only raises an error.
    """
    return x.is_leaf or type(gradient_function(x)).__name__ == "Error"


def _is_traced(x: torch.Tensor) -> bool:
    """Whether a backward is being traced; otherwise `x` is the real tensor, tracked by autograd."""
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
    if gradient is not None:  # autograd passes None if a function has no gradient for this result
        torch.ops.comgra_decl.gradient(gradient, ticket)


def operator_of(node: torch.fx.Node) -> str:
    """Return the name of the operator that a node applies as an effect, or "" if there is none."""
    if node.target is torch.ops.higher_order.with_effects:
        return str(node.args[1])
    return ""


def _define() -> torch.library.Library:
    """Register the operators, which last as long as the returned library."""
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

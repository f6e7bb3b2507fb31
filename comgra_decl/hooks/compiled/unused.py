"""Gradients of outputs that nobody uses, where compiled code runs eagerly for a recorded step.

Compiled code computes its backward as a whole: where any of its outputs has a gradient, the others
have one as well, of zeros, and so has every parameter that only they depend on. Eagerly such a
parameter has none. Optimizers tell the two apart (AdamW decays only what has a gradient), and so
does DistributedDataParallel, which waits for all. So the zeros are sent back after the program's
own backward.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import unserializable_hook

from comgra_decl.hooks.call_context import is_backward, torch_variable
from comgra_decl.hooks.pytree import gradient_function, tensors_in
from comgra_decl.torch_private import without_functions

_SEVERAL = 2  # outputs: with one alone, a backward comes to all that it depends on, or to nothing


class _Output(NamedTuple):
    """One output, without its memory."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclass
class _Call:
    """One call of compiled code that ran eagerly."""

    outputs: list[_Output]
    reached: set[int]


class UnusedOutputs:
    """Sends zeros back through outputs that a backward has not reached.

    Args:
        quietly: within it, `backward` is no backward of the program's, and nothing is recorded.
        on_fault: told about an error of our own.
    """

    def __init__(
        self,
        *,
        quietly: Callable[[], contextlib.AbstractContextManager[None]],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._quietly = quietly
        self._on_fault = on_fault
        self._depths: dict[int, int] = {}  # of calls of compiled code, by thread
        self._calls: list[_Call] = []
        self._roots: list[Any] = []  # what the backward in progress begins with

    def clear(self) -> None:
        """The step is over."""
        self._calls.clear()
        self._roots.clear()

    def called(self, caller: FrameType, compiler: Any) -> None:
        """Compiled code is about to run eagerly.

        Args:
            caller: the compiled callable.
            compiler: what would compile it.
        """
        if is_backward() or not torch.is_grad_enabled() or not _sends_zeros(compiler):
            return
        endings = torch_variable(caller, "cleanups")  # torch calls them when it is over
        if isinstance(endings, list):
            thread = get_ident()
            self._depths[thread] = self._depths.get(thread, 0) + 1
            endings.append(partial(self._returned, thread))

    def _returned(self, thread: int) -> None:
        self._depths[thread] -= 1
        if self._depths[thread]:
            return  # within another piece of compiled code, which would have it as a part
        del self._depths[thread]
        try:
            with without_functions():
                frame = sys._getframe(1)
                given = torch_variable(frame, "args"), torch_variable(frame, "kwargs")
                self._note(given, torch_variable(frame, "result"))
        except Exception as error:
            self._on_fault(error)

    def _note(self, given: Any, result: Any) -> None:
        theirs = {id(tensor) for _, tensor in tensors_in(given)}
        outputs = {
            id(tensor): tensor
            for _, tensor in tensors_in(result)
            if gradient_function(tensor) is not None
            and id(tensor) not in theirs
            and id(tensor._base) not in theirs
        }
        if len(outputs) < _SEVERAL:
            return
        call = _Call([], set())
        for position, tensor in enumerate(outputs.values()):
            reached = partial(_reach, call, position)
            tensor.register_hook(unserializable_hook(reached))
            edge = get_gradient_edge(tensor)
            call.outputs.append(_Output(edge, tensor.shape, tensor.dtype, tensor.device))
        self._calls.append(call)

    def begin(self, tensor: torch.Tensor) -> None:
        """The program calls `backward` on a tensor."""
        if self._calls:
            self._roots.append(gradient_function(tensor))

    def end(self, *, whole: bool) -> None:
        """That backward is over.

        Args:
            whole: whether it has accumulated all that it came to: it has not failed, and was not
                for some `inputs` alone.
        """
        roots, self._roots = self._roots, []
        try:
            for call in self._calls:
                if whole and roots and call.reached and len(call.reached) < len(call.outputs):
                    self._send(call, roots)
                call.reached.clear()
        except Exception as error:
            self._on_fault(error)

    def _send(self, call: _Call, roots: list[Any]) -> None:
        come_to = _behind(roots)
        unused = [o for i, o in enumerate(call.outputs) if i not in call.reached]
        leaves = [
            node.variable
            for node in _behind(output.edge.node for output in unused) - come_to
            if hasattr(node, "variable")
        ]
        if leaves:
            with self._quietly():
                torch.autograd.backward(
                    [output.edge for output in unused],
                    [output.zeros() for output in unused],
                    inputs=leaves,
                    retain_graph=True,
                )


def _reach(call: _Call, position: int, gradient: torch.Tensor | None) -> None:
    if gradient is not None:  # autograd hands over None where it comes for another output
        call.reached.add(position)


def _behind(nodes: Iterable[Any]) -> set[Node]:
    """Returns what autograd comes to from some of its functions."""
    found: set[Node] = set()
    waiting = [node for node in nodes if node is not None]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(before for before, _ in node.next_functions if before is not None)
    return found


def _sends_zeros(compiler: Any) -> bool:
    """Whether what a backend compiles has a backward of its own, computed as a whole."""
    from comgra_decl.torch_private import AotAutograd

    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    name = str(getattr(compiler, "compiler_name", ""))
    made = getattr(compiler, "compiler_fn", None)
    return name == "inductor" or name.startswith("aot_") or isinstance(made, AotAutograd)

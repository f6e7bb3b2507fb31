"""Send zero gradients to unused outputs when compiled code runs eagerly in a recorded step.

Compiled code computes its backward as a whole. If any of its outputs has a gradient, all others
receive zeros, and so does every parameter that is used only for those other outputs. In eager code,
such a parameter has no gradient. Optimizers treat the two cases differently; for example, AdamW
decays only parameters with a gradient. So does DistributedDataParallel, which waits for all
gradients. Tracing therefore sends the zeros back after the program's own backward.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import unserializable_hook

from comgra_decl.hooks.call_context import is_backward, torch_variable
from comgra_decl.hooks.other_threads import this_thread
from comgra_decl.hooks.pytree import gradient_function, tensors_in
from comgra_decl.torch_private import without_functions

_SEVERAL = 2  # outputs; if there is only one, a backward reaches all outputs or none


class _Output(NamedTuple):
    """One output, without its data."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclass
class _Call:
    """One call to compiled code that ran eagerly."""

    outputs: list[_Output]
    reached: set[int]


class UnusedOutputs:
    """Sends zeros back through outputs that a backward did not reach.

    Args:
        quietly: a context in which `backward` is not treated as the program's and not recorded.
        on_fault: called with an error in tracing itself.
    """

    def __init__(
        self,
        *,
        quietly: Callable[[], contextlib.AbstractContextManager[None]],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._quietly = quietly
        self._on_fault = on_fault
        self._depths: dict[int, int] = {}  # nesting depth of compiled code, by thread
        self._calls: list[_Call] = []
        self._roots: list[Any] = []  # the roots of the current backward

    def clear(self) -> None:
        """Discard the calls in a finished step."""
        self._calls.clear()
        self._roots.clear()

    def called(self, caller: FrameType, compiler: Any) -> None:
        """Register a call to compiled code that is about to run eagerly.

        Args:
            caller: the frame of the compiled callable.
            compiler: the compiler that would compile it.
        """
        if is_backward() or not torch.is_grad_enabled() or not _sends_zeros(compiler):
            return
        endings = torch_variable(caller, "cleanups")  # torch calls these when the call ends
        if isinstance(endings, list):
            thread = this_thread.number
            self._depths[thread] = self._depths.get(thread, 0) + 1
            endings.append(partial(self._returned, thread))

    def _returned(self, thread: int) -> None:
        self._depths[thread] -= 1
        if self._depths[thread]:
            return  # inside another piece of compiled code, which would include it
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
        """Register a `backward` call that the program makes on a tensor."""
        if self._calls:
            self._roots.append(gradient_function(tensor))

    def end(self, *, whole: bool) -> None:
        """Send the zeros after the `backward` call.

        Args:
            whole: whether the backward accumulated all gradients, that is, it did not fail and was
                not limited to some `inputs`.
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
    if gradient is not None:  # autograd passes None when it reaches another output
        call.reached.add(position)


def _behind(nodes: Iterable[Any]) -> set[Node]:
    """Return all autograd nodes reachable from the given ones."""
    found: set[Node] = set()
    waiting = [node for node in nodes if node is not None]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(before for before, _ in node.next_functions if before is not None)
    return found


def _sends_zeros(compiler: Any) -> bool:
    """Whether a backend compiles its own backward, which is computed as a whole."""
    from comgra_decl.torch_private import AotAutograd

    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    name = str(getattr(compiler, "compiler_name", ""))
    made = getattr(compiler, "compiler_fn", None)
    return name == "inductor" or name.startswith("aot_") or isinstance(made, AotAutograd)

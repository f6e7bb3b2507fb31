"""Follow calls that do not reach any torch function mode.

Custom autograd functions may compute in numpy, scripted code runs in C++, and the transforms of
`torch.func` and tensor subclasses wrap tensors in C++. Each mechanism is patched at a point that
every call passes through. This includes calls through a stored reference (`op = MyFunction.apply`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from comgra_decl.hooks.graph.calls import tensors_of
from comgra_decl.hooks.graph.lineage import Lineage, Sources, merged
from comgra_decl.hooks.other_threads import this_thread
from comgra_decl.hooks.patches import Patch
from comgra_decl.torch_private import (
    BufferDict,
    ModuleDict,
    ParameterDict,
    ScriptFunction,
    ScriptMethod,
    SingleLevelFunction,
    graph_task,
    of_transforms,
    of_vmap,
    without_functions,
)

if TYPE_CHECKING:
    from comgra_decl.hooks.graph.call_lineage import Follower


class OpaqueCalls:
    """Connects the results of opaque calls to their arguments.

    One instance serves all followed steps: creating the patches takes longer than a small step.

    Args:
        on_fault: called with an error in tracing itself.
    """

    def __init__(self, *, on_fault: Callable[[BaseException], None]) -> None:
        self._on_fault = on_fault
        self._step: tuple[Lineage, Follower] | None = None
        self._thread = 0  # function modes are per thread, and so are these calls
        self.inside = 0  # depth of calls whose inner calls need not be followed
        self._patches = [
            Patch(SingleLevelFunction, "apply", self._function),
            *(Patch(kind, "__call__", self._script) for kind in (ScriptFunction, ScriptMethod)),
            *(
                Patch(owner, name, self._alias)
                for owner, name in (
                    (torch.Tensor, "as_subclass"),
                    (of_vmap, "_add_batch_dim"),
                    (of_vmap, "_remove_batch_dim"),
                    (of_transforms, "_wrap_for_grad"),
                    (of_transforms, "_unwrap_for_grad"),
                )
            ),
        ]

    def apply(self, lineage: Lineage, follower: Follower) -> None:
        """Start following this thread's calls. Idempotent.

        Args:
            lineage: receives the sources of each result.
            follower: notified while code runs that the backward pass will run again.
        """
        self._step = lineage, follower
        self._thread = this_thread.number
        for patch in self._patches:
            patch.apply()

    def restore(self) -> None:
        """Stop following."""
        for patch in self._patches:
            patch.restore()
        self._step = None  # it references tensors

    # -- custom autograd functions -------------------------------------------------------------

    def _function(self, apply: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
        step = self._step
        inputs = None
        try:
            if step is not None and not self._elsewhere():
                with without_functions():
                    inputs = step[0].union(tensors_of([*args, *kwargs.values()]))
        except Exception as error:
            self._on_fault(error)
        if step is None or inputs is None:
            return apply(cls, *args, **kwargs)
        lineage, follower = step
        again = cls is CheckpointFunction
        self.inside += not again
        follower.recomputed += again
        try:
            result = apply(cls, *args, **kwargs)
        finally:
            self.inside -= not again
            follower.recomputed -= again
        try:
            with without_functions():
                _after_function(lineage, inputs, result, again=again)
        except Exception as error:
            self._on_fault(error)
        return result

    # -- scripted code -------------------------------------------------------------------------

    def _script(self, call: Callable[..., Any], script: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(script, *args, **kwargs)
        try:
            step = self._step
            if step is not None and not self._elsewhere():
                with without_functions():
                    _after_script(step[0], script, [*args, *kwargs.values()], result)
        except Exception as error:
            self._on_fault(error)
        return result

    # -- the same values in another wrapper ----------------------------------------------------

    def _alias(self, original: Callable[..., Any], tensor: Any, *args: Any) -> Any:
        result = original(tensor, *args)
        try:
            step = self._step
            if step is not None and not self._elsewhere():
                with without_functions():
                    step[0].set(result, step[0].of(tensor))
        except Exception as error:
            self._on_fault(error)
        return result

    def _elsewhere(self) -> bool:
        """Whether a call is outside the step, that is, within backward or in another thread."""
        return graph_task() != -1 or this_thread.number != self._thread


def _after_function(lineage: Lineage, inputs: Sources, result: Any, *, again: bool) -> None:
    """Connect the results of a custom autograd function to its arguments.

    For gradients, the results are connected to all arguments, as in autograd. For values, the
    connections follow the calls observed inside the function. Recomputed code is followed as if it
    were not wrapped.
    """
    for tensor in tensors_of((result,)):
        seen = lineage.of(tensor)
        if again and seen.all:
            lineage.set(tensor, seen)
            continue
        values = seen.all or inputs.all
        reached = inputs.grad if tensor.requires_grad else frozenset()
        lineage.set(tensor, Sources(values | reached, reached))


def _after_script(lineage: Lineage, script: Any, arguments: list[Any], result: Any) -> None:
    held = list(_held(script.owner)) if isinstance(script, ScriptMethod) else []
    sources = merged([lineage.union(tensors_of(arguments)), lineage.union(held)])
    for tensor in tensors_of((result,)):
        lineage.set(tensor, sources)


def _held(script: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of a scripted module and its children."""
    for name_and_tensor in (*ParameterDict(script).items(), *BufferDict(script).items()):
        yield name_and_tensor[1]
    for name_and_child in ModuleDict(script).items():
        yield from _held(name_and_child[1])

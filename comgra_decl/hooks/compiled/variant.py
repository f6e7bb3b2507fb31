"""A second variant of the program's compiled code: the same code, with observers inside.

The compiler stores compiled code by backend and by region. A recorded step requests code for a
separate backend and region, so it never runs the plain variant. All other steps never use the
variant with observers and evaluate none of its guards. They run exactly as they would without
tracing.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as torch_module

from comgra_decl.hooks import modes
from comgra_decl.hooks.call_context import MODULE_HOOKS, is_backward, is_module_call
from comgra_decl.hooks.compiled.borders import mark_borders
from comgra_decl.hooks.compiled.control_flow import GLOBAL_HOOKS, hooks_aside
from comgra_decl.hooks.compiled.operators import operator_of
from comgra_decl.hooks.compiled.targets import show_targets
from comgra_decl.hooks.frames import OUR_FOLDER
from comgra_decl.torch_private import InductorBackend, available

if TYPE_CHECKING:
    from comgra_decl.hooks.compiled.observers import Observers

_COMMUNICATES = (
    "compiled code calls collectives itself, so it would wait forever for ranks that run eagerly"
)
_IS_TORCHS_OWN = "frame is in the Dynamo skipfiles list"
"""The compiler's reason for skipping most calls between pieces of compiled code.

Each query to the compiler takes a millisecond, and a step repeats dozens of these calls.
"""


def unsupported() -> str | None:
    """Return why this version of torch cannot separate the two variants; None if it can."""
    from comgra_decl.torch_private import convert_frame, eval_frame, pgo

    needed = (
        (eval_frame, "set_eval_frame_isolate_recompiles_id"),
        (eval_frame, "_next_isolate_recompiles_id"),
        (eval_frame, "_callback_from_stance"),
        (convert_frame, "CatchErrorsWrapper"),
        (pgo, "get_code_state"),
    )
    parts = ("graph_compile", "effectful_operator", "EffectType")
    if all(map(available, parts)) and all(hasattr(owner, name) for owner, name in needed):
        return None
    return f"torch {torch.__version__} cannot separate observed code from plain code (2.13 can)"


class Variant:
    """Compiles the program's compiled code a second time, with observers.

    Args:
        observers: the hooks inside the variant.
        fail: called with the reason if code cannot be compiled and therefore runs eagerly.
    """

    def __init__(self, observers: Observers, *, fail: Callable[[str], None]) -> None:
        self.observers = observers
        self.fail = fail
        self._regions: dict[int, int] = {}  # by the program's own region
        self._compilers: dict[int, _Compiler] = {}  # by the program's own
        self.failed = False
        self._seconds = 0.0
        self._known: Any = None  # the compiler's state about dynamic sizes

    def instead_of(self, compiler: Any, caller: FrameType) -> Any:
        """Return a compiler with a separate region for a call that is about to run, or None.

        Args:
            compiler: the compiler that is used in steps that are not recorded.
            caller: the frame of the compiled callable.
        """
        from comgra_decl.torch_private import convert_frame

        if not isinstance(compiler, convert_frame.CatchErrorsWrapper):
            return None
        if not hasattr(compiler._torchdynamo_orig_backend, "_clone_with_backend"):
            return None
        if not self._may_show(caller) or modes.any_active():
            return None
        found = self._compilers.get(id(compiler))
        if found is None:
            found = self._compilers[id(compiler)] = _Compiler(compiler, self)
        self._enter_region()
        return found

    def take_seconds(self) -> float:
        """Return the seconds spent compiling since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def compiled_since(self, began: float) -> None:
        """Add to the compile time, which is a one-time cost and not a cost of recording."""
        self._seconds += time.perf_counter() - began

    def _may_show(self, caller: FrameType) -> bool:
        """Whether a compiled callable is a model, is part of a model, or calls a model."""
        observers = self.observers
        if is_backward():
            return observers.place_again(caller)
        return observers.placed or is_module_call(caller) or observers.place_within(caller)

    def _enter_region(self) -> None:
        """Enter our own region; the caller leaves the region that is current at the end."""
        from comgra_decl.torch_private import eval_frame

        theirs = eval_frame.set_eval_frame_isolate_recompiles_id(-1)
        ours = self._regions.get(theirs)
        if ours is None:
            ours = self._regions[theirs] = next(eval_frame._next_isolate_recompiles_id)
        eval_frame.set_eval_frame_isolate_recompiles_id(ours)

    @contextmanager
    def knowing_sizes(self) -> Iterator[None]:
        """Keep the sizes seen here separate from those that the program's compiler has seen.

        Which sizes are dynamic depends on the sizes seen before, and the plain variant must be
        compiled as if no step had been recorded.
        """
        from comgra_decl.torch_private import pgo

        theirs = pgo.get_code_state()
        if self._known is None:
            self._known = copy.deepcopy(theirs)
        pgo._CODE_STATE = self._known
        try:
            yield
        finally:
            self._known, pgo._CODE_STATE = pgo._CODE_STATE, theirs


class _Backend:
    """The program's own backend with a separate identity, which distinguishes its compiled code.

    It does not capture CUDA graphs, because the operators would not run during a replay; only
    recorded steps run without CUDA graphs. A forward of the variant is always followed by a
    backward of the variant, so nothing passed between them is in memory that a replay writes to.
    That memory may contain results of an unrecorded step. They are overwritten only by the next
    replay, which also belongs to an unrecorded step.
    """

    def __init__(self, backend: Callable[..., Any], observers: Observers) -> None:
        self._backend = backend
        self._observers = observers
        self.__name__ = getattr(backend, "__name__", type(backend).__name__)

    def __call__(self, graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if _communicates(graph):
            raise RuntimeError(_COMMUNICATES)
        if self._observers.within_function:
            show_targets(graph)
        mark_borders(graph)
        if _is_inductor(self._backend):
            from comgra_decl.hooks.compiled import inductor as late

            theirs = kwargs.get("config_patches") or {}
            ours = {**late.settings(graph), "triton.cudagraphs": False}
            kwargs["config_patches"] = {**theirs, **ours}
        return self._observers.around(self._backend(graph, *args, **kwargs))


def _communicates(graph: torch.fx.GraphModule) -> bool:
    """Whether a graph contains collectives, explicitly or through sharded tensors.

    The collectives of DistributedDataParallel and `fully_shard` do not count, because hooks call
    them in the same order as in eager code. A rank that cannot compile with observers therefore
    still matches the other ranks.
    """
    for node in graph.graph.nodes:
        sharded = type(node.meta.get("example_value")).__name__ == "DTensor"
        if sharded or "c10d" in str(node.target):
            return True
    return False


def _is_inductor(backend: Any) -> bool:
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return isinstance(backend, InductorBackend)


class _Compiler:
    """Replaces a compiler of the program; called with each frame that is not compiled yet."""

    def __init__(self, compiler: Any, variant: Variant) -> None:
        from comgra_decl.torch_private import convert_frame

        inner = compiler._torchdynamo_orig_backend
        backend = _Backend(inner._torchdynamo_orig_backend, variant.observers)
        self._before = compiler.hooks.guard_filter_fn
        hooks = dataclasses.replace(compiler.hooks, guard_filter_fn=self._guards)
        self._variant = variant
        self._never: dict[CodeType, Any] = {}  # results for code that is never compiled
        self._kept = compiler  # keeps the id from being reused
        self._torchdynamo_orig_backend = convert_frame.CatchErrorsWrapper(
            inner._clone_with_backend(backend), hooks
        )

    def __call__(self, frame: Any, *args: Any) -> Any:
        if frame.f_code is MODULE_HOOKS:
            return _eagerly(alone=True)  # our own hooks run there and determine the callees
        observes = self._variant.observers.placed and not self._variant.failed
        if frame.f_code.co_filename.startswith(OUR_FOLDER) or not observes:
            return _eagerly()
        if frame.f_code in self._never:
            return self._never[frame.f_code]
        began = time.perf_counter()
        try:
            with ExitStack() as meanwhile:
                meanwhile.enter_context(_without_global_hooks())
                meanwhile.enter_context(self._variant.knowing_sizes())
                meanwhile.enter_context(_compiling_all())
                found = self._torchdynamo_orig_backend(frame, *args)
        except Exception as error:
            self._variant.compiled_since(began)
            self._variant.failed = True
            self._variant.fail(_first_line(error))
            return _eagerly()
        if found.guarded_code is None:
            found.apply_to_code = False  # the plain variant is not affected
            if found.skip_reason == _IS_TORCHS_OWN:
                self._never[frame.f_code] = found
        else:
            self._variant.compiled_since(began)
        return found

    def _guards(self, guards: Any) -> list[bool]:
        """Drop the guards on global module hooks, because the program has none."""
        kept = [True] * len(guards) if self._before is None else [*self._before(guards)]
        return [
            keep and not any(name in guard.name for name in GLOBAL_HOOKS)
            for keep, guard in zip(kept, guards, strict=True)
        ]


def _eagerly(*, alone: bool = False) -> Any:
    """Return the result that makes one frame run eagerly, this time only.

    Args:
        alone: whether the calls inside it are checked separately instead of running eagerly as
            well.
    """
    from comgra_decl.torch_private import dynamo_types as types

    below = types.FrameAction.DEFAULT if alone else types.FrameAction.SKIP
    strategy = types.FrameExecStrategy(types.FrameAction.SKIP, below)
    return types.ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Temporarily hide our own global module hooks from the compiler.

    Raises:
        RuntimeError: the program has global module hooks.
    """
    with hooks_aside():
        if any(getattr(torch_module, name) for name in GLOBAL_HOOKS):
            raise RuntimeError("the program has global module hooks")
        yield


@contextmanager
def _compiling_all() -> Iterator[None]:
    """Compile everything now, including the backward.

    Otherwise an error in the backward would be raised in the program's `backward`. A model within
    DistributedDataParallel is compiled as a whole, not once per bucket of gradients. Otherwise,
    several pieces could use the same tensor, and each would have only part of its gradient.
    """
    from comgra_decl.torch_private import dynamo_config, functorch_config

    whole = dynamo_config.patch(optimize_ddp=False)
    once = partial(_show_once, functorch_config.joint_custom_pass)
    settings = {"force_non_lazy_backward_lowering": True, "joint_custom_pass": once}
    with functorch_config.patch(settings), whole, _donating_nothing():
        yield


@contextmanager
def _donating_nothing() -> Iterator[None]:
    """Keep a backward from overwriting saved tensors, so that a second backward does not fail.

    The tickets that identify gradients are saved tensors too. With donated buffers, programs that
    save only inputs and outputs and run backward twice (`retain_graph=True`) would fail.
    """
    from comgra_decl.torch_private import graph_compile

    theirs = graph_compile.collect_bw_donated_buffer_idxs
    graph_compile.collect_bw_donated_buffer_idxs = lambda *_: []
    try:
        yield
    finally:
        graph_compile.collect_bw_donated_buffer_idxs = theirs


def _show_once(theirs: Any, joint: torch.fx.GraphModule, given: Any) -> torch.fx.GraphModule:
    """Exclude our operators from recomputation, before forward and backward are split.

    The ticket of a gradient is saved for the backward instead; it is a single integer.
    """
    if callable(theirs):
        joint = theirs(joint, given)
    for node in joint.graph.nodes:
        if operator_of(node).startswith("comgra_decl."):
            for made in (node, *node.users):
                made.meta.pop("recompute", None)
    return joint


def _first_line(error: BaseException) -> str:
    cause = getattr(error, "inner_exception", error)  # set by a failed backend
    text = str(cause).strip().partition("\n")[0]
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__

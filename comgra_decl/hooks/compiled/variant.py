"""The second variant of what a program compiles: the same code, with observers inside.

The compiler keeps what it has compiled by backend and by region. A recorded step asks for code of
a backend and a region of its own, and so never meets the plain variant; all other steps never meet
the one with observers, pass none of its guards, and run exactly what they would run untraced.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
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
from comgra_decl.torch_private import InductorBackend, available

if TYPE_CHECKING:
    from comgra_decl.hooks.compiled.observers import Observers

_COMMUNICATES = (
    "compiled code calls collectives itself, and would wait for ever for ranks that run eagerly"
)
_IS_TORCHS_OWN = "frame is in the Dynamo skipfiles list"
"""Why the compiler leaves out most of what is called between pieces of compiled code, every time.

To ask it takes a millisecond, and there are some dozens in a step.
"""

_OURS = str(Path(__file__).resolve().parents[1])


def unsupported() -> str | None:
    """Returns why this torch cannot keep two variants apart; None if it can."""
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
    return f"torch {torch.__version__} cannot keep it apart from the plain one (2.13 can)"


class Variant:
    """Compiles the code that a program has compiled once more, with observers.

    Args:
        observers: the hooks that it has inside.
        fail: told why code could not be compiled; it runs eagerly then.
    """

    def __init__(self, observers: Observers, *, fail: Callable[[str], None]) -> None:
        self.observers = observers
        self.fail = fail
        self._regions: dict[int, int] = {}  # by the program's own region
        self._compilers: dict[int, _Compiler] = {}  # by the program's own
        self.failed = False
        self._seconds = 0.0
        self._known: Any = None  # what the compiler knows of sizes that change

    def instead_of(self, compiler: Any, caller: FrameType) -> Any:
        """Returns what is to compile a call that begins, in its own region; None: nothing is.

        Args:
            compiler: what would compile it in a step that is not recorded.
            caller: the compiled callable.
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
        """Returns the seconds of compiling since this was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def compiled_since(self, began: float) -> None:
        """Something was compiled, once: that is no part of what a record costs."""
        self._seconds += time.perf_counter() - began

    def _may_show(self, caller: FrameType) -> bool:
        """Whether a compiled callable is part of a model, is one, or calls one."""
        observers = self.observers
        if is_backward():
            return observers.place_again(caller)
        return observers.placed or is_module_call(caller) or observers.place_within(caller)

    def _enter_region(self) -> None:
        """The caller has entered one and leaves it in the end, whichever it is by then."""
        from comgra_decl.torch_private import eval_frame

        theirs = eval_frame.set_eval_frame_isolate_recompiles_id(-1)
        ours = self._regions.get(theirs)
        if ours is None:
            ours = self._regions[theirs] = next(eval_frame._next_isolate_recompiles_id)
        eval_frame.set_eval_frame_isolate_recompiles_id(ours)

    @contextmanager
    def knowing_sizes(self) -> Iterator[None]:
        """What is compiled here teaches the program's compiler no size, and learns of none later.

        Which sizes are dynamic depends on those seen before; the plain variant is compiled as if
        recorded steps had not been.
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
    """The program's own backend under another identity, by which compiled code is told apart.

    It makes no CUDA graphs: a replay of one would show nothing. A step that is recorded only lacks
    them. Forward and backward of the variant belong together, so what one hands to the other never
    lies in memory that a replay writes to. What an unrecorded step has left there, the next replay
    writes to, and that belongs to an unrecorded step again.
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
    """Whether collectives are part of a graph: its own, or of sharded tensors that it computes on.

    Those of DistributedDataParallel and `fully_shard` are none: hooks call them, in the same order
    in eager code, so a rank that cannot compile with observers still meets those that can.
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
    """Stands for one compiler of the program: called with each frame that is not compiled yet."""

    def __init__(self, compiler: Any, variant: Variant) -> None:
        from comgra_decl.torch_private import convert_frame

        inner = compiler._torchdynamo_orig_backend
        backend = _Backend(inner._torchdynamo_orig_backend, variant.observers)
        self._before = compiler.hooks.guard_filter_fn
        hooks = dataclasses.replace(compiler.hooks, guard_filter_fn=self._guards)
        self._variant = variant
        self._never: dict[CodeType, Any] = {}  # what is said of code that is never compiled
        self._kept = compiler  # so that its number stays its own
        self._torchdynamo_orig_backend = convert_frame.CatchErrorsWrapper(
            inner._clone_with_backend(backend), hooks
        )

    def __call__(self, frame: Any, *args: Any) -> Any:
        if frame.f_code is MODULE_HOOKS:
            return _eagerly(alone=True)  # where ours run, which say what is called
        observes = self._variant.observers.placed and not self._variant.failed
        if frame.f_code.co_filename.startswith(_OURS) or not observes:
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
            found.apply_to_code = False  # it says nothing about the plain variant
            if found.skip_reason == _IS_TORCHS_OWN:
                self._never[frame.f_code] = found
        else:
            self._variant.compiled_since(began)
        return found

    def _guards(self, guards: Any) -> list[bool]:
        """Leaves out those on hooks of all modules, of which there are none of the program's."""
        kept = [True] * len(guards) if self._before is None else [*self._before(guards)]
        return [
            keep and not any(name in guard.name for name in GLOBAL_HOOKS)
            for keep, guard in zip(kept, guards, strict=True)
        ]


def _eagerly(*, alone: bool = False) -> Any:
    """Returns what lets one frame run eagerly, this time.

    Args:
        alone: whether what it calls is asked about, or runs eagerly as well.
    """
    from comgra_decl.torch_private import dynamo_types as types

    below = types.FrameAction.DEFAULT if alone else types.FrameAction.SKIP
    strategy = types.FrameExecStrategy(types.FrameAction.SKIP, below)
    return types.ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Takes our own hooks of all modules away from what is compiled.

    Raises:
        RuntimeError: the program has such hooks.
    """
    with hooks_aside():
        if any(getattr(torch_module, name) for name in GLOBAL_HOOKS):
            raise RuntimeError("the program has hooks on all modules")
        yield


@contextmanager
def _compiling_all() -> Iterator[None]:
    """Compiles all of it, now.

    The backward as well: an error in it would meet the program's `backward`. And a model within
    DistributedDataParallel in one piece, not one for each bucket of gradients: what a tensor's
    gradient is, a piece knows only in part if several use it.
    """
    from comgra_decl.torch_private import dynamo_config, functorch_config

    whole = dynamo_config.patch(optimize_ddp=False)
    once = partial(_show_once, functorch_config.joint_custom_pass)
    settings = {"force_non_lazy_backward_lowering": True, "joint_custom_pass": once}
    with functorch_config.patch(settings), whole, _donating_nothing():
        yield


@contextmanager
def _donating_nothing() -> Iterator[None]:
    """Lets no backward overwrite what was kept for it: a second one would end with an error.

    The numbers by which gradients are known are kept, so it would do so where the program's own
    code keeps nothing but what it was given and returns, and is run twice (`retain_graph=True`).
    """
    from comgra_decl.torch_private import graph_compile

    theirs = graph_compile.collect_bw_donated_buffer_idxs
    graph_compile.collect_bw_donated_buffer_idxs = lambda *_: []
    try:
        yield
    finally:
        graph_compile.collect_bw_donated_buffer_idxs = theirs


def _show_once(theirs: Any, joint: torch.fx.GraphModule, given: Any) -> torch.fx.GraphModule:
    """Forward and backward are about to be told apart: no checkpoint computes again what shows.

    The number by which a gradient is known is kept for the backward instead: it is one integer.
    """
    if callable(theirs):
        joint = theirs(joint, given)
    for node in joint.graph.nodes:
        if operator_of(node).startswith("comgra_decl."):
            for made in (node, *node.users):
                made.meta.pop("recompute", None)
    return joint


def _first_line(error: BaseException) -> str:
    cause = getattr(error, "inner_exception", error)  # of a backend that has failed
    text = str(cause).strip().partition("\n")[0]
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__

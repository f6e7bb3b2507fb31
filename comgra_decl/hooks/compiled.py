"""Running a recorded step eagerly in a compiled program, without recompiles."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch


class EagerStance:
    """Forces compiled code to run eagerly while a step is recorded, then restores the stance.

    Dynamo is not imported for the sake of it: until the program compiles something there is
    nothing to force. A program that calls `torch.compile` during a recorded step (the first one
    always is) is caught by a thin wrapper around that function.
    """

    def __init__(self) -> None:
        self._prior: Any = None
        self._wish: Any = None
        self._forced = False
        self._needed = False
        self._compile: Callable[..., Any] | None = None
        self._filter: Any = None

    def force(self) -> None:
        """Enters eager execution; calling it twice is harmless."""
        if self._forced:
            return
        self._silence()
        if "torch._dynamo" in sys.modules:
            self._set()
        elif self._compile is None:
            self._watch()

    def force_if_needed(self) -> None:
        """Enters eager execution if the program has compiled anything; far cheaper if not."""
        self._needed = self._needed or _anything_compiled()
        if self._needed:
            self.force()

    def restore(self) -> None:
        """Returns to the stance found by `force`."""
        self._unwatch()
        if self._filter is not None:
            with contextlib.suppress(ValueError):
                warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
            self._filter = None
        if self._forced:
            from torch._dynamo import eval_frame

            decorators = _decorators()
            if decorators._set_stance is self._wish:
                decorators._set_stance = eval_frame._set_stance
            eval_frame._set_stance(self._prior)
            self._forced = False

    def _set(self) -> None:
        from torch._dynamo import eval_frame

        decorators = _decorators()
        self._prior = eval_frame._stance
        torch.compiler.set_stance("force_eager")
        if decorators._set_stance is eval_frame._set_stance:
            decorators._set_stance = self._wish = self._new_wish()
        self._forced = True

    def _new_wish(self) -> Callable[[Any], Any]:
        """Returns what takes the stances that the program asks for meanwhile, for later.

        In any other one our hooks would be compiled with the program's code.
        """

        def set_stance(stance: Any) -> Any:
            prior, self._prior = self._prior, stance
            return prior

        cast("Any", set_stance)._dynamo_forbidden = True
        return set_stance

    def _silence(self) -> None:
        """Compiled modules warn about global module hooks; ours never meet compiled code."""
        if self._filter is None:
            warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there")
            self._filter = warnings.filters[0]

    def _watch(self) -> None:
        original = self._compile = torch.compile

        def compile_and_force(*args: Any, **kwargs: Any) -> Any:
            compiled = original(*args, **kwargs)
            self._unwatch()
            self.force()
            return compiled

        torch.compile = compile_and_force

    def _unwatch(self) -> None:
        if self._compile is not None:
            torch.compile = self._compile
            self._compile = None


def _decorators() -> Any:
    """Returns the module in which `torch.compiler.set_stance` finds what sets it."""
    from torch._dynamo import decorators

    return decorators


def run_natively(*functions: Callable[..., Any], within: bool = True) -> None:
    """Keeps Dynamo from compiling functions of ours that compiled code comes by.

    Between two graphs of a compiled function it compiles whatever Python is called there, ours
    too; and since `is_compiling()` is true in all that it compiles, a hook would take its call for
    one that is only traced and do nothing.

    Args:
        functions: plain functions or methods.
        within: whether what they call is kept from it as well; not for wrappers, which call the
            program's code.
    """
    evaluation: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if not hasattr(evaluation, "set_code_exec_strategy"):  # another torch: they are compiled, then
        return
    action = evaluation._FrameAction
    inner = action.SKIP if within else action.DEFAULT
    for function in functions:
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None:  # of Python, not of C
            strategy = evaluation._FrameExecStrategy(action.SKIP, inner)
            evaluation.set_code_exec_strategy(code, strategy)


def _anything_compiled() -> bool:
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:
        return False
    backends = getattr(eval_frame, "cached_backends", None)  # with None for `disable`
    return backends is None or any(callable(backend) for backend in backends.values())

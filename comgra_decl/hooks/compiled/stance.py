"""Run a recorded step eagerly in a compiled program, without recompilation."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from comgra_decl.hooks.call_context import is_compiled_call, torch_variable
from comgra_decl.hooks.patches import Patch
from comgra_decl.torch_private import loaded

if TYPE_CHECKING:
    from types import FrameType

    from comgra_decl.hooks.compiled.variant import Variant

OnCall = Callable[["FrameType", Any], None]
"""Called with the compiled callable and its compiler before compiled code runs eagerly."""


class EagerStance:
    """Forces compiled code to run eagerly while a step is recorded, then restores the stance.

    `force` imports Dynamo. The import adds no cost, because the program's first optimizer imports
    Dynamo anyway. It ensures that the stance affects everything the program compiles. The stance is
    global to the process. If traces are nested, it is restored once none of them is recording.

    Args:
        on_call: called for compiled code that runs eagerly while a step is recorded.
    """

    _lifted: ClassVar[bool] = False
    _forcing: ClassVar[dict[int, OnCall]] = {}  # by the ids of the recording instances
    _prior: ClassVar[Any] = None
    _filter: ClassVar[Any] = None
    _wishes: ClassVar[Patch | None] = None
    _calls: ClassVar[Patch | None] = None
    _variants: ClassVar[dict[int, Variant]] = {}  # by the ids of the instances that have one

    def __init__(self, *, on_call: OnCall = lambda *_: None) -> None:
        self._needed = False
        self._on_call = on_call

    @property
    def variant(self) -> Variant | None:
        """The variant that runs instead of eager code where possible, or None."""
        return self._variants.get(id(self))

    @variant.setter
    def variant(self, variant: Variant | None) -> None:
        if variant is None:
            self._variants.pop(id(self), None)
        else:
            self._variants[id(self)] = variant

    def force(self) -> None:
        """Switch to eager execution. Idempotent."""
        if not self._forcing:
            _force()
        self._forcing[id(self)] = self._on_call

    def force_if_needed(self) -> None:
        """Switch to eager execution if the program has compiled anything; far cheaper otherwise."""
        self._needed = self._needed or anything_compiled()
        if self._needed:
            self.force()

    @classmethod
    @contextlib.contextmanager
    def lifted(cls) -> Iterator[None]:
        """Temporarily restore the program's stance for code that torch compiles internally."""
        if not cls._forcing or cls._lifted:
            yield
            return
        from comgra_decl.torch_private import eval_frame

        forced = eval_frame._set_stance(cls._prior)
        cls._lifted = True
        try:
            yield
        finally:
            cls._lifted = False
            if cls._forcing:
                eval_frame._set_stance(forced)

    def restore(self) -> None:
        """Restore the stance found by `force`."""
        self.variant = None
        if id(self) in self._forcing:
            if len(self._forcing) == 1:
                _restore()
            del self._forcing[id(self)]  # last, so that a failed `_restore` is retried


def _force() -> None:
    from comgra_decl.torch_private import dynamo_decorators, eval_frame

    cls = EagerStance
    if cls._wishes is None:
        cls._wishes = Patch(dynamo_decorators, "_set_stance", _wish)
        cls._calls = Patch(eval_frame, "_callback_from_stance", _called)
    # Compiled modules warn about global module hooks, but ours never reach compiled code.
    warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there")
    cls._filter = warnings.filters[0]
    cls._prior = eval_frame._stance
    try:
        for patch in (cls._wishes, cls._calls):
            if patch is not None:
                patch.apply()
        eval_frame._set_stance(eval_frame.DynamoStance("force_eager"))
    except Exception:
        _restore()
        raise


def _restore() -> None:
    from comgra_decl.torch_private import eval_frame

    cls = EagerStance
    with contextlib.suppress(ValueError):
        warnings.filters.remove(cls._filter)  # type: ignore[attr-defined]
    for patch in (cls._wishes, cls._calls):
        if patch is not None:
            patch.restore()
    eval_frame._set_stance(cls._prior)


def _wish(_original: Callable[..., Any], stance: Any) -> Any:
    """Defer a stance that the program sets while a step is recorded.

    Under any other stance, our hooks would be compiled into the program's code.
    """
    prior, EagerStance._prior = EagerStance._prior, stance
    return prior


def _called(original: Callable[..., Any], compiler: Any) -> Any:
    """Return the callback that compiles a call to compiled code, or None to run it eagerly.

    Respects a stance set by the program, and runs eagerly if two traces record simultaneously.
    """
    caller = sys._getframe(2)  # skip the frame of the patch
    forced = EagerStance._forcing and not EagerStance._lifted
    if not forced or not compiler or not is_compiled_call(caller) or not _is_default():
        return original(compiler)
    found = None
    variants = [*EagerStance._variants.values()]
    if len(variants) == len(EagerStance._forcing) == 1:
        found = variants[0].instead_of(compiler, caller)
    if found is not None:
        return found
    _hush(caller)
    for on_call in [*EagerStance._forcing.values()]:
        on_call(caller, compiler)
    return original(compiler)


def _hush(caller: FrameType) -> None:
    """Suppress torch's incorrect warning about uncompiled code while that code runs eagerly."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    endings = torch_variable(caller, "cleanups")  # torch calls these when the call ends
    if flex is None or not isinstance(endings, list):
        return
    given: Any = getattr(flex, "_WARNINGS_SHOWN", set())
    before = set(given)
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    ours = warnings.filters[0]

    def undo() -> None:
        with contextlib.suppress(ValueError):
            warnings.filters.remove(ours)  # type: ignore[attr-defined]
        given.intersection_update(before)

    endings.append(undo)


def _is_default() -> bool:
    prior = EagerStance._prior
    return prior.stance == "default" and prior.backend is None


def anything_compiled() -> bool:
    """Whether the program has compiled anything so far."""
    eval_frame = loaded("eval_frame")
    if eval_frame is None:
        return False
    backends = getattr(eval_frame, "cached_backends", None)  # contains None for `disable`
    return backends is None or any(callable(backend) for backend in backends.values())

"""Running a recorded step eagerly in a compiled program, without recompiles."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from comgra_decl.hooks.calling import is_compiled_call
from comgra_decl.hooks.patches import Patch

if TYPE_CHECKING:
    from comgra_decl.hooks.compiled.variant import Variant


class EagerStance:
    """Forces compiled code to run eagerly while a step is recorded, then restores the stance.

    Dynamo is imported for it, which costs a program nothing: the first optimizer that it makes
    does the same. So there is never a moment in which the program could compile something that
    the stance does not reach. The stance is the process's: with one trace inside another, it is
    restored when neither records.
    """

    _lifted: ClassVar[bool] = False
    _forcing: ClassVar[set[int]] = set()  # ids of those that record
    _prior: ClassVar[Any] = None
    _filter: ClassVar[Any] = None
    _wishes: ClassVar[Patch | None] = None
    _calls: ClassVar[Patch | None] = None
    _variants: ClassVar[dict[int, Variant]] = {}  # of those of them that have one

    def __init__(self) -> None:
        self._needed = False

    @property
    def variant(self) -> Variant | None:
        """What runs in the place of eager code where it can; None: nothing does."""
        return self._variants.get(id(self))

    @variant.setter
    def variant(self, variant: Variant | None) -> None:
        if variant is None:
            self._variants.pop(id(self), None)
        else:
            self._variants[id(self)] = variant
        _watch_calls(bool(self._variants))

    def force(self) -> None:
        """Enters eager execution; calling it twice is harmless."""
        if not self._forcing:
            _force()
        self._forcing.add(id(self))

    def force_if_needed(self) -> None:
        """Enters eager execution if the program has compiled anything; far cheaper if not."""
        self._needed = self._needed or anything_compiled()
        if self._needed:
            self.force()

    @classmethod
    @contextlib.contextmanager
    def lifted(cls) -> Iterator[None]:
        """Lets what torch itself compiles be compiled as the program has it, for a while."""
        if not cls._forcing or cls._lifted:
            yield
            return
        from torch._dynamo import eval_frame

        forced = eval_frame._set_stance(cls._prior)
        cls._lifted = True
        try:
            yield
        finally:
            cls._lifted = False
            if cls._forcing:
                eval_frame._set_stance(forced)

    def restore(self) -> None:
        """Returns to the stance found by `force`."""
        self.variant = None
        if id(self) in self._forcing:
            if len(self._forcing) == 1:
                _restore()
            self._forcing.discard(id(self))  # not before: if that has failed, it is done again


def _force() -> None:
    from torch._dynamo import decorators, eval_frame

    cls = EagerStance
    if cls._wishes is None:
        cls._wishes = Patch(decorators, "_set_stance", _wish)
    # Compiled modules warn about global module hooks; ours never meet compiled code.
    warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there")
    cls._filter = warnings.filters[0]
    cls._prior = eval_frame._stance
    try:
        cls._wishes.apply()
        eval_frame._set_stance(eval_frame.DynamoStance("force_eager"))
    except Exception:
        _restore()
        raise


def _restore() -> None:
    from torch._dynamo import eval_frame

    cls = EagerStance
    with contextlib.suppress(ValueError):
        warnings.filters.remove(cls._filter)  # type: ignore[attr-defined]
    if cls._wishes is not None:
        cls._wishes.restore()
    eval_frame._set_stance(cls._prior)


def _wish(_original: Callable[..., Any], stance: Any) -> Any:
    """Takes the stance that the program asks for while a step is recorded, for later.

    In any other one our hooks would be compiled with the program's code.
    """
    prior, EagerStance._prior = EagerStance._prior, stance
    return prior


def _watch_calls(wanted: bool) -> None:
    """Is asked at each call of compiled code what is to compile it, or no longer."""
    cls = EagerStance
    if wanted and cls._calls is None:
        from torch._dynamo import eval_frame

        cls._calls = Patch(eval_frame, "_callback_from_stance", _called)
    if cls._calls is not None:
        (cls._calls.apply if wanted else cls._calls.restore)()


def _called(original: Callable[..., Any], compiler: Any) -> Any:
    """Compiled code is called; returns what compiles it, None for eagerly.

    As the program has it where the program has a stance, and eagerly where two record at once.
    """
    found = None
    caller = sys._getframe(2)  # behind the stand-in
    variants = [*EagerStance._variants.values()]
    alone = len(variants) == len(EagerStance._forcing) == 1 and not EagerStance._lifted
    if alone and compiler and is_compiled_call(caller) and _is_default():
        found = variants[0].instead_of(compiler, caller)
    return original(compiler) if found is None else found


def _is_default() -> bool:
    prior = EagerStance._prior
    return prior.stance == "default" and prior.backend is None


def anything_compiled() -> bool:
    """Whether the program has compiled anything until now."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:
        return False
    backends = getattr(eval_frame, "cached_backends", None)  # with None for `disable`
    return backends is None or any(callable(backend) for backend in backends.values())

"""Running a recorded step eagerly in a compiled program, without recompiles."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

from comgra_decl.hooks.patches import Patch


class EagerStance:
    """Forces compiled code to run eagerly while a step is recorded, then restores the stance.

    Dynamo is imported for it, which costs a program nothing: the first optimizer that it makes
    does the same. So there is never a moment in which the program could compile something that
    the stance does not reach. The stance is the process's: with one trace inside another, it is
    restored when neither records.
    """

    _forcing: ClassVar[set[int]] = set()  # ids of those that record
    _prior: ClassVar[Any] = None
    _filter: ClassVar[Any] = None
    _wishes: ClassVar[Patch | None] = None

    def __init__(self) -> None:
        self._needed = False

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

    def restore(self) -> None:
        """Returns to the stance found by `force`."""
        if id(self) in self._forcing:
            self._forcing.discard(id(self))
            if not self._forcing:
                _restore()


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


def anything_compiled() -> bool:
    """Whether the program has compiled anything until now."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:
        return False
    backends = getattr(eval_frame, "cached_backends", None)  # with None for `disable`
    return backends is None or any(callable(backend) for backend in backends.values())

"""An error anywhere in tracing is reported once, leaves nothing behind and changes no bit.

The interpreter itself injects the error, at a call to one of our functions. No function is
therefore overlooked, and none needs to be prepared for this.
"""

from __future__ import annotations

import logging
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest

from comgra_decl.hooks import HookManager
from comgra_decl.spec import load_spec
from tests.faults.program import SPEC, training
from tests.support.freezing import set_aside
from tests.support.recording import Recording
from tests.support.shortened import shortened
from tests.ways.proof import Outcome, Told, attached, same, seeded

PARTS = ("/comgra_decl/hooks/", "/comgra_decl/stats/")

ENTRANCES = {
    # hooks, function modes and profiled calls in torch
    "FunctionTracer._before",
    "ModuleTracer._after",
    "ModuleTracer._before",
    "OwnMode.__torch_function__",
    "Owners.note",
    "Owners.note_parameter",
    "Parameters._on_share",
    "Provenance.handle",
    "Targets.handle",
    "TensorRecorder._on_gradient",
    "_Mode.handle",
    "_Stepped.__call__",
    "_hook.<locals>.after_optimizer",
    # stand-ins for torch's and the program's functions
    "DirectCalls._forward",
    "LossWatch._any_backward.<locals>.backward",
    "LossWatch._backward",
    "LossWatch._scale",
    "OpaqueCalls._function",
    "Patch._made.<locals>.<lambda>",
    "Watching.call",
    "watch_mode.<locals>.train",
    "watch_skips.<locals>.step",
    # the boundary itself
    "guarded.<locals>.guard",
}
"""Functions that torch or the program itself calls. An error before their first line is the
interpreter's own (no memory for a frame, recursion too deep), and nobody can catch it."""

Profile = Callable[[FrameType, str, Any], None]


def traced(profile: Profile | None) -> tuple[Outcome, Recording]:
    """Trains with tracing, under a profile function that sees every call."""
    result = Recording()
    manager = HookManager(load_spec(SPEC), result.steps.append, on_fault=result.faults.append)
    manager.attach()
    sys.setprofile(profile)
    try:
        found = seeded(training, Told(listening=False))
    finally:
        sys.setprofile(None)
        manager.detach()
    return found, result


def functions() -> list[tuple[CodeType, int]]:
    """Returns all of our functions that the training run calls, and how often."""
    calls: Counter[CodeType] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and any(part in frame.f_code.co_filename for part in PARTS):
            calls[frame.f_code] += 1

    traced(count)
    assert {code.co_qualname for code in calls} >= ENTRANCES, "a name that is none"
    named = [(c, n) for c, n in calls.items() if c.co_qualname not in ENTRANCES]
    return sorted(named, key=lambda item: (item[0].co_filename, item[0].co_firstlineno))


@pytest.fixture(scope="module")
def plain() -> Outcome:
    return seeded(training, Told(listening=False))


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Hides the objects of other tests from the search for optimizers and models."""
    set_aside()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        yield
        logging.disable(logging.NOTSET)


def fails(code: CodeType, at: int, kind: type[Exception]) -> Profile:
    """Returns a profile function that makes the `at`-th call to a function fail."""
    seen = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal seen
        if event == "call" and frame.f_code is code:
            seen += 1
            if seen == at:
                raise kind(f"injected into {code.co_qualname}")

    return profile


def check(plain: Outcome, code: CodeType, at: int, kind: type[Exception]) -> None:
    """Asserts that an error in a call is reported once and changes nothing."""
    where = f"{code.co_filename}:{code.co_firstlineno} {code.co_qualname}, call {at}"
    before = attached()
    found, recorded = traced(fails(code, at, kind))
    assert len(recorded.faults) <= 1, where
    assert all(isinstance(fault, kind) for fault in recorded.faults), where
    assert attached() == before, where
    try:
        same(plain, found)
    except AssertionError as error:
        raise AssertionError(f"the training differs after a fault in {where}") from error


CALLS = ["first", "middle", "last"]


def which(call: str, calls: int) -> int:
    """Returns the number of a call; the first create things, and the last remove them."""
    return {"first": 1, "middle": (calls + 1) // 2, "last": calls}[call]


@pytest.mark.parametrize("kind", shortened([RuntimeError, MemoryError], tried=1))
def test_a_fault_in_some_of_all_functions(plain: Outcome, kind: type[Exception]) -> None:
    chance = random.Random(kind.__name__)
    for code, calls in chance.sample(functions(), 8):
        check(plain, code, which(chance.choice(CALLS), calls), kind)


@pytest.mark.parametrize("name", shortened(["remove", "is_active", "_all"], tried=1))
def test_a_fault_where_the_last_mode_is_taken_off(plain: Outcome, name: str) -> None:
    ((code, calls),) = [
        found
        for found in functions()
        if found[0].co_qualname == name and found[0].co_filename.endswith("hooks/modes.py")
    ]
    check(plain, code, calls, RuntimeError)


# a generator that is closed while an injected error propagates may receive one as well
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize(
    ("call", "kind"),
    [*((call, RuntimeError) for call in CALLS), ("middle", MemoryError)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_fault_in_every_function(
    plain: Outcome, call: str, kind: type[Exception], part: int
) -> None:
    wrong = []
    for code, calls in functions()[part::6]:
        try:
            check(plain, code, which(call, calls), kind)
        except (AssertionError, kind) as error:
            wrong.append(str(error))
    assert wrong == []

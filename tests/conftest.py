"""Fixtures and settings that apply to every test."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support import forked, freezing
from tests.support.browser import chromium as chromium

ROOT = Path(__file__).parents[1]

# Before torch is imported, here and in the programs that tests start: tests run in parallel, and a
# second thread only slows tiny networks down.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before Triton is imported: without a GPU, its interpreter runs the kernels.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests must not fail because the machine is busy with something else. The long suite tries more
# examples: `--hypothesis-profile=long`.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=10)
hypothesis.settings.register_profile("long", deadline=None, max_examples=200)
hypothesis.settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    """Allows the programs that tests start to be interrupted, and lets processes share a server.

    A background job started by a script ignores SIGINT, and so does everything it starts: Ctrl-C
    could not be tested there, and servers would not end.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    served = getattr(config, "workerinput", {}).get("forks programs")
    if served is not None:
        forked.use(served)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Starts what forks programs once for all processes of `pytest -n`, while they collect."""
    if node.config.getoption("numprocesses", 0) > 1:
        node.workerinput["forks programs"] = forked.serve()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects no garbage while tests are collected: almost everything made there stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Excludes everything imported so far from later collections, because most of it stays.

    A test that thaws these objects must freeze them again; freezing further objects does no harm.
    """
    freezing.set_aside()


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Does the same with what tests leave in memory, between one file and the next."""
    global _file
    file, before, _file = nodeid.partition("::")[0], _file, nodeid.partition("::")[0]
    if file != before and len(gc.get_objects()) > _MOST_OBJECTS:
        freezing.set_aside()


_MAIN = sys.modules["__main__"]
_MOST_OBJECTS = 20_000
"""Tracing looks through all objects, often; this takes it a millisecond."""
_file = ""


@pytest.fixture(autouse=True)
def _frozen_is_what_a_test_freezes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that we froze do not belong to a program, and counting them would be slow."""

    def freeze() -> None:
        monkeypatch.setattr(gc, "get_freeze_count", freezing.frozen)
        freezing.freeze()

    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    monkeypatch.setattr(gc, "freeze", freeze)


_of_git: dict[str, Any] = {}  # for this repository, once determined


@pytest.fixture(autouse=True)
def _facts_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches what git reports about this repository, which is always the same."""
    context: Any = sys.modules.get("comgra_decl.record.context")
    if context is None:
        return
    ask = context.git_facts

    def git_facts(folder: Any) -> Any:
        if not folder.is_relative_to(ROOT):  # pytest itself is in `.venv`
            return ask(folder)
        if "facts" not in _of_git:
            _of_git["facts"] = ask(folder)
        return _of_git["facts"]

    monkeypatch.setattr(context, "git_facts", git_facts)


@pytest.fixture(autouse=True)
def _nothing_stays_compiled() -> Iterator[None]:
    """Forgets what a test compiled: tracing asks whether this process compiled anything so far."""
    yield
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is not None and any(map(callable, frames.cached_backends.values())):
        sys.modules["torch"].compiler.reset()


@pytest.fixture(autouse=True)
def _nothing_of_ours_is_left_behind() -> Iterator[None]:
    """Asserts that a test leaves the process as it found it, whatever it traces."""
    before = _left_behind()
    yield
    left = [what for what in _left_behind() if what not in before]  # per test
    assert not left, left


def _left_behind() -> list[str]:
    if "torch" not in sys.modules:
        return []
    from torch.nn.modules import module
    from torch.optim import optimizer

    torch: Any = sys.modules["torch"]
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    patches: Any = sys.modules.get("comgra_decl.hooks.patches")
    headroom: Any = sys.modules.get("comgra_decl.hooks.recursion")
    doors: Any = sys.modules.get("comgra_decl.doors.environment")
    hooks: Any = vars(module) | vars(optimizer)
    found = {
        "a stance of the compiler": frames is not None and frames._stance.stance != "default",
        "a session": doors is not None and doors.is_recording(),
        "headroom": headroom is not None and headroom.Headroom._users,
        "another main program": sys.modules["__main__"] is not _MAIN,
        "patches": patches is not None and [(p.owner, p.name) for p in patches.in_place],
        "torch function modes": torch._C._len_torch_function_stack(),
        "module hooks": [*hooks["_global_forward_hooks"], *hooks["_global_forward_pre_hooks"]],
        "optimizer hooks": [
            *hooks["_global_optimizer_post_hooks"],
            *hooks["_global_optimizer_pre_hooks"],
        ],
    }
    return [f"{name}: {what}" for name, what in found.items() if what]

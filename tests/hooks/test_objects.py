"""Objects are found among all existing ones, without disturbing other threads."""

from __future__ import annotations

import gc
import linecache
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

from comgra_decl.hooks.objects import functions_with, instances_of, watch_freezing
from comgra_decl.hooks.other_threads import uncollected
from tests.support import freezing

CODE = (lambda: None).__code__


@pytest.fixture
def hurried() -> Iterator[None]:
    """Makes threads take turns as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class Counted:
    """Yields numbers slowly, so that a tuple of them is nearly always under construction."""

    def __init__(self, made: Callable[[], object]) -> None:
        self.made = made
        self.over = False
        self.failed: list[Exception] = []
        self.rounds = 0

    def __call__(self) -> None:
        try:
            while not self.over:
                assert len(tuple(self.made() for _ in range(200))) == 200
                self.rounds += 1
        except Exception as error:  # noqa: BLE001 - this is what is looked for
            self.failed.append(error)


LOOKS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "modules": (lambda: nn.Module, lambda: [*instances_of(nn.Module)]),
    "optimizers": (lambda: None, lambda: [*instances_of(torch.optim.Optimizer)]),
    "functions": (lambda: CODE, lambda: functions_with(CODE)),
}


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("look", LOOKS)
def test_another_thread_finishes_the_tuple_that_it_makes(look: str) -> None:
    """`tuple(generator)` fails if anything holds a reference when the tuple gets its final size."""
    item, finds = LOOKS[look]
    counted = Counted(item)
    thread = threading.Thread(target=counted)
    thread.start()
    try:
        for _ in range(60):
            finds()
    finally:
        counted.over = True
        thread.join()
    assert counted.failed == []
    assert counted.rounds > 0


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collects between instructions only")
@pytest.mark.slow
def test_so_it_does_if_the_program_has_an_audit_hook() -> None:
    """`id` is an audited event, and hooks cannot be removed: in a process of its own."""
    code = """
import sys, threading
import torch
from comgra_decl.hooks.objects import instances_of, referrers_of, unfrozen_of
from torch import nn
sys.addaudithook(lambda event, arguments: None)
sys.setswitchinterval(1e-6)
failed, over = [], []
def fill():
    try:
        while not over:
            tuple(number for number in range(200))
    except Exception as error:
        failed.append(error)
thread = threading.Thread(target=fill)
thread.start()
model = nn.Linear(2, 2)
for _ in range(20):
    assert any(found is model for found in instances_of(nn.Module))
    assert unfrozen_of([list, dict])
    assert referrers_of(model.weight)
over.append(True)
thread.join()
assert not failed, failed
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_nothing_is_collected_meanwhile() -> None:
    during: list[str] = []

    def collects(phase: str, _: object) -> None:
        frame = sys._getframe(1)
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if "return list(chain(fill" in line:
            during.append(f"{phase} in {line}")

    model = nn.Linear(1, 1)
    threshold = gc.get_threshold()
    gc.callbacks.append(collects)
    try:
        gc.set_threshold(1)
        with uncollected():
            assert not gc.isenabled()
        assert any(found is model for found in instances_of(nn.Module))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(collects)
    assert during == []


def test_nothing_is_held_afterwards_not_even_until_the_next_collection() -> None:
    probe: list[None] = []

    def made() -> None:
        pass

    gc.disable()
    try:
        before = sys.getrefcount(probe)
        for _ in instances_of(nn.Module):
            pass
        assert len(functions_with(made.__code__)) == 1
        assert sys.getrefcount(probe) == before
    finally:
        gc.enable()


class Odd(type):
    """Types that can be neither distinguished by `==` nor put into a set."""

    def __eq__(cls, other: object) -> bool:
        raise AssertionError("compared")

    __hash__ = None  # type: ignore[assignment]


class Strange(nn.Module, metaclass=Odd):
    """A module of such a type."""


class Proxy:
    """Claims to be a module."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise AssertionError("woken")


def test_each_living_instance_is_found_and_no_proxy_is_woken() -> None:
    proxies = [Proxy()]
    modules = [nn.Linear(1, 1), nn.Module(), nn.Sequential(nn.Tanh()), Strange()]
    expected = {id(m) for m in modules} | {id(modules[2][0])}  # type: ignore[index]
    found = {id(m) for m in instances_of(nn.Module)}
    assert expected <= found
    assert expected & {id(m) for m in instances_of(nn.Sequential)} == {id(modules[2])}
    assert len(proxies) == 1


CHANGES = st.sampled_from(["model", "optimizer", "drop", "young", "older", "all"])


@given(st.lists(CHANGES, max_size=6))
def test_each_living_instance_is_found_whatever_was_collected(changes: list[str]) -> None:
    models: list[nn.Linear] = [nn.Linear(1, 1)]
    optimizers: list[Optimizer] = []
    for change in changes:
        if change == "model":
            models.append(nn.Linear(1, 1))
        elif change == "optimizer":
            optimizers.append(torch.optim.SGD(models[-1].parameters()))
        elif change == "drop":
            del models[1:]
        else:
            gc.collect({"young": 0, "older": 1, "all": 2}[change])
        found = {id(model) for model in instances_of(nn.Module)}
        assert {id(model) for model in models} <= found
        found = {id(optimizer) for optimizer in instances_of(Optimizer)}
        assert {id(optimizer) for optimizer in optimizers} <= found


@pytest.mark.slow
def test_what_was_frozen_in_between_is_found() -> None:
    faults: list[BaseException] = []
    watched = watch_freezing(on_fault=faults.append)
    watched.apply()
    try:
        gc.disable()
        before = {id(model) for model in instances_of(nn.Module)}
        model = nn.Linear(1, 1)
        gc.freeze()
        assert any(found is model for found in instances_of(nn.Module))
        gc.unfreeze()
        assert any(found is model for found in instances_of(nn.Module))
    finally:
        gc.enable()
        watched.restore()
        freezing.set_aside()
    assert id(model) not in before
    assert faults == []


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="has no second generation")
def test_a_second_search_reads_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    of_gc = gc.get_objects

    def get_objects(*generation: int) -> list[object]:
        asked.append(generation)
        return of_gc(*generation)

    monkeypatch.setattr(gc, "get_objects", get_objects)
    gc.disable()
    try:
        gc.collect()
        first = {id(module) for module in instances_of(nn.Module)}
        new = nn.Linear(1, 1)
        second = {id(module) for module in instances_of(nn.Module)}
        optimizer = torch.optim.SGD(new.parameters())
        assert any(found is optimizer for found in instances_of(Optimizer))
        assert asked[:1] == [()] or asked[2:3] == [()]  # something else was remembered before
        assert asked[-4:] == [(0,), (1,)] * 2
    finally:
        gc.enable()
    assert second - first == {id(new)}


def test_each_function_that_runs_some_code_is_found() -> None:
    def made() -> Callable[[], None]:
        def inner() -> None:
            pass

        return inner

    one, two = made(), made()
    assert isinstance(one, FunctionType)
    code: CodeType = one.__code__
    assert {*functions_with(code)} == {one, two}
    assert functions_with(code.replace(co_name="nobody's")) == []

"""Reading the frames of all threads is safe, even if a garbage collection lets others run."""

from __future__ import annotations

import gc
import linecache
import sys
import threading
from types import FrameType

import pytest

from comgra_decl.hooks.other_threads import alive, running, this_thread


def parked(depth: int, waiting: threading.Barrier, go: threading.Event) -> None:
    if depth:
        parked(depth - 1, waiting, go)
    else:
        waiting.wait()
        go.wait()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="frames are made without collecting")
def test_nothing_is_collected_while_frames_of_other_threads_are_read() -> None:
    """A collection during the read crashes the process if it allows the other thread to return."""
    waiting, go = threading.Barrier(2), threading.Event()
    thread = threading.Thread(target=parked, args=(50, waiting, go))
    thread.start()
    waiting.wait()
    inner = running.__code__
    while_reading: list[str] = []

    def collects(phase: str, _: object) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not inner:
            frame = frame.f_back
        line = "" if frame is None else linecache.getline(inner.co_filename, frame.f_lineno)
        if frame is not None and "with uncollected()" not in line:
            while_reading.append(f"{phase} in {line}")

    threshold, was = gc.get_threshold(), gc.isenabled()
    gc.callbacks.append(collects)
    try:
        gc.enable()
        gc.set_threshold(1)
        running(lambda _: True)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(collects)
        if not was:
            gc.disable()
        go.set()
        thread.join()
    assert while_reading == []


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_as_it_was_afterwards(enabled: bool) -> None:
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        running(lambda _: True)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_a_thread_has_a_number_that_no_other_has_before_or_after_it() -> None:
    numbers: list[int] = []
    waiting, go = threading.Barrier(2), threading.Event()

    def live() -> None:
        numbers.append(this_thread.number)
        waiting.wait()
        go.wait()
        numbers.append(this_thread.number)

    identifiers = []
    for _ in range(5):
        go.clear()
        thread = threading.Thread(target=live)
        thread.start()
        waiting.wait()
        assert {this_thread.number, numbers[-1]} <= alive()
        identifiers.append(thread.ident)
        go.set()
        thread.join()
        assert numbers[-1] not in alive()
    assert numbers == sorted(numbers)
    assert len({*numbers, this_thread.number}) == 6
    assert len({*identifiers}) < 5, "identifiers are used again, or nothing is tested"


def test_each_call_in_each_thread_is_told_by_its_line() -> None:
    waiting, go = threading.Barrier(3), threading.Event()
    threads = [threading.Thread(target=parked, args=(depth, waiting, go)) for depth in (0, 2)]
    for thread in threads:
        thread.start()
    waiting.wait()
    first = parked.__code__.co_firstlineno
    lines = sorted(line - first for line in running(parked.__code__.__eq__))
    assert lines[:2] == [2, 2]
    assert len(lines) == 4
    go.set()
    for thread in threads:
        thread.join()
    assert running(parked.__code__.__eq__) == []

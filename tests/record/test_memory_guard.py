"""Address space that tracing reserves, for a limit that is set while a program runs."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from comgra_decl.errors import NoMemoryError
from comgra_decl.record import memory_guard as room
from comgra_decl.record.memory_guard import LEFT, STEP, Room

RESERVE = LEFT + STEP
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def taken() -> tuple[int, int]:
    """The number of bytes of address space and memory that this process uses."""
    addresses, memory, *_ = Path("/proc/self/statm").read_text().split()
    return int(addresses) * mmap.PAGESIZE, int(memory) * mmap.PAGESIZE


def about(size: int, wanted: int) -> bool:
    return abs(size - wanted) < 16 << 20


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the process may use only this much address space, to be appended to."""
    now = [False]
    monkeypatch.setattr(room, "_is_limited", lambda: now[-1])
    monkeypatch.setattr(room, "_is_strict", lambda: False)
    return now


@pytest.mark.usefixtures("limited")
def test_the_reserve_takes_addresses_and_no_memory() -> None:
    before = taken()
    held = Room()
    after = taken()
    assert about(after[0] - before[0], RESERVE)
    assert about(after[1] - before[1], 0)
    held.give_back()
    held.give_back()
    assert about(taken()[0] - before[0], 0)


@pytest.mark.usefixtures("limited")
def test_nothing_is_given_back_while_nothing_is_limited() -> None:
    before = taken()[0]
    held = Room()
    held.for_a_step()
    assert about(taken()[0] - before, RESERVE)
    held.give_back()


def test_the_reserve_goes_to_the_training_when_a_limit_comes(limited: list[bool]) -> None:
    before = taken()[0]
    held = Room()
    limited.append(True)
    held.for_a_step()
    assert about(taken()[0] - before, 0)


def test_nothing_is_held_where_a_limit_was_from_the_start(limited: list[bool]) -> None:
    limited.append(True)
    before = taken()[0]
    Room()
    assert about(taken()[0] - before, 0)


def test_a_step_that_finds_too_little_is_not_recorded(
    limited: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Room()
    limited.append(True)

    def refuse(_fileno: int, size: int) -> mmap.mmap:
        raise OSError(12, f"no {size}")

    monkeypatch.setattr("comgra_decl.record.memory_guard.mmap.mmap", refuse)
    with pytest.raises(NoMemoryError, match="refuses to allocate 512 MiB"):
        held.for_a_step()
    with pytest.raises(NoMemoryError, match="refuses to allocate 1024 MiB"):
        Room()

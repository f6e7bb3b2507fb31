"""Programs with events in any order: which steps are recorded, and what is left behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from comgra_decl.hooks import HookManager
from comgra_decl.hooks.hook_lists import tidy
from comgra_decl.records import RawStep
from comgra_decl.spec import load_spec
from tests.hooks.tiny import net
from tests.support.shortened import examples
from tests.ways.proof import attached

NODES = {"all": {"select": "**", "capture": ["output", "output_grad", "parameter_grad"]}}

EVENTS = {
    "step": "the model is trained, and the optimizer steps",
    "accumulate": "the same, with two calls of the model",
    "evaluate": "the model is called in evaluation mode, without gradient",
    "peek": "the model is called without gradient, in training mode",
    "switch": "the model is switched to evaluation and back, and not called",
}


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


class Program:
    """A network that is trained, evaluated and called in between.

    Attributes:
        ended: how many steps have ended.
        calls: how often the model was called with gradients in each of them.
    """

    def __init__(self) -> None:
        self.model: nn.Module = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.calls: list[int] = []

    def does(self, event: str) -> None:
        if event in ("step", "accumulate"):
            self.train(calls=1 + (event == "accumulate"))
            return
        self.model.train(event == "peek")
        with torch.no_grad():
            if event != "switch":
                self.model(torch.ones(2, 3))
        self.model.train()

    def train(self, *, calls: int) -> None:
        self.optimizer.zero_grad()
        for _ in range(calls):
            self.model(torch.ones(4, 3)).sum().backward()
        self.optimizer.step()
        self.calls.append(calls)


class Seen:
    """Stores what the hooks emit."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.records: list[RawStep] = []
        self.faults: list[BaseException] = []
        self.fails_at = fails_at

    def take(self, record: RawStep) -> None:
        if len(self.records) == self.fails_at:
            raise OSError("no space left")
        self.records.append(record)

    @property
    def trained(self) -> dict[int, int]:
        """Returns how often the first layer was called in each recorded step."""
        slots = {s.id: s.key for record in self.records for s in record.new_slots}
        found: dict[int, int] = {}
        for record in self.records:
            if record.info.mode == "train":
                assert record.info.step not in found, "recorded twice"
                keys = [slots[slot] for slot in record.layout.slots.tolist()]
                found[record.info.step] = sum(
                    key.node == "0" and key.role == "output" and key.pass_ == "forward"
                    for key in keys
                )
        return found


@contextmanager
def following(seen: Seen, scheduled: set[int]) -> Iterator[HookManager]:
    """Traces a block, and asserts that nothing of ours is left on torch afterwards."""
    before = attached()
    spec = {"nodes": NODES, "schedule": {"steps": sorted(scheduled)}, "graph": False}
    manager = HookManager(load_spec(spec), seen.take, on_fault=seen.faults.append)
    manager.attach()
    try:
        yield manager
    finally:
        manager.detach()
    assert attached() == before


def left() -> list[Any]:
    """Returns what is attached, without the empty entry of a hook removed during an iteration."""
    tidy()
    return attached()


programs = st.lists(st.sampled_from(sorted(EVENTS)), max_size=12)
schedules = st.sets(st.integers(0, 10), min_size=1)


@settings(max_examples=examples(60), deadline=None)
@given(events=programs, scheduled=schedules)
def test_exactly_the_scheduled_steps_are_recorded_each_with_its_own_calls(
    events: list[str], scheduled: set[int]
) -> None:
    seen, program = Seen(), Program()
    with following(seen, scheduled):
        for event in events:
            program.does(event)
    assert seen.faults == []
    expected = {n: calls for n, calls in enumerate(program.calls) if n in scheduled}
    assert seen.trained == expected


@settings(max_examples=examples(40), deadline=None)
@given(events=programs, scheduled=schedules, stop=st.integers(0, 12))
def test_tracing_that_is_stopped_anywhere_leaves_nothing_on_the_program(
    events: list[str], scheduled: set[int], stop: int
) -> None:
    before, seen, program = attached(), Seen(), Program()
    ended = 0
    with following(seen, scheduled) as manager:
        for number, event in enumerate(events):
            if number == stop:
                manager.stop()
                ended = len(program.calls)
            program.does(event)
            if number >= stop and len(program.calls) > ended:
                assert left() == before, "it ends with the step in progress"
    assert seen.faults == []
    whole = ended if len(events) > stop else len(program.calls)
    assert seen.trained == {n: program.calls[n] for n in range(whole) if n in scheduled}


@settings(max_examples=examples(40), deadline=None)
@given(events=programs, fails_at=st.integers(0, 3))
def test_a_fault_in_handing_over_ends_the_tracing_and_is_reported_once(
    events: list[str], fails_at: int
) -> None:
    before, seen, program = attached(), Seen(fails_at=fails_at), Program()
    with following(seen, set(range(12))):
        for event in events:
            program.does(event)
            if seen.faults:
                assert left() == before
    assert len(seen.records) <= fails_at
    assert [type(fault) for fault in seen.faults] in ([], [OSError])

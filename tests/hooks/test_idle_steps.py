"""Steps that are only counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.hooks.scalars.scalars import END
from comgra_decl.hooks.schedule.idle import IdleSteps


class Resting:
    """A rest, what it counted and what it passed on."""

    def __init__(self) -> None:
        self.beats: list[object] = []
        self.others: list[Any] = []
        self.faults: list[BaseException] = []
        self.rest = IdleSteps(
            self.beats.append, otherwise=self.others.append, on_fault=self.faults.append
        )
        self.owner = SimpleNamespace()

    def step(self, optimizer: object | None = None) -> None:
        self.rest.after_optimizer(optimizer or self.owner, (), {})


@given(given_steps=st.integers(-3, 20), taken=st.integers(0, 30))
def test_as_many_steps_are_counted_as_were_given_and_all_others_passed_on(
    given_steps: int, taken: int
) -> None:
    resting = Resting()
    resting.rest.begin(id(resting.owner), given_steps)
    for _ in range(taken):
        resting.step()
    counted = min(taken, max(given_steps, 0))
    assert resting.beats == [END] * counted
    assert resting.rest.counted() == counted
    assert resting.others == [resting.owner] * (taken - counted)


def test_another_optimizers_step_is_passed_on_and_not_counted() -> None:
    resting, other = Resting(), SimpleNamespace()
    resting.rest.begin(id(resting.owner), 5)
    resting.step(other)
    assert resting.others == [other]
    assert resting.rest.counted() == 0


def test_a_fault_of_what_it_passes_on_to_does_not_reach_the_optimizer() -> None:
    faults: list[BaseException] = []
    rest = IdleSteps(lambda _: None, otherwise=lambda _: 1 / 0, on_fault=faults.append)
    rest.after_optimizer(SimpleNamespace(), (), {})
    (fault,) = faults
    assert isinstance(fault, ZeroDivisionError)


def test_a_rest_that_is_ended_still_knows_what_it_counted() -> None:
    resting = Resting()
    resting.rest.begin(id(resting.owner), 5)
    resting.step()
    resting.step()
    resting.rest.end()
    resting.step()
    assert (resting.rest.counted(), resting.others) == (2, [resting.owner])
    resting.rest.begin(id(resting.owner), 5)
    assert resting.rest.counted() == 0


def test_nobody_rests_before_it_is_said() -> None:
    resting = Resting()
    resting.step()
    assert resting.others == [resting.owner]


def test_a_step_that_is_only_traced_by_the_compiler_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("comgra_decl.hooks.schedule.idle._is_compiling", lambda: True)
    resting = Resting()
    resting.rest.begin(id(resting.owner), 5)
    resting.step()
    assert not resting.beats
    assert not resting.others


def test_a_rest_does_not_keep_an_optimizer_alive() -> None:
    import gc
    import weakref

    resting = Resting()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    resting.rest.begin(id(optimizer), 5)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None

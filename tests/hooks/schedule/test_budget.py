"""The cost of recording, with a simulated clock and disk."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.hooks.schedule.agenda import Agenda, Plan
from comgra_decl.hooks.schedule.budget import Budget, Meter
from comgra_decl.spec import load_spec

_MOST_COUNTED = 32
"""The number of steps that a program counts between two checks."""


class Training:
    """A simulated training run: a step takes `plain` seconds, and `cost` more with a record."""

    def __init__(
        self, schedule: Mapping[str, object], *, plain: float = 0.01, cost: float = 0.05
    ) -> None:
        self.now = 100.0
        self.plain, self.cost, self.record_bytes = plain, cost, 1000.0
        self.meter = Meter()
        self.said: list[tuple[str, str]] = []
        spec = load_spec({"schedule": dict(schedule)})
        self.budget = Budget(
            spec.schedule.budget,
            meter=self.meter,
            say=lambda _, what, text: self.said.append((what, text)),
            clock=lambda: self.now,
        )
        self.agenda = Agenda(spec, self.budget, clock=lambda: self.now)
        self.recorded: list[int] = []
        self.start = self.now
        self.looked = 0  # how often the end of a step was observed

    def run(self, steps: int, *, rests: bool = False) -> Training:
        """Trains; with `rests`, steps that cannot be due are only counted, as in a program."""
        quiet, unseen = 0.0, 0
        for step in range(steps):
            if rests and step < quiet and unseen < _MOST_COUNTED and not self.budget.attentive:
                self.now += self.plain
                unseen += 1
                continue
            if unseen:
                self.budget.step_ended(None, steps=unseen)
                unseen = 0
            recorded = self.agenda.plan(step) is Plan.ARM
            quiet = self.agenda.quiet_until
            self.looked += 1
            self.now += self.plain + (self.cost if recorded else 0)
            if recorded:
                self.recorded.append(step)
                self.budget.recorded()
                self.meter.disk_bytes += self.record_bytes
            self.meter.polls += 1
            if recorded:
                self.agenda.end(recorded=True)
            self.budget.step_ended(self.cost / 2 if recorded else None)
        return self

    @property
    def share(self) -> float:
        return len(self.recorded) * self.cost / (self.now - self.start)


def test_records_are_as_far_apart_as_the_time_allows() -> None:
    training = Training({"first": 1, "every": 1, "budget": {"time": "10%"}}).run(3000)
    assert 0.08 < training.share <= 0.11
    gaps = [b - a for a, b in zip(training.recorded[5:], training.recorded[6:], strict=False)]
    assert set(gaps) <= {45, 46, 47}


def test_steps_that_only_pay_off_a_record_are_counted_several_at_a_time() -> None:
    schedule = {"first": 1, "every": 1, "budget": {"time": "1%"}}
    training = Training(schedule).run(20_000, rests=True)
    looked_at = Training(schedule).run(20_000)
    assert training.looked < 0.1 * looked_at.looked
    assert training.recorded == looked_at.recorded


def test_a_step_that_is_wanted_whatever_it_costs_is_not_passed_over() -> None:
    schedule = {"first": 1, "every": 1, "windows": [[200, 205]], "budget": {"time": "1%"}}
    training = Training(schedule).run(300, rests=True)
    assert set(range(200, 206)) <= set(training.recorded)


def test_what_the_first_steps_cost_is_paid_off_afterwards() -> None:
    training = Training({"first": 10, "every": 1, "budget": {"time": "10%"}}).run(5000)
    assert training.share <= 0.11


def test_all_that_the_first_record_took_is_paid_off() -> None:
    """The time taken to discover the model is not part of any measurement of its capture."""
    training = Training({"first": 1, "every": 1, "budget": {"time": "10%"}}, cost=1.0)
    training.budget.begin()
    training.run(1)
    training.cost = 0.05
    training.run(1500)
    assert training.recorded[1] == pytest.approx(1.0 / 0.1 / 0.01 - 100, abs=3)


def test_a_cheap_record_changes_no_schedule() -> None:
    schedule = {"first": 1, "every": 50, "budget": {"time": "10%"}}
    training = Training(schedule, cost=0.001).run(1000)
    assert training.recorded == [*range(0, 1000, 50)]


def test_the_processor_time_of_the_writer_counts() -> None:
    training = Training({"first": 1, "every": 1, "budget": {"time": "10%"}})
    training.run(50)
    training.meter.writer_seconds += 10.0
    before = len(training.recorded)
    training.run(2000)
    assert len(training.recorded) - before < 10


def test_windows_are_recorded_whatever_they_cost() -> None:
    schedule = {"first": 1, "every": 1, "windows": [[200, 205]], "budget": {"time": "1%"}}
    training = Training(schedule).run(300)
    assert set(range(200, 206)) <= set(training.recorded)


def test_the_cadence_chosen_is_said_once_and_again_when_it_changes_much() -> None:
    training = Training({"first": 1, "every": 1, "budget": {"time": "10%"}}).run(3000)
    assert [what for what, _ in training.said] == ["time"]
    assert "to stay below 10% of the time" in training.said[0][1]
    training.cost *= 5
    training.run(10000)
    assert 1 < len(training.said) <= 3


@given(
    plain=st.floats(1e-4, 1.0),
    ratio=st.floats(0.01, 100),
    percent=st.integers(1, 50),
    first=st.integers(1, 10),
    every=st.integers(1, 20),
    rests=st.booleans(),
)
def test_the_share_stays_below_the_budget(
    plain: float, ratio: float, percent: int, first: int, every: int, rests: bool
) -> None:
    schedule = {"first": first, "every": every, "budget": {"time": f"{percent}%"}}
    training = Training(schedule, plain=plain, cost=plain * ratio).run(2000, rests=rests)
    paid = len(training.recorded) - first  # the last ones may not be paid off yet
    assert (
        paid * training.cost
        <= percent / 100 * (training.now - training.start) * 1.05 + training.cost
    )


# -- disk ----------------------------------------------------------------------------------------


def test_a_long_training_has_records_until_its_end_within_the_budget() -> None:
    training = Training({"first": 1, "every": 1, "budget": {"disk": "100kB"}}).run(20_000)
    assert training.meter.disk_bytes <= 100_000
    assert training.recorded[-1] > 1500
    assert len(training.recorded) > 90


@pytest.mark.parametrize(("used", "factor"), [(0, 1), (0.4, 1), (0.5, 4), (0.7, 4), (0.8, 16)])
def test_gaps_grow_whenever_half_of_what_remained_is_used(used: float, factor: float) -> None:
    training = Training({"budget": {"disk": "1MB"}})
    training.meter.disk_bytes = used * 1e6
    training.meter.polls = 1
    assert training.budget.factor() == factor


def test_nothing_is_recorded_beyond_the_budget_and_this_is_said_once() -> None:
    schedule = {"first": 1, "every": 1, "windows": [[0, 100_000]], "budget": {"disk": "50kB"}}
    training = Training(schedule).run(200)
    assert len(training.recorded) == 50
    assert training.recorded[-1] < 60
    assert [text for _, text in training.said if "used up" in text] == [
        "the disk budget of 50kB is used up: no more records"
    ]


@given(st.integers(20, 2000), st.integers(1, 9))
def test_the_disk_never_holds_more_than_its_budget(records: int, every: int) -> None:
    schedule = {"first": 3, "every": every, "budget": {"disk": f"{records}kB"}}
    training = Training(schedule).run(5000)
    assert training.meter.disk_bytes <= records * 1000
    assert math.isfinite(training.budget.factor())


# -- wall clock ----------------------------------------------------------------------------------


def test_a_record_at_least_every_so_many_seconds() -> None:
    schedule = {"first": 1, "every": None, "seconds": 1.0}
    training = Training(schedule, plain=0.125, cost=0.0).run(100)
    assert training.recorded == [*range(0, 100, 9)]  # the step after eight that are not recorded


def test_seconds_count_from_the_last_record_whatever_it_was_for() -> None:
    schedule = {"first": 1, "every": 8, "seconds": 1.05}
    training = Training(schedule, plain=0.1, cost=0.0).run(40)
    assert training.recorded == [0, 8, 16, 24, 32]

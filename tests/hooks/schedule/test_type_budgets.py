"""Budgets for types of execution, compared with an independent simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import comgra_decl as comgra
from comgra_decl.errors import SpecError
from comgra_decl.hooks.schedule.agenda import Agenda, Plan
from comgra_decl.hooks.schedule.budget import Budget, Meter
from comgra_decl.spec import load_spec

TICK = 1 / 1024  # durations are multiples of it, so their sums are exact


class Training:
    """A training run whose steps have labels; the first label sets a record's time and size."""

    def __init__(self, schedule: Mapping[str, Any], costs: Mapping[str, float]) -> None:
        self.now, self.costs, self.plain = 64.0, costs, 8 * TICK
        self.meter = Meter()
        self.said: list[tuple[str, str, str]] = []
        spec = load_spec({"schedule": dict(schedule)}).schedule
        self.budget = Budget(
            spec.budget,
            meter=self.meter,
            say=lambda *what: self.said.append(what),
            types=spec.type_budgets,
            clock=lambda: self.now,
        )
        whole = load_spec({"schedule": dict(schedule)})
        self.agenda = Agenda(whole, self.budget, clock=lambda: self.now)
        self.sizes: dict[str, float] = {}
        self.recorded: list[int] = []
        self.start = self.now

    def run(self, steps: Sequence[Sequence[str]]) -> Training:
        for step, labels in enumerate(steps):
            plan = self.agenda.plan(step)
            self.agenda.declare(labels)
            recorded = plan is Plan.ARM or (plan is Plan.WATCH and self.agenda.due)
            self.now += self.plain + (self.costs[labels[0]] if recorded else 0.0)
            if recorded:
                self.recorded.append(step)
                self.budget.recorded(*labels)
                self.meter.disk_bytes += self.sizes.get(labels[0], 0.0)
            self.meter.polls += 1
            self.agenda.end(recorded=recorded)
            self.budget.step_ended(self.costs[labels[0]] if recorded else None, self.agenda.ended)
        return self

    def share(self, steps: Sequence[Sequence[str]], label: str) -> float:
        spent = [self.costs[steps[at][0]] for at in self.recorded if label in steps[at]]
        return sum(spent) / (self.now - self.start)


def simulated(
    steps: Sequence[Sequence[str]], costs: Mapping[str, float], shares: Mapping[str, float]
) -> list[int]:
    """Returns which steps are recorded if each label pays its own debts, and "" those of all."""
    now, plain = 64.0, 8 * TICK
    paid = dict.fromkeys(shares, -math.inf)
    recorded: list[int] = []
    durations: list[float] = []
    for step, labels in enumerate(steps):
        concerned = [name for name in ("", *labels) if name in shares]
        due = all(now >= paid[name] for name in concerned)
        took = plain + (costs[labels[0]] if due else 0.0)
        now += took
        if due:
            recorded.append(step)
            usual = median(durations[-32:]) if durations else 0.0
            over = took - usual if durations and step else 0.0
            cost = max(costs[labels[0]], over)
            began = now - (took if step else costs[labels[0]])
            for name in concerned:
                paid[name] = max(paid[name], began - usual) + cost / shares[name]
        elif step:
            durations.append(took)
    return recorded


PERCENT = {0.5: "50%", 0.25: "25%", 0.125: "12.5%"}


@given(
    steps=st.lists(
        st.lists(st.sampled_from("abc"), min_size=1, max_size=2, unique=True),
        min_size=30,
        max_size=80,
    ),
    costs=st.fixed_dictionaries({name: st.integers(1, 64) for name in "abc"}),
    shares=st.fixed_dictionaries(
        {"a": st.sampled_from([*PERCENT]), "b": st.sampled_from([*PERCENT])},
        optional={"": st.sampled_from([*PERCENT])},
    ),
)
def test_each_type_pays_for_its_own_records_within_what_all_may_cost(
    steps: list[list[str]], costs: dict[str, int], shares: dict[str, float]
) -> None:
    seconds = {name: ticks * TICK for name, ticks in costs.items()}
    types: dict[str, Any] = {name: {"budget": {"time": PERCENT[shares[name]]}} for name in "ab"}
    schedule: dict[str, Any] = {"types": {**types, "c": {}}}
    if "" in shares:
        schedule["budget"] = {"time": PERCENT[shares[""]]}
    training = Training(schedule, seconds).run(steps)
    assert training.recorded == simulated(steps, seconds, shares)


def cycle(*labels: str, times: int) -> list[list[str]]:
    return [[label] for label in labels] * times


def test_a_type_stays_below_its_share_and_the_others_do_not_care() -> None:
    steps = cycle("short", "long", times=2000)
    schedule = {"types": {"long": {"budget": {"time": "5%"}}, "short": {"every": 10}}}
    training = Training(schedule, {"long": 64 * TICK, "short": TICK}).run(steps)
    assert 0.04 < training.share(steps, "long") <= 0.051
    shorts = [at for at in training.recorded if steps[at] == ["short"]]
    assert shorts == [*range(0, 4000, 20)], "every tenth of them"


def test_the_budget_of_the_run_is_a_cap_over_all_types() -> None:
    steps = cycle("a", "b", times=2000)
    types = {name: {"budget": {"time": "30%"}} for name in "ab"}
    costs = {"a": 64 * TICK, "b": 64 * TICK}
    free = Training({"types": types}, costs).run(steps)
    capped = Training({"types": types, "budget": {"time": "10%"}}, costs).run(steps)
    assert sum(free.share(steps, name) for name in "ab") > 0.3
    assert sum(capped.share(steps, name) for name in "ab") <= 0.102


def test_the_star_gives_each_type_that_is_not_named_a_budget_of_its_own() -> None:
    steps = cycle("a", "b", "c", times=2000)
    schedule = {"types": {"*": {"budget": {"time": "5%"}}}}
    training = Training(schedule, dict.fromkeys("abc", 32 * TICK)).run(steps)
    for name in "abc":
        assert 0.04 < training.share(steps, name) <= 0.051


def test_windows_of_a_type_are_recorded_whatever_they_cost() -> None:
    steps = cycle("a", times=100)
    window = {"every": None, "windows": [[40, 44]], "budget": {"time": "1%"}}
    training = Training({"types": {"a": window}}, {"a": 640 * TICK}).run(steps)
    assert training.recorded == [0, 40, 41, 42, 43, 44]


def test_what_was_chosen_is_said_for_each_type() -> None:
    steps = cycle("a", "b", times=500)
    types = {"a": {"budget": {"time": "5%"}}, "b": {"budget": {"disk": "3kB"}}}
    training = Training({"types": types}, {"a": 64 * TICK, "b": 0.0})
    training.sizes = {"a": 1000.0, "b": 100.0}
    training.run(steps)
    keys = [(key, what) for key, what, _ in training.said]
    assert set(keys) == {("types.a.budget", "time"), ("types.b.budget", "disk")}
    text = next(text for key, _, text in training.said if key == "types.a.budget")
    assert "to stay below 5% of the time, records of type 'a' are at least 152 steps apart" in text
    assert any(
        "gaps between records of type 'b' are 16 times longer" in s for *_, s in training.said
    )


# -- disk ----------------------------------------------------------------------------------------


@given(
    small=st.integers(20, 400), large=st.integers(500, 2000), limit=st.integers(5, 60), period=...
)
def test_a_type_takes_no_more_of_the_disk_than_it_may(
    small: int, large: int, limit: int, period: bool
) -> None:
    steps = cycle("small", *["large"] * (1 + period), times=300)
    schedule = {"types": {"large": {"budget": {"disk": f"{limit}kB"}}, "small": {"every": 3}}}
    training = Training(schedule, {"small": 0.0, "large": 0.0})
    training.sizes = {"small": float(small), "large": float(large)}
    training.run(steps)
    counts = {name: sum(steps[at] == [name] for at in training.recorded) for name in training.sizes}
    assert counts["large"] * large <= limit * 1000
    assert counts["large"] * large > limit * 1000 / 2 - 2 * large, "and makes use of it"
    assert counts["small"] == len(range(0, 300, 3)), "as if there were no other type"


def test_a_change_of_the_spec_forgets_neither_debt_nor_size() -> None:
    steps = cycle("a", times=40)
    schedule = {"types": {"a": {"budget": {"disk": "10kB", "time": "10%"}}}}
    training = Training(schedule, {"a": 64 * TICK})
    training.sizes = {"a": 1000.0}
    training.run(steps)
    spec = load_spec({"schedule": {"types": {"a": {"budget": {"disk": "1500B", "time": "10%"}}}}})
    after = Budget(
        spec.schedule.budget,
        meter=training.meter,
        say=lambda *_: None,
        types=spec.schedule.type_budgets,
        clock=lambda: training.now,
        before=training.budget,
    )
    assert training.budget.indebted("a")
    assert after.indebted("a")
    assert not training.budget.exhausted("a")
    assert after.exhausted("a")
    assert not after.exhausted("b")


# -- as a user declares it ------------------------------------------------------------------------


def test_a_run_says_what_it_chose_for_a_type(tmp_path: Path) -> None:
    spec = {
        "nodes": {"all": {"select": "**", "values": True}},
        "schedule": {
            "types": {"long": {"budget": {"disk": "1B"}}, "short": {"every": 5}},
            "first": 1,
        },
        "store": {"commit_interval": 0},
    }
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with comgra.trace(spec, root=tmp_path) as session:
        for step in range(40):
            comgra.tag("long" if step % 2 else "short")
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            if step < 5:
                session_looks(session)
    assert session.path is not None
    run = comgra.open_run(session.path)
    chosen = "the disk budget of 1B is used up: no more records of type 'long'"
    notes = [note for note in run.notes()["text"] if "types.long" in note]
    assert notes == [f"schedule.types.long.budget: {chosen}"]
    assert run.report["choices"] == {"types.long.budget.disk": chosen}


def session_looks(session: Any) -> None:
    """Does what the monitoring thread does once a second."""
    session._attendant.look()


@pytest.mark.parametrize(
    ("budget", "problem"),
    [
        ({"time": "3"}, "comgra.schedule.types.long.budget.time: '3' is not a share of the time"),
        ({"disc": "1GB"}, "did you mean 'disk'"),
    ],
)
def test_mistakes_name_their_place(budget: dict[str, str], problem: str) -> None:
    with pytest.raises(SpecError) as error:
        load_spec({"schedule": {"types": {"long": {"budget": budget}}}})
    assert problem in str(error.value)

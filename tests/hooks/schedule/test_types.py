"""Types of execution: what a step is called, and how often each kind is recorded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

import comgra_decl as comgra
from tests.support.recording import EVERYTHING, Recording, recording

LENGTHS = {"input": 0, "shape": 1, "bins": [4], "names": ["short", "long"]}


class Sequential(nn.Module):
    """Accepts sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, kind: Any = None) -> torch.Tensor:
        return self.linear(x).mean(1)


def trained(
    lengths: Sequence[int], schedule: Mapping[str, Any], types: Mapping[str, Any]
) -> Recording:
    model = Sequential()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING, schedule=schedule, types={"by": types}) as run:
        for length in lengths:
            optimizer.zero_grad()
            model(torch.randn(2, length, 3)).sum().backward()
            optimizer.step()
    assert run.faults == []
    return run


def types_of(run: Recording) -> dict[int, str]:
    return {step.info.step: step.info.type for step in run.steps}


def test_the_length_of_the_batch_is_the_type() -> None:
    run = trained([2, 9, 3, 4], {"first": 10}, LENGTHS)
    assert types_of(run) == {0: "short", 1: "long", 2: "short", 3: "long"}
    assert {step.info.mode for step in run.steps} == {"train"}


def test_limits_name_their_labels() -> None:
    by = {"input": "x", "shape": 1, "bins": [3, 5]}
    run = trained([2, 3, 4, 5, 9], {"first": 10}, by)
    assert list(types_of(run).values()) == ["<3", "3-5", "3-5", ">=5", ">=5"]


def test_a_type_seen_for_the_first_time_is_recorded_at_once() -> None:
    run = trained([2] * 7 + [9] + [2] * 20, {"first": 1, "every": 100}, LENGTHS)
    assert types_of(run) == {0: "short", 7: "long"}


def test_each_type_is_counted_by_itself() -> None:
    schedule = {
        "first": 0,
        "every": 1,
        "types": {"long": {"every": 3, "first": 2}, "*": {"every": 5}},
    }
    lengths = [2, 9] * 10
    run = trained(lengths, schedule, LENGTHS)
    assert [s for s, t in types_of(run).items() if t == "long"] == [1, 3, 7, 13, 19]
    assert [s for s, t in types_of(run).items() if t == "short"] == [0, 10]


def test_a_type_can_be_left_out() -> None:
    run = trained([2, 9, 2, 9], {"first": 10, "types": {"long": None}}, LENGTHS)
    assert types_of(run) == {0: "short", 2: "short"}


def test_a_list_of_steps_leaves_types_no_say() -> None:
    run = trained([2, 9, 2, 9, 2], {"steps": [3], "types": {"long": None}}, LENGTHS)
    assert list(types_of(run)) == [3]


@hypothesis_settings(max_examples=10)
@given(
    st.lists(st.sampled_from([2, 9]), min_size=1, max_size=25),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_recorded_steps_of_a_type_are_those_of_its_own_count(
    lengths: list[int], every: int, first: int
) -> None:
    cadence = {"every": every, "first": first}
    run = trained(lengths, {"types": {"long": cadence, "short": None}}, LENGTHS)
    long = [step for step, length in enumerate(lengths) if length == 9]
    expected = [s for k, s in enumerate(long) if k < first or k % every == 0]
    assert [step.info.step for step in run.steps] == expected


def test_a_step_armed_by_the_call_has_the_whole_record() -> None:
    schedule = {"types": {"long": {"every": 2}, "short": None}}
    run = trained([2, 9, 2, 9, 9], schedule, LENGTHS)
    whole = trained([9], {"first": 1}, LENGTHS)
    assert set(whole.slots) == set(run.slots)
    for step in run.steps:
        assert set(step.layout.slots.tolist()) == set(run.steps[0].layout.slots.tolist())
    assert run.edges() == whole.edges()


@pytest.mark.parametrize(
    ("given", "label"),
    [(torch.tensor(3), "3"), (torch.tensor([True]), "True"), ("warm", "warm"), (7, "7")],
)
def test_the_value_of_an_input_is_the_type(given: Any, label: str) -> None:
    model = Sequential()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING, types={"by": {"input": "kind", "value": True}}) as run:
        model(torch.randn(2, 4, 3), kind=given).sum().backward()
        optimizer.step()
        model(torch.randn(2, 4, 3), given).sum().backward()
        optimizer.step()
    assert [step.info.type for step in run.steps] == [label, label]
    assert run.structures[0].cuts == []


def parity(module: nn.Module, args: Any, _kwargs: Any, *, names: list[str]) -> list[str]:
    assert isinstance(module, Sequential)
    return [names[args[0].shape[1] % 2], "counted"]


def test_a_function_gives_type_and_tags() -> None:
    target = {"_target_": f"{__name__}.parity", "names": ["even", "odd"]}
    run = trained([2, 3], {"first": 10}, target)
    assert list(types_of(run).values()) == ["even", "odd"]
    assert [step.info.extra["tags"] for step in run.steps] == [["counted"]] * 2


@pytest.mark.parametrize(
    ("by", "said"),
    [
        ({"_target_": "tests.no_such_module.function"}, "No module named"),
        ({"_target_": f"{__name__}.parity", "nmes": []}, "unexpected keyword argument"),
        ({"input": "y", "shape": 0}, "was not given 'y'"),
        ({"input": 0, "value": True}, "elements"),
    ],
)
def test_what_gives_no_type_is_said_once_and_the_mode_is_the_type(
    by: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run = trained([2, 3, 4], {"first": 10}, by)
    assert list(types_of(run).values()) == ["train"] * 3
    assert sum("types.by" in record.message for record in caplog.records) == 1
    assert said in run.report["warnings"][0]


# -- tags -------------------------------------------------------------------------------------


def tagged(
    tags: Mapping[int, Sequence[str]], count: int, *, late: bool = False, **spec: Any
) -> Recording:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording({**EVERYTHING, **spec}) as run:
        for number in range(count):
            if not late:
                comgra.tag(*tags.get(number, ()))
            model(torch.randn(4, 3)).sum().backward()
            if late:
                comgra.tag(*tags.get(number, ()))
            optimizer.step()
            optimizer.zero_grad()
    assert run.faults == []
    return run


def test_the_first_tag_is_the_type_and_the_others_are_kept() -> None:
    run = tagged({1: ["long", "noisy"]}, 3)
    assert [s.info.type for s in run.steps] == ["train", "long", "train"]
    assert run.steps[1].info.extra["tags"] == ["noisy"]


def test_a_declared_type_comes_before_tags() -> None:
    run = tagged({0: ["noisy"]}, 1, types={"by": {"input": 0, "shape": 0}})
    assert run.steps[0].info.type == "4"
    assert run.steps[0].info.extra["tags"] == ["noisy"]


def test_tags_have_cadences_of_their_own() -> None:
    often = {number: ["long"] for number in range(0, 40, 4)}
    schedule = {"first": 0, "every": 1, "types": {"long": {"every": 3}, "*": {"every": 20}}}
    run = tagged(often, 40, schedule=schedule)
    assert [s.info.step for s in run.steps if s.info.type == "long"] == [0, 12, 24, 36]
    assert [s.info.step for s in run.steps if s.info.type == "train"] == [1, 27]


@pytest.mark.parametrize("late", [False, True])
def test_an_unexpected_tag_is_recorded_the_next_time_it_is_seen(late: bool) -> None:
    run = tagged(
        {10: ["rare"], 20: ["rare"], 30: ["rare"]},
        40,
        late=late,
        schedule={"first": 1, "every": 100},
    )
    recorded = {s.info.step: s.info.type for s in run.steps}
    assert recorded == {0: "train", (30 if late else 20): "rare"}


def test_tags_that_come_late_are_waited_for() -> None:
    schedule = {"types": {"rare": {"every": 2}, "*": None}}
    run = tagged({k: ["rare"] for k in (5, 10, 15, 20, 25)}, 30, late=True, schedule=schedule)
    assert [s.info.step for s in run.steps] == [10, 15, 25]  # the second, third and fifth


def test_a_tag_can_forbid_a_record() -> None:
    run = tagged({1: ["secret"], 2: ["secret"]}, 4, late=True, schedule={"types": {"secret": None}})
    assert [s.info.step for s in run.steps] == [0, 3]


def test_an_evaluation_has_its_own_tags() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING) as run:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            comgra.tag("split:test")
            model(torch.randn(4, 3))
    assert [(s.info.type, s.info.extra.get("tags")) for s in run.steps] == [
        ("train", None),
        ("eval", ["split:test"]),
    ]


def test_with_keep_every_step_is_captured_and_says_whether_it_was_scheduled() -> None:
    model = Sequential()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = {"types": {"long": {"every": 2}, "short": None}}
    spec = {**EVERYTHING, "schedule": schedule, "types": {"by": LENGTHS}}
    with recording(spec, keep={"ring": 2}) as run:
        for length in (2, 9, 9, 2, 9):
            model(torch.randn(2, length, 3)).sum().backward()
            optimizer.step()
    assert [s.info.step for s in run.steps] == [0, 1, 2, 3, 4]
    assert [s.info.type for s in run.steps] == ["short", "long", "long", "short", "long"]
    assert [s.scheduled for s in run.steps] == [False, True, False, False, True]


# -- the cost of a step that turns out not to be due
# -----------------------------------------------


def test_a_step_that_is_not_due_meets_one_hook_call() -> None:
    calls: list[str] = []

    def count(module: nn.Module, _args: Any, _kwargs: Any) -> str:
        calls.append(type(module).__name__)
        hooks = nn.modules.module._global_forward_hooks
        assert len(hooks) == 0 or len(calls) == 1
        return "same"

    globals()["count"] = count
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(10)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = {"types": {"same": {"every": 1000}}}
    before = dict(nn.modules.module._global_forward_pre_hooks)
    with recording(EVERYTHING, schedule=schedule, types={"by": {"_target_": f"{__name__}.count"}}):
        for _ in range(20):
            model(torch.randn(2, 3)).sum().backward()
            assert dict(nn.modules.module._global_forward_pre_hooks) == before or len(calls) == 1
            optimizer.step()
    assert calls == ["Sequential"] * 20


def test_compiled_models_stay_compiled_in_steps_that_are_not_due() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    compiled = torch.compile(model, backend=counter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = {"types": {"*": {"every": 5}}}
    with recording(EVERYTHING, schedule=schedule, types={"by": {"input": 0, "shape": 0}}) as run:
        for number in range(11):
            compiled(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            assert counter.frame_count == min(number, 1)
    assert [step.info.step for step in run.steps] == [0, 5, 10]
    assert run.faults == []


def test_training_is_the_same_with_types() -> None:
    def train() -> np.ndarray:
        torch.manual_seed(0)
        model = Sequential()
        optimizer = torch.optim.Adam(model.parameters())
        for length in (2, 9, 4, 9, 9, 2):
            optimizer.zero_grad()
            model(torch.randn(2, length, 3)).square().sum().backward()
            optimizer.step()
        return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])

    plain = train()
    with recording(EVERYTHING, schedule={"types": {"long": {"every": 2}}}, types={"by": LENGTHS}):
        traced = train()
    assert (plain == traced).all()

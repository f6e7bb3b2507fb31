"""The steps at which triggers fire, compared with loops over plain lists."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.keep import StepView
from comgra_decl.keep.triggers import Function, Nonfinite, Quantile, Spike, Trigger
from comgra_decl.spec.keep import MeasureSpec, QuantileTrigger, SpikeTrigger

from .trigger_steps import look_of, looks_of

Numbers = st.lists(st.floats(-1e3, 1e3, width=32), max_size=120)
Cuts = st.lists(st.integers(0, 120), max_size=4)


def fired(trigger: Trigger, losses: list[float], cuts: list[int], **facts: Any) -> list[int]:
    """Returns the steps at which it fires; the steps arrive in chunks that end at `cuts`."""
    steps, start = [], 0
    for look in looks_of(losses, cuts, **facts):
        steps += [start + i for i in trigger.look(look)]
        start += len(look.batch.steps)
    return sorted(steps)


@given(Numbers, Cuts, st.sampled_from([0.8, 0.9, 0.2]), st.integers(10, 40))
def test_a_quantile_is_that_of_the_numbers_before(
    losses: list[float], cuts: list[int], quantile: float, window: int
) -> None:
    expected = []
    for step, loss in enumerate(losses):
        before = losses[max(0, step - window) : step]
        if len(before) < 10:
            continue
        bound = np.quantile(before, quantile, method="inverted_cdf")
        if (loss > bound) if quantile > 0.5 else (loss < bound):
            expected.append(step)
    spec = QuantileTrigger(quantile=quantile, window=window)
    assert fired(Quantile(spec), losses, cuts) == expected


@given(
    st.lists(st.one_of(st.floats(-2, 2), st.floats(-1e4, 1e4), st.just(float("nan"))), max_size=90),
    Cuts,
    st.sampled_from([1.0, 3.0]),
)
def test_a_spike_exceeds_the_mean_by_standard_deviations(
    losses: list[float], cuts: list[int], sigmas: float
) -> None:
    expected: list[int] = []
    known: list[float] = []
    finite = True
    for step, loss in enumerate(losses):
        before = known[-24:]
        if not np.isfinite(loss):
            expected += [step] if finite else []
        else:
            if len(known) >= 20:
                mean, std = np.mean(before), np.std(before, ddof=1)
                expected += [step] if loss - mean > sigmas * std + 1e-6 * abs(mean) else []
            known.append(loss)
        finite = bool(np.isfinite(loss))
    spec = SpikeTrigger(spike=sigmas, window=24)
    assert fired(Spike(spec), losses, cuts) == expected


def test_types_of_execution_are_compared_with_themselves() -> None:
    losses = [1.0 + 0.01 * (step % 7) if step % 2 else 100.0 for step in range(200)]
    types = ["a" if step % 2 else "b" for step in range(200)]
    spike = Spike(SpikeTrigger(), name="loss_spike")
    assert fired(spike, losses, [50, 51, 120], types=types) == []
    losses[151] = 50.0  # less than what the other type always has
    assert fired(Spike(SpikeTrigger()), losses, [50, 51, 120], types=types) == [151]


def test_a_loss_that_does_not_change_has_no_spikes() -> None:
    losses = [0.1 + 0.2 if step % 3 else 0.3 for step in range(300)]
    assert fired(Spike(SpikeTrigger()), losses, [100]) == []


def test_evaluations_are_not_looked_at() -> None:
    losses = [float("nan")] * 5
    assert fired(Spike(SpikeTrigger()), losses, [], mode="eval") == []
    assert fired(Nonfinite(), losses, [], mode="eval", counts=np.ones((5, 1))) == []


@given(
    st.integers(1, 40).flatmap(
        lambda k: st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=k, max_size=k)
    ),
    Cuts,
)
def test_a_slot_that_turns_nonfinite_fires_once(wild: list[list[bool]], cuts: list[int]) -> None:
    expected = [
        step
        for step, now in enumerate(wild)
        if any(n and not (step and wild[step - 1][i]) for i, n in enumerate(now))
    ]
    counts = np.array(wild, float) * 5
    assert fired(Nonfinite(), [0.0] * len(wild), cuts, counts=counts) == expected


def test_the_first_slot_that_turned_is_named() -> None:
    counts = np.array([[1.0, 0, 0], [1, 0, 2], [1, 3, 2]])
    (look,) = looks_of([0.0] * 3, [], counts=counts)
    assert Nonfinite().look(look) == {
        0: "nonfinite: net.0 output, forward",
        1: "nonfinite: net.2 output, forward",
        2: "nonfinite: net.1 output, forward",
    }


def test_of_the_tensors_that_a_measure_names_the_largest_counts() -> None:
    table = np.tile(np.array([[1.0, 5.0, 2.0]]), (40, 1))
    table[30] = [9.0, 5.0, 2.0]
    of = MeasureSpec.model_validate({"node": "net.*", "statistic": "l2", "over_batch": "std"})
    spec = QuantileTrigger(quantile=0.9, of=of)
    assert fired(Quantile(spec), [0.0] * 40, [7], values=table) == [30]
    only = MeasureSpec.model_validate({"node": "net.[12]", "statistic": "l2", "over_batch": "std"})
    assert (
        fired(Quantile(QuantileTrigger(quantile=0.9, of=only)), [0.0] * 40, [7], values=table) == []
    )


def test_a_measure_that_finds_nothing_says_so() -> None:
    of = MeasureSpec.model_validate({"node": "elsewhere", "statistic": "l2"})
    trigger = Quantile(QuantileTrigger(quantile=0.9, of=of))
    trigger.look(look_of([1.0]))
    assert trigger.trouble is not None
    assert "elsewhere" in trigger.trouble
    loss = Quantile(QuantileTrigger(quantile=0.9))
    loss.look(look_of([1.0]))
    assert loss.trouble is None


def odd(view: StepView, *, but: int) -> str | bool:
    if view.step == but:
        return False
    assert view.lookup("net.1", "l2", over_batch="std") == view.kpis["loss"]
    assert np.isnan(view.lookup("net.7", "l2"))
    return f"step {view.step}" if view.step % 2 else ""


def test_a_function_is_asked_about_every_step() -> None:
    trigger = Function(f"{__name__}.odd", {"but": 3})
    values = np.tile(np.arange(6.0)[:, None], (1, 3))
    (look,) = looks_of([*map(float, range(6))], [], values=values)
    assert trigger.look(look) == {i: f"{__name__}.odd: step {i}" for i in (1, 5)}
    assert trigger.trouble is None


def fails(view: StepView) -> bool:
    raise RuntimeError(f"at {view.step}")


@pytest.mark.parametrize("path", [f"{__name__}.fails", f"{__name__}.nowhere", "no_such.module"])
def test_a_function_that_cannot_work_is_reported_once(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        trigger = Function(path, {})
        for _ in range(3):
            assert trigger.look(look_of([1.0, 2.0])) == {}
    assert len(caplog.records) == 1
    assert path in caplog.text
    assert trigger.trouble is not None

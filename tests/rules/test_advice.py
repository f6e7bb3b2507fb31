"""Advice names the optimizers' settings, and omits what the program already does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from comgra_decl.rules.api import Scene
from comgra_decl.rules.settings import Clipping, LearningRates, lower_decay, lower_rate, raise_rate


def optimizer(rate: float, decay: float = 0.0, class_: str = "AdamW") -> list[dict[str, Any]]:
    return [{"class": class_, "groups": [{"lr": rate, "weight_decay": decay, "parameters": 3}]}]


def scene(
    rates: dict[int, float], *, decay: float = 0.0, class_: str = "AdamW", last: int = 100
) -> Scene:
    """A run whose records have these learning rates."""
    made = Scene(last_step=last)
    for step, rate in rates.items():
        made.optimizers = optimizer(rate, decay, class_)
        made.rates.add(step, made.optimizers)
    return made


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ({0: 0.1, 12: 0.1, 13: 0.0, 14: 0.0}, "The learning rate is 0 from step 13 on; it was 0.1"),
        ({0: 0.1, 12: 0.1, 16: 0.0}, "0 starting between steps 13 and 16; it was 0.1"),
        ({0: 0.0, 1: 0.0}, "The learning rate is 0 from the start"),
        ({0: 0.0, 1: 0.1, 2: 0.0}, "The learning rate is 0 from step 2 on"),
        ({0: 0.1, 9: 1e-4}, "has fallen from 0.1 to 0.0001. Check its schedule"),
        ({0: 1e-9, 9: 1e-9}, "Raise the learning rate of 1e-09"),
        ({}, "as ever"),
    ],
)
def test_updates_that_are_too_small(rates: dict[int, float], words: str) -> None:
    assert words in raise_rate(scene(rates), "as ever")


@pytest.mark.parametrize(
    ("rate", "decay", "class_", "words"),
    [
        (0.002, 50.0, "AdamW", "decay 50 times learning rate 0.002 removes 10% of each weight"),
        (0.001, 0.01, "AdamW", "removes 0.001% of each weight per step, which is too little"),
        (0.1, 0.0, "SGD", "No optimizer has weight decay"),
        (0.1, 0.5, "Adam", "Weight decay 0.5 is added to the gradients"),
    ],
)
def test_weights_that_fade(rate: float, decay: float, class_: str, words: str) -> None:
    text = lower_decay(scene({0: rate}, decay=decay, class_=class_), "as ever")
    assert words in text
    assert ("lower the weight decay" in text) == (decay == 50.0)


def test_steps_that_are_too_large_leave_out_a_warm_up_and_a_clip_that_are_there() -> None:
    plain = scene({0: 0.3, 5: 0.3})
    assert lower_rate(plain, "as ever") == (
        "Lower the learning rate of 0.3 (start with a tenth of it), or use a warmup. Clip the "
        "gradient norm (to about 1)."
    )
    warm = scene({0: 0.01, 5: 0.3})
    warm.clipping.norm = 1.0
    assert lower_rate(warm, "as ever", further="Look.") == (
        "Lower the learning rate of 0.3 (start with a tenth of it). Gradients are already clipped "
        "to a norm of 1. Look."
    )
    assert lower_rate(scene({}), "as ever") == "as ever"


@pytest.mark.parametrize("window", [1, 3, 10])
@pytest.mark.parametrize("clipped", [True, False])
def test_clipping_shows_in_the_total_norm(window: int, clipped: bool) -> None:
    raw = np.random.default_rng(0).uniform(1, 3, (10, 4))
    used = raw / np.linalg.norm(raw, axis=1, keepdims=True) * 0.5 if clipped else raw
    clipping = Clipping()
    for start in range(0, 10, window):
        clipping.look(np.arange(10)[start : start + window], used[start : start + window])
    assert clipping.norm == (pytest.approx(0.5) if clipped else None)


def test_gradients_that_stay_what_they_are_are_not_clipped() -> None:
    clipping = Clipping()
    clipping.look(np.arange(20), np.tile([[0.3, 0.4]], (20, 1)))
    assert clipping.norm is None


def test_a_record_without_an_optimizer_changes_nothing() -> None:
    rates = LearningRates()
    rates.add(0, optimizer(0.1))
    rates.add(1, [])
    rates.add(2, [{"class": "Odd", "groups": [{"parameters": 1}]}])
    assert (rates.first, rates.now, rates.zero) == (0.1, 0.1, None)

"""The numbers next to the checklist are those of the run, and withhold contradicted ticks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from comgra_decl.rules import Reading
from comgra_decl.rules.data.targets import ClassImbalance
from comgra_decl.rules.loss.diverging import LossDiverges
from comgra_decl.rules.loss.flat import LossNotFalling
from comgra_decl.rules.loss.oscillating import LossOscillates
from comgra_decl.rules.loss.spike import LossSpike
from tests.rules.tape import Tape


def of_losses(losses: Sequence[float], **others: Sequence[float]) -> Tape:
    tape = Tape()
    tape.losses(losses)
    for name, values in others.items():
        tape.losses(values, name=name)
    return tape


def read(tape: Tape, name: str, window: int = 7) -> Reading:
    return tape.play(window=window).readings()[name]


def falling(losses: Sequence[float]) -> Reading:
    return read(of_losses(losses), "falling")


def noisy(
    start: float, stop: float, count: int, *, noise: float = 0.05, seed: int = 0
) -> list[float]:
    rng = np.random.default_rng(seed)
    return [float(x) for x in np.linspace(start, stop, count) + noise * rng.normal(size=count)]


def test_the_first_loss_and_the_mean_of_the_last_ones_are_shown() -> None:
    """Of 8 losses, the last quarter is 3.5 and 3.7."""
    losses = [2.27, 2.5, 3.0, 5.79, 4.0, 3.8, 3.5, 3.7]
    assert falling(losses).text == "loss 2.27 \u2192 3.6 in 8 steps"


def test_a_loss_that_is_only_below_its_first_value_is_compared_with_the_start() -> None:
    """The first quarter of the 28 losses has a mean of 3, as the last one has."""
    losses = [6.0, *[2.0, 3.0] * 3, *[2.5, 3.5] * 10, 3.0]
    assert falling(losses).verdict == "poor"
    assert falling(losses).text == "loss 6 \u2192 3 in 28 steps, after a mean of 3 at the start"


@pytest.mark.parametrize("count", [2, 8, 19, 20, 50, 99, 100, 1000])
def test_a_loss_that_falls_is_fine_however_few_there_are(count: int) -> None:
    assert falling(noisy(2.3, 1.0, count)).verdict == "fine"


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        (noisy(2.3, 3.6, 50), "bad"),
        (noisy(2.3, 2.7, 50), "poor"),
        (noisy(2.3, 2.3, 50), "poor"),
        ([2.27, *noisy(6.0, 3.6, 49)], "bad"),  # it falls from a peak, but not below its start
        ([2.3 * 1.5**i for i in range(50)], "bad"),
        ([2.3, 2.4], "unknown"),
        ([2.3, 9.9], "poor"),
        ([2.3], "unknown"),
        ([0.5] * 3 + [0.0] * 5, "poor"),
        ([1.0, float("nan"), 0.5, 0.2], "bad"),
        ([5.0, 1.0, *[0.01] * 100], "fine"),  # it fell within the first tenth
        (noisy(2.0, 1.0, 300) + noisy(1.0, 1.5, 300), "fine"),
    ],
)
def test_a_loss_that_does_not_fall_is_never_fine(losses: list[float], verdict: str) -> None:
    assert falling(losses).verdict == verdict


@pytest.mark.parametrize("seed", range(20))
def test_a_loss_that_ends_above_its_start_is_never_fine(seed: int) -> None:
    rng = np.random.default_rng(seed)
    losses = [float(x) for x in 2 + np.cumsum(rng.normal(size=int(rng.integers(2, 300)))) / 10]
    found = falling(losses)
    first, last = (float(x) for x in found.text.split(" in ")[0][5:].split(" \u2192 "))
    assert found.verdict != "fine" or last <= first


def test_losses_of_networks_that_train_against_each_other_need_not_fall() -> None:
    tape = of_losses([1.0] * 30, **{"loss[0]": [0.5] * 30})
    assert read(tape, "falling").verdict == "unknown"


def test_a_peak_is_shown_with_its_step() -> None:
    """The last quarter of five losses is 1.8 and 1.7."""
    found = read(of_losses([2.0, 1.9, 5.5, 1.8, 1.7]), "steady")
    assert (found.text, found.verdict) == ("first 2, highest 5.5 at step 2, last 1.75", "poor")


def test_a_validation_loss_twice_the_training_loss_is_not_as_good() -> None:
    """The last quarter of 40 losses from 1 to 0.5 has a mean of 0.558."""
    for validation, verdict in ([1.0, 0.9, 0.7], "fine"), ([1.0, 0.9, 1.2], "poor"):
        tape = of_losses(noisy(1.0, 0.5, 40, noise=0), val_loss=validation)
        assert read(tape, "evaluation").verdict == verdict


def test_zero_and_a_validation_loss_as_low_from_the_start_are_said_not_to_prove_anything() -> None:
    zero = of_losses([0.5] * 3 + [0.0] * 5).play().caveats()
    assert zero[0].startswith("The loss is exactly 0 from step 3 on.")
    losses = [2.0 - 0.01 * step for step in range(100)]
    for factor, count in (0.98, 1), (1.5, 0):
        tape = of_losses(losses)
        tape.numbers += [("val_loss", "train", s, factor * losses[s]) for s in range(9, 100, 10)]
        found = tape.play().caveats()
        assert len(found) == count
        assert all(sentence.startswith("val_loss has been as low as") for sentence in found)


def test_readings_do_not_depend_on_windows() -> None:
    rng = np.random.default_rng(0)
    tape = of_losses(noisy(2.0, 1.0, 60), val_loss=noisy(2.0, 1.2, 6))
    x = tape.slot("input", (4, 3), role="input", kind="input")
    out = tape.slot("net", (4, 5), class_="ReLU")
    grad = tape.slot("net", (4, 5), pass_="grad")
    weight = tape.slot("net", (5, 3), role="weight", kind="parameter")
    update = tape.slot("net", (5, 3), role="weight", kind="parameter", pass_="update")
    for step in range(60):
        tape.record(
            {
                x: rng.normal(size=(4, 3)),
                out: np.maximum(rng.normal(size=(4, 5)), 0) * (1 + step),
                grad: rng.normal(size=(4, 5)) if step != 30 else np.full((4, 5), np.nan),
                weight: np.full((5, 3), 2.0),
                update: np.full((5, 3), 0.002),
            }
        )
    found = tape.play(window=7).readings()
    for window in (1, 60):
        assert tape.play(window=window).readings() == found
    assert found["finite"].text == "NaN or infinity in 1 of 60 records from step 30 on"
    assert found["updates"].text.startswith("update divided by weight: 0.001 (net weight)")
    assert found["updates"].verdict == found["gradients"].verdict == "poor"


def test_readings_survive_storage() -> None:
    reading = Reading("targets int64 [8]", "fine", ("class_imbalance",))
    assert Reading.from_json(reading.to_json()) == reading


@pytest.mark.parametrize("window", [1, 7, 50])
def test_a_short_run_is_judged_once_it_has_ended_and_by_wider_limits(window: int) -> None:
    for losses, ended in (noisy(2.3, 3.6, 50), 1), (noisy(2.3, 2.31, 50), 0):
        engine = of_losses(losses).play(LossNotFalling(), window=window)
        assert not engine.findings()
        assert engine.unchecked()[0].reason == "it needs 60 losses; the run has 50"
        engine.end()
        assert [f.severity for f in engine.findings()] == ["hint"] * ended
        assert not engine.unchecked()


def test_classes_of_a_short_run_are_counted_once_it_has_ended() -> None:
    """Of 20 batches of 10, one contains a single target of class 1: 199 to 1 is above 2 * 10."""
    tape = Tape()
    target = tape.slot("target", (10,), role="target", kind="target", dtype="int64")
    for step in range(20):
        tape.record({target: np.array([0] * 9 + [int(step == 3)])})
    engine = tape.play(ClassImbalance())
    assert (engine.findings(), engine.unchecked()[0].rule) == ([], "class_imbalance")
    assert engine.unchecked()[0].reason == "it needs 500 targets; the run has 200"
    engine.end()
    assert [f.evidence["ratio"] for f in engine.findings()] == [199]
    assert not engine.unchecked()


def test_small_batches_of_classes_are_named_as_the_reason() -> None:
    tape = Tape()
    target = tape.slot("target", (4,), role="target", kind="target", dtype="int64")
    for _ in range(3):
        tape.record({target: np.array([0, 1, 2, 3])})
    (unchecked,) = tape.play(ClassImbalance()).unchecked()
    assert "no batch of at least 8 class targets" in unchecked.reason


def test_a_very_short_run_must_diverge_further() -> None:
    for factor, found in (3.0, 0), (5.0, 1):
        engine = of_losses([1.0, 0.9, *[1.0] * 8, factor, factor]).play(LossDiverges())
        assert not engine.findings()
        engine.end()
        assert len(engine.findings()) == found


def test_rules_about_jumps_say_when_they_have_too_few_losses() -> None:
    """A spike is compared with half a window of 64 losses; oscillation takes a window of 50."""
    for rule, least in (LossSpike(), 33), (LossOscillates(), 50):
        for count in (least - 1, least):
            engine = of_losses([1.0] * count).play(rule)
            reason = f"it needs {least} losses; the run has {count}"
            assert [u.reason for u in engine.unchecked()] == ([reason] if count < least else [])

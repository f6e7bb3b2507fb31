"""Which targets are classes, and how often each class occurs."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from comgra_decl.rules.data.targets import ClassImbalance, SingleClass
from comgra_decl.rules.loss.class_weights import InvertedWeights
from comgra_decl.rules.loss.guessing import NoBetterThanGuessing
from tests.rules.tape import Tape

RNG = np.random.default_rng(0)


def seen(batches: NDArray[np.float64], dtype: str) -> Tape:
    """Targets of these batches [records, samples, ...]."""
    tape = Tape()
    slot = tape.slot("target", batches.shape[1:], kind="target", role="target", dtype=dtype)
    for batch in batches:
        tape.record({slot: batch})
    return tape


def rare(*shape: int) -> NDArray[np.float64]:
    """Zeros and ones [records, samples, ...], in which every twentieth element is a one."""
    size = int(np.prod(shape))
    return RNG.permutation(np.arange(size) % 20 == 0).astype(float).reshape(shape)


@pytest.mark.parametrize("window", [1, 100])
@pytest.mark.parametrize(
    ("batches", "dtype"),
    [
        (rare(25, 32), "int64"),
        (rare(25, 32), "float32"),  # in the format of binary_cross_entropy
        (rare(25, 32, 1), "float32"),
        (rare(25, 32, 4, 5), "int64"),  # a class for each pixel
        (rare(25, 32, 6), "int64"),  # a class for each token
    ],
)
def test_one_in_twenty_is_out_of_balance(
    batches: NDArray[np.float64], dtype: str, window: int
) -> None:
    (finding,) = seen(batches, dtype).findings(ClassImbalance(), window=window)
    assert finding.evidence == {"ratio": pytest.approx(19), "targets": batches.size}
    assert finding.severity == "hint"


@pytest.mark.parametrize("window", [1, 100])
def test_zeros_and_ones_are_the_only_classes_among_floats(window: int) -> None:
    constant = np.repeat([[0.0], [1.0], [-1.0]], 32, axis=1)  # as of a critic before any reward
    batches = np.concatenate([constant, rare(20, 32), RNG.normal(size=(5, 32))])
    tape = seen(batches, "float32")
    (counted,) = tape.play(ClassImbalance(), window=window).scene.classes.by_slot.values()
    ones = 32 + int(batches[3:23].sum())
    assert counted == {0: 22 * 32 - ones, 1: ones}


@pytest.mark.parametrize("window", [1, 7, 100])
def test_several_rules_count_each_target_once(window: int) -> None:
    batches = RNG.integers(0, 3, (25, 32)).astype(float)
    rules = [ClassImbalance(), InvertedWeights(), NoBetterThanGuessing()]
    (counted,) = seen(batches, "int64").play(*rules, window=window).scene.classes.by_slot.values()
    classes, counts = np.unique(batches, return_counts=True)
    assert counted == dict(zip(classes.astype(int).tolist(), counts.tolist(), strict=True))


@pytest.mark.parametrize(
    ("batches", "dtype"),
    [
        (rare(25, 32) + 0.5 * rare(25, 32), "float32"),  # not only zeros and ones
        (2 * rare(25, 32), "float32"),
        (rare(25, 32, 4), "float32"),  # several numbers per sample
        (rare(15, 32), "int64"),  # 480 targets
        (np.tile(np.arange(32.0), (25, 1)), "int64"),  # each sample is its own class
        (np.tile(np.arange(128.0), (25, 1)), "int64"),  # two in each histogram bin
    ],
)
def test_other_numbers_are_no_classes(batches: NDArray[np.float64], dtype: str) -> None:
    assert seen(batches, dtype).findings(ClassImbalance()) == []


def test_samples_that_are_their_own_classes_are_not_of_one_class() -> None:
    assert seen(np.tile(np.arange(32.0), (25, 1)), "int64").findings(SingleClass()) == []


def test_a_short_batch_of_own_classes_counts_neither() -> None:
    """The last batch of an epoch in contrastive learning."""
    tape = seen(np.tile(np.arange(32.0), (25, 1)), "int64")
    tape.record({0: np.arange(20.0)})
    assert tape.findings(ClassImbalance()) == []

"""Many steps: each is reduced as if it were the only one, and memory use stays constant."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comgra_decl.stats import Reduced, Reducer, ring
from comgra_decl.stats import reducer as module
from tests.support.shortened import examples

from .recording import Tensors, check, ready, reduce, reducer

KINDS: dict[str, tuple[tuple[int, ...], int | None, torch.dtype]] = {
    "activation": ((6, 10), 0, torch.float32),
    "whole": ((6, 10), None, torch.float32),
    "wide": ((6, 90), 0, torch.float32),
    "bias": ((10,), None, torch.float32),
    "double": ((6, 10), 0, torch.float64),
    "half": ((6, 10), 0, torch.bfloat16),
    "large": ((3, 12_000), 0, torch.float32),
    "empty": ((3, 0), 0, torch.float32),
    "token": ((6, 10), 0, torch.int64),
    "late batch": ((10, 6), 1, torch.float32),
}


def tensors_of(kinds: list[str], seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    made: Tensors = []
    for kind in kinds:
        shape, batch_dim, dtype = KINDS[kind]
        made.append(((torch.randn(shape, generator=generator) * 10).to(dtype), batch_dim))
    return made


def capture(by: Reducer, tensors: Tensors) -> Reduced:
    for tensor, batch_dim in tensors:
        by.add(tensor, batch_dim=batch_dim)
    return by.finish()


SEQUENCES = st.lists(st.lists(st.sampled_from(list(KINDS)), max_size=5), min_size=1, max_size=3)


@settings(max_examples=examples(40))
@given(
    sequences=SEQUENCES,
    order=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    at_once=st.booleans(),
)
def test_any_succession_of_steps_gives_what_each_gives_alone(
    sequences: list[list[str]], order: list[int], at_once: bool
) -> None:
    by = reducer(histogram_elements=50)
    steps = []
    for number, which in enumerate(order):
        tensors = tensors_of(sequences[which % len(sequences)], number)
        reduced = capture(by, tensors)
        steps.append((tensors, ready(reduced) if at_once else reduced))
    for tensors, reduced in steps:
        alone = reduce(tensors, reducer(histogram_elements=50))
        ready(reduced)
        check(tensors, reduced)
        np.testing.assert_array_equal(reduced.starts, alone.starts)
        np.testing.assert_allclose(reduced.raw, alone.raw, rtol=1e-5, atol=1e-3)
        np.testing.assert_array_equal(reduced.histogram_values, alone.histogram_values)


def test_what_was_handed_out_is_never_written_again() -> None:
    by = reducer(histogram_elements=50)
    kept = []
    for number in range(300):
        tensors = tensors_of(["activation", "large", "bias"], number)
        reduced = ready(capture(by, tensors))
        if number % 37 == 0:
            kept.append((reduced, reduced.raw.copy(), np.array(reduced.histogram_values)))
    for reduced, raw, histogram in kept:
        np.testing.assert_array_equal(reduced.raw, raw)
        np.testing.assert_array_equal(reduced.histogram_values, histogram)


def test_results_may_be_waited_for_on_another_thread_while_training_goes_on() -> None:
    by = reducer(histogram_elements=50)
    done: list[tuple[Tensors, Reduced]] = []
    stop = threading.Event()

    def write() -> None:
        seen = 0
        while not stop.is_set() or seen < len(done):
            while seen < len(done):
                ready(done[seen][1])
                seen += 1

    writer = threading.Thread(target=write)
    writer.start()
    for number in range(400):
        kinds = ["activation", "wide", "bias", "large"] if number % 50 else ["wide"]
        tensors = tensors_of(kinds, number % 7)
        done.append((tensors, capture(by, tensors)))
    stop.set()
    writer.join()
    for tensors, reduced in done[::11]:
        check(tensors, reduced)


def test_waiting_twice_and_late_is_harmless() -> None:
    by = reducer()
    tensors = tensors_of(["activation", "bias"], 0)
    steps = [capture(by, tensors) for _ in range(200)]
    for reduced in steps[::-1] + steps:
        ready(reduced)
    for reduced in steps[::17]:
        check(tensors, reduced)


def test_steps_of_one_form_share_their_layout_arrays() -> None:
    by = reducer(histogram_elements=8)
    train = [capture(by, tensors_of(["activation", "bias"], n)) for n in range(5)]
    evaluation = capture(by, tensors_of(["activation"], 0))
    again = capture(by, tensors_of(["activation", "bias"], 9))
    for reduced in [*train, again]:
        assert reduced.signature == train[0].signature
        assert reduced.starts is train[0].starts
        assert reduced.samples is train[0].samples
        assert reduced.elements is train[0].elements
        assert reduced.batched is train[0].batched
        assert reduced.histogram_starts is train[0].histogram_starts
    assert evaluation.signature != again.signature


def test_clear_drops_the_step_in_progress_only() -> None:
    by = reducer()
    first = tensors_of(["activation", "large"], 0)
    pending = capture(by, first)
    for _ in range(3):
        by.add(torch.full((6, 10), torch.nan), batch_dim=0)
        by.clear()
    second = tensors_of(["activation", "large"], 1)
    after = ready(capture(by, second))
    check(first, ready(pending))
    check(second, after)


def test_a_step_without_tensors() -> None:
    reduced = ready(reducer(histogram_elements=8).finish())
    assert reduced.raw.shape == (0, 8)
    assert reduced.starts.shape == (0,)


def test_the_same_large_tensor_twice_in_a_row_is_reduced_once_unless_it_changed() -> None:
    by = reducer()
    x = torch.randn(4, 10_000)
    assert [by.add(x, batch_dim=0) for _ in range(3)] == [0, 0, 0]
    assert by.add(x, batch_dim=None) == 1
    before = x.clone()
    x.add_(1)
    assert by.add(x, batch_dim=None) == 2
    check([(before, 0), (before, None), (x, None)], ready(by.finish()))


def test_inference_tensors_have_no_version_and_are_reduced_every_time() -> None:
    by = reducer()
    with torch.inference_mode():
        x = torch.randn(4, 10_000)
        assert by.add(x, batch_dim=0) == 0
        before = x.clone()
        x.add_(1)
        assert by.add(x, batch_dim=0) == 1
    check([(before, 0), (x, 0)], ready(by.finish()))


def held(by: Reducer) -> tuple[int, int]:
    """Returns the bytes in the ring and the number of known nodes."""
    return by._ring.nbytes, by._nodes


def test_memory_does_not_grow_over_many_steps() -> None:
    by = reducer(histogram_elements=50)
    tensors = tensors_of(["activation", "wide", "bias", "large"], 0)
    raws = []
    for number in range(2000):
        reduced = capture(by, tensors)
        raws.append(weakref.ref(reduced.raw))
        if number == 100:
            before = held(by)
    del reduced
    assert held(by) == before
    assert before[0] <= ring.RING_BYTES
    assert sum(raw() is not None for raw in raws) == 0


def test_shapes_that_never_repeat_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_NODES", 300)
    monkeypatch.setattr(module, "MOST_BYTES", 200_000)
    by = reducer(histogram_elements=50)
    most = 0
    for length in range(1, 500):
        tensors: Tensors = [(torch.randn(3, length), 0), (torch.randn(length), None)]
        reduced = capture(by, tensors)
        most = max(most, held(by)[0])
        assert held(by)[1] <= 300
        if length % 50 == 0:
            check(tensors, ready(reduced))
    assert most < 400_000


def test_a_step_copies_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_BYTES", 10_000)
    by = reducer()
    tensors: Tensors = [(torch.randn(4, 200), 0) for _ in range(40)]
    for _ in range(4):
        check(tensors, ready(capture(by, tensors)))
    assert by._ring.nbytes // by._ring._slots < 30_000


def test_slow_steps_are_reduced_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "SETTLE_SECONDS", 0.0)
    by = reducer()
    tensors = tensors_of(["activation"], 0)
    for _ in range(5):
        reduced = capture(by, tensors)
    check(tensors, reduced)  # not waited for

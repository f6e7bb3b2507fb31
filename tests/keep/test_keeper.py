"""The keeper on chunks of any size, compared with finalising everything and choosing later."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from comgra_decl.keep import Keeper
from comgra_decl.records import (
    RAW_STATISTICS,
    Layout,
    Note,
    Raw,
    RawStep,
    SlotInfo,
    SlotKey,
    StepBatch,
    StepInfo,
    Structure,
)
from comgra_decl.spec.keep import KeepSpec, QuantileTrigger
from comgra_decl.stats import finalise
from tests.support.shortened import examples

STATISTICS = ("mean", "abs_max", "nonfinite")
STEPS, ROWS = 60, 4


def layout(slots: int) -> Layout:
    """Slots of `ROWS` samples each, with five elements per sample."""
    return Layout(
        slots=np.arange(slots, dtype=np.int32),
        tensors=np.arange(slots),
        starts=np.arange(slots) * ROWS,
        rows=np.full(slots, ROWS),
        samples=np.full(slots, ROWS),
        elements=np.full(slots, 5),
        batched=np.full(slots, fill_value=True),
    )


def slot(number: int) -> SlotInfo:
    key = SlotKey(f"n{number}", "output", 0, "forward")
    return SlotInfo(number, key, "computed", "float32", (ROWS, 5), 0, "")


def training(scheduled: set[int], wild: set[int]) -> list[RawStep]:
    """Steps with two slots, and three from step 20 on; at steps in `wild`, one is not finite."""
    two, three = layout(2), layout(3)
    starts = {2: np.arange(3) * 10, 3: np.arange(4) * 10}
    steps = []
    for step in range(STEPS):
        generator = np.random.default_rng(step)
        form = two if step < 20 else three
        n = len(form.slots)
        raw = np.zeros((n * ROWS, RAW_STATISTICS))
        raw[:, Raw.SUM : Raw.NONFINITE] = generator.normal(size=(n * ROWS, 6))
        raw[1, Raw.NONFINITE] = step in wild
        new = [slot(0), slot(1)] if step == 0 else [slot(2)] if step == 20 else []
        steps.append(
            RawStep(
                info=StepInfo(step, float(step), "train", "train"),
                layout=form,
                raw=raw,
                new_slots=new,
                structure=Structure(f"s{step}", [], [], []) if step % 9 == 0 else None,
                histogram_values=generator.normal(size=n * 10).astype(np.float32),
                histogram_starts=starts[n],
                values={0: generator.normal(size=(2, 5))},
                spare_values={1: generator.normal(size=(2, 5))},
                kpis={"loss": float(step)},
                documents={"report": step} if step % 7 == 0 else {},
                scheduled=step in scheduled,
            )
        )
    return steps


def kept(steps: list[RawStep], cuts: list[int], **spec: Any) -> tuple[list[StepBatch], list[Note]]:
    notes: list[Note] = []
    whole = partial(finalise, statistics=STATISTICS, sample_count=2, bins=(4, "linear"))
    keeper = Keeper(
        KeepSpec(when=["nonfinite"], **spec),
        finalise=whole,
        look=lambda raw, names: finalise(raw, statistics=names, sample_count=0, bins=None),
        statistics=STATISTICS,
        note=notes.append,
    )
    edges = sorted({0, len(steps), *cuts})
    batches = [batch for a, b in pairwise(edges) for batch in keeper(steps[a:b])]
    return [*batches, *keeper.close()], notes


Numbers = st.sets(st.integers(0, STEPS - 1), max_size=5)


@settings(max_examples=examples(40))
@given(Numbers, Numbers, st.lists(st.integers(0, STEPS), max_size=8), st.booleans())
def test_what_is_stored_is_what_finalising_everything_gives(
    scheduled: set[int], wild: set[int], cuts: list[int], values: bool
) -> None:
    fired = {step for step in wild if step - 1 not in wild}
    near = {s for s in range(STEPS) for f in fired if f - 4 <= s <= f + 1}
    batches, notes = kept(training(scheduled, wild), cuts, ring=4, after=1, values=values)
    stored = [info.step for batch in batches for info in batch.steps]
    assert stored == sorted(scheduled | near)
    assert [note.step for note in notes] == sorted(fired)
    plain = {raw.info.step: raw for raw in training(set(), wild)}
    for batch in batches:
        for i, info in enumerate(batch.steps):
            raw = plain[info.step]
            (alone,) = finalise([raw], statistics=STATISTICS, sample_count=2, bins=(4, "linear"))
            assert_array_equal(batch.slots, alone.slots)
            assert_array_equal(batch.aggregates[i], alone.aggregates[0])
            assert_array_equal(batch.samples[i], alone.samples[0])
            assert batch.counts is not None
            assert alone.counts is not None
            assert_array_equal(batch.counts[i], alone.counts[0])
            assert batch.kpis[i] == raw.kpis
            assert_array_equal(batch.values[i][0], raw.values[0])
            if values or info.step not in scheduled:
                assert (1 in batch.values[i]) == (info.step in near)


@settings(max_examples=20)
@given(Numbers, Numbers, st.lists(st.integers(0, STEPS), max_size=8))
def test_nothing_that_dropped_steps_brought_is_lost(
    scheduled: set[int], wild: set[int], cuts: list[int]
) -> None:
    batches, _ = kept(training(scheduled, wild), cuts, ring=4)
    known: set[int] = set()
    for batch in batches:
        known |= {info.id for info in batch.new_slots}
        if batch.steps:
            assert {*batch.slots.tolist()} <= known
    assert known == {0, 1, 2}
    structures = [s.hash for batch in batches for s in batch.new_structures]
    assert structures == [f"s{step}" for step in range(0, STEPS, 9)]
    reports = [b.documents["report"] for b in batches if "report" in b.documents]
    assert reports == sorted(reports)
    assert reports[-1] == 56
    assert batches[-1].documents["keep"]["captured"] == STEPS


def test_however_long_it_lasts_no_more_steps_are_held_than_the_ring_has() -> None:
    form, ring = layout(2), 5
    held: list[weakref.ref[Any]] = []

    def look(raw: list[RawStep], names: tuple[str, ...]) -> list[StepBatch]:
        held.extend(weakref.ref(step.raw) for step in raw)
        return finalise(raw, statistics=names, sample_count=0, bins=None)

    keeper = Keeper(
        KeepSpec(ring=ring, when=["nonfinite", "loss_spike", QuantileTrigger(quantile=0.9)]),
        finalise=partial(finalise, statistics=STATISTICS, sample_count=2, bins=None),
        look=look,
        statistics=STATISTICS,
    )
    for first in range(0, 5000, 10):
        steps = [
            RawStep(
                info=StepInfo(step, 0.0, "train", "train"),
                layout=form,
                raw=np.zeros((2 * ROWS, RAW_STATISTICS)),
                new_slots=[slot(0), slot(1)] if step == 0 else [],
                kpis={"loss": 1.0},
                scheduled=False,
            )
            for step in range(first, first + 10)
        ]
        assert keeper(steps) == []
        del steps
    gc.collect()
    assert sum(ref() is not None for ref in held) == 0  # waiting steps are finalised
    assert len(keeper._ring.pending) == ring

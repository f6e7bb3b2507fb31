"""Metrics and notes of any step: nothing is lost, few bytes, fast reads, robust to damage."""

from __future__ import annotations

import math
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comgra_decl.errors import DamagedRunError, StoreError
from comgra_decl.query import open_run
from comgra_decl.records import Note, ScalarBatch
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.appending import append_to
from comgra_decl.store.layout import SCALAR_BLOCK, scalar_block_key, scalar_piece_key
from comgra_decl.store.scalars import LOST, ROW, packed, unpacked
from comgra_decl.store.view import View
from tests.store.test_damage import overwrite
from tests.store.threads import FakeWriter, raw, thread_of, until
from tests.store.truth import Truth, meta_of

Scalar = tuple[int, str, str, float]


def said(scalars: list[Scalar], notes: list[Note] | None = None) -> ScalarBatch:
    return ScalarBatch(
        steps=np.array([s[0] for s in scalars], np.int64),
        values=np.array([s[3] for s in scalars], np.float64),
        names=[s[1] for s in scalars],
        types=[s[2] for s in scalars],
        notes=notes or [],
    )


def scalars_of(view: View) -> list[Scalar]:
    names, types = view.names("scalar"), view.names("scalar_type")
    return [
        (int(row["step"]), names[row["name"]], types[row["type"]], float(row["value"]))
        for row in view.scalars
    ]


def bits(scalars: list[Scalar]) -> list[tuple[int, str, str, bytes]]:
    return [(*scalar[:3], struct.pack("<d", scalar[3])) for scalar in scalars]


any_scalar = st.tuples(
    st.integers(-(2**62), 2**62),
    st.text(min_size=1, max_size=5),
    st.sampled_from(["train", "long"]),
    st.floats(),
)


@settings(max_examples=30)
@given(st.lists(any_scalar, max_size=200))
def test_rows_come_back_bit_for_bit(scalars: list[Scalar]) -> None:
    rows = np.array([(s[0], s[3], i, 0) for i, s in enumerate(scalars)], ROW)
    assert unpacked(packed(rows, "a"), "a").tobytes() == rows.tobytes()


@settings(max_examples=15)
@given(
    st.lists(st.integers(0, 3 * SCALAR_BLOCK), min_size=1, max_size=6),
    st.lists(any_scalar, min_size=1, max_size=7),
    st.sets(st.integers(0, 5)),
)
def test_a_reader_sees_every_scalar_whenever_it_looks(
    sizes: list[int], some: list[Scalar], looks: set[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer = RunWriter.create(Path(folder) / "run", meta_of())
        early = Reader(Path(folder) / "run")
        written: list[Scalar] = []
        for number, size in enumerate(sizes):
            part = (some * size)[:size]
            writer.commit([], [said(part)])
            written += part
            if number in looks:
                early.poll()
                assert bits(scalars_of(early.view)) == bits(written)
        early.poll()
        assert bits(scalars_of(early.view)) == bits(written)
        assert bits(scalars_of(Reader(Path(folder) / "run").view)) == bits(written)


def test_an_older_view_does_not_grow(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", meta_of())
    writer.commit([], [said([(0, "a", "train", 1.0)])])
    reader = Reader(tmp_path / "run")
    old = reader.view
    writer.commit([], [said([(1, "b", "train", 2.0)] * 5000)])
    reader.poll()
    assert len(reader.view.scalars) == 5001
    assert scalars_of(old) == [(0, "a", "train", 1.0)]


def test_scalars_lie_beside_records_in_one_commit(tmp_path: Path) -> None:
    truth = Truth(0)
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    writer.commit([], [said([(0, "loss", "train", 0.5)])])  # before the first record
    writer.commit([truth.batch(3, [0, 1])], [said([(1, "loss", "train", 0.25)])])
    writer.commit([], [said([(2, "loss", "train", 0.125)])])
    writer.commit([truth.batch(4, [0, 1, 2])])
    writer.close()
    view = Reader(tmp_path / "run").view
    assert view.n == 7
    assert [scalar[3] for scalar in scalars_of(view)] == [0.5, 0.25, 0.125]


def test_notes_keep_their_order_and_their_words(tmp_path: Path) -> None:
    notes = [Note(i, "train", float(i), f"näheres {i}\n\0{'x' * i}") for i in range(5)]
    writer = RunWriter.create(tmp_path / "run", meta_of())
    writer.commit([], [said([], notes[:2]), said([], notes[2:3])])
    reader = Reader(tmp_path / "run")
    assert reader.view.notes == notes[:3]
    writer.commit([], [said([], notes[3:])])
    assert reader.poll()
    assert reader.view.notes == notes


def test_a_commit_that_failed_can_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter.create(tmp_path / "run", meta_of())
    first, second = said([(0, "a", "train", 1.0)] * 1500), said([(1, "b", "long", 2.0)] * 1500)
    writer.commit([], [first])
    with monkeypatch.context() as patch:
        patch.setattr("comgra_decl.store.commit.Commit.finish", _fail)
        with pytest.raises(StoreError):
            writer.commit([], [second])
    writer.commit([], [second])
    assert scalars_of(Reader(tmp_path / "run").view) == [
        *[(0, "a", "train", 1.0)] * 1500,
        *[(1, "b", "long", 2.0)] * 1500,
    ]


def _fail(_commit: object) -> None:
    raise OSError("no")


@pytest.mark.slow
def test_a_curve_takes_few_bytes(tmp_path: Path) -> None:
    """How much 100,000 losses add to a run, in commits of a few hundred."""
    losses = np.exp(-np.arange(100_000) / 30_000) + np.random.default_rng(0).normal(0, 0.1, 100_000)
    rows = [(i, "loss", "train", float(np.float32(v))) for i, v in enumerate(losses)]
    writer = RunWriter.create(tmp_path / "run", meta_of())
    for first in range(0, len(rows), 500):
        writer.commit([], [said(rows[first : first + 500])])
    stored = sum(f.stat().st_size for f in (tmp_path / "run").rglob("*") if f.is_file())
    assert scalars_of(Reader(tmp_path / "run").view) == rows
    assert stored / len(rows) < 60, "index and heads of the commits included"
    whole = np.zeros(SCALAR_BLOCK, ROW)
    whole["step"], whole["value"] = np.arange(SCALAR_BLOCK), [r[3] for r in rows[:SCALAR_BLOCK]]
    assert len(packed(whole, "a")) / SCALAR_BLOCK < 10


def test_damage_hides_the_numbers_it_has_hit_and_no_others(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", meta_of())
    rows = [(i, "a", "train", float(i)) for i in range(2 * SCALAR_BLOCK + 30)]
    for first, last in ((0, 2 * SCALAR_BLOCK), (2 * SCALAR_BLOCK, -20), (-20, -10), (-10, None)):
        writer.commit([], [said(rows[first:last])])
    writer.close()
    overwrite(tmp_path / "run", scalar_block_key(SCALAR_BLOCK), b"rubbish")
    key = scalar_piece_key(2 * SCALAR_BLOCK + 10)
    overwrite(tmp_path / "run", key, packed(np.zeros(3, ROW), key))
    view = Reader(tmp_path / "run").view
    kept = rows[:SCALAR_BLOCK] + rows[2 * SCALAR_BLOCK : -20] + rows[-10:]
    assert [row for row in scalars_of(view) if row[0] != LOST] == kept
    assert len(view.scalars) == len(rows)
    assert [loss.partition(" ")[0] for loss in view.damage] == [str(SCALAR_BLOCK), "10"]
    assert "key 'scalars/blk/000000001024' is damaged" in view.damage[0]
    assert open_run(tmp_path / "run").kpis()["step"].tolist() == [row[0] for row in kept]
    with pytest.raises(DamagedRunError, match="the newest scalars are damaged"):
        append_to(tmp_path / "run", meta_of())


def test_keys_that_are_gone_are_told_too(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", meta_of())
    rows = [(i, "a", "train", float(i)) for i in range(SCALAR_BLOCK + 30)]
    writer.commit([], [said(rows[:-10])])
    writer.commit([], [said(rows[-10:])])
    for low, high in (("blk/", "blk0"), ("row/", f"row/{SCALAR_BLOCK + 1:012d}")):
        for key in writer._db.keys(f"scalars/{low}", f"scalars/{high}"):
            overwrite(tmp_path / "run", key, None)
    view = Reader(tmp_path / "run").view
    assert [row for row in scalars_of(view) if row[0] != LOST] == rows[-10:]
    assert [loss.partition(" ")[0] for loss in view.damage] == [str(SCALAR_BLOCK), "20"]
    assert all("is missing" in loss for loss in view.damage)


# -- the writer thread


def test_what_is_said_goes_with_the_next_record() -> None:
    writer = FakeWriter()
    thread, errors = thread_of(writer)
    thread.put_scalars(said([(0, "a", "train", 1.0)]))
    thread.put(raw(0))
    until(lambda: bool(writer.scalars))
    assert writer.commits == [[0]]
    thread.close(20)
    assert errors == []


def test_what_is_said_is_written_soon_without_any_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comgra_decl.store.pace.NUMBERS_PATIENCE", 0.05)
    writer = FakeWriter()
    thread, _ = thread_of(writer)
    for step in range(3):
        thread.put_scalars(said([(step, "a", "train", 1.0)]))
        until(lambda expected=step: len(writer.scalars) == expected + 1)  # type: ignore[misc]
    thread.close(20)
    assert writer.records == 0


def test_what_waits_is_written_at_the_end() -> None:
    writer = FakeWriter()
    thread, _ = thread_of(writer)
    thread.put_scalars(said([(0, "a", "train", 1.0)]))
    thread.close(20)
    assert len(writer.scalars) == 1


def test_it_is_settled_on_the_thread_before_it_is_written() -> None:
    writer = FakeWriter()
    thread, _ = thread_of(writer)
    late = said([(0, "a", "train", math.nan)])

    def settle() -> None:
        late.values[0] = 7.0

    late.settle = settle
    thread.put_scalars(late)
    thread.close(20)
    assert writer.scalars[0].values.tolist() == [7.0]
    assert late.settle is None


def test_a_flood_makes_the_training_wait_and_loses_nothing(tmp_path: Path) -> None:
    thread, errors = thread_of(RunWriter.create(tmp_path / "run", meta_of()), queue_bytes=20_000)
    rows = [(i, "a", "train", float(i)) for i in range(20_000)]
    for first in range(0, len(rows), 100):
        thread.put_scalars(said(rows[first : first + 100]))
    thread.close(20)
    assert errors == []
    assert scalars_of(Reader(tmp_path / "run").view) == rows


def test_numbers_do_not_end_a_commit_early_under_pressure() -> None:
    writer = FakeWriter()
    large = raw(0, size=1000)
    thread, _ = thread_of(writer, commit_interval=1000, queue_bytes=20 * large.nbytes)
    thread.put(raw(0))
    until(lambda: writer.commits == [[0]])
    thread.put_scalars(said([(0, "a", "train", 1.0)]))
    for step in range(1, 41):
        thread.put(raw(step, size=1000))
    assert writer.commits == [[0]]
    thread.close(20)
    assert writer.commits == [[0], list(range(1, 41))]

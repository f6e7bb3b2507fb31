"""Metrics, notes and labels logged for steps, as a user reads them from a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from comgra_decl.errors import UnknownNameError
from comgra_decl.query import open_run
from comgra_decl.records import Note, ScalarBatch
from tests.support.fake_run import FakeRun

NODES = ("embed",)


def said(
    steps: range,
    name: str,
    values: list[float],
    *,
    type_: str = "train",
    notes: tuple[Note, ...] = (),
) -> ScalarBatch:
    return ScalarBatch(
        np.array(steps, np.int64),
        np.array(values),
        [name] * len(steps),
        [type_] * len(steps),
        list(notes),
    )


def test_numbers_of_steps_without_a_record_are_in_the_table(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "run", nodes=NODES)
    fake.writer.commit([], [said(range(50, 150), "accuracy", [0.5] * 100)])
    kpis = open_run(fake.path).kpis()
    assert list(kpis.columns) == ["step", "type", "name", "value"]
    assert kpis["step"].tolist() == list(range(50, 150))
    assert kpis["step"].dtype == np.int64
    assert set(kpis["name"]) == {"accuracy"}
    assert set(kpis["type"]) == {"train"}


def test_the_whole_curve_replaces_the_one_of_the_records(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "run", nodes=NODES)
    fake.write(3)
    recorded = open_run(fake.path).kpis()
    assert set(recorded["name"]) == {"lr", "loss"}
    fake.writer.commit([], [said(range(10), "loss", [float(i) for i in range(10)])])
    kpis = open_run(fake.path).kpis()
    assert kpis[kpis["name"] == "loss"]["value"].tolist() == list(range(10))
    assert kpis[kpis["name"] == "lr"]["step"].tolist() == [0, 1, 2]


def test_notes_come_in_order_with_refresh(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "run", nodes=NODES)
    run = open_run(fake.path)
    assert run.notes().empty
    notes = (Note(3, "train", 1.5, "warm"), Note(3, "long", 2.5, "warmer"))
    fake.writer.commit([], [said(range(0), "", [], notes=notes)])
    assert run.notes().empty
    assert run.refresh()
    table = run.notes()
    assert list(table.columns) == ["step", "type", "time", "text"]
    assert list(table.itertuples(index=False, name=None)) == [tuple(note) for note in notes]


def test_tags_are_shown_and_choose_records(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "run", nodes=NODES)
    batches = fake.batches([(step, "train") for step in range(4)])
    for batch, tags in zip(batches, ([], ["long"], ["long", "wide"], []), strict=True):
        batch.steps[0].extra["tags"] = tags
    fake.writer.commit(batches)
    run = open_run(fake.path)
    assert run.tags == ["long", "wide"]
    assert run.records["tags"].tolist() == [(), ("long",), ("long", "wide"), ()]
    assert run.series("embed", "std", type="long").index.tolist() == [1, 2]
    assert run.series("embed", "std", type="wide").index.tolist() == [2]
    with pytest.raises(UnknownNameError, match="did you mean 'long'"):
        run.series("embed", "std", type="lon")


def test_a_hundred_thousand_numbers_are_there(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "run", nodes=NODES)
    values = np.random.default_rng(0).normal(size=100_000).astype(np.float32).astype(np.float64)
    fake.writer.commit([], [said(range(100_000), "loss", values.tolist())])
    run = open_run(fake.path)
    assert np.array_equal(run.kpis()["value"], values)

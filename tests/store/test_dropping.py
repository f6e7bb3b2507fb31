"""A transform that drops or delays steps: what is committed, and when it is called."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from comgra_decl.records import Note, RawStep, ScalarBatch, StepBatch, Structure
from comgra_decl.store import Reader, RunWriter
from tests.store.threads import FakeWriter, raw, thread_of, transform, until
from tests.store.truth import meta_of, slot_info


class Even:
    """Keeps the even steps, and delays the last one until the end."""

    def __init__(self) -> None:
        self.chunks: list[int] = []
        self._last: list[RawStep] = []

    def __call__(self, steps: list[RawStep]) -> list[StepBatch]:
        self.chunks.append(len(steps))
        steps = [*self._last, *steps]
        self._last = steps[-1:]
        even = [step for step in steps[:-1] if step.info.step % 2 == 0]
        return transform(even) if even else []

    def flush(self) -> list[StepBatch]:
        return transform(self._last) if self._last else []


def test_what_is_held_back_is_committed_at_the_end(tmp_path: Path) -> None:
    even = Even()
    writer = RunWriter.create(tmp_path / "run", meta_of())
    thread, errors = thread_of(writer, transform=even, flush=even.flush)
    thread.put(raw(0, slots=[slot_info(0)]))
    for step in range(1, 502):
        thread.put(raw(step))
    thread.close()
    assert errors == []
    view = Reader(tmp_path / "run").view
    assert view.records[:, 0].tolist() == [*range(0, 501, 2), 501]
    assert Reader(tmp_path / "run").state == "finished"


def test_dropped_steps_come_in_chunks_and_commit_nothing() -> None:
    chunks: list[int] = []

    def drop(steps: list[RawStep]) -> list[StepBatch]:
        chunks.append(len(steps))
        return []

    writer = FakeWriter()
    thread, errors = thread_of(writer, transform=drop, flush=list, commit_interval=3600.0)
    thread.put(raw(0))
    until(lambda: chunks == [1])
    for step in range(1, 101):
        thread.put(raw(step))
    thread.close()
    assert errors == []
    assert chunks == [1, 100]  # not called for every single one
    assert writer.commits == []


def test_a_full_queue_of_steps_that_are_dropped_does_not_block() -> None:
    thread, errors = thread_of(
        FakeWriter(), transform=lambda _: [], flush=list, queue_bytes=5000, commit_interval=60.0
    )
    for step in range(200):
        thread.put(raw(step))
    thread.close(20.0)
    assert errors == []


def test_what_the_transform_says_is_committed_with_its_steps() -> None:
    writer = FakeWriter()

    def speak(steps: list[RawStep]) -> list[StepBatch]:
        nothing = np.empty(0)
        note = Note(0, "train", 0.0, "kept")
        thread.add_scalars(ScalarBatch(nothing.astype(np.int64), nothing, [], [], [note]))
        return transform(steps)

    thread, errors = thread_of(writer, transform=speak, flush=list)
    thread.put(raw(0))
    until(lambda: writer.commits == [[0]])
    assert [note.text for part in writer.scalars for note in part.notes] == ["kept"]
    thread.close()
    assert errors == []


def test_documents_reach_the_run_without_a_record(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", meta_of())
    (batch,) = transform([raw(0, slots=[slot_info(0)])])
    writer.commit([batch])
    (last,) = transform([])
    last.documents, last.new_structures = {"keep": {"kept": 0}}, [Structure("h", [], [], [])]
    writer.commit([last])
    writer.close()
    reader = Reader(tmp_path / "run")
    assert reader.view.n == 1
    assert reader.view.document("keep") == {"kept": 0}
    assert reader.view.read_structure("h").hash == "h"

"""A run that is being recorded to a bucket has few objects, and stays readable meanwhile."""

from __future__ import annotations

import pytest

from comgra_decl.store import Reader, RunWriter, merging
from comgra_decl.store.location import Remote
from comgra_decl.store.remote import Objects
from comgra_decl.store.verify import verify
from tests.store.test_merging import FAN, merged, most_files
from tests.store.truth import Truth


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges few objects at a time, and removes them at the next merge."""
    monkeypatch.setattr(merging, "FAN", FAN)
    monkeypatch.setattr(merging, "GRACE", 0.0)


def recorded(run: Remote, writer: RunWriter, truth: Truth, commits: int) -> int:
    """Makes commits; returns the largest number of objects."""
    most = 0
    for _ in range(commits):
        batch = truth.batch(1, [0, 1, 2])
        writer.commit([batch])
        truth.keep([batch])
        merged(writer)
        most = max(most, len(Objects(run).names()))
    return most


def test_a_run_in_a_bucket_has_few_objects(root: Remote) -> None:
    truth, run = Truth(), root / "run"
    writer = RunWriter.create(run, truth.meta)
    recorded(run, writer, truth, 5)
    view, there = Reader(run).view, {*Objects(run).names()}
    assert recorded(run, writer, truth, 40) <= most_files(45) + 1  # and the manifest
    assert there & {*Objects(run).names()} == {"trace.ocdbt/manifest.ocdbt"}
    truth.check(view, 5)
    truth.check(Reader(run).view)
    assert verify(run).whole


def test_objects_stay_for_readers_of_old_versions(
    root: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "GRACE", 3600.0)
    truth, run = Truth(), root / "run"
    writer = RunWriter.create(run, truth.meta)
    recorded(run, writer, truth, 5)
    there = {*Objects(run).names()}
    recorded(run, writer, truth, 20)
    assert there <= {*Objects(run).names()}

"""The index of runs in a bucket saves requests, and says nothing untrue."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import tensorstore as ts

from comgra_decl.query import Index, list_runs, listed, open_run
from comgra_decl.store import RunWriter
from comgra_decl.store.appending import append_to
from comgra_decl.store.location import Remote
from comgra_decl.store.remote import Objects
from tests.store.truth import Truth, meta_of

MANY = 21  # more than the number of lines from which an index is written


def write(place: Remote, *, started: float) -> None:
    truth = Truth(meta=meta_of(started=started))
    writer = RunWriter.create(place, truth.meta)
    writer.commit([truth.batch(2, [0])])
    writer.close()


def requests() -> Counter[str]:
    """Return the number of requests of each kind that this process has sent."""
    found: Counter[str] = Counter()
    for metric in ts.experimental_collect_matching_metrics("/tensorstore/kvstore/s3/"):
        kind = str(metric["name"]).rpartition("/")[2]
        if kind in ("read", "write", "list", "delete") and metric["values"]:
            found[kind] = int(metric["values"][0]["value"])
    return found


@pytest.mark.slow
def test_runs_that_have_ended_cost_no_request(root: Remote) -> None:
    for number in range(MANY):
        write(root / "group" / f"run {number}", started=100.0 + number)
    first = list_runs(root)
    assert len(first) == MANY
    before = requests()
    assert list_runs(root) == first
    sent = requests() - before
    assert sent["list"] == 1  # for all names; a server sends a thousand per page
    assert sent["read"] <= 2  # whether the location is a run, and the index
    assert sent["write"] == 0
    before = requests()
    assert open_run(root).name == f"run {MANY - 1}"
    assert (requests() - before)["read"] < 30


def test_a_run_that_changes_is_opened_again(root: Remote) -> None:
    for number in range(3):
        write(root / "group" / f"run {number}", started=100.0 + number)
    index = Index(root)
    before = listed(index)
    index.save(least=0)
    actions = [
        partial(resume, root / "group" / "run 1"),
        partial(write, root / "group" / "another", started=500.0),
        partial(Objects(root).remove, "group/run 2/"),
        partial(Objects(root).write, ".comgra-index.parquet", b"garbage"),
    ]
    for action in actions:
        action()
        assert listed(index) == listed(Index(root)) == listed(Index(root / "group"))
    assert listed(index) != before


def resume(place: Remote) -> None:
    writer, _ = append_to(place, meta_of())
    writer.close()

"""Ranks in a bucket are read side by side, and those that have ended are not polled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from comgra_decl.query import Run, open_run
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.appending import append_to
from comgra_decl.store.location import Remote
from comgra_decl.store.view import View
from tests.remote.test_index import requests
from tests.store.truth import Truth, meta_of

RANKS = 4


def place(root: Remote, rank: int) -> Remote:
    return root / "ranks" / str(rank) if rank else root


def facts_of(rank: int) -> dict[str, Any]:
    recorded = list(range(RANKS))
    return {"ranks": {"run": "x", "world_size": RANKS, "recorded": recorded, "rank": rank}}


@pytest.fixture
def writers(root: Remote) -> list[RunWriter]:
    """The writers of a job with several ranks, which have committed some records."""
    found = []
    for rank in range(RANKS):
        truth = Truth(seed=rank, meta=meta_of(started=1.0, facts=facts_of(rank)))
        found.append(RunWriter.create(place(root, rank), truth.meta))
        found[-1].commit([truth.batch(4, [0, 1])])
    return found


def together(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Let a method wait until all ranks are in it; otherwise it fails."""
    barrier, real = threading.Barrier(RANKS), getattr(owner, name)

    def waiting(self: Any, *arguments: Any) -> Any:
        barrier.wait(timeout=20)
        return real(self, *arguments)

    monkeypatch.setattr(owner, name, waiting)


READS: dict[str, tuple[type, str, Callable[[Run], Any]]] = {
    "row": (View, "row", lambda run: run.row(int(run.steps[-1]))),
    "series": (View, "series", lambda run: run.slot(run.nodes[0]).series("std")),
    "heat": (View, "tile", lambda run: run.heat("std")),
    "document": (View, "document", lambda run: run.document("report")),
    "samples": (View, "samples", lambda run: run.samples(int(run.steps[-1]))),
}


@pytest.mark.usefixtures("writers")
@pytest.mark.parametrize("what", READS)
def test_all_ranks_are_read_at_once(
    what: str, root: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(root)
    assert run.ranks == list(range(RANKS))
    assert len(run.steps) == 4
    owner, name, read = READS[what]
    together(monkeypatch, owner, name)
    read(run)


@pytest.mark.usefixtures("writers")
def test_the_numbers_are_those_of_the_ranks(root: Remote) -> None:
    run = open_run(root)
    node = run.nodes[0]
    own = [run.rank(rank).slot(node).series("std", over_batch="abs_max") for rank in run.ranks]
    joined = run.slot(node).series("std", over_batch="abs_max")
    np.testing.assert_array_equal(joined, np.max(own, axis=0))
    heat = run.heat("std", over_batch="abs_max")
    np.testing.assert_array_equal(heat[node].to_numpy()[:, 0], joined.to_numpy())


def test_a_rank_is_polled_until_it_has_ended_and_when_it_is_resumed(
    root: Remote, writers: list[RunWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(root)
    assert run.state == "live"
    polled: list[Remote] = []
    real = Reader.poll

    def counting(self: Reader) -> bool:
        assert isinstance(self.path, Remote)
        polled.append(self.path)
        return real(self)

    monkeypatch.setattr(Reader, "poll", counting)
    everybody = {place(root, rank) for rank in range(RANKS)}
    assert not run.refresh()
    assert {*polled} == everybody
    for writer in writers[2:]:
        writer.close()
    assert run.refresh()
    polled.clear()
    assert not run.refresh()
    assert {*polled} == {place(root, rank) for rank in (0, 1)}
    for writer in writers[:2]:
        writer.close()
    assert run.refresh()
    assert run.state == "finished"
    polled.clear()
    before = requests()
    assert not run.refresh()
    assert polled == [place(root, 0)]
    assert (requests() - before).total() <= 2
    again = [append_to(place(root, rank), meta_of(facts=facts_of(rank)))[0] for rank in (0, 1)]
    assert run.refresh()
    assert run.state == "live"
    again += [append_to(place(root, rank), meta_of(facts=facts_of(rank)))[0] for rank in (2, 3)]
    for number, writer in enumerate(again):
        truth = Truth(seed=number)
        truth.batch(4, [0, 1])
        truth.infos = [None] * 4  # type: ignore[list-item]
        writer.commit([truth.batch(2, [0, 1])])
    assert run.refresh()
    assert len(run.steps) == 6

"""How many requests it takes to read a run in a bucket, and how many one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from comgra_decl.query import Run, open_run
from comgra_decl.store import Reader, RunWriter, database
from comgra_decl.store.location import Remote
from tests.remote.bucket_server import Bucket, bucket_server
from tests.store.truth import Truth, meta_of

RECORDS = 256
"""Records of a complete block. Those after it are rows, until the next block is complete."""

MOST = {"open": 6, "row": 2, "series": 3, "poll": 1}
"""Requests for each rank."""


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Bucket]]:
    with bucket_server() as found:
        yield found


@pytest.fixture
def bucket(server: tuple[str, Bucket], monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An S3-compatible bucket that counts its requests, however slow this machine is."""
    url, bucket = server
    monkeypatch.setitem(database._COALESCED, "experimental_read_coalescing_interval", "50ms")
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    bucket.reset()
    bucket.objects.clear()
    return bucket


def written(ranks: int, *, records: int = RECORDS) -> tuple[Remote, list[RunWriter], list[Truth]]:
    """Writes a run; returns its place, and the writers, which are still open."""
    root = Remote("s3", "a-bucket", f"runs/of {ranks}")
    writers, truths = [], []
    for rank in range(ranks):
        facts: dict[str, Any] = {"run": "x", "world_size": ranks, "rank": rank}
        facts["recorded"] = list(range(ranks))
        meta = meta_of(started=1.0, facts={"ranks": facts} if ranks > 1 else {})
        truths.append(Truth(seed=rank, meta=meta))
        writers.append(RunWriter.create(root / "ranks" / str(rank) if rank else root, meta))
        batch = truths[-1].batch(records, [0, 1])
        truths[-1].keep([batch])
        writers[-1].commit([batch])
    return root, writers, truths


def counted(bucket: Bucket, ranks: int, records: int) -> dict[str, tuple[int, int]]:
    """Reads a run; returns the requests of each operation, and the longest chain of them."""
    root, _writers, _ = written(ranks, records=records)  # still open
    found: dict[str, tuple[int, int]] = {}

    def timed(name: str, read: Callable[[], Any]) -> Any:
        bucket.reset()
        bucket.gathers = True
        result = read()
        found[name] = bucket.asked.total(), bucket.rounds
        return result

    run: Run = timed("open", lambda: open_run(root))
    timed("facts", lambda: (run.steps, run.slots))
    timed("row", lambda: run.row(int(run.steps[-1])))
    timed("series", lambda: run.slot(run.nodes[0]).series("std"))
    assert not timed("poll", run.refresh)
    bucket.reset()
    return found


@pytest.mark.parametrize(
    ("ranks", "records"),
    [
        (7, RECORDS + 44),
        pytest.param(16, RECORDS, marks=pytest.mark.slow),
        pytest.param(61, RECORDS + 77, marks=pytest.mark.slow),
        pytest.param(64, RECORDS, marks=pytest.mark.slow),
        pytest.param(11, 77, marks=pytest.mark.slow),
    ],
)
def test_requests_grow_with_ranks_and_their_chain_does_not(
    bucket: Bucket, ranks: int, records: int
) -> None:
    one, many = counted(bucket, 1, records), counted(bucket, ranks, records)
    for name, most in MOST.items():
        assert one[name][0] <= most + (name == "open"), (name, one)  # its index may be deeper
        assert many[name][0] <= most * ranks, (name, many)
        assert many[name][1] <= 3 * one[name][1], (name, one, many)


@pytest.mark.parametrize("commits", [7, 37, pytest.param(200, marks=pytest.mark.slow)])
def test_records_that_were_committed_one_by_one_take_as_few_requests(
    bucket: Bucket, commits: int
) -> None:
    """The rows after the last complete block are in two objects."""
    root, (writer,), (truth,) = written(1)
    for _ in range(commits):
        batch = truth.batch(1, [0, 1])
        truth.keep([batch])
        writer.commit([batch])
    run = open_run(root)
    assert (len(run.steps), len(run.slots)) == (RECORDS + commits, 2)
    bucket.reset()
    series = run.slot(run.nodes[0]).series("std")
    asked = bucket.asked.total()
    assert len(series) == RECORDS + commits
    assert asked <= MOST["series"] + 2, asked
    bucket.reset()
    run.row(int(run.steps[-1]))
    assert bucket.asked.total() <= MOST["row"]
    truth.check(Reader(root).view)


def test_a_finished_run_is_polled_with_one_request(bucket: Bucket) -> None:
    root, writers, _ = written(4, records=8)
    run = open_run(root)
    for writer in writers:
        writer.close()
    assert run.refresh()
    assert run.state == "finished"
    bucket.reset()
    assert not run.refresh()
    assert bucket.asked.total() == 1


@pytest.mark.usefixtures("bucket")
def test_numbers_read_in_few_requests_are_those_that_were_written() -> None:
    root, (writer,), (truth,) = written(1, records=20)
    reader = Reader(root)
    for _ in range(3):
        truth.check(reader.view)
        batch = truth.batch(20, [0, 1])
        truth.keep([batch])
        writer.commit([batch])
        assert reader.poll()
        assert not reader.poll()
    truth.check(reader.view)
    truth.check(Reader(root).view)

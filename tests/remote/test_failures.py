"""Training is recorded in full to buckets that are slow and fail, and it never waits for them.

Both drivers speak to a server in this process, `bucket_server`, which delays and fails on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

import comgra_decl as comgra
from comgra_decl.store import Reader, RunWriter, WriterThread, remote
from comgra_decl.store.location import Remote
from comgra_decl.store.verify import verify
from tests.remote.bucket_server import Bucket, Fault, bucket_server
from tests.remote.test_sessions import traced, train
from tests.store.truth import Truth, meta_of
from tests.support.shortened import shortened

LATENCY, RETRIES = 0.03, 5


def some(number: int) -> bool:
    """Whether a request is one of those that fail: a quarter of them, without a period.

    With a period, the same request of each attempt could fail forever.
    """
    return crc32(str(number).encode()) % 4 == 0


FAULTS: dict[str, Callable[[str, int], Fault | None]] = {
    "slow": lambda _method, _number: None,
    "server errors": lambda _method, number: (500, 502, 503)[number % 3] if some(number) else None,
    "throttling": lambda _method, number: 429 if some(number) else None,
    "resets": lambda _method, number: "reset" if some(number) else None,
    "lost answers": lambda _method, number: "lost" if some(number) else None,
}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Bucket]]:
    with bucket_server() as found:
        yield found


# the driver reads the address of `gs` once per process, so no other test may use it before
@pytest.fixture(params=["s3", pytest.param("gs", marks=pytest.mark.slow)])
def root(
    request: pytest.FixtureRequest, server: tuple[str, Bucket], monkeypatch: pytest.MonkeyPatch
) -> Remote:
    """An empty bucket, reached by the driver of Amazon's or of Google's storage."""
    url, bucket = server
    bucket.reset()
    bucket.objects.clear()
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "nobody's")
    patience = WriterThread.__init__.__kwdefaults__
    assert patience is not None
    monkeypatch.setitem(patience, "patience", 0.0)
    hurry = {"max_retries": RETRIES, "initial_delay": "1ms", "max_delay": "4ms"}
    monkeypatch.setattr(remote, "RETRIES", hurry)
    return Remote(request.param, "a-bucket", "runs")


@pytest.fixture
def bucket(server: tuple[str, Bucket]) -> Bucket:
    return server[1]


@pytest.mark.parametrize("fault", shortened(FAULTS, tried=1))
def test_nothing_is_lost(root: Remote, bucket: Bucket, fault: str, tmp_path: Path) -> None:
    plain = train()
    _, local = traced(tmp_path)
    bucket.latency, bucket.fault = LATENCY, FAULTS[fault]
    losses, session = traced(root)
    assert losses == plain
    assert fault == "slow" or bucket.failed > 0
    bucket.reset()
    found, expected = (comgra.open_run(str(each.path)) for each in (session, local))
    assert found.state == "finished"
    assert list(found.steps) == list(expected.steps) == [0, 1, 2, 3]
    for step in found.steps:
        np.testing.assert_array_equal(found.row(int(step)), expected.row(int(step)))
    assert session.path == root / "g" / "run"
    assert verify(root / "g" / "run").whole


@pytest.mark.parametrize("fault", shortened(FAULTS, tried=1))
def test_training_waits_for_no_request(root: Remote, bucket: Bucket, fault: str) -> None:
    """Its records wait in a queue; the writer thread alone sends requests."""
    bucket.latency, bucket.fault = LATENCY, FAULTS[fault]
    _, session = traced(root)
    bucket.reset()
    assert comgra.open_run(str(session.path)).report["writer"]["waited"] == 0


def test_retries_are_bounded(root: Remote, bucket: Bucket) -> None:
    """A bucket that always fails is asked once, and then as often as `RETRIES` says."""
    bucket.fault = lambda _method, _number: 503
    losses, session = traced(root)
    assert losses == train()
    assert session.path is None
    assert bucket.asked.total() <= 2 * (1 + RETRIES)


def test_a_reader_asks_again_and_reads_the_same(root: Remote, bucket: Bucket) -> None:
    truth = Truth(seed=3, meta=meta_of(started=1.0))
    writer = RunWriter.create(root / "run", truth.meta)
    for _ in range(3):
        batch = truth.batch(5, [0, 1])
        truth.keep([batch])
        writer.commit([batch])
    writer.close()
    for fault in FAULTS.values():
        bucket.reset()
        bucket.fault = fault
        truth.check(Reader(root / "run").view)


@pytest.mark.parametrize("seed", range(4))
def test_a_commit_whose_answer_is_lost_counts(root: Remote, bucket: Bucket, seed: int) -> None:
    """It was carried out, so a second attempt finds a database that has changed."""
    bucket.fault = lambda _method, number: (
        "lost" if crc32(f"{seed} {number}".encode()) % 3 == 0 else None
    )
    truth = Truth(seed=seed, meta=meta_of(started=1.0))
    writer = RunWriter.create(root / "run", truth.meta)
    for _ in range(3):
        batch = truth.batch(2, [0, 1])
        truth.keep([batch])
        writer.commit([batch])
    writer.close()
    bucket.reset()
    truth.check(Reader(root / "run").view)


def test_a_bucket_that_denies_access_is_not_asked_again(root: Remote, bucket: Bucket) -> None:
    bucket.fault = lambda _method, _number: 403
    _, session = traced(root)
    assert session.path is None
    assert bucket.asked.total() <= 2

"""In a bucket, too, the viewer has read what is likely to be shown next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from comgra_decl.store.location import Remote
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from tests.remote.bucket_server import Bucket, bucket_server
from tests.remote.test_sessions import traced

LATENCY = 0.03


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setattr("comgra_decl.viewer.prefetching._REST", 0.02)
    with bucket_server() as (url, found):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield found


def rested(dashboard: Dashboard, act: Callable[[], None]) -> None:
    """Acts within an event loop and waits until nothing is left to be read ahead."""

    async def wait() -> None:
        act()
        while dashboard._ahead._work:
            await asyncio.sleep(0.005)

    work: Coroutine[Any, Any, None] = wait()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, work).result()


def test_a_step_to_the_next_record_sends_no_request(bucket: Bucket) -> None:
    root = Remote("s3", "a-bucket", "runs")
    traced(root)
    dashboard = Dashboard(Catalogue(root))
    bucket.latency = LATENCY
    rested(dashboard, lambda: dashboard.change(step=3, node="0"))
    rested(dashboard, lambda: dashboard.change(step=2))
    bucket.asked.clear()
    for step in (1, 0):
        dashboard.change(step=step)
        assert dashboard.state.step == step
    assert bucket.asked.total() == 0

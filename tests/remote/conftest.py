"""A separate bucket for the tests of locations that are not folders."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from comgra_decl.store import remote
from comgra_decl.store.location import Remote
from tests.remote.server import BUCKET, ENVIRONMENT, fake_s3

_numbers = count()


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """The URL of a server that answers like S3."""
    with fake_s3() as url:
        yield url


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends no request outside this machine, and keeps waits short."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # where nothing listens
    hurry = {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"}
    monkeypatch.setattr(remote, "RETRIES", hurry)


@pytest.fixture
def root(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Remote:
    """An empty location."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    return Remote("s3", BUCKET, f"läufe mit raum/{next(_numbers)}")

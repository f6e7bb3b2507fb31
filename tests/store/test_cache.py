"""What readers cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from comgra_decl.query import limit_cache, open_run
from comgra_decl.store import reader
from tests.support.fake_run import FakeRun


@pytest.fixture
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_limit", reader._limit)
    monkeypatch.setattr(reader, "_context", None)


@pytest.mark.usefixtures("_as_before")
def test_a_program_says_how_much_all_its_readers_may_keep(tmp_path: Path) -> None:
    def kept() -> int:
        return int(reader._shared_context()["cache_pool"].to_json()["total_bytes_limit"])

    fake = FakeRun(tmp_path / "run", nodes=["embed"], layers=1)
    fake.write(3)
    fake.close()
    assert kept() == reader.CACHE_BYTES
    before = open_run(fake.path)
    limit_cache(1 << 20)
    assert kept() == 1 << 20
    shared = reader._shared_context()
    limit_cache(1 << 20)  # again: cached entries stay
    assert reader._shared_context() is shared
    assert open_run(fake.path).series("embed", "std").equals(before.series("embed", "std"))

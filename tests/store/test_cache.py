"""What readers and writers keep in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from comgra_decl.query import limit_cache, open_run
from comgra_decl.store import reader
from tests.support.fake_run import FakeRun

ROOT = Path(__file__).parents[2]


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


COMMITS = """
import resource, sys
from pathlib import Path
from comgra_decl.store import RunWriter
from tests.store.truth import Truth

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6

truth = Truth()
writer = RunWriter.create(Path(sys.argv[1]), truth.meta)
for number in range(1, 8001):
    writer.commit([truth.batch(1, range(20))])
    if number in (2000, 8000):
        print(resident())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_a_writer_does_not_grow_with_its_commits(tmp_path: Path) -> None:
    """Each of them adds nodes to the index, of which a few are kept."""
    command = [sys.executable, "-c", COMMITS, str(tmp_path / "run")]
    ended = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    early, late = map(float, ended.stdout.split())
    assert late - early < 25, (early, late)

"""A run is complete at every moment: while it is written, and after its writer was killed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from comgra_decl.store import Reader
from tests.store import endless, kills
from tests.support.shortened import shortened

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0


@contextmanager
def writing_process(run: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Runs a writer in a separate process; yields it and the counts it acknowledged."""
    command = [sys.executable, "-m", "tests.store.endless", str(run)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    acknowledged: list[int] = []
    assert process.stdout is not None
    stream = process.stdout

    def listen() -> None:
        acknowledged.extend(int(line) for line in stream if line.endswith("\n"))

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        wait_for(acknowledged, 1, process)
        yield process, acknowledged
    finally:
        process.kill()
        process.wait()
        listener.join()
        stream.close()


def wait_for(acknowledged: list[int], commits: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE
    while len(acknowledged) < commits:
        assert process.poll() is None, "the writer died"
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_reader_sees_only_whole_records_while_they_are_written(tmp_path: Path) -> None:
    run = tmp_path / "Läufe" / "live run"
    with writing_process(run) as (process, acknowledged):
        reader = Reader(run)
        seen, changes = 0, 0
        while changes < 25:
            assert process.poll() is None
            known = acknowledged[-1] if acknowledged else 0
            if not reader.poll():
                continue
            changes += 1
            view = reader.view
            assert view.n >= max(seen, known), "what was acknowledged is there"
            endless.check(view, min(seen, view.n - 1))
            seen = view.n
        assert reader.state == "live"
    assert reader.state == "stopped"


@pytest.mark.slow
def test_many_threads_share_a_reader(tmp_path: Path) -> None:
    with writing_process(tmp_path / "run") as (process, acknowledged):
        reader = Reader(tmp_path / "run")
        failures: list[BaseException] = []

        def look() -> None:
            try:
                for _ in range(15):
                    reader.poll()
                    endless.check(reader.view)
            except BaseException as error:  # noqa: BLE001 - shown by the test
                failures.append(error)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert process.poll() is None
        assert acknowledged


@pytest.mark.parametrize("seed", shortened([0, 1, 9, 2, 3], tried=1))
def test_nothing_is_lost_or_half_when_the_writer_is_killed(tmp_path: Path, seed: int) -> None:
    kills.kill_once(tmp_path / "a run", seed)


@pytest.mark.slow
def test_nothing_is_lost_or_half_when_fifty_writers_are_killed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert kills.main(kills.LONG) == 0
    assert "tried 50, survived 50" in capsys.readouterr().out

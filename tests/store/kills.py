"""Kills writers at random moments during reads: `python -m tests.store.kills [COUNT]`.

Every second one merges its files.

Fails if an acknowledged record is lost, a record is seen incomplete, or a number is wrong.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from comgra_decl.errors import RunNotFoundError
from comgra_decl.store import Reader
from tests.store import endless

ROOT = Path(__file__).parents[2]
LONG = 50


def kill_once(folder: Path, seed: int, *, merging: bool = False) -> tuple[int, int, int]:
    """Starts a writer, reads its run until it is killed; returns records, polls and acks.

    Every tenth is killed at a moment relative to its start, mostly before its run exists. With
    `merging`, the writer merges four files at a time, after every commit.
    """
    rng = np.random.default_rng(seed)
    log = folder.with_suffix(".acknowledged")
    with log.open("w") as out:
        command = [sys.executable, "-m", "tests.store.endless", str(folder)]
        command += ["--merging"] * merging
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, text=True)
    try:
        polls = _watch(folder, log, process, rng, early=seed % 10 == 9)
    finally:
        process.kill()
        process.wait()
    acknowledged = _acknowledged(log)
    try:
        reader = Reader(folder)
    except RunNotFoundError:
        assert acknowledged == 0
        return 0, polls, 0
    assert reader.view.n >= acknowledged
    assert reader.state == "stopped"
    endless.check(reader.view)
    return reader.view.n, polls, acknowledged


def _watch(
    folder: Path,
    log: Path,
    process: subprocess.Popen[str],
    rng: np.random.Generator,
    *,
    early: bool,
) -> int:
    """Polls until the given moment; returns how often."""
    wanted = int(rng.integers(1, 600))
    end = time.monotonic() + (float(rng.random()) * 1.5 if early else 60)
    reader, polls, seen = None, 0, 0
    while time.monotonic() < end and process.poll() is None:
        known = _acknowledged(log)
        if known >= wanted and not early:
            time.sleep(float(rng.random()) * 0.02)
            break
        if reader is None:
            reader = _opened(folder)
            continue
        polls += 1
        if reader.poll() or not seen:
            view = reader.view
            assert view.n >= max(known, seen), "what was acknowledged is there"
            endless.check(view, max(0, seen - 1))
            seen = view.n
    return polls


def _opened(folder: Path) -> Reader | None:
    try:
        return Reader(folder)
    except RunNotFoundError:
        time.sleep(0.002)
        return None


def _acknowledged(log: Path) -> int:
    lines = log.read_text().split("\n")[:-1]  # the last one may be incomplete
    return int(lines[-1]) if lines else 0


def main(count: int) -> int:
    """Prints how many were tried and survived; returns the exit status."""
    survived = records = polls = 0
    with tempfile.TemporaryDirectory(prefix="kills ä ") as root:
        for seed in range(count):
            try:
                place = Path(root) / f"run {seed}"
                found, looked, _ = kill_once(place, seed, merging=bool(seed % 2))
            except Exception as error:  # noqa: BLE001 - told, and counted
                sys.stdout.write(f"{seed}: {type(error).__name__}: {error}\n")
                continue
            survived, records, polls = survived + 1, records + found, polls + looked
    sys.stdout.write(f"tried {count}, survived {survived}; ")
    sys.stdout.write(f"{records} records checked, {polls} polls\n")
    return 0 if survived == count else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else LONG))

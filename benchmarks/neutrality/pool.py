"""Run each program in a separate process, a few in parallel, with a time limit."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

_POLL = 0.05


@dataclass
class _Running:
    name: str
    process: ForkServerProcess
    answer: Path
    started: float


def run_all(names: Sequence[str], *, jobs: int, limit: float) -> Iterator[dict[str, Any]]:
    """Yield the verdict on each program as soon as it is available.

    Processes are forked from a server that has already imported the libraries, so they start
    quickly. A crash, or a program that takes longer than `limit` seconds, also yields a verdict.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.neutrality.child"])
    waiting, running = list(names), list[_Running]()
    with tempfile.TemporaryDirectory(prefix="neutrality-") as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(context, waiting.pop(0), Path(folder)))
            time.sleep(_POLL)
            for one in list(running):
                verdict = _answer(one, limit)
                if verdict is not None:
                    running.remove(one)
                    yield verdict


def _start(context: Any, name: str, folder: Path) -> _Running:
    from benchmarks.neutrality.child import work

    answer = Path(tempfile.mkstemp(dir=folder, suffix=".json")[1])
    process = context.Process(target=work, args=(name, os.fspath(answer)))
    process.start()
    return _Running(name, process, answer, time.monotonic())


def _answer(one: _Running, limit: float) -> dict[str, Any] | None:
    seconds = time.monotonic() - one.started
    if one.process.is_alive() and seconds < limit:
        return None
    late = one.process.is_alive()
    if late:
        one.process.kill()
    one.process.join()
    text = one.answer.read_text()
    one.answer.unlink()
    if text:
        verdict: dict[str, Any] = json.loads(text)
        return verdict
    reason = f"not finished within {limit:.0f} s" if late else f"ended with {one.process.exitcode}"
    sys.stderr.write(f"{one.name}: {reason}\n")
    return {"name": one.name, "status": "crashed", "error": reason, "sound": False}

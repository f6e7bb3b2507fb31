"""The events of a trace that the program itself has recorded with `torch.profiler`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from comgra_decl.errors import DamagedRunError, FormatError
from comgra_decl.store.folder import read_file

MOST = 4 << 30
"""Largest size of the file in bytes."""

_GZIP = b"\x1f\x8b"


def events_of(
    file: Path, *, started: float, first: int, statistics: Mapping[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the events of a file of `torch.profiler` on the clock of a run.

    Times in the file are in microseconds since its `baseTimeNanoseconds`, or since 1970 without it.
    A range (`record_function`) whose name is that of a node gets the node and its statistics.

    Args:
        file: the file that `export_chrome_trace` has written; it may be compressed with gzip.
        started: when the run started, in unix seconds.
        first: the number of the first process; the processes of the file are numbered from it.
        statistics: what is added to the ranges of each node.

    Raises:
        FormatError: the file does not exist, cannot be read, or is no such trace.
    """
    trace = _read(file)
    found = trace.get("traceEvents") if isinstance(trace, dict) else None
    if found is None:
        raise FormatError(f"{str(file)!r} is not a trace of torch.profiler: no `traceEvents`")
    if not isinstance(found, list) or not all(isinstance(event, dict) for event in found):
        raise FormatError(
            f"{str(file)!r} is not a trace of torch.profiler: `traceEvents` must be a list of "
            "objects"
        )
    began = float(trace.get("baseTimeNanoseconds", 0)) / 1e3 - started * 1e6
    numbers: dict[Any, int] = {}
    for event in found:
        process = numbers.setdefault(event.get("pid"), first + len(numbers))
        moved = {**event, "pid": process}
        if isinstance(event.get("ts"), int | float):
            moved["ts"] = round(began + event["ts"], 3)
        name = event.get("name")
        if event.get("cat") == "user_annotation" and name in statistics:
            told = event.get("args") if isinstance(event.get("args"), dict) else {}
            moved["args"] = {**told, "node": name, **statistics[name]}
        yield moved


def _read(file: Path) -> Any:
    try:
        content = read_file(file.absolute().parent, file.name, most=MOST)
        if content is None:
            raise FormatError(f"{str(file)!r} does not exist")
        if content.startswith(_GZIP):
            content = gzip.decompress(content)
        return json.loads(content)
    except (DamagedRunError, OSError, EOFError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            f"{str(file)!r} is not a trace of torch.profiler "
            f"({type(error).__name__}: {error}); write one with `export_chrome_trace`"
        ) from error

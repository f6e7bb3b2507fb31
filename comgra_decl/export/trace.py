"""trace: one time line in the Trace Event Format, which Perfetto and Chrome's tracing page show.

The format is described in "Trace Event Format" (Google, 2016). All times are in microseconds since
the run started, with three decimals: Perfetto reads them as whole nanoseconds. The spans of a track
lie within one another or apart, because a track cannot show spans that partly overlap. Other
numbers have 15 significant digits: Perfetto reads all digits of a number as one 64-bit integer, and
shows 0.00044481115764938295 as 0.0057.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Run
from comgra_decl.records import AUTOMATIC, PROFILE, PROGRAM, TIMELINE

from .content import Content
from .profiler_trace import events_of

_RUN, _HOST, _DEVICE, _PROGRAM = 1, 2, 3, 4  # process numbers of the format: groups of tracks
_RECORDS, _STEPS, _NOTES = 1, 2, 3  # thread numbers of the first group: its tracks
_ON_DEVICE = -1
_US = 1e6
_BLOCK = 4096  # events between two reports of progress

Event = dict[str, Any]


def write(content: Content, to: Path) -> None:
    """Write the file `to`, one event per line."""
    with to.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ')
        facts = {"run": f"{content.run.group}/{content.run.name}", "started": content.run.started}
        file.write(f'{json.dumps(facts)}, "traceEvents": [')
        found = [*events(content)]
        for number, event in enumerate(found):
            file.write(",\n" if number else "\n")
            file.write(json.dumps(event, allow_nan=False))
            if number % _BLOCK == 0:
                content.report(number, len(found))
        file.write("\n]}\n")


def events(content: Content) -> Iterator[Event]:
    """Yield all events: the tracks, records, metrics, notes, profiled steps and the program's."""
    yield from _tracks(content.run)
    yield from _records(content)
    yield from _metrics(content)
    yield from _notes(content)
    yield from _steps(content)
    yield from _profiled(content)
    if content.profile is not None:
        steps = content.run.steps
        known = _statistics(content.run, int(steps[-1]) if len(steps) else 0)
        yield from events_of(
            content.profile, started=content.run.started, first=_PROGRAM, statistics=known
        )


def _tracks(run: Run) -> Iterator[Event]:
    groups = {_RUN: "records and metrics", _HOST: "profiled steps: host"}
    if run.document(TIMELINE) is not None:
        groups[_DEVICE] = "profiled steps: device"
    for number, name in groups.items():
        yield _metadata("process_name", number, 0, name=name)
        yield _metadata("process_sort_index", number, 0, sort_index=number)
    names = {_RECORDS: "records", _STEPS: "profiled steps", _NOTES: "notes and findings"}
    for number, name in names.items():
        yield _metadata("thread_name", _RUN, number, name=name)


def _metadata(kind: str, process: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": args}


def _span(
    name: str, start: float, duration: float, *, track: tuple[int, int], **more: Any
) -> Event:
    process, thread = track
    begins, ends = round(start, 3), round(start + max(duration, 0.0), 3)
    times = {"ts": begins, "dur": round(ends - begins, 3)}
    return {"ph": "X", "name": name, "pid": process, "tid": thread, **times, **more}


def _digits(value: float) -> float:
    """Return a number with at most 15 significant digits."""
    return float(f"{value:.15g}")


# -- records -----------------------------------------------------------------------------------


def _records(content: Content) -> Iterator[Event]:
    """Yield the records; each one ends at its time, and its duration is its cost.

    The cost also contains work that was done earlier in the step, so a record may seem to begin
    before the previous one ended. Tracks cannot show that, so it then begins where that one ended.
    """
    run, before = content.run, 0.0
    for row in content.records.to_dict("records"):
        cost = _US * float(row["cost"])
        args: dict[str, Any] = {"step": int(row["step"]), "type": row["type"], "mode": row["mode"]}
        if row["kept"] is not None:
            args["kept"] = str(row["kept"])
        args["cost_ms"] = _digits(cost / 1000)
        ends = _US * (float(row["time"]) - run.started)
        start = min(max(ends - cost, before), ends)
        before = ends
        name = f"record of step {row['step']}"
        yield _span(name, start, ends - start, track=(_RUN, _RECORDS), cat="record", args=args)


def _times(content: Content) -> dict[int, float]:
    """Return the time of each step that has a training record, or else any record."""
    rows = content.records.to_dict("records")
    rows.sort(key=lambda row: row["mode"] == "train")  # stable; the last one counts
    started = content.run.started
    return {int(row["step"]): _US * (float(row["time"]) - started) for row in rows}


def _metrics(content: Content) -> Iterator[Event]:
    """Yield the metrics of recorded steps as counters; the times of other steps are unknown."""
    times = _times(content)
    table = content.run.kpis(automatic=True)
    for step, name, value in zip(table["step"], table["name"], table["value"], strict=True):
        if step in times and math.isfinite(value):
            yield {
                "ph": "C",
                "name": str(name).removeprefix(AUTOMATIC),
                "pid": _RUN,
                "tid": 0,
                "ts": round(times[step], 3),
                "args": {"value": _digits(value)},
            }


def _notes(content: Content) -> Iterator[Event]:
    """Yield notes at their time, and findings at their first step or the next recorded one."""
    run, times = content.run, _times(content)
    notes = run.notes()
    for text, step, at in zip(notes["text"], notes["step"], notes["time"], strict=True):
        yield _instant(str(text), _US * (float(at) - run.started), cat="note", step=int(step))
    steps = np.array(sorted(times))
    for row in run.findings().to_dict("records"):
        later = steps[steps >= row["first_step"]]
        if len(later):
            args = {"step": int(row["first_step"]), "severity": str(row["severity"])}
            args |= {} if row["node"] is None else {"node": str(row["node"])}
            args["message"] = str(row["message"])
            yield _instant(str(row["rule"]), times[int(later[0])], cat="finding", **args)


def _instant(name: str, at: float, *, cat: str, **args: Any) -> Event:
    where = {"pid": _RUN, "tid": _NOTES, "ts": round(at, 3)}
    return {"ph": "i", "name": name, **where, "s": "p", "cat": cat, "args": args}


# -- profiled steps ----------------------------------------------------------------------------


def _steps(content: Content) -> Iterator[Event]:
    """Yield the profiled steps; their beginnings and durations are measured with two clocks."""
    document, before = content.run.document(PROFILE), 0.0
    for step in document["steps"] if document is not None else ():
        phases = {
            f"{phase}_ms": _digits(step[phase] / 1000)
            for phase in ("data", "forward", "backward", "optimizer", "other")
        }
        start = max(_US * (step["time"] - content.run.started), before)
        before = start + step["total"]
        args = {"step": step["step"], **phases}
        track = _RUN, _STEPS
        yield _span(
            f"step {step['step']}", start, step["total"], track=track, cat="step", args=args
        )


def _profiled(content: Content) -> Iterator[Event]:
    """Yield the profiler's events; those of a module also have its last recorded statistics."""
    line = content.run.document(TIMELINE)
    if line is None:
        return
    lanes = sorted({lane for lane in line["lane"] if lane != _ON_DEVICE})
    for lane in lanes:
        yield _metadata("thread_name", _HOST, lane, name=f"thread {lane}")
    document = content.run.document(PROFILE)
    known = _statistics(
        content.run,
        document["steps"][0]["step"] if document is not None and document["steps"] else 0,
    )
    chosen = {str(node) for node in content.slots["node"]}
    everything = len(content.slots) == len(content.run.slots)
    tracks = _device_tracks(line)
    for number in range(max(tracks.values(), default=-1) + 1):
        yield _metadata("thread_name", _DEVICE, number, name="kernels and copies")
    began = round(_US * (line["began"] - content.run.started), 3)
    columns = (line[key] for key in ("name", "node", "pass", "lane", "start", "duration"))
    for row, (name, node, pass_, lane, start, duration) in enumerate(zip(*columns, strict=True)):
        owner = PROGRAM if node < 0 else line["nodes"][node]
        if not everything and owner not in chosen:
            continue
        label = line["names"][name]
        is_call = label == owner
        args = {"node": owner, "pass": pass_, **(known.get(owner, {}) if is_call else {})}
        on_device = lane == _ON_DEVICE
        track = (_DEVICE, tracks[row]) if on_device else (_HOST, lane)
        category = "module" if is_call else "kernel" if on_device else "operation"
        yield _span(label, began + start, duration, track=track, cat=category, args=args)


def _device_tracks(line: Mapping[str, Any]) -> dict[int, int]:
    """Return the track of each event on the device, by its row.

    Kernels of several streams run at the same time. Each one is on the first track that is free.
    """
    rows = [row for row, lane in enumerate(line["lane"]) if lane == _ON_DEVICE]
    ends: list[float] = []  # of the last event of each track
    found: dict[int, int] = {}
    for row in sorted(rows, key=lambda row: line["start"][row]):
        start = line["start"][row]
        free = next((track for track, end in enumerate(ends) if end <= start), len(ends))
        if free == len(ends):
            ends.append(0.0)
        ends[free] = round(start + line["duration"][row], 3)
        found[row] = free
    return found


def _statistics(run: Run, last: int) -> Mapping[str, dict[str, Any]]:
    """Return the statistics of each node's output in the last record up to a step."""
    before = [int(step) for step in run.steps if step <= last]
    if not before:
        return {}
    step = before[-1]
    found: dict[str, dict[str, Any]] = {}
    try:
        row = run.row(step)
    except UnknownNameError:
        return {}
    for key, values in row.iterrows():
        node, role, iteration, pass_ = cast(tuple[Any, ...], key)
        if (role, iteration, pass_) == ("output", 0, "forward"):
            kept = {str(k): _digits(v) for k, v in values.items() if math.isfinite(v)}
            found[str(node)] = {"recorded_step": step, "output": kept}
    return found

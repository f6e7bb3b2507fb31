"""A run as one time line: valid events, on one clock, named by nodes."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.errors import FormatError, UnknownNameError
from comgra_decl.export import export_run
from comgra_decl.hooks.measuring import profiling
from comgra_decl.hooks.measuring.attribution import (
    Attribution,
    Event,
    Owner,
    Span,
    attribute,
)
from comgra_decl.query import Run
from comgra_decl.records import PROGRAM
from tests.record.test_around import traced
from tests.record.test_profile import FIRST, LAST, PROFILE, program
from tests.support.uncompiled import uncompiled as uncompiled  # applies to all tests here

SPEC: dict[str, Any] = {**PROFILE, "nodes": {"all": {"select": "**", "capture": ["output"]}}}

REQUIRED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {"name": str, "pid": int, "tid": int, "ts": (int, float), "dur": (int, float)},
    "C": {"name": str, "pid": int, "ts": (int, float), "args": dict},
    "i": {"name": str, "pid": int, "tid": int, "ts": (int, float), "s": str},
    "M": {"name": str, "pid": int, "args": dict},
}
"""The fields that the Trace Event Format requires, by phase of the event."""

METADATA = {
    "process_name": {"name": str},
    "process_sort_index": {"sort_index": int},
    "thread_name": {"name": str},
}
"""The metadata that the format defines, and their arguments."""


def check(event: dict[str, Any]) -> None:
    """Fail unless an event is valid in the format."""
    form = REQUIRED[event["ph"]]
    assert set(form) <= set(event), event
    assert set(event) <= {"ph", "name", "cat", "pid", "tid", "ts", "dur", "s", "args"}, event
    for name, kind in form.items():
        assert isinstance(event[name], kind), (name, event)
        assert not isinstance(event[name], bool)
    if event["ph"] == "X":
        assert event["dur"] >= 0
    if event["ph"] == "C":
        assert all(isinstance(value, (int, float)) for value in event["args"].values())
    if event["ph"] == "i":
        assert event["s"] in ("g", "p", "t")
    if event["ph"] == "M":
        assert {k: type(v) for k, v in event["args"].items()} == METADATA[event["name"]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return traced(tmp_path_factory.mktemp("trace"), program, **SPEC)


@pytest.fixture(scope="module")
def content(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = export_run(run, tmp_path_factory.mktemp("out") / "trace.json", "trace")
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def unnested(content: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the pairs of spans on the same track of which one begins but does not end in another.

    The times are compared as whole nanoseconds, as Perfetto reads them. Fails if they are none.
    """
    tracks: dict[tuple[int, int], list[tuple[int, int, dict[str, Any]]]] = defaultdict(list)
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            start, duration = 1000 * event["ts"], 1000 * event["dur"]
            assert start == pytest.approx(round(start), abs=1e-3)
            assert duration == pytest.approx(round(duration), abs=1e-3)
            times = round(start), round(start) + round(duration)
            tracks[event["pid"], event["tid"]].append((*times, event))
    found = []
    for spans in tracks.values():
        running: list[tuple[int, dict[str, Any]]] = []
        for start, end, event in sorted(spans, key=lambda span: (span[0], -span[1])):
            running = [(until, above) for until, above in running if until > start]
            found += [(above, event) for until, above in running if until < end]
            running.append((end, event))
    return found


def of(content: dict[str, Any], **where: Any) -> list[dict[str, Any]]:
    return [e for e in content["traceEvents"] if all(e.get(k) == v for k, v in where.items())]


def test_every_event_is_valid(content: dict[str, Any]) -> None:
    assert set(content) == {"traceEvents", "displayTimeUnit", "otherData"}
    for event in content["traceEvents"]:
        check(event)
    used = {(e["pid"], e["tid"]) for e in content["traceEvents"] if e["ph"] in "Xi"}
    named = {(e["pid"], e["tid"]) for e in of(content, name="thread_name")}
    assert used <= named


def test_spans_of_a_track_lie_within_one_another_or_apart(content: dict[str, Any]) -> None:
    assert len(of(content, ph="X", cat="operation")) > 100
    assert unnested(content) == []


def test_kernels_that_run_at_the_same_time_are_on_different_tracks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [(10, 50), (20, 40), (45, 60), (60, 70)]
    made = profiling._timeline

    def with_device(found: Attribution, base: float, began: float) -> dict[str, Any]:
        kernels = [Event("gemm", base + start, base + end, on_device=True) for start, end in times]
        found.spans += [Span(kernel, Owner((PROGRAM,), "device")) for kernel in kernels]
        return made(found, base, began)

    monkeypatch.setattr(profiling, "_timeline", with_device)
    run = traced(tmp_path, program, **SPEC)
    content = json.loads(export_run(run, tmp_path / "t.json", "trace").read_text())
    kernels = of(content, cat="kernel")
    first = kernels[0]["ts"]
    assert [(round(e["ts"] - first, 2), e["tid"]) for e in kernels] == [
        (0, 0), (10, 1), (35, 1), (50, 0)
    ]  # fmt: skip
    assert unnested(content) == []
    named = {(e["pid"], e["tid"]) for e in of(content, name="thread_name")}
    assert {(e["pid"], e["tid"]) for e in kernels} <= named


def test_steps_whose_clocks_disagree_do_not_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The durations of steps are from the profiler's clock, which runs twice as fast here."""

    def faster(*given: Any) -> Attribution:
        found = attribute(*given)
        found.steps = [{name: 2 * time for name, time in step.items()} for step in found.steps]
        return found

    monkeypatch.setattr(profiling, "attribute", faster)
    run = traced(tmp_path, program, **SPEC)
    content = json.loads(export_run(run, tmp_path / "t.json", "trace").read_text())
    assert len(of(content, cat="step")) == 3
    assert unnested(content) == []


def test_records_and_profiled_steps_alternate_on_one_clock(
    content: dict[str, Any], run: Run
) -> None:
    records = of(content, cat="record")
    steps = of(content, cat="step")
    assert [e["args"]["step"] for e in records] == [*run.steps]
    assert [e["args"]["step"] for e in steps] == [*range(FIRST, LAST + 1)]
    ordered = sorted([*records, *steps], key=lambda e: e["ts"])
    assert [e["args"]["step"] for e in ordered] == [*range(10)]
    ends = [e["ts"] + e["dur"] for e in records]
    assert all(end <= e["ts"] + 0.01 for end, e in zip(ends, records[1:], strict=False))
    table = run.profile(by="step")
    assert [e["dur"] / 1000 for e in steps] == pytest.approx([*table["total"]], abs=1e-5)


def test_profiled_events_carry_their_node_and_its_last_statistics(
    content: dict[str, Any], run: Run
) -> None:
    calls = of(content, cat="module", name="block.twice")
    assert len(calls) == 2 * 3  # two calls in each of three steps
    expected = run.series("block.twice", "std")[FIRST - 1]
    for call in calls:
        assert call["args"]["node"] == "block.twice"
        assert call["args"]["recorded_step"] == FIRST - 1
        assert call["args"]["output"]["std"] == pytest.approx(expected)
    inside = [
        e
        for e in of(content, name="aten::addmm")
        if calls[0]["ts"] <= e["ts"]
        and e["ts"] + e["dur"] <= calls[0]["ts"] + calls[0]["dur"] + 0.01
    ]
    assert [e["args"]["node"] for e in inside] == ["block.twice"]
    first, last_step = of(content, cat="step")[0], of(content, cat="step")[-1]
    for event in of(content, cat="operation"):
        assert first["ts"] - 1000 <= event["ts"] <= last_step["ts"] + last_step["dur"] + 1000


def test_metrics_are_counters_at_recorded_steps(content: dict[str, Any], run: Run) -> None:
    losses = run.kpis().set_index("step")["value"]
    shown = [e["args"]["value"] for e in of(content, ph="C", name="loss")]
    assert shown == [float(f"{losses[step]:.15g}") for step in run.steps]


def test_a_pattern_chooses_nodes(run: Run, tmp_path: Path) -> None:
    path = export_run(run, tmp_path / "some.json", "trace", nodes="block.*")
    chosen = json.loads(path.read_text())
    assert {e["args"]["node"] for e in of(chosen, cat="operation")} == {"block.twice", "block.kept"}


def test_a_run_without_a_profile_has_records_only(tmp_path: Path) -> None:
    plain = traced(tmp_path, lambda: program(3), nodes=SPEC["nodes"], schedule={"first": 3})
    content = json.loads(export_run(plain, tmp_path / "t.json", "trace").read_text())
    assert len(of(content, cat="record")) == 3
    assert of(content, cat="operation") == []


def profiled_by_the_program(folder: Path) -> tuple[Run, Path]:
    """Trains while the program's own profiler records; its ranges have the names of two nodes."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with comgra.trace({"nodes": {"all": {"select": "**"}}}, root=folder) as session:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(3):
                optimizer.zero_grad()
                with torch.profiler.record_function("0"):
                    hidden = model[0](torch.ones(2, 4))
                model[1](hidden).sum().backward()
                optimizer.step()
    file = folder / "own.json"
    profiler.export_chrome_trace(str(file))
    return comgra.open_run(str(session.path)), file


@pytest.mark.parametrize("compressed", [False, True])
def test_what_the_programs_own_profiler_recorded_is_on_the_same_clock(
    tmp_path: Path, *, compressed: bool
) -> None:
    run, file = profiled_by_the_program(tmp_path)
    own = json.loads(file.read_text())
    if compressed:
        file = tmp_path / "own.json.gz"
        file.write_bytes(gzip.compress(json.dumps(own).encode()))
    out = export_run(run, tmp_path / "all.json", "trace", profile=file)
    found = json.loads(out.read_text())["traceEvents"]
    plain = json.loads(export_run(run, tmp_path / "plain.json", "trace").read_text())
    assert found[: len(plain["traceEvents"])] == plain["traceEvents"]
    added = found[len(plain["traceEvents"]) :]
    assert [e["name"] for e in added] == [e["name"] for e in own["traceEvents"]]
    assert not {e["pid"] for e in added} & {e["pid"] for e in plain["traceEvents"]}
    ranges = [e for e in added if e.get("cat") == "user_annotation" and e["name"] == "0"]
    ends = [e["ts"] + e["dur"] for e in plain["traceEvents"] if e.get("cat") == "record"]
    assert len(ranges) == len(ends) == 3
    for event, end, after in zip(ranges, ends, [*ends[1:], None], strict=True):
        assert event["ts"] < end  # the record of a step ends after its forward pass
        assert after is None or event["ts"] < after
        assert event["args"]["node"] == "0"
        output = event["args"]["output"]
        assert output["std"] == pytest.approx(float(run.series("0", "std").iloc[-1]))
    assert [e["ts"] for e in ranges] == sorted(e["ts"] for e in ranges)
    assert ranges[1]["ts"] > ends[0]


@pytest.mark.parametrize(
    ("text", "why"),
    [(None, "does not exist"), ("{", "is not a trace of torch.profiler"),
     ("[]", "no `traceEvents`"),
     ('{"traceEvents": {}}', "`traceEvents` must be a list of objects"),
     ('{"traceEvents": [1, "x"]}', "`traceEvents` must be a list of objects")],
)  # fmt: skip
def test_a_file_that_is_no_trace_is_named(text: str | None, why: str, tmp_path: Path) -> None:
    run, _ = profiled_by_the_program(tmp_path)
    file = tmp_path / "odd.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(FormatError, match=why):
        export_run(run, tmp_path / "out.json", "trace", profile=file)
    assert not (tmp_path / "out.json").exists()
    with pytest.raises(UnknownNameError, match="part of the format trace, not of csv"):
        export_run(run, tmp_path / "out", "csv", profile=file)

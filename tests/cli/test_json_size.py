"""JSON about a run of 2,000 nodes is short enough for a language model, or says what is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import typer

import comgra_decl as comgra
from comgra_decl.cli.commands import register
from comgra_decl.cli.printing import shortened
from comgra_decl.records import (
    STATISTICS,
    Note,
    ScalarBatch,
    SlotInfo,
    SlotKey,
    StepBatch,
    StepInfo,
)
from comgra_decl.spec import Spec
from comgra_decl.store import RunMeta, RunWriter
from tests.cli.test_commands import done

NODES, STEPS, MOST = 2000, 4, 20_000

ABOUT_RUNS = {
    "ls": ["{root}"],
    "index": ["{root}"],
    "show": ["{root}/g/a"],
    "diagnose": ["{root}/g/a"],
    "compare": ["{root}/g/a", "{root}/g/b"],
    "verify": ["{root}/g/a"],
    "cp": ["{root}/g/a", "{root}/copy"],
    "compact": ["{root}/g/b"],
    "export": ["{root}/g/a", "{root}/out", "--format", "csv"],
    "check": ["{root}/g/a", "{root}/contract.yaml"],
}
OTHERS = {
    "profile": "shortened, but this run has no profiled steps",
    "memory": "shortened, but this run has no measured steps",
    "plot": "two paths, whatever the run",
    "edit": "shortened",
    "import": "shortened, as `ls` is",
    "harvest": "shortened",
    "send": "shortened, and sends to a tool",
}


def write(path: Path, seed: int) -> None:
    """Store a run in which every tensor is NaN from step 2 on."""
    shape = (STEPS, NODES, len(STATISTICS))
    numbers = np.random.default_rng(seed)
    aggregates = numbers.random((*shape, 3)).astype(np.float32)
    aggregates[:, :, STATISTICS.index("nonfinite")] = 0
    aggregates[2:, :, STATISTICS.index("nonfinite")] = 1
    spec = Spec().model_dump(mode="json")
    meta = RunMeta(STATISTICS, 0, None, spec, {}, {}, started=1e9)
    batch = StepBatch(
        steps=[StepInfo(step, 1e9 + step, "train", "train", batch_size=8) for step in range(STEPS)],
        slots=np.arange(NODES, dtype=np.int32),
        aggregates=aggregates,
        samples=np.empty((STEPS, NODES, 0, len(STATISTICS)), np.float32),
        counts=None,
        ranges=None,
        values=[{}] * STEPS,
        kpis=[{}] * STEPS,
        new_slots=[
            SlotInfo(
                number,
                SlotKey(f"blocks.{number}.linear", "output", 0, "forward"),
                "computed",
                "float32",
                (8, 4),
                0,
                "Linear",
            )
            for number in range(NODES)
        ],
        new_structures=[],
        rows=np.full(NODES, 8),
    )
    notes = [Note(0, "train", 1e9, "x" * 100)] * 500
    losses = ScalarBatch(
        np.arange(STEPS), numbers.random(STEPS), ["loss"] * STEPS, ["train"] * STEPS, notes
    )
    writer = RunWriter.create(path, meta)
    writer.commit([batch], [losses])
    writer.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("large")
    for seed, name in enumerate(("a", "b")):
        write(root / "g" / name, seed)
    return root


@pytest.mark.parametrize("command", ABOUT_RUNS)
def test_json_is_short(command: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if command == "check":
        assert done("contract", str(root / "g" / "b")) == 0
        (root / "contract.yaml").write_text(capsys.readouterr().out)
    assert done(command, *(part.format(root=root) for part in ABOUT_RUNS[command]), "--json") in (
        0,
        3,
    )
    out = capsys.readouterr().out
    assert json.loads(out)
    assert len(out.encode()) <= MOST + 1  # with the line break


@pytest.mark.parametrize("command", ["show", "diagnose"])
def test_the_space_is_used(command: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert done(command, str(root / "g" / "a"), "--json") in (0, 3)
    assert 15_000 <= len(capsys.readouterr().out.encode()) <= MOST + 1


DEEP = {"node": "blocks.3.mlp", "role": "output", "device": {"cpu": 1.5, "count": 3}}


@pytest.mark.parametrize(
    "content",
    [
        {"steps": [3, 4], "nodes": [DEEP] * 910},  # as `profile`
        {"remarks": ["short"] * 4, "tensors": [{"at": [DEEP], "bytes": 3}] * 1511},  # as `plan`
        {"findings": [DEEP] * 900, "health": [DEEP] * 24},  # as `diagnose`
        {"counts": {f"name{i}": i for i in range(5000)}, "inner": {"rows": [[1, 2]] * 5000}},
    ],
    ids=["profile", "plan", "diagnose", "counts"],
)
def test_as_much_is_printed_as_fits(content: dict[str, Any]) -> None:
    found = shortened(content)
    assert 15_000 <= len(json.dumps(found, indent=2)) <= MOST
    assert found["left_out"]
    for name, number in found["left_out"].items():
        short, full = found, content
        for key in name.split("."):
            short, full = short[key], full[key]
        assert len(short) + number == len(full)
        assert [*short] == [*full][: len(short)]


def test_a_short_list_is_complete_beside_a_long_one() -> None:
    found = shortened({"findings": [DEEP] * 900, "health": [DEEP] * 24})
    assert len(found["health"]) == 24
    assert [*found["left_out"]] == ["findings"]


def test_what_is_left_out_is_counted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert done("show", str(root / "g" / "a"), "--json") == 0
    short = json.loads(capsys.readouterr().out)
    assert done("show", str(root / "g" / "a"), "--json", "--all") == 0
    full = json.loads(capsys.readouterr().out)
    assert len(full["slots"]) == NODES
    for name in ("slots", "nodes", "notes"):
        assert short[name] == full[name][: len(short[name])]
        assert len(short[name]) + short["left_out"][name] == len(full[name])
    assert "left_out" not in full


def test_short_content_is_complete() -> None:
    content = {"a": [1, 2, 3, 4], "b": {"c": ["x"] * 10}}
    assert shortened(content) == {**content, "left_out": {}}
    cut = shortened(content, most=150)
    assert cut["a"] == [1, 2, 3, 4]
    assert cut["left_out"] == {"b.c": 10 - len(cut["b"]["c"])}
    assert len(json.dumps(cut, indent=2)) <= 150
    assert content["b"] == {"c": ["x"] * 10}


def test_lists_and_counts_in_short_lists_are_cut() -> None:
    counts = {str(number): number for number in range(1000)}
    content = {"tensors": [{"label": "target", "classes": counts}, {"values": [*range(1000)]}]}
    cut = shortened(content, most=2_000)
    assert len(json.dumps(cut, indent=2)) <= 2_000
    assert [tensor.get("label") for tensor in cut["tensors"]] == ["target", None]
    left = cut["left_out"]
    assert left["tensors[0].classes"] == 1000 - len(cut["tensors"][0]["classes"])
    assert left["tensors[1].values"] == 1000 - len(cut["tensors"][1]["values"])


def test_long_texts_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with comgra.trace("light", root=tmp_path, group="g", name="n"):
        for letter in "abc":
            comgra.note(letter * 60_000)
    assert done("show", str(tmp_path / "g" / "n"), "--json") == 0
    out = capsys.readouterr().out
    assert len(out.encode()) <= MOST + 1
    told = json.loads(out)
    for at, note in enumerate(told["notes"]):
        kept = note["text"].removesuffix("\N{HORIZONTAL ELLIPSIS}")
        assert kept == "abc"[at] * len(kept)
        assert len(kept) + told["left_out"][f"notes[{at}].text"] == 60_000
    assert len(told["notes"]) == 3


def test_a_copy_tells_what_it_does_not_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run", 0)
    (tmp_path / "run" / "links").mkdir()
    for number in range(800):
        (tmp_path / "run" / "links" / f"link{number}").symlink_to("/nowhere")
    assert done("cp", str(tmp_path / "run"), str(tmp_path / "copy"), "--json") == 0
    out = capsys.readouterr().out
    assert len(out.encode()) <= MOST + 1
    told = json.loads(out)
    assert len(told["left_out"]) + told["not_shown"]["left_out"] == 800


@pytest.mark.parametrize(
    "content",
    [
        {"text": "x" * 100_000, "texts": ["y" * 30_000] * 40},
        {"rows": [{"text": "z" * 3_000, "list": [{"deep": ["w" * 900] * 9}] * 9}] * 200},
        {f"field{i}": {f"name{j}": "v" * 90 for j in range(400)} for i in range(20)},
        {f"field{i}": [["u" * 100] * 5] * 5 for i in range(20)},
    ],
    ids=["texts", "rows", "mappings", "nested lists"],
)
def test_whatever_the_content_the_json_is_short(content: dict[str, Any]) -> None:
    found = shortened(content)
    assert len(json.dumps(found, indent=2)) <= MOST
    assert [*found] == [*content, "left_out"]
    assert found["left_out"]


@pytest.mark.slow
def test_ls_keeps_the_newest_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(150):
        meta = RunMeta(STATISTICS, 0, None, Spec().model_dump(mode="json"), {}, {}, started=1e9)
        path = tmp_path / "group" / f"run{number:03}"
        RunWriter.create(path, replace(meta, started=1e9 + number)).close()
    assert done("ls", str(tmp_path), "--json") == 0
    out = capsys.readouterr().out
    told = json.loads(out)
    assert len(out.encode()) <= MOST + 1
    names = [run["name"] for run in told["runs"]]
    assert names == [f"run{number:03}" for number in range(150 - len(names), 150)]
    assert told["left_out"] == {"runs": 150 - len(names)}
    assert done("ls", str(tmp_path), "--json", "--all") == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 150


def test_every_command_with_json_is_considered() -> None:
    app = typer.Typer()
    passed_on = register(app)
    names = {
        command.name
        for command in app.registered_commands
        if command.callback is not None
        and command.name not in passed_on
        and "as_json" in get_type_hints(command.callback)
    }
    assert names == {*ABOUT_RUNS, *OTHERS}

"""Agents get short answers and errors that help; the MCP SDK's own client reads them."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import comgra_decl as comgra
from comgra_decl.cli.agents import (
    _POINTS,
    LIMIT,
    PICTURE_BYTES,
    PICTURE_SIDE,
    SERIES_LIMIT,
    Agent,
    _extremes,
    server,
    wrong_arguments,
)
from comgra_decl.errors import PlanError, UnknownNameError
from comgra_decl.query import open_run
from comgra_decl.records import ScalarBatch
from comgra_decl.store import RunWriter
from tests.store.truth import Truth
from tests.support.fake_run import FakeRun


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    for name, broken in (("a", None), ("b", 100)):
        fake = FakeRun(folder / "g" / name, layers=1, nonfinite_from=broken)
        fake.write(120, commit=64)
        fake.close()
    return folder


def test_answers_are_short_and_right(root: Path) -> None:
    agent, run = Agent(root), open_run(root / "g" / "b")
    answers: dict[str, Any] = {
        "runs": agent.list_runs(),
        "open": agent.open_run("g/b"),
        "findings": agent.findings("b"),
        "explain": agent.explain("b"),
        "row": agent.row(10, "b"),
        "compare": agent.compare("a", "b"),
    }
    assert all(len(text) <= LIMIT for text in answers.values())
    told = {name: json.loads(text) for name, text in answers.items() if name != "explain"}
    assert {each["run"] for each in told["runs"]["newest"]} == {"g/a", "g/b"}
    assert told["open"]["steps"] == {"count": 120, "first": 0, "last": 119}
    found = {(each["rule"], each["first_step"]) for each in told["findings"]["findings"]}
    assert ("nonfinite", 100) in found
    table = run.row(10)
    assert (
        told["row"]["count"]
        == len(table)
        == (len(told["row"]["tensors"]) + told["row"].get("tensors_left_out", 0))
    )
    first = told["row"]["tensors"][0]
    assert first["std"] == float(f"{table['std'].iloc[0]:.5g}")
    assert "100" in " ".join(told["compare"]["found"])


def test_a_long_series_keeps_its_extremes(root: Path) -> None:
    truth = open_run(root / "g" / "a").series("head", "std")
    text = Agent(root).series("head", "std", "a")
    told = json.loads(text)
    assert len(text) <= SERIES_LIMIT
    assert told["length"] == len(truth) > len(told["steps"])
    assert {truth.idxmin(), truth.idxmax()} <= {*told["steps"]}
    expected = [float(f"{value:.5g}") for value in truth[told["steps"]].to_numpy(np.float64)]
    assert told["values"] == expected
    loss = json.loads(Agent(root).series("metrics", "loss", "a"))
    assert loss["length"] > 0


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a NaN, one metric of two types, many metrics with long names and a long note."""
    truth = Truth()
    names = [f"{'m' * 60} {i}" for i in range(500)]
    told = ScalarBatch(
        np.array([0, 1, 0, 1, *[0] * 500]),
        np.array([1.5, np.nan, 7.0, 8.0, *range(500)], np.float64),
        ["loss", "loss", "loss", "loss", *names],
        ["train", "train", "eval", "eval", *["train"] * 500],
    )
    folder = tmp_path_factory.mktemp("odd")
    writer = RunWriter.create(folder / "g" / "odd", truth.meta)
    writer.commit([truth.batch(2, range(2))], [told])
    writer.close()
    return folder


def test_metrics_of_each_type_are_answered(odd: Path) -> None:
    agent = Agent(odd)
    for type_, values in (("", [1.5, "nan"]), ("train", [1.5, "nan"]), ("eval", [7.0, 8.0])):
        assert json.loads(agent.series("metrics", "loss", type=type_))["values"] == values
    with pytest.raises(UnknownNameError, match=r"no type 'evl'; did you mean 'eval'\?"):
        agent.series("metrics", "loss", type="evl")


def test_a_long_answer_says_what_it_leaves_out(odd: Path) -> None:
    text = Agent(odd).open_run()
    told = json.loads(text)
    assert len(text) <= LIMIT
    assert (told["metrics"]["loss"], told["metrics"]["loss (eval)"]) == ("nan", 8.0)
    assert len(told["metrics"]) + told["metrics_left_out"] == 502


def test_the_longest_series_fits() -> None:
    steps = np.arange(10_000, dtype=np.int64) + 2**62
    values = np.where(np.arange(10_000) % 3, np.arange(10_000) * -1.2345e-300, np.nan)
    kept = _extremes(values, _POINTS)
    answer = {"steps": steps[kept].tolist(), "values": [-1.2345e-300] * len(kept), "length": 10_000}
    assert len(kept) > _POINTS
    assert len(json.dumps(answer)) <= SERIES_LIMIT


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (lambda agent: agent.series("haed"), "did you mean 'head'"),
        (lambda agent: agent.series("metrics", "los"), "did you mean 'loss'"),
        (lambda agent: agent.open_run("g/aa"), "did you mean 'g/a'"),
        (lambda agent: agent.open_run("../../etc"), "there is no run"),
        (lambda agent: agent.picture("likenes"), "did you mean 'likeness'"),
    ],
)
def test_a_wrong_name_is_answered_with_a_near_one(root: Path, question: Any, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        question(Agent(root))


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("series", {}, "node is missing. Arguments: node (required), statistic, run, "),
        ("series", {"metric": "loss"}, "there is no argument 'metric'. node is missing. "),
        ("series", {"metric": "loss"}, 'or of a metric if node is "metrics".'),
        ("series", {"nod": "head"}, "there is no argument 'nod'; did you mean 'node'?"),
        ("series", {"node": 3}, "node must be a text, got 3."),
        ("row", {"step": "last"}, "step must be an integer, got 'last'."),
        ("list_runs", {"root": "x"}, "Arguments: none. list_runs: List the newest runs"),
    ],
)
def test_wrong_arguments_are_named_with_the_valid_ones(
    root: Path, tool: str, arguments: dict[str, Any], message: str
) -> None:
    said = wrong_arguments(getattr(Agent(root), tool), arguments)
    assert said is not None
    assert message in said


def test_right_arguments_are_accepted(root: Path) -> None:
    agent = Agent(root)
    assert wrong_arguments(agent.series, {"node": "head", "run": "a"}) is None
    assert wrong_arguments(agent.row, {"step": "3"}) is None


def test_the_clients_of_the_sdk_list_call_and_see(root: Path) -> None:
    mcp = pytest.importorskip("mcp")
    anyio = pytest.importorskip("anyio")

    async def talk() -> tuple[Any, Any, Any, Any, Any]:
        async with mcp.Client(server(root)) as client:
            return (
                await client.list_tools(),
                await client.call_tool("series", {"node": "head", "run": "a"}),
                await client.call_tool("series", {"node": "haed"}),
                await client.call_tool("picture", {"name": "likeness", "run": "a"}),
                await client.call_tool("series", {"metric": "loss"}),
            )

    tools, series, wrong, picture, refused = anyio.run(talk)
    assert {tool.name for tool in tools.tools} >= {"list_runs", "findings", "series", "picture"}
    assert all(tool.description for tool in tools.tools)
    assert series.content[0].text == Agent(root).series("head", run="a")
    assert wrong.is_error
    assert "did you mean 'head'" in wrong.content[0].text
    assert picture.content[0].mime_type == "image/png"
    assert refused.is_error
    assert refused.content[0].text.startswith("there is no argument 'metric'. node is missing.")


def test_the_command_serves_over_standard_input_and_output(root: Path) -> None:
    """As the documentation tells to configure it."""
    mcp = pytest.importorskip("mcp")
    anyio = pytest.importorskip("anyio")
    code = "from comgra_decl.cli.main import main; main()"
    path = os.pathsep.join(filter(None, sys.path))
    command = mcp.StdioServerParameters(
        command=sys.executable,
        args=["-c", code, "mcp", str(root), "--allow-plan"],
        env={**os.environ, "PYTHONPATH": path},
    )

    async def talk() -> tuple[Any, Any]:
        async with mcp.Client(command) as client:
            return await client.list_tools(), await client.call_tool("findings", {"run": "b"})

    tools, findings = anyio.run(talk)
    assert {tool.name for tool in tools.tools} >= {"list_runs", "findings", "plan"}
    assert findings.content[0].text == Agent(root).findings("b")


@pytest.mark.slow
def test_pictures_have_a_limited_size(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).standard_normal((64, 300, 300))
    maps = {"noise": noise, "map": np.eye(4)}
    monkeypatch.setattr(
        "comgra_decl.query.Run.picture", lambda _, name, *__: SimpleNamespace(values=maps[name])
    )
    found = {name: Agent(root).picture(name, "a") for name in maps}
    assert len(found["noise"]) <= PICTURE_BYTES
    image = Image.open(io.BytesIO(found["noise"]))
    assert 100 < max(image.size) <= PICTURE_SIDE
    assert Image.open(io.BytesIO(found["map"])).size == (64, 64)  # each value is a square


PROGRAM = """
import torch

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("allowed", [False, True])
def test_agents_plan_only_where_scripts_may_run(root: Path, allowed: bool) -> None:
    tools = {tool.__name__ for tool in Agent(root, allow_plan=allowed).tools}
    assert ("plan" in tools) is allowed


@pytest.mark.slow
def test_a_plan_says_what_a_spec_records_or_why_the_script_failed(
    root: Path, tmp_path: Path
) -> None:
    agent = Agent(root, allow_plan=True)
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    told = json.loads(agent.plan(str(script), overrides="samples.count=2"))
    assert {each["node"] for each in told["tensors"]} >= {"Linear", "input", "loss"}
    assert len(json.dumps(told)) <= LIMIT
    script.write_text("raise ValueError('no data')")
    with pytest.raises(PlanError, match="no data"):
        agent.plan(str(script))


def test_runs_of_the_same_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for folder, records in (("x", 3), ("y", 5)):
        fake = FakeRun(tmp_path / folder / "g" / "n", layers=1)
        fake.write(records, commit=5)
        fake.close()
    agent = Agent(tmp_path)
    listed = json.loads(agent.list_runs())["newest"]
    assert {each["run"]: each["records"] for each in listed} == {"x/g/n": 3, "y/g/n": 5}
    for name, records in (("x/g/n", 3), ("y/g/n", 5)):
        told = json.loads(agent.open_run(name))
        assert (told["run"], told["records"]) == (name, records)
    with pytest.raises(UnknownNameError, match="'g/n' is several runs: x/g/n, y/g/n"):
        agent.findings("g/n")


def test_what_a_type_never_records_is_no_series_of_nan(tmp_path: Path) -> None:
    spec = {
        "nodes": {"all": {"select": "**", "capture": ["output", "output_grad"]}},
        "probes": {"eyes": {"samples": {"count": 2}, "schedule": {"first": 9}}},
    }
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with comgra.trace(spec, root=tmp_path):
        for _ in range(2):
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    agent = Agent(tmp_path)
    assert json.loads(agent.series("0", of="grad"))["length"] == 2
    assert json.loads(agent.series("0", type="probe:eyes"))["length"] == 2
    with pytest.raises(UnknownNameError, match="0 output, pass grad, was not recorded at any step"):
        agent.series("0", of="grad", type="probe:eyes")

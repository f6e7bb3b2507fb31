"""Agents get short answers and errors that help; the MCP SDK's own client reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comgra_decl.cli.agents import LIMIT, SERIES_LIMIT, Agent, server
from comgra_decl.errors import UnknownNameError
from comgra_decl.query import open_run
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


def test_the_clients_of_the_sdk_list_call_and_see(root: Path) -> None:
    mcp = pytest.importorskip("mcp")
    anyio = pytest.importorskip("anyio")

    async def talk() -> tuple[Any, Any, Any, Any]:
        async with mcp.Client(server(root)) as client:
            return (
                await client.list_tools(),
                await client.call_tool("series", {"node": "head", "run": "a"}),
                await client.call_tool("series", {"node": "haed"}),
                await client.call_tool("picture", {"name": "likeness", "run": "a"}),
            )

    tools, series, wrong, picture = anyio.run(talk)
    assert {tool.name for tool in tools.tools} >= {"list_runs", "findings", "series", "picture"}
    assert all(tool.description for tool in tools.tools)
    assert series.content[0].text == Agent(root).series("head", run="a")
    assert wrong.is_error
    assert "did you mean 'head'" in wrong.content[0].text
    assert picture.content[0].mime_type == "image/png"

"""A run whose program failed, as the commands and the viewer report it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.cli.explaining import explained
from comgra_decl.query import open_run
from comgra_decl.rules import diagnose
from comgra_decl.viewer.model.headline import headline, tab_counts
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.model.verdicts import found
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.panes.findings import page_of
from tests.cli.test_commands import done


class HostileError(ValueError):
    """An error whose message a terminal or a page would interpret."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that failed after three steps, and one with a hostile message."""
    root = tmp_path_factory.mktemp("explained")

    def hostile() -> None:
        raise HostileError("\x1b[2J <script>alert(1)</script> | [a](http://x) `code")

    def wrong_shape() -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            model(torch.ones(3, 4 + (step == 3))).sum().backward()
            optimizer.step()

    for program in (hostile, wrong_shape):
        with (
            pytest.raises((RuntimeError, HostileError)),
            comgra.trace("light", root=root, group="g", name=program.__name__),
        ):
            program()
    return {name: root / "g" / name for name in ("hostile", "wrong_shape")}


def test_show_and_diagnose_begin_with_the_failure(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert done("show", str(runs["wrong_shape"])) == 0
    assert (
        "the program failed at step 3, in the forward pass of 0: Runtime" in capsys.readouterr().out
    )
    assert done("diagnose", str(runs["wrong_shape"]), "--no-together") == 3
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("the program failed at step 3")
    text = " ".join(row.strip() for row in rest)
    assert "5 features in its last dimension, but the weight expects 4" in text
    assert done("diagnose", str(runs["wrong_shape"]), "--no-together", "--fail-on", "never") == 0
    capsys.readouterr()
    assert done("show", str(runs["wrong_shape"]), "--json") == 0
    told = json.loads(capsys.readouterr().out)["ending"]
    assert told["post_mortem"]["module"] == "0"
    assert told["parts"][0]["title"] == "What it means"


def test_explain_prints_one_page_of_markdown(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert done("explain", str(runs["wrong_shape"])) == 0
    page = capsys.readouterr().out
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert headings[0] == "# Run g/wrong_shape"
    assert headings[1:3] == ["## Verdict", "## Post-mortem"]
    assert headings[-1] == "## Metrics"
    assert "- **model**: Sequential, 4 modules, 58 parameters, 58 of them trained" in page
    assert "- 0 (Linear), input: float32 [3, 5] on cpu; min 1, max 1, mean 1, std 0" in page
    assert page.count("```") == 4
    assert "| loss | train |" in page
    assert len(page) < 12_000


def test_a_run_without_a_failure_is_explained_too(tmp_path: Path) -> None:
    with comgra.trace("light", root=tmp_path, group="g", name="n"):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
    run = open_run(tmp_path / "g" / "n")
    page = explained(run, diagnose(run))
    assert "## Post-mortem" not in page
    assert "## Metrics" in page


def test_a_hostile_message_stays_text(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert done("explain", str(runs["hostile"])) == 0
    page = capsys.readouterr().out
    assert "\x1b" not in page
    text = "".join(page.split("```")[::2])  # without blocks of code, which show all as it is
    assert "\\<script\\>" in text
    assert "<script>" not in text
    assert "](http" not in text.replace("\\](http", "")
    view = RunView(open_run(runs["hostile"]))
    shown = Shown(view, resolve(view, Selection(), {}), colour="kind", scale="linear",
                  expanded=None, follow=False)  # fmt: skip
    content = page_of(found(view), shown)
    assert "<script>" not in content
    assert "&lt;script&gt;" in content


def test_the_viewer_leads_with_the_failure(runs: dict[str, Path]) -> None:
    view = RunView(open_run(runs["wrong_shape"]))
    said = headline(view)
    assert (said.tone, said.lead) == ("error", "The program failed")
    assert said.text.startswith("at step 3, in the forward pass of 0: RuntimeError")
    assert tab_counts(view)["findings"][1] == "error"

"""The documentation is correct: its code runs, its links resolve, its walkthrough works."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

import comgra_decl as comgra
from comgra_decl.query import Run
from tests.examples.conftest import EXAMPLES, Train
from tests.examples.test_tracing import TRACED

ROOT = EXAMPLES.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
HALF_TRAINED = "steps=600"


def blocks(page: str, language: str) -> list[str]:
    """Returns the code blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def block(page: str, language: str, containing: str) -> str:
    """Returns the only code block on a page that contains a given text."""
    found = [code for code in blocks(page, language) if containing in code]
    assert len(found) == 1
    return found[0]


@pytest.fixture(scope="module")
def bugged(train: Train) -> Run:
    """The tutorial's run, trained long enough for the bug to show."""
    outcome = train("tutorial", "+comgra=debug", HALF_TRAINED, "eval_every=600")
    return comgra.open_run(outcome.folder / "runs")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    local = [link for link in links if not link.startswith("http")]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_server_that_is_started_listens_on_this_machine_alone(page: Path) -> None:
    lines = [line for line in page.read_text().splitlines() if "panel serve" in line]
    assert [line for line in lines if "--address 127.0.0.1" not in line] == []


def test_the_ten_lines_of_the_readme_read_a_run(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(train("tutorial", *TRACED).folder)
    exec(block("README.md", "python", "open_run"), {})


def test_the_spec_of_the_readme_is_valid_and_selects_attention_weights() -> None:
    spec = comgra.load_spec(yaml.safe_load(block("README.md", "yaml", "nodes:")))
    assert list(spec.nodes) == ["all", "weights", "softmax"]
    assert spec.nodes["softmax"].values


def test_the_overrides_of_the_readme_are_valid() -> None:
    assert "schedule.every=10" in block("README.md", "bash", "comgra.schedule")
    assert comgra.load_spec("debug", ["schedule.every=10"]).schedule.every == 10


@pytest.mark.slow
def test_the_notebook_of_the_tutorial_runs(
    bugged: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(str(bugged.path)).parents[2])
    exec(block("docs/tutorial.md", "python", "open_run"), {})
    close, far = map(float, capsys.readouterr().out.split())
    assert close > far > 0


def test_tutorial_inputs_are_uniform(bugged: Run) -> None:
    mean = bugged.slot("input", role="input").series("mean")
    std = bugged.slot("input", role="input").series("std")
    assert mean.abs().max() < 0.1
    assert std.between(0.5, 0.65).all()


def test_tutorial_answers_near_one_come_early_and_answers_near_zero_do_not(bugged: Run) -> None:
    step = int(bugged.steps[bugged.steps <= 300][-1])
    counts, edges = bugged.slot("answer", iteration=4).histogram(step)
    centres, share = (edges[1:] + edges[:-1]) / 2, counts / counts.sum()
    assert share[centres < 0.1].sum() == 0
    assert share[centres > 0.9].sum() > 0.01
    assert share[(centres > 0.4) & (centres < 0.5)].sum() > 0.5


def test_tutorial_negative_outputs_are_a_hundredth_of_the_last_layers(bugged: Run) -> None:
    step = int(bugged.steps[-1])
    before, after = (bugged.slot(node, iteration=4).value(step) for node in ("out.last", "out"))
    expected = np.where(before < 0, before / 100, before)
    np.testing.assert_allclose(after, expected, rtol=1e-5)
    lowest = bugged.slot("out.last", iteration=4).series("min")
    assert lowest[step] < 20 * lowest.iloc[:10].min() < 0


def test_tutorial_gradients_of_negative_outputs_are_a_hundredth(bugged: Run) -> None:
    step = int(bugged.steps[-1])
    last = bugged.slot("input", role="input").value(step).shape[1] - 1
    values, gradient, arriving = (
        bugged.slot(node, iteration=last, of=pass_).value(step)
        for node, pass_ in (("out.last", "forward"), ("out.last", "grad"), ("out", "grad"))
    )
    expected = np.where(values < 0, arriving / 100, arriving)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)

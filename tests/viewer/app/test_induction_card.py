"""The Pictures section draws the induction scores of attention heads over the steps."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.query import Run
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.page import create_page
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.panes.pictures import PicturesPane
from tests.pictures.test_induction import by_loops
from tests.probing.attention import HEADS, TOKENS, Language

BLOCKS, SAMPLES = 3, 3
FUSED = {"select": {"function": "F.scaled_dot_product_attention"}}
SPEC: dict[str, Any] = {
    "nodes": {
        "all": {"select": "**", "capture": ["input", "output"]},
        "fused": {**FUSED, "attention": {"recompute": True}, "values": True},
    },
    "samples": {"count": SAMPLES},
    "schedule": {"every": 2},
    "rules": "off",
}
EYES = {"probes": {"eyes": {"samples": {"count": SAMPLES}, "schedule": {"every": 1}}}}
TITLE = "induction scores of attention heads"


def trained(root: Path, spec: dict[str, Any], *, repeat: bool = True) -> Run:
    torch.manual_seed(0)
    model = Language(BLOCKS)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with comgra.trace(spec, root=root) as session:
        for _ in range(7):
            once = torch.stack([torch.randperm(TOKENS) for _ in range(5)])
            tokens = once[:, torch.arange(9) % (5 if repeat else TOKENS)]
            optimizer.zero_grad()
            logits = model(tokens)
            F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
    assert session.path is not None
    return comgra.open_run(session.path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(tmp_path_factory.mktemp("runs"), SPEC)


def cards(run: Run, step: int = 4) -> str:
    view = RunView(run)
    at = replace(resolve(view, Selection(), {}), step=step, node="head")
    pane = PicturesPane(lambda **_: None)
    pane.refresh(Shown(view, at, colour="kind", scale="linear", expanded=None, follow=False))
    return pane.view.html


def card(run: Run, step: int = 4) -> str:
    """Return the card with the scores; "" if there is none."""
    begin = re.escape(f"><h3>{TITLE}</h3>")
    return "".join(re.findall(rf'<div class="card[^"]*"{begin}.*?(?=<div class="card|$)',
                              cards(run, step), re.S))  # fmt: skip


def scores_of(run: Run) -> dict[tuple[str, int], list[float]]:
    """Return the scores by step of each head, by loops over the recorded values."""
    slots = run.slots
    (name,) = {*slots[slots["kind"] == "input"].query("shape.str.len() == 2")["node"]}
    nodes = [*dict.fromkeys(slots.query("role == 'attention (recomputed)'")["node"])]
    found: dict[tuple[str, int], list[float]] = {}
    for step in run.steps.tolist():
        tokens = run.slot(name, role="input").value(step)
        for node in nodes:
            weights = run.slot(node, role="attention (recomputed)").value(step)
            for head, score in enumerate(by_loops(weights, tokens)):
                found.setdefault((node, head), []).append(score)
    return found


@pytest.mark.parametrize("probed", [False, True])
def test_the_highest_scores_are_curves_by_step_and_numbers_at_the_step(
    run: Run, tmp_path: Path, probed: bool
) -> None:
    if probed:
        run = trained(tmp_path, {**SPEC, **EYES})
    drawn, scores = card(run), scores_of(run)
    assert len(scores) == BLOCKS * HEADS
    highest = sorted(scores, key=lambda each: -max(scores[each]))[:8]
    names = re.findall(r'data-send="node:[^"]+">([^<]+)</th>', drawn)
    assert names == [f"{node}, head {head}" for node, head in highest]
    numbers = [float(text) for text in re.findall(r"<td>([^<]+)</td>", drawn)]
    at = run.steps.tolist().index(4)
    assert numbers == pytest.approx([scores[each][at] for each in highest], rel=5e-3)
    most = max(map(max, scores.values()))
    paths = re.findall(r'<path d="M([^"]*)"', drawn)
    assert len(paths) == 8
    for path, each in zip(paths, highest, strict=True):
        spots = np.array([spot.split() for spot in path.split("L")], float)
        share = (run.steps - run.steps[0]) / (run.steps[-1] - run.steps[0])
        np.testing.assert_allclose(spots[:, 0], 8 + share * (300 - 16), atol=0.06)
        wanted = 8 + (1 - np.array(scores[each]) / most) * (190 - 16)
        np.testing.assert_allclose(spots[:, 1], wanted, atol=0.06)
    assert f"8 of {BLOCKS * HEADS} heads" in drawn
    assert "numbers: step 4." in drawn
    assert "numbers: step 6." in card(run, 99)


def test_without_values_the_card_names_the_lines_that_record_them(tmp_path: Path) -> None:
    fused = {**FUSED, "attention": {"recompute": True}}
    nodes = {"all": {"select": "**"}, "heads": fused}
    spec = {**SPEC, "nodes": nodes}
    empty = card(trained(tmp_path, spec))
    assert "No record contains the values of attention weights and of the tokens" in empty
    (lines,) = re.findall(r"<pre>([^<]*)</pre>", empty)
    filling = yaml.safe_load(html.unescape(lines))
    spec["nodes"] = {**nodes, **filling["nodes"]}
    assert "8 of 12 heads" in card(trained(tmp_path / "filled", spec))


def test_sequences_without_a_repeated_token_have_no_scores(tmp_path: Path) -> None:
    assert "No recorded sequence repeats a token" in card(trained(tmp_path, SPEC, repeat=False))


def test_a_model_without_attention_has_no_such_card(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(TOKENS, 4), torch.nn.Linear(4, 2))
    with comgra.trace({"nodes": {"all": {"select": "**"}}}, root=tmp_path) as session:
        model(torch.randint(TOKENS, (4, 6))).square().mean().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert session.path is not None
    assert TITLE not in cards(comgra.open_run(session.path))


@pytest.mark.browser
@pytest.mark.slow
def test_the_browser_draws_the_scores_and_a_head_selects_its_layer(
    run: Run, serve: Callable[..., str], page: Any, tmp_path: Path
) -> None:
    from playwright.sync_api import expect

    address = serve(lambda: create_page([str(run.path.parent)]))
    page.goto(f"{address}?section=pictures&step=4&node=head")
    found = page.locator(".card", has=page.get_by_role("heading", name=TITLE))
    lines = found.locator("svg path")
    expect(lines).to_have_count(8)
    colours = lines.evaluate_all("all => all.map(line => getComputedStyle(line).stroke)")
    assert len({*colours}) == 8
    swatches = found.locator("th").evaluate_all(
        "all => all.map(head => getComputedStyle(head, '::before').backgroundColor)"
    )
    assert swatches == colours
    heads = found.locator("th")
    node = heads.nth(7).inner_text().partition(", ")[0]
    heads.nth(7).click()
    page.wait_for_function("name => new URL(location).searchParams.get('node') === name", arg=node)
    found.screenshot(path=tmp_path / "scores.png")

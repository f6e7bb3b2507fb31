"""What explains a predicted token is shown as shaded text, and read as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import comgra_decl
from comgra_decl.errors import UnknownNameError
from comgra_decl.viewer.model.pictures import album
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.panes.pictures import PicturesPane
from tests.probing.attention import TOKENS, WIDTH, Language

COUNT, LENGTH = 3, 6
ALPHABET = "abcdefghijk"
SPEC: dict[str, Any] = {
    "nodes": {"all": {"select": "**"}},
    "schedule": {"first": 100},
    "tokens": {"alphabet": ALPHABET, "inputs": ["*"]},
    "probes": {"eyes": {"samples": {"count": COUNT}, "schedule": {"first": 0, "every": 2}}},
    "pictures": {
        "why": {
            "method": "input_x_gradient",
            "of": "eyes",
            "target": {"token": 5, "rather_than": [1, 2, 3]},
        },
        "hide": {"method": "occlusion", "of": "eyes", "window": [1], "target": {"position": 2}},
        "roll": {"method": "attention_rollout", "of": "eyes"},
        "lens": {"method": "logit_lens", "of": "eyes", "target": "next"},
        "each": {
            "method": "integrated_gradients",
            "of": "eyes",
            "points": 4,
            "target": {"token": "next", "position": "all"},
        },
    },
}


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    torch.manual_seed(0)
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with comgra_decl.trace(SPEC, root=tmp_path_factory.mktemp("runs")) as session:
        for _ in range(4):
            tokens = torch.randint(TOKENS, (5, LENGTH))
            optimizer.zero_grad()
            logits = model(tokens)
            F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
    assert session.path is not None
    return RunView(comgra_decl.open_run(session.path))


def tokens_of(view: RunView) -> np.ndarray[Any, Any]:
    (slot,) = (s for s in view.slots.values() if s.kind == "input" and "int" in s.dtype)
    return np.asarray(view.value(slot, 0, "probe:eyes"))


def at(view: RunView, **wanted: Any) -> Selection:
    return replace(resolve(view, Selection(), {}), **wanted)


def test_a_table_has_one_number_for_each_token(view: RunView) -> None:
    run = view.run
    picture = run.picture("why", 2)
    assert picture.axes == ("sample", "position", "feature")
    assert picture.values.shape == (COUNT, LENGTH, WIDTH)
    table = run.token_attributions("why", 2)
    assert table.index.names == ["sample", "position"]
    letters = [ALPHABET[i] for i in tokens_of(view).ravel()]
    assert table["token"].to_list() == letters
    wide = picture.values.astype(np.float64)
    np.testing.assert_allclose(table["value"].to_numpy(), wide.sum(-1).ravel(), rtol=1e-12)
    norms = run.token_attributions("why", 2, by="l2")["value"].to_numpy()
    np.testing.assert_allclose(norms, np.linalg.norm(wide, axis=-1).ravel(), rtol=1e-12)
    magnitudes = run.token_attributions("why", 2, by="abs")["value"].to_numpy()
    np.testing.assert_allclose(magnitudes, np.abs(wide).sum(-1).ravel(), rtol=1e-12)
    spans = run.token_attributions("why", 2, spans={"begin": (0, 2), "end": (2, LENGTH)})
    np.testing.assert_allclose(spans["begin"], wide[:, :2].sum((1, 2)), rtol=1e-12)
    np.testing.assert_allclose(spans.sum(axis=1), wide.sum((1, 2)), rtol=1e-9)
    assert run.picture("hide", 2).axes == ("sample", "position")
    hidden = run.token_attributions("hide")["value"].to_numpy()
    np.testing.assert_array_equal(hidden, run.picture("hide", 2).values.ravel())
    rolled = run.token_attributions("roll", 0)["value"]
    np.testing.assert_allclose(rolled.groupby("sample").sum(), 1.0, atol=1e-6)


def test_what_has_no_numbers_for_tokens_is_said(view: RunView) -> None:
    run = view.run
    with pytest.raises(UnknownNameError, match="by='sums' is not one of sum, l2, abs; did you"):
        run.token_attributions("why", by="sums")
    with pytest.raises(UnknownNameError, match="'x', 4 to 7, does not lie in the 6 positions"):
        run.token_attributions("hide", spans={"x": (4, 7)})
    with pytest.raises(UnknownNameError, match="there is no picture 'whi'"):
        run.token_attributions("whi")
    with pytest.raises(UnknownNameError, match="no number for each token"):
        run.token_attributions("likeness")


def test_each_token_is_shaded_on_one_scale_for_all_steps(view: RunView) -> None:
    at = replace(resolve(view, Selection(), {}), step=2, batch="1")
    cards = {card.title.partition(":")[0]: card for card in album(view, at).cards}
    card = cards["why"]
    assert card.words == tuple(ALPHABET[i] for i in tokens_of(view)[1])
    assert card.image == ""
    assert card.note == "explains token f rather than c at position -1"
    steps = [view.run.token_attributions("why", step)["value"] for step in (0, 2)]
    most = max(float(np.abs(values).max()) for values in steps)
    assert card.high == pytest.approx(most)
    np.testing.assert_allclose(card.shares, steps[1][1] / most, rtol=1e-6)
    best = view.run.picture("hide", 2).facts["target"][1]
    assert cards["hide"].note == f"explains token {ALPHABET[best]} at position 2"
    assert cards["roll"].note == "attention of position -1"
    assert all(share >= 0 for share in cards["roll"].shares)


@pytest.mark.browser
@pytest.mark.slow
def test_the_browser_shades_the_text(
    view: RunView, serve: Callable[..., str], page: Any, tmp_path: Path
) -> None:
    from playwright.sync_api import expect

    panel: Any = pytest.importorskip("panel")

    def make() -> Any:
        pane = PicturesPane(lambda **_: None)
        at = replace(resolve(view, Selection(), {}), step=2, batch="1")
        pane.refresh(Shown(view, at, colour="kind", scale="linear", expanded=None, follow=False))
        panel.state.onload(lambda: pane.view.param.update(ready=True))
        return pane.panel

    page.goto(serve(make))
    page.wait_for_function("!!(window.Bokeh && Bokeh.documents[0]?.is_idle)")
    card = page.locator(".card", has=page.get_by_role("heading", name="why: input_x_gradient"))
    words = card.locator(".words span")
    expect(words).to_have_count(LENGTH)
    assert [text.strip() for text in words.all_text_contents()] == [
        ALPHABET[i] for i in tokens_of(view)[1]
    ]
    colours = words.evaluate_all("all => all.map(w => getComputedStyle(w).backgroundColor)")
    assert len(set(colours)) > 2
    page.screenshot(path=tmp_path / "tokens.png", full_page=True)


@pytest.mark.browser
@pytest.mark.slow
def test_the_cells_of_the_lens_in_the_browser_are_those_of_the_run(
    view: RunView, serve: Callable[..., str], page: Any
) -> None:
    from playwright.sync_api import expect

    panel: Any = pytest.importorskip("panel")

    def make() -> Any:
        pane = PicturesPane(lambda **_: None)
        at = replace(resolve(view, Selection(), {}), step=2, batch="1")
        pane.refresh(Shown(view, at, colour="kind", scale="linear", expanded=None, follow=False))
        panel.state.onload(lambda: pane.view.param.update(ready=True))
        return pane.panel

    page.goto(serve(make))
    page.wait_for_function("!!(window.Bokeh && Bokeh.documents[0]?.is_idle)")
    card = page.locator(".card", has=page.get_by_role("heading", name="lens: logit_lens"))
    lens, ranks = card.locator("table").all()
    cells = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    painted = lens.locator("tbody tr").evaluate_all(cells)
    nodes = ["blocks.0", "blocks.1"]
    assert [row[0] for row in painted] == nodes
    for node, *words in painted:
        tokens = view.run.picture("lens", 2, node).facts["tokens"][1]
        assert words == [ALPHABET[token] for token in tokens]
    titles = "cells => cells.map(cell => cell.title)"
    said = lens.locator("tbody td").evaluate_all(titles)
    likely = np.exp([view.run.picture("lens", 2, node).values[1] for node in nodes])
    assert said[LENGTH - 1] == said[-1] == "no token"  # nothing follows the last one
    shown = [float(text.removeprefix("probability ")) for text in said if text != "no token"]
    np.testing.assert_allclose(shown, likely[:, :-1].ravel(), rtol=6e-3)
    for position in (LENGTH - 2, 1):
        head = lens.get_by_role("button").nth(position)
        head.press("Enter")
        expect(head).to_have_attribute("aria-pressed", "true")
        rows = ranks.locator("tbody tr").evaluate_all(cells)
        for node, *places in rows:
            wanted = [view.run.picture("lens", s, node).facts["ranks"][1, position] for s in (0, 2)]
            assert places == [str(rank) for rank in wanted]


def test_a_sample_of_tokens_is_shown_as_text(view: RunView) -> None:
    tiles = album(view, Selection(step=2)).tiles
    texts = ["".join(ALPHABET[i] for i in row) for row in tokens_of(view)]
    assert [tile.text for tile in tiles] == texts
    assert not any(tile.image for tile in tiles)


def test_several_explained_positions_are_a_table(view: RunView) -> None:
    run, size = view.run, LENGTH - 1
    drawn = run.picture("each", 2)
    assert drawn.axes[:3] == ("sample", "explained", "position")
    assert drawn.labels["explained"] == [*range(size)]
    tokens = tokens_of(view)
    assert drawn.facts["target"] == tokens[:, 1:].tolist()
    table: Any = run.token_attributions("each", 2)
    assert [*table.index.names] == ["sample", "explained", "position"]
    for sample, explained, position in ((0, 0, 0), (2, 4, 1)):
        row = table.loc[(sample, explained, position)]
        assert row["value"] == pytest.approx(drawn.values[sample, explained, position].sum())
        assert row["token"] == ALPHABET[tokens[sample, position]]
    spans = run.token_attributions("each", 2, spans={"begin": (0, 2)})
    assert spans.loc[(1, 3), "begin"] == pytest.approx(drawn.values[1, 3, :2].sum(), abs=1e-6)
    card = next(c for c in album(view, at(view, step=2, batch="1")).cards if c.rows)
    assert card.words == tuple(ALPHABET[i] for i in tokens[1])
    per_token = drawn.values.astype(np.float64).sum(-1)
    bound = max(np.abs(run.picture("each", s).values.sum(-1)).max() for s in (0, 2))
    assert card.high == pytest.approx(bound, rel=1e-5)
    for i, (name, shares) in enumerate(card.rows):
        assert name == f"{i} {ALPHABET[tokens[1, i]]} \u2192 {ALPHABET[tokens[1, i + 1]]}"
        np.testing.assert_allclose(shares, per_token[1, i] / card.high, atol=1e-6)
    pane = PicturesPane(lambda **_: None)
    pane.refresh(Shown(view, at(view, step=2), "kind", "linear", expanded=None, follow=False))
    assert 'class="lens explained"' in pane.view.html

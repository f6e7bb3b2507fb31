"""The Pictures section shows the effects of interventions at each place."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import comgra_decl
from comgra_decl.viewer.model.effects import effect_tables
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.panes.pictures import PicturesPane
from tests.probing.attention import HEADS, TOKENS, Language

OUT = {"of": "eyes", "select": "blocks.*.attn.out", "role": "input", "do": {"patch": "other"}}
SPEC: dict[str, Any] = {
    "nodes": {"all": {"select": "**"}},
    "schedule": {"first": 100},
    "probes": {"eyes": {"samples": {"count": 4}, "schedule": {"first": 0, "every": 2}}},
    "interventions": {
        "no_mlp": {"of": "eyes", "select": "blocks.1.mlp", "do": "zero"},
        "heads": {**OUT, "sweep": ["head", "node"]},
        "places": {**OUT, "sweep": ["node", "head", "position"], "every": 2},
        "positions": {**OUT, "sweep": "position"},
        "wrong": {**OUT, "measure": 99, "do": "zero"},
    },
}


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    torch.manual_seed(0)
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with comgra_decl.trace(SPEC, root=tmp_path_factory.mktemp("runs")) as session:
        for _ in range(4):
            tokens = torch.randint(TOKENS, (6, 5))
            optimizer.zero_grad()
            logits = model(tokens)
            F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
    assert session.path is not None
    return RunView(comgra_decl.open_run(session.path))


def shown(view: RunView, **wanted: Any) -> Shown:
    at = replace(resolve(view, Selection(), {}), **wanted)
    return Shown(view, at, colour="kind", scale="linear", expanded=None, follow=False)


def test_each_intervention_is_a_table_at_its_nearest_record(view: RunView) -> None:
    tables = {t.title.partition(":")[0]: t for t in effect_tables(view, "eyes", 2)}
    assert [*tables] == ["no_mlp", "heads", "places", "positions", "wrong"]
    heads = tables["heads"]
    assert heads.nodes == ("blocks.0.attn.out", "blocks.1.attn.out")
    assert heads.columns == tuple(f"head {i}" for i in range(HEADS))
    means = view.run.effects("heads")["mean"]
    for i, node in enumerate(heads.nodes):
        for head in range(HEADS):
            assert heads.values is not None
            assert heads.values[i, head] == means[2, head, node]
    assert heads.most == np.abs(means).max()
    places = tables["places"]
    assert "at step 0" in places.note  # made at every second record of the probe
    assert places.rows[1] == "blocks.0.attn.out, head 1"
    assert len(places.columns) == 5
    assert places.values is not None
    assert places.values[1, 3] == view.run.effects("places", 0)["mean"][0, places.nodes[1], 1, 3]
    assert tables["positions"].rows == tuple(f"position {i}" for i in range(5))
    assert (tables["no_mlp"].rows, tables["no_mlp"].columns) == (("no_mlp",), ("effect",))
    assert "class 99 does not exist" in tables["wrong"].missing
    assert effect_tables(view, "ears", 2) == ()


def test_a_row_selects_its_node_and_cells_have_the_numbers(view: RunView) -> None:
    chosen: list[dict[str, Any]] = []
    pane = PicturesPane(lambda **changes: chosen.append(changes))
    pane.refresh(shown(view, step=2, node="head"))
    html = pane.view.html
    card = html[html.index("heads: effect on loss") :].partition("</table>")[0]
    cells = [float(cell) for cell in re.findall(r"<td[^>]*>([^<]+)</td>", card)]
    means = view.run.effects("heads", 2)["mean"].unstack("head")
    assert cells == [float(f"{mean:.2g}") for mean in means.to_numpy().ravel()]
    assert pane.view.check({"send": "node:blocks.1.attn.out"})
    pane._on_message({"send": "node:blocks.1.attn.out"})
    assert chosen == [{"node": "blocks.1.attn.out"}]


def test_without_interventions_the_lines_that_would_declare_some_are_shown(tmp_path: Path) -> None:
    spec = {key: value for key, value in SPEC.items() if key != "interventions"}
    torch.manual_seed(0)
    model = Language()
    with comgra_decl.trace(spec, root=tmp_path) as session:
        model(torch.randint(TOKENS, (6, 5))).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert session.path is not None
    pane = PicturesPane(lambda **_: None)
    pane.refresh(shown(RunView(comgra_decl.open_run(session.path))))
    assert "interventions:\n  no_mlp: {of: eyes, select:" in pane.view.html


@pytest.mark.browser
def test_the_browser_draws_the_tables(
    view: RunView, serve: Callable[..., str], page: Any, tmp_path: Path
) -> None:
    from playwright.sync_api import expect

    panel: Any = pytest.importorskip("panel")

    def make() -> Any:
        pane = PicturesPane(lambda **_: None)
        pane.refresh(shown(view, step=2, node="head"))
        panel.state.onload(lambda: pane.view.param.update(ready=True))
        return pane.panel

    page.goto(serve(make))
    page.wait_for_function("!!(window.Bokeh && Bokeh.documents[0]?.is_idle)")
    card = page.locator(".card", has=page.get_by_role("heading", name="heads: effect on loss"))
    expect(card.locator("tbody tr")).to_have_count(2)
    expect(card.locator("tbody td")).to_have_count(2 * HEADS)
    colours = card.locator("tbody td").evaluate_all(
        "all => all.map(cell => getComputedStyle(cell).backgroundColor)"
    )
    assert len(set(colours)) > 2
    page.screenshot(path=tmp_path / "effects.png", full_page=True)

"""The Pictures section shows the effects of interventions at each place."""

from __future__ import annotations

import base64
import html
import json
import re
import shlex
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
from comgra_decl.query import Run
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.circuits import circuit_drawing
from comgra_decl.viewer.model.compare import statistics_of
from comgra_decl.viewer.model.comparison_target import other_of
from comgra_decl.viewer.model.effects import effect_tables, place_effects
from comgra_decl.viewer.model.pictures import album
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.model.sheet import slot_of
from comgra_decl.viewer.page import create_page
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.panes.compare import ComparePane
from comgra_decl.viewer.panes.effects import cell_token
from comgra_decl.viewer.panes.pictures import PicturesPane
from comgra_decl.viewer.plotting import plotted, save
from tests.probing.attention import HEADS, TOKENS, Language
from tests.viewer.app.test_probe_pictures import pixels

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
        "paths": {
            **OUT,
            "into": ["blocks.*.attn", "blocks.*.mlp", "head"],
            "sweep": ["node", "head", "into"],
        },
    },
}


def traced(
    spec: dict[str, Any], root: Path, *, blocks: int = 2, positions: int = 5, steps: int = 4
) -> Run:
    """Return a run of a training that is the same each time."""
    torch.manual_seed(0)
    model = Language(blocks)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with comgra_decl.trace(spec, root=root) as session:
        for _ in range(steps):
            tokens = torch.randint(TOKENS, (6, positions))
            optimizer.zero_grad()
            logits = model(tokens)
            F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
    assert session.path is not None
    return comgra_decl.open_run(session.path)


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return RunView(traced(SPEC, tmp_path_factory.mktemp("runs")))


def shown(view: RunView, **wanted: Any) -> Shown:
    at = replace(resolve(view, Selection(), {}), **wanted)
    return Shown(view, at, colour="kind", scale="linear", expanded=None, follow=False)


def test_the_passes_of_effects_are_offered_for_effects_alone(view: RunView) -> None:
    (effects,) = (n for n in view.nodes if "effect" in view.roles(n))
    at = resolve(view, Selection(node=effects, role="effect"), {})
    assert at.gradient.startswith("effect:")
    assert view.passes(effects, "effect", 0).keys() >= {at.gradient}
    for node in {*view.nodes} - {effects}:
        for role in view.roles(node):
            elsewhere = resolve(view, replace(at, node=node, role=role), {})
            assert not elsewhere.gradient.startswith("effect:")
    assert not [p for p in view.gradient_passes() if not p.startswith(("grad", "update"))]


def test_each_intervention_is_a_table_at_its_nearest_record(view: RunView) -> None:
    tables = {t.title.partition(":")[0]: t for t in effect_tables(view, "eyes", 2)}
    assert [*tables] == ["no_mlp", "heads", "places", "positions", "wrong", "paths"]
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
    content = pane.view.html
    card = content[content.index("heads: effect on loss") :].partition("</table>")[0]
    cells = [float(cell) for cell in re.findall(r"<td[^>]*>([^<]+)</td>", card)]
    means = view.run.effects("heads", 2)["mean"].unstack("head")
    assert cells == [float(f"{mean:.2g}") for mean in means.to_numpy().ravel()]
    assert pane.view.check({"send": "node:blocks.1.attn.out"})
    pane._on_message({"send": "node:blocks.1.attn.out"})
    assert chosen == [{"node": "blocks.1.attn.out"}]


def test_a_cell_opens_the_samples_without_and_with_the_change(view: RunView) -> None:
    pane = PicturesPane(lambda **_: None)
    pane.refresh(shown(view, step=2, node="head"))
    token = cell_token("places", 5, 3)
    assert pane.view.check({"send": token})
    pane._on_message({"send": token})
    content = pane.view.html
    card = content[content.index("places: blocks.1.attn.out, head 1, position 3") :]
    rows = re.findall(r"<tr><th>(\d)[^<]*</th>(.*?)</tr>", card.partition("</table>")[0])
    facts = view.run.intervention_facts("places", 0)
    place = [(0, "blocks.1.attn.out", 1, 3)]
    (effects,) = view.run.effects("places", 0).loc[place, [*range(4)]].to_numpy()
    assert len(rows) == 4
    for number, cells in rows:
        numbers = [float(cell.replace("\u2212", "-")) for cell in re.findall(r"<td>([^<]+)", cells)]
        without, effect = facts["baseline"][int(number)], effects[int(number)]
        np.testing.assert_allclose(numbers, [without, without + effect, effect], rtol=1e-3)
    assert content.count('aria-selected="true"') == 1
    pane._on_message({"send": token})
    assert "without and with the change" not in pane.view.html
    pane._on_message({"send": cell_token("heads", 1, 2)})
    assert not pane.view.check({"send": cell_token("heads", 2, 0)})  # there are two modules
    line = re.search(r'Mean effect over steps.*?<polyline points="([^"]+)"', pane.view.html)
    assert line is not None
    assert len(line[1].split()) == 2  # steps 0 and 2
    assert re.search(r'<polygon points="(\S+ ){3}\S+" ', pane.view.html)  # up and down by the error


def test_a_cell_of_a_recorded_intervention_compares_it_with_the_unchanged_samples(
    view: RunView,
) -> None:
    catalogue = Catalogue(view.run.path.parent)
    catalogue.refresh()
    query = f"?section=pictures&step=2&node=head&run={view.run.path.name}"
    dashboard = Dashboard(catalogue, query=query)
    pane = PicturesPane(dashboard.change)
    pane.refresh(shown(view, step=2, node="head"))
    pane._on_message({"send": cell_token("no_mlp", 0, 0)})
    state = dashboard.state
    assert (state.section, state.colour) == ("compare", "difference")
    assert (state.type, state.other_type, state.step) == ("intervention:no_mlp", "probe:eyes", 2)
    assert state.node == "head"  # as before, since it is recorded
    pane.refresh(shown(view, step=2, node="loss"))  # not part of the model
    pane._on_message({"send": cell_token("no_mlp", 0, 0)})
    assert state.node == "blocks.1.mlp"  # which differs most
    (compare,) = dashboard.screen.sections["compare"].panes
    assert isinstance(compare, ComparePane)
    assert "this: intervention:no_mlp, step 2 \u00b7 other: probe:eyes, this run, step 2" in (
        compare.table.html
    )
    for node in ("blocks.0", "blocks.1.mlp", "head"):
        dashboard.change(node=node, role="output", statistic="std", batch="mean")
        found = re.search(r"<td>std</td><td>([^<]+)</td><td>([^<]+)</td>", compare.table.html)
        assert found is not None
        sides = [float(text.replace("\u2212", "-")) for text in found.groups()]
        for side, type_ in zip(sides, ("intervention:no_mlp", "probe:eyes"), strict=True):
            values = view.run.slot(node).value(2, type=type_).astype(np.float64)
            spread = values.reshape(len(values), -1).std(1).mean()
            assert side == pytest.approx(spread, rel=2e-3)
    painted: Any = dashboard.screen.graph.view.heat
    assert painted["embed"]["text"] == "0%"
    trained = view.structure(2, "")
    assert trained is not None
    assert trained.edges
    for type_ in ("intervention:no_mlp", "probe:eyes"):  # drawn with the edges of training
        assert view.structure(2, type_) == trained
    assert painted["head"]["text"] != "0%"
    assert album(view, replace(shown(view).at, type="intervention:no_mlp")).probe == "eyes"


def test_a_place_of_a_sweep_says_how_to_record_it(view: RunView, tmp_path: Path) -> None:
    (table,) = (t for t in effect_tables(view, "eyes", 2) if t.name == "places")
    found = place_effects(view, table, 5, 3)
    assert found is not None
    assert json.loads(found.entry) == {
        "of": "eyes", "select": "blocks.1.attn.out", "role": "input", "do": {"patch": "other"},
        "parts": {"head": {"only": [1]}, "position": {"only": [3]}},
    }  # fmt: skip
    run = traced({**SPEC, "interventions": {"here": json.loads(found.entry)}}, tmp_path)
    effects = run.effects("here", 0)[[*range(4)]].to_numpy()[0]
    np.testing.assert_allclose(effects, found.effects, atol=1e-6)
    (paths,) = (t for t in effect_tables(view, "eyes", 2) if t.name == "paths")
    path = place_effects(view, paths, 1, 4)
    assert path is not None
    entry = json.loads(path.entry)
    assert (entry["into"], entry["parts"]) == ({"select": "head"}, {"head": {"only": [1]}})
    pane = PicturesPane(lambda **_: None)
    pane.refresh(shown(view, step=2, node="head"))
    pane._on_message({"send": cell_token("places", 5, 3)})
    command = re.search(r"<code>([^<]+)</code>", pane.view.html)
    assert command is not None
    words = shlex.split(html.unescape(command[1]))
    assert words[:5] == ["comgra-decl", "look", "--step", "0", "RUN"]
    assert words[5] == f"interventions.here={found.entry}"


def test_compare_shows_a_changed_gradient_beside_the_unchanged_one(tmp_path: Path) -> None:
    cut = {"of": "eyes", "select": "blocks.1.mlp", "do": "zero", "pass": "grad"}
    view = RunView(traced({**SPEC, "interventions": {"cut": cut}}, tmp_path, steps=1))
    catalogue = Catalogue(tmp_path)
    catalogue.refresh()
    where = resolve(view, Selection(node="embed", step=0, statistic="std"), {})
    where = replace(where, type="intervention:cut")
    gradient = slot_of(view, where, "grad")
    other = other_of(catalogue, view, where, run="", step=0, type_="probe:eyes")
    pair = dict(statistics_of(view, gradient, other, where))["std"]
    for side, type_ in ((pair.here, "intervention:cut"), (pair.there, "probe:eyes")):
        assert side == view.run.slot("embed").grad.series("std", type=type_)[0]
    assert pair.here != pair.there


def test_a_cell_of_a_changed_gradient_compares_the_gradients(tmp_path: Path) -> None:
    cut: dict[str, Any] = {"of": "eyes", "select": "blocks.1.mlp", "do": "zero", "pass": "grad"}
    cut["measure"] = {"gradient": "embed"}
    view = RunView(traced({**SPEC, "interventions": {"cut": cut}}, tmp_path, steps=1))
    catalogue = Catalogue(view.run.path.parent)
    catalogue.refresh()
    query = f"?section=pictures&step=0&node=input&run={view.run.path.name}"
    dashboard = Dashboard(catalogue, query=query)
    pane = PicturesPane(dashboard.change)
    pane.refresh(shown(view, step=0, node="input"))
    pane._on_message({"send": cell_token("cut", 0, 0)})
    state = dashboard.state
    assert (state.section, state.pass_, state.type) == ("compare", "grad", "intervention:cut")
    painted: Any = dashboard.screen.graph.view.heat
    assert painted[state.node]["text"] != "0%", "the tensor that differs most is selected"


def test_the_gradient_of_a_parameter_is_one_number_for_all_samples(tmp_path: Path) -> None:
    cut = {**OUT, "do": "zero", "pass": "grad", "sweep": ["node", "head"]}
    cut["measure"] = {"gradient": "embed", "role": "weight"}
    view = RunView(traced({**SPEC, "interventions": {"cut": cut}}, tmp_path, steps=1))
    (table,) = effect_tables(view, "eyes", 0)
    assert table.note.startswith("one number for all samples at step 0")
    found = place_effects(view, table, 1, 2)
    assert found is not None
    assert found.labels == ("all samples",)
    assert found.measure == "norm of the gradient of loss at embed, weight"
    assert json.loads(found.entry)["pass"] == "grad"
    (effect,) = found.effects
    assert effect == view.run.effects("cut", 0)["mean"].loc[(0, "blocks.1.attn.out", 2)]
    pane = PicturesPane(lambda **_: None)
    pane.refresh(shown(view, step=0, node="head"))
    pane._on_message({"send": cell_token("cut", 1, 2)})
    assert "<tr><th>all samples</th><td>" in pane.view.html


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    """A sweep over 144 heads and 32 positions."""
    sweep = {
        **OUT,
        "parts": {"head": {"groups": 8}},
        "sweep": ["node", "head", "position"],
        "estimate": "gradient",
    }
    spec = {**SPEC, "nodes": {"head": {"select": "head"}}, "interventions": {"heads": sweep}}
    folder = tmp_path_factory.mktemp("wide")
    return RunView(traced(spec, folder, blocks=18, positions=32, steps=1))


@pytest.mark.slow
def test_a_sweep_of_4608_places_is_a_picture_with_a_pixel_for_each(wide: RunView) -> None:
    (table,) = effect_tables(wide, "eyes", 0)
    assert table.values is not None
    assert table.values.shape == (144, 32)
    means = wide.run.effects("heads", 0)["mean"].to_numpy()
    np.testing.assert_array_equal(table.values.ravel(), means)
    pane = PicturesPane(lambda **_: None)
    pane.refresh(shown(wide, step=0))
    drawn = re.search(r'<image href="([^"]+)".*?data-values="([^"]+)"', pane.view.html)
    assert drawn is not None
    sent = np.frombuffer(base64.b64decode(drawn[2]), "<f4")
    np.testing.assert_array_equal(sent, means.astype(np.float32))
    image = pixels(drawn[1])
    assert image.shape == (144, 32, 3)
    strongest = np.unravel_index(np.abs(table.values).argmax(), (144, 32))
    end = [0x24, 0x63, 0xAD] if table.values[strongest] < 0 else [0xD1, 0x56, 0x1F]
    assert image[strongest].tolist() == end
    zero = table.values == 0
    assert (image[zero] == 255).all()
    assert len(pane.view.html) < 100_000
    token = cell_token("heads", 143, 31)
    assert pane.view.check({"send": token})
    for wrong in ("place:heads:144:0", "place:heads:0:32", "place:heads:-1:0", "place:heads:x:0",
                  "place:heads:1", "place:other:0:0"):  # fmt: skip
        assert not pane.view.check({"send": wrong})
    pane._on_message({"send": token})
    assert "heads: blocks.17.attn.out, head 7, position 31" in pane.view.html


@pytest.mark.browser
@pytest.mark.slow
def test_the_browser_points_at_cells_of_a_picture(
    wide: RunView, serve: Callable[..., str], page: Any, tmp_path: Path
) -> None:
    from playwright.sync_api import expect

    panel: Any = pytest.importorskip("panel")

    def make() -> Any:
        pane = PicturesPane(lambda **_: None)
        pane.refresh(shown(wide, step=0))
        panel.state.onload(lambda: pane.view.param.update(ready=True))
        return pane.panel

    page.goto(serve(make))
    page.wait_for_function("!!(window.Bokeh && Bokeh.documents[0]?.is_idle)")
    card = page.locator(".card", has=page.get_by_role("heading", name="heads: effect on loss"))
    picture = card.locator("image")
    box = picture.bounding_box()
    means = wide.run.effects("heads", 0)["mean"].to_numpy().reshape(144, 32)
    picture.hover(position={"x": 10.5 / 32 * box["width"], "y": 100.5 / 144 * box["height"]})
    said = card.locator("output")
    expect(said).to_contain_text("blocks.12.attn.out, head 4, position 10: ")
    value = float(said.inner_text().rpartition(": ")[2])
    assert value == pytest.approx(means[100, 10], rel=6e-3)
    picture.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(said).to_contain_text("blocks.12.attn.out, head 5, position 11: ")
    page.keyboard.press("Enter")
    place = page.locator(".card", has=page.get_by_role("heading", name="heads: blocks"))
    expect(place.get_by_role("heading")).to_have_text(
        "heads: blocks.12.attn.out, head 5, position 11"
    )
    page.keyboard.press("ArrowUp")  # the picture has kept the focus and the place
    expect(said).to_contain_text("blocks.12.attn.out, head 4, position 11: ")
    expect(page.locator("rect.chosen")).to_have_count(1)
    page.screenshot(path=tmp_path / "wide.png", full_page=True)


def test_places_of_each_form_of_sweep_have_the_effects_of_their_cell(view: RunView) -> None:
    for table in effect_tables(view, "eyes", 2):
        if table.values is None:
            continue
        for row, column in np.ndindex(table.values.shape):
            found = place_effects(view, table, row, column)
            assert found is not None
            assert found.effects.mean() == pytest.approx(table.values[row, column], abs=1e-9)
            assert found.node == table.nodes[row]
    assert place_effects(view, table, 99, 0) is None


def test_paths_are_drawn_as_a_circuit_from_left_to_right(view: RunView) -> None:
    (table,) = (t for t in effect_tables(view, "eyes", 2) if t.name == "paths")
    assert table.rows[1] == "blocks.0.attn.out, head 1"
    assert table.columns == tuple(
        f"\u2192 {path}"
        for path in ("blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp", "head")
    )
    drawing = circuit_drawing(view, table, 10)
    assert drawing is not None
    circuit = view.run.circuit("paths", table.step, strongest=10)
    assert drawing.circuit == circuit
    assert {*drawing.spots} == {*circuit.nodes}
    pairs = [*((x.source, x.sink) for x in circuit.links), *circuit.parts]
    for source, sink in pairs:
        a, b = drawing.spots[source], drawing.spots[sink]
        assert a.x + a.width < b.x
        for left, right, y in drawing.lanes[source, sink]:
            assert a.x + a.width < left < right < b.x
            crossed = [s for s in drawing.spots.values() if s.x < right and left < s.x + s.width]
            assert crossed  # it passes a column,
            assert not any(s.y < y < s.y + s.height for s in crossed)  # between its boxes
    assert any(drawing.lanes.values())
    boxes = [*drawing.spots.values()]
    assert all(b.x >= 0 and b.x + b.width <= drawing.width for b in boxes)
    assert all(b.y >= 0 and b.y + b.height <= drawing.height for b in boxes)
    assert [circuit_drawing(view, t, 10) for t in effect_tables(view, "eyes", 2)][:5] == [None] * 5
    pane = PicturesPane(lambda **_: None)
    pane.refresh(shown(view, step=2, node="head"))
    svg = pane.view.html[pane.view.html.index('class="circuit"') :].partition("</svg>")[0]
    assert svg.count("stroke-width") == 10
    pane._on_message({"send": "strongest:30"})
    svg = pane.view.html[pane.view.html.index('class="circuit"') :].partition("</svg>")[0]
    assert svg.count("stroke-width") == len(view.run.circuit("paths", 2, strongest=30).links)


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
@pytest.mark.slow
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
    cell = card.locator("tbody td").first
    cell.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.set_viewport_size({"width": 900, "height": 420})  # of which the tables take more
    page.keyboard.press("Enter")
    place = page.locator(".card", has=page.get_by_role("heading", name="heads: blocks.1.attn.out"))
    expect(place.get_by_role("heading")).to_have_text("heads: blocks.1.attn.out, head 1")
    expect(place.locator("tbody tr")).to_have_count(4)
    course = place.get_by_role("img", name="Mean effect over steps")
    expect(course.locator("polyline")).to_have_count(1)
    expect(course.locator("polygon")).to_have_count(1)  # the band of the error over the samples
    expect(page.locator("td[aria-selected]")).to_have_count(1)
    circuit = page.locator(".card", has=page.get_by_role("heading", name="paths: circuit"))
    expect(circuit.locator("svg.circuit path[stroke]")).to_have_count(10)
    circuit.get_by_role("button", name="30").click()
    expect(circuit.locator("svg.circuit path[stroke]")).to_have_count(24)
    circuit.screenshot(path=tmp_path / "circuit.png")
    place.screenshot(path=tmp_path / "place.png")
    page.screenshot(path=tmp_path / "effects.png", full_page=True)


@pytest.mark.browser
def test_a_click_in_the_page_shows_both_sides_in_compare_and_on_the_graph(
    view: RunView, serve: Callable[..., str], page: Any, tmp_path: Path
) -> None:
    from playwright.sync_api import expect

    address = serve(lambda: create_page([str(view.run.path.parent)]))
    page.goto(f"{address}?section=pictures&step=2&node=head")
    card = page.locator(".card", has=page.get_by_role("heading", name="no_mlp: effect on loss"))
    card.locator("tbody td").click()
    sides = "this: intervention:no_mlp, step 2 \u00b7 other: probe:eyes, this run, step 2"
    expect(page.get_by_text(sides)).to_be_visible()
    table = page.locator("table", has=page.get_by_role("cell", name="std", exact=True)).first
    row = table.locator("tr", has=page.get_by_role("cell", name="std", exact=True))
    texts = row.locator("td").all_inner_texts()[1:3]
    numbers = [float(text.replace("\u2212", "-")) for text in texts]
    for side, type_ in zip(numbers, ("intervention:no_mlp", "probe:eyes"), strict=True):
        values = view.run.slot("head").value(2, type=type_).astype(np.float64)
        assert side == pytest.approx(values.reshape(4, -1).std(1).mean(), rel=2e-3)
    expect(page.locator('.node[data-id="embed"] .value')).to_have_text("0%")
    expect(page.locator('.node[data-id="head"] .value')).not_to_have_text("0%")
    page.screenshot(path=tmp_path / "compare.png")
    page.goto(f"{address}?section=inspect&step=2&node=head&colour=effects:paths&open=blocks")
    expect(page.locator(".legend")).to_contain_text("effects of paths on loss, step 2")
    lines = page.locator(".flow path")
    expect(lines).not_to_have_count(0)
    widths = lines.evaluate_all("all => all.map(e => parseFloat(getComputedStyle(e).strokeWidth))")
    assert max(widths) == 9  # the edge with the largest effect
    assert len(set(widths)) > 1


def check_curve(plot: Any, label: str, effects: Any) -> None:
    """Check a curve and its band against a table of `Run.effects` in one place."""
    (curve,) = (e for e in plot if type(e).__name__ == "Curve" and e.label == label)
    (band,) = (e for e in plot if type(e).__name__ == "Area" and e.label == label)
    np.testing.assert_array_equal(curve["step"], effects.index)
    np.testing.assert_allclose(curve["effect"], effects["mean"])
    samples = effects[[*range(4)]].to_numpy()
    error = samples.std(1, ddof=1) / 2  # of 4 samples
    np.testing.assert_allclose(band["low"], effects["mean"] - error)
    np.testing.assert_allclose(band["high"], effects["mean"] + error)


def test_the_strongest_places_of_a_sweep_are_curves_by_step(view: RunView, tmp_path: Path) -> None:
    run, plots = view.run, plotted(view.run)
    plot = plots.effects("heads", strongest=3)
    table: Any = run.effects("heads")
    largest = table["mean"].abs().unstack("step").max(axis=1).sort_values(ascending=False)
    labels = [e.label for e in plot if type(e).__name__ == "Curve"]
    assert labels == [f"head {head}, {node}" for head, node in largest.index[:3]]
    for (head, node), label in zip(largest.index[:3], labels, strict=True):
        check_curve(plot, label, table.xs((head, node), level=("head", "node")))
    at_0 = table.loc[0]["mean"].abs().idxmax()
    first = plots.effects("heads", strongest=1, step=0)
    assert [e.label for e in first if type(e).__name__ == "Curve"] == [f"head {at_0[0]}, {at_0[1]}"]
    for backend in ("curves.svg", "curves.html"):
        assert save(plot, tmp_path / backend).stat().st_size
    with pytest.raises(ValueError, match="strongest must be at least 1, got 0"):
        plots.effects("heads", strongest=0)


def test_effects_are_plotted_with_their_numbers(view: RunView, tmp_path: Path) -> None:
    run, plots = view.run, plotted(view.run)
    heads = plots.effects("heads", step=2)
    table: Any = run.effects("heads", 2)["mean"]
    names = [str(dimension) for dimension in heads.dimensions()]
    assert names == ["column", "row", "effect", "head", "node"]
    shown_ = heads.dframe().set_index(["head", "node"])["effect"]
    for (_, head, node), value in table.items():
        assert shown_[str(head), str(node)] == pytest.approx(value)
    places = plots.effects("places")
    assert len(places.dframe()) == len(run.effects("places", 0))
    assert len(plots.effects("positions").dframe()) == 5
    check_curve(plots.effects("no_mlp"), "no_mlp", run.effects("no_mlp"))
    for name in ("heads", "places", "positions", "no_mlp", "paths"):
        assert save(plots.effects(name), tmp_path / f"{name}.svg").stat().st_size
    with pytest.raises(UnknownNameError, match="did you mean 'heads'"):
        plots.effects("haeds")

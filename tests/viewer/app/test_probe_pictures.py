"""The Pictures section shows the samples of a probe and the pictures of the selected one."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import holoviews as hv
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comgra_decl
from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Run
from comgra_decl.viewer.elements import picture_of
from comgra_decl.viewer.model.brushing import NOTHING, Brush
from comgra_decl.viewer.model.clouds import Cloud
from comgra_decl.viewer.model.compare import ranking_of
from comgra_decl.viewer.model.comparison_target import Other
from comgra_decl.viewer.model.drawing import Drawing
from comgra_decl.viewer.model.gallery import Tile
from comgra_decl.viewer.model.images import png
from comgra_decl.viewer.model.pictures import Album, album
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.panes.gallery import CSS as GALLERY
from comgra_decl.viewer.panes.gallery import gallery
from comgra_decl.viewer.panes.pictures import PicturesPane
from comgra_decl.viewer.panes.record_cards import record_card
from comgra_decl.viewer.plotting import plotted
from tests.viewer.app.test_reachable import FAINT, FAULTS

SPEC: dict[str, Any] = {
    "nodes": {"all": {"select": "**"}},
    "schedule": {"first": 100},
    "probes": {
        "eyes": {
            "samples": {"count": 6, "by": "target"},
            "schedule": {"first": 0, "every": 2},
            "show": {"image": {"mean": [0.5], "std": [0.25]}},
        }
    },
    "pictures": {
        "cam": {"method": "grad_cam", "of": "eyes", "select": "0", "target": "label"},
        "guided": {"method": "guided_backprop", "of": "eyes"},
    },
}


def trained(root: Path, spec: dict[str, Any]) -> RunView:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with comgra_decl.trace(spec, root=root) as session:
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.randn(9, 1, 6, 6)), torch.arange(9) % 3).backward()
            optimizer.step()
    assert session.path is not None
    return RunView(comgra_decl.open_run(session.path))


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return trained(tmp_path_factory.mktemp("runs"), SPEC)


def at(view: RunView, **wanted: Any) -> Selection:
    return replace(resolve(view, Selection(), {}), **wanted)


def shown(view: RunView, **wanted: Any) -> Shown:
    chosen = at(view, **wanted)
    return Shown(view, chosen, colour="kind", scale="linear", expanded=None, follow=False)


def pixels(source: str) -> Any:
    """Decode the only form of PNG that the section writes."""
    content = base64.b64decode(source.removeprefix("data:image/png;base64,"))
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    start = content.index(b"IDAT") + 4
    lines = np.frombuffer(zlib.decompress(content[start:]), np.uint8).reshape(height, -1)
    return lines[:, 1:].reshape(height, width, 3)


def test_an_image_survives_its_encoding() -> None:
    image = np.random.default_rng(0).integers(256, size=(5, 7, 3), dtype=np.uint8)
    assert (pixels(png(image)) == image).all()


def test_the_gallery_holds_input_label_prediction_and_loss_at_the_nearest_record(
    probed: RunView,
) -> None:
    run: Run = probed.run
    found = album(probed, at(probed, step=3))
    assert (found.probe, found.step) == ("eyes", 2)
    scores = torch.from_numpy(run.value("Sequential", 2, type="probe:eyes"))
    given = run.slot("input", role="input").value(2, type="probe:eyes")
    assert len(found.tiles) == 6
    for tile in found.tiles:
        label = run.samples(2, type="probe:eyes")["label"][tile.sample]
        assert tile.label == label
        assert tile.prediction == str(int(scores[tile.sample].argmax()))
        wanted = F.cross_entropy(scores[tile.sample], torch.tensor(int(label)))
        assert tile.loss == pytest.approx(float(wanted), rel=1e-5)
        grey = np.clip(given[tile.sample, 0] * 0.25 + 0.5, 0, 1) * 255
        assert np.abs(pixels(tile.image)[..., 0] - grey).max() <= 0.51


def test_a_picture_has_one_scale_for_all_steps_and_says_why_if_there_is_none(
    probed: RunView,
) -> None:
    largest = max(np.abs(probed.run.picture("cam", step).values).max() for step in (0, 2, 4))
    for step in (0, 4):
        cards = {
            card.title.partition(":")[0]: card
            for card in album(probed, at(probed, step=step)).cards
        }
        assert cards["cam"].high == -cards["cam"].low == pytest.approx(largest)
        assert "defined for ReLU" in cards["guided (guided_backprop)"].missing


def test_the_cloud_of_the_selected_node_keeps_its_frame_between_steps(probed: RunView) -> None:
    clouds = [album(probed, at(probed, step=step, node="0")).cloud for step in (0, 4)]
    first, second = clouds
    assert isinstance(first, Cloud)
    assert isinstance(second, Cloud)
    assert (first.low, first.high, first.steps) == (second.low, second.high, 3)
    assert (first.points != second.points).any()


def test_a_click_selects_the_sample_for_all_sections(probed: RunView) -> None:
    chosen: list[dict[str, Any]] = []
    pane = PicturesPane(lambda **changes: chosen.append(changes))
    pane.refresh(shown(probed, batch="2"))
    assert 'data-send="sample:2" aria-pressed="true"' in pane.view.html
    assert len(re.findall(r'data-send="sample:\d" aria-pressed="true"', pane.view.html)) == 1
    assert pane.view.check({"send": "sample:4"})
    assert not pane.view.check({"send": "sample:6"})
    pane._on_message({"send": "sample:4"})
    assert chosen == [{"batch": "4"}]


def test_without_a_probe_the_section_names_the_lines_that_would_fill_it(tmp_path: Path) -> None:
    view = trained(tmp_path, {"nodes": SPEC["nodes"]})
    pane = PicturesPane(lambda **_: None)
    pane.refresh(shown(view))
    assert "probes:\n  eyes: {samples: {count: 8}}" in pane.view.html


@pytest.mark.browser
def test_the_browser_draws_the_pictures_and_reports_the_chosen_sample(
    probed: RunView, serve: Callable[..., str], page: Any
) -> None:
    from playwright.sync_api import expect

    panel: Any = pytest.importorskip("panel")

    def make() -> Any:
        def act(**changes: Any) -> None:
            pane.refresh(shown(probed, node="0", step=4, **changes))

        pane = PicturesPane(act)
        act()
        panel.state.onload(lambda: pane.view.param.update(ready=True))
        return pane.panel

    page.goto(serve(make))
    page.wait_for_function("!!(window.Bokeh && Bokeh.documents[0]?.is_idle)")
    expect(page.get_by_role("heading", name="Probe eyes at step 4")).to_be_visible()
    images = page.locator(".gallery img, .cards img")
    expect(images).to_have_count(10)  # six samples, one picture, and three feature maps
    sizes = images.evaluate_all("all => all.map(image => image.naturalWidth)")
    assert sizes[:7] == [6] * 6 + [4]
    expect(page.locator('.cards g[data-send^="sample:"]')).to_have_count(6)
    sample = page.get_by_role("button", name="sample 4")
    expect(sample).to_have_attribute("aria-pressed", "false")
    sample.press("Enter")
    expect(sample).to_have_attribute("aria-pressed", "true")


@pytest.mark.browser
@pytest.mark.slow
def test_a_line_drawn_around_points_brushes_their_samples(
    probed: RunView, serve: Callable[..., str], page: Any
) -> None:
    from playwright.sync_api import expect

    panel: Any = pytest.importorskip("panel")
    brushes: list[Brush] = []

    def make() -> Any:
        def act(brush: Brush = NOTHING, **changes: Any) -> None:
            brushes.append(brush)
            pane.refresh(replace(shown(probed, node="0", step=4, **changes), brush=brush))

        pane = PicturesPane(act)
        act(Brush.of(steps=[2]))
        panel.state.onload(lambda: pane.view.param.update(ready=True))
        return pane.panel

    page.goto(serve(make))
    page.wait_for_function("!!(window.Bokeh && Bokeh.documents[0]?.is_idle)")
    cloud = page.locator("svg.points")
    cloud.scroll_into_view_if_needed()
    boxes = {
        int(number): (x, y)
        for number, x, y in cloud.locator("g").evaluate_all(
            """all => all.map(mark => {
                const { x, y, width, height } = mark.getBoundingClientRect();
                return [mark.dataset.mark, x + width / 2, y + height / 2];
            })"""
        )
    }
    order = sorted(boxes, key=lambda i: boxes[i][0])
    frame = cloud.bounding_box()
    left, right = frame["x"] - 5, (boxes[order[2]][0] + boxes[order[3]][0]) / 2
    top, bottom = frame["y"] + 1, frame["y"] + frame["height"] - 1
    page.mouse.move(frame["x"] + 1, top)
    page.mouse.down()
    for x, y in ((right, top), (right, bottom), (left, bottom), (left, top)):
        page.mouse.move(x, y, steps=4)
    page.mouse.up()
    tiles = page.locator(".tile.brushed")
    expect(tiles).to_have_count(3)
    assert brushes[-1] == Brush.of(samples=order[:3], steps=[2])  # those of steps stay
    expect(cloud.locator("g.brushed")).to_have_count(3)
    cloud.locator(f'[data-mark="{order[0]}"]').press("Shift+Enter")
    expect(tiles).to_have_count(2)
    cloud.locator(f'[data-mark="{order[5]}"]').press("Shift+Enter")
    expect(tiles).to_have_count(3)
    assert brushes[-1].samples == tuple(sorted([order[1], order[2], order[5]]))
    page.get_by_role("button", name="none", exact=True).press("Enter")
    expect(tiles).to_have_count(0)
    cloud.locator(f'[data-mark="{order[0]}"]').press("Enter")  # still selects the sample
    chosen = page.get_by_role("button", name=f"sample {order[0]}")
    expect(chosen).to_have_attribute("aria-pressed", "true")


def test_only_samples_of_the_probe_can_be_brushed(probed: RunView) -> None:
    pane = PicturesPane(lambda **_: None)
    pane.refresh(shown(probed, node="0"))
    for sent in ("lasso:", "lasso:0,5", "lasso:3"):
        assert pane.view.check({"send": sent})
    for sent in (
        "lasso:6",
        "lasso:-1",
        "lasso:1,,2",
        "lasso:x",
        "lasso",
        "lasso:1, 2",
        "cloud:1,2",
    ):
        assert not pane.view.check({"send": sent})


@pytest.mark.browser
@pytest.mark.slow
def test_the_page_paints_the_numbers_of_the_run(
    probed: RunView, serve: Callable[..., str], page: Any
) -> None:
    panel: Any = pytest.importorskip("panel")

    def make() -> Any:
        pane = PicturesPane(lambda **_: None)
        pane.refresh(shown(probed, node="0", step=4, batch="2"))
        panel.state.onload(lambda: pane.view.param.update(ready=True))
        return pane.panel

    page.goto(serve(make))
    page.wait_for_function("!!(window.Bokeh && Bokeh.documents[0]?.is_idle)")
    heading = page.get_by_role("heading", name="feature maps: 0")
    maps = page.locator(".card", has=heading).locator("img")
    assert maps.count() == 3
    values = probed.run.value("0", 4, type="probe:eyes")[2]
    steps = (0, 2, 4)
    most = max(np.abs(probed.run.value("0", step, type="probe:eyes")).max() for step in steps)
    for image, channel in zip(maps.all(), np.argsort(-values.mean((1, 2))), strict=True):
        painted = np.array(image.evaluate(PAINTED), np.float64).reshape(4, 4, 4)
        share = values[channel] / most
        zero, ends = np.full(3, 255.0), np.array([[0x24, 0x63, 0xAD], [0xD1, 0x56, 0x1F]], float)
        end = ends[(share > 0).astype(int)]
        wanted = zero + np.abs(share)[..., None] * (end - zero)
        np.testing.assert_allclose(painted[..., :3], wanted, atol=1)


@pytest.mark.browser
@pytest.mark.slow
def test_every_card_can_be_read_and_worked_without_a_mouse(
    probed: RunView, serve: Callable[..., str], page: Any
) -> None:
    panel: Any = pytest.importorskip("panel")

    def make() -> Any:
        pane = PicturesPane(lambda **_: None)
        brush = Brush.of(samples=[1, 2])
        pane.refresh(replace(shown(probed, node="0", step=4, batch="2"), brush=brush))
        panel.state.onload(lambda: pane.view.param.update(ready=True))
        return pane.panel

    page.goto(serve(make))
    page.wait_for_function("!!(window.Bokeh && Bokeh.documents[0]?.is_idle)")
    assert page.locator(".card").count() > 10
    assert page.evaluate(FAULTS) + page.evaluate(FAINT) == []


PAINTED = """async image => {
  await image.decode();
  const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  return [...context.getImageData(0, 0, canvas.width, canvas.height).data];
}"""


def test_compare_ranks_two_records_of_a_probe(probed: RunView) -> None:
    chosen = {"statistic": "mean", "auto_statistic": False, "auto_batch": False}
    here = at(probed, type="probe:eyes", step=4, **chosen)
    other = Other("", probed, 0, type="probe:eyes")
    rows = ranking_of(probed, other, here, "forward", most=20).rows
    assert {row.slot.node for row in rows} >= {"0", "1", "3"}
    for row in rows:
        slot = probed.run.slot(row.slot.node, role=row.slot.role)
        wanted = [float(slot.value(step, type="probe:eyes").mean()) for step in (4, 0)]
        assert [row.pair.here, row.pair.there] == pytest.approx(wanted, abs=1e-5)


def test_a_picture_is_plotted_with_its_numbers(probed: RunView) -> None:
    run, step = probed.run, 4
    values = run.picture("cam", step).values
    image = plotted(run).picture("cam", step=step, sample=3)
    np.testing.assert_allclose(image.dimension_values("value", flat=False), values[3])
    with pytest.raises(UnknownNameError, match="no sample 6; there are 6"):
        plotted(run).picture("cam", sample=6)


def test_cells_are_drawn_at_their_names(probed: RunView) -> None:
    """The first row is on top, in images and in the browser."""
    wanted = probed.run.picture("likeness", 4)
    names = wanted.labels["node"]
    element = plotted(probed.run).picture("likeness", step=4)
    figure = hv.render(element, backend="bokeh")
    assert figure.y_range.start > figure.y_range.end  # row 0 is on top
    (source,) = (r.data_source.data for r in figure.renderers)
    ticks = figure.yaxis[0].major_label_overrides
    bottoms, tops = source["bottom"], source["top"]
    for low, high, value, column in zip(
        bottoms, tops, source["value"], source["other_node"], strict=True
    ):
        row = names.index(ticks[round((low + high) / 2)])
        assert value == pytest.approx(wanted.values[row, names.index(column)])
    axes = hv.render(element, backend="matplotlib").axes[0]
    drawn = {
        kind: {round(tick): text.get_text() for tick, text in zip(ticks, texts, strict=True)}
        for kind, ticks, texts in (
            ("x", axes.get_xticks(), axes.get_xticklabels()),
            ("y", axes.get_yticks(), axes.get_yticklabels()),
        )
    }
    (mesh,) = axes.collections
    corners = mesh.get_coordinates()
    middles = (corners[:-1, :-1] + corners[1:, 1:]) / 2
    cells = mesh.get_array().reshape(middles.shape[:2])
    for (x, y), value in zip(middles.reshape(-1, 2), cells.ravel(), strict=True):
        row, place = names.index(drawn["y"][round(y)]), names.index(drawn["x"][round(x)])
        assert value == pytest.approx(wanted.values[row, place])
    low, high = axes.get_ylim()
    assert low > high  # row 0 is on top


def test_plotted_pictures_name_nodes_and_steps(probed: RunView) -> None:
    run, plots = probed.run, plotted(probed.run)
    likeness = plots.picture("likeness", step=4)
    names = run.picture("likeness", 4).labels["node"]
    table = likeness.dframe()
    assert [*dict.fromkeys(table["node"])] == names
    cell = table[(table["node"] == names[1]) & (table["other node"] == names[0])]["value"]
    np.testing.assert_allclose(cell, run.picture("likeness", 4).values[0, 1])
    over = plots.picture("likeness_over_steps", node="0").dframe()
    steps = run.picture("likeness_over_steps", node="0").labels["step"]
    assert {*over["step"]} == {*map(str, steps)}
    confusion = plots.picture("confusion").dframe()
    assert {*confusion["class"]} == {"0", "1", "2"}
    assert confusion["value"].sum() == len(run.samples(4, type="probe:eyes"))  # of one step
    flow = run.picture("flow", 4).labels["node"]
    assert len({*flow}) == len(flow)
    assert [*plots.picture("flow", step=4).dframe()["node"]] == flow


def test_a_reliability_diagram_is_bars_against_the_diagonal(probed: RunView) -> None:
    bars, diagonal = plotted(probed.run).picture("reliability", step=4)
    sure, right, counts = probed.run.picture("reliability", 4).values.T
    assert (bars.edges == np.linspace(0, 1, 11)).all()
    np.testing.assert_array_equal(bars.dimension_values("accuracy"), right)
    np.testing.assert_array_equal(bars.dimension_values("mean confidence"), sure)
    assert bars.dimension_values("samples").sum() == counts.sum() == 6
    assert [*map(tuple, diagonal.array())] == [(0, 0), (1, 1)]


def test_linear_probes_are_a_line_over_the_layers_for_each_step(probed: RunView) -> None:
    found = probed.run.picture("linear_probe")
    lines = plotted(probed.run).picture("linear_probe")
    assert [*lines.keys()] == found.labels["step"] == [0, 2, 4]
    for step, values in zip(found.labels["step"], found.values, strict=True):
        np.testing.assert_array_equal(lines[step].dimension_values("accuracy"), values)
        assert [*lines[step].dimension_values("node")] == found.labels["node"]


def test_the_section_draws_reliability_and_linear_probes(probed: RunView) -> None:
    pane = PicturesPane(lambda **_: None)
    pane.refresh(shown(probed, step=4))
    page = ET.fromstring(f"<p>{re.sub('<img[^>]*>', '', pane.view.html).replace('<br>', '')}</p>")
    bars, line = page.iterfind(".//svg[@class='curve bars']"), page.find(".//svg[path]")
    (drawing,) = bars
    accuracy = probed.run.picture("reliability", 4).values[:, 1]
    heights = [float(bar.get("height", "")) / 190 for bar in drawing.iterfind("rect")]
    assert heights == pytest.approx(accuracy[np.isfinite(accuracy)].tolist(), abs=1e-3)
    samples = probed.run.picture("reliability", 4).values[:, 2]
    histogram = page.find(".//svg[@class='curve counts']")
    assert histogram is not None
    high = [float(bar.get("height", "")) for bar in histogram.iterfind("rect")]
    whole = float(histogram.get("height", ""))
    wanted = [whole * count / samples.max() for count in samples if count]
    assert high == pytest.approx(wanted, abs=0.1)
    probes = probed.run.picture("linear_probe", 4)
    assert line is not None
    dots = [*line.iterfind("circle")]
    assert [dot.get("data-send") for dot in dots] == [f"node:{n}" for n in probes.labels["node"]]
    up = [1 - (float(dot.get("cy", "")) - 8) / (190 - 16) for dot in dots]
    assert up == pytest.approx(probes.values[0].tolist(), abs=1e-3)


def test_a_picture_keeps_its_shape_in_a_page_of_any_width(probed: RunView) -> None:
    figure = hv.render(plotted(probed.run).picture("cam"), backend="bokeh")
    assert figure.frame_width == figure.frame_height  # of 4 x 4 cells
    assert figure.sizing_mode is None


def test_tiles_are_numbered_at_the_axes(probed: RunView) -> None:
    view = probed.run.slot("1").plot.preview(int(probed.run.steps[0]), sample=0)  # 3 channels
    figure = hv.render(view, backend="bokeh")
    assert figure.xaxis[0].major_label_overrides == {2: "0", 7: "1"}
    assert figure.yaxis[0].major_label_overrides == {2: "0", 7: "2"}
    assert figure.yaxis[0].axis_label.startswith("first channel of the row")


def test_a_colour_bar_of_small_numbers_leaves_the_title_readable() -> None:
    pytest.importorskip("matplotlib")
    values = np.linspace(-1e-6, 1e-6, 16).reshape(4, 4)
    figure = hv.render(
        picture_of(Drawing("map", values, "", down="height", across="width"), "title"),
        backend="matplotlib",
    )
    figure.canvas.draw()
    assert [axes.yaxis.get_offset_text().get_text() for axes in figure.axes] == ["", ""]


def test_a_likeness_of_too_few_samples_says_how_many_it_needs(tmp_path: Path) -> None:
    few = {**SPEC["probes"]["eyes"], "samples": {"count": 3}}
    view = trained(tmp_path, {**SPEC, "probes": {"eyes": few}})
    (likeness,) = (c for c in album(view, at(view, step=4)).computed if c.name == "likeness")
    assert likeness.picture is None
    assert "at least four samples" in likeness.why
    assert "samples: {count: 8}" in likeness.lines


def test_a_likeness_says_how_many_samples_it_compares(tmp_path: Path) -> None:
    view = trained(tmp_path, SPEC)
    (likeness,) = (c for c in album(view, at(view, step=4)).computed if c.name == "likeness")
    assert "6 samples" in record_card(likeness)


def test_an_intervention_without_a_record_says_why(tmp_path: Path) -> None:
    """A regression, whose loss cannot be measured for each sample."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    made = {"of": "eyes", "select": "1", "do": "zero"}
    spec: dict[str, Any] = {
        "nodes": {"all": {"select": "**"}},
        "probes": {"eyes": {"samples": {"count": 3}, "schedule": {"first": 9}}},
        "interventions": {"units": {**made, "sweep": "feature"}},
    }
    for name, interventions in (("a", spec["interventions"]), ("b", {}), ("c", {"whole": made})):
        with comgra_decl.trace({**spec, "interventions": interventions}, root=tmp_path / name) as s:
            for _ in range(2):
                optimizer.zero_grad()
                (net(torch.randn(9, 3)) - 1).abs().pow(1.5).mean().backward()
                optimizer.step()
        assert s.path is not None
        view = RunView(comgra_decl.open_run(s.path))
        pane = PicturesPane(lambda **_: None)
        pane.refresh(shown(view, step=1))
        html = pane.view.html
        assert ("No intervention is declared" in html) == (name == "b")
        assert ("There is no intervention units" in html) == (name == "a")
        if name == "a":
            (warning,) = [w for w in view.run.report["warnings"] if "intervention 'units'" in w]
            assert "is not made" in warning
            assert warning in unescape(html)


def test_the_scale_of_a_magnitude_begins_at_0(tmp_path: Path) -> None:
    pictures = {
        "amount": {"method": "saliency", "of": "eyes"},
        "signed": {"method": "input_x_gradient", "of": "eyes"},
    }
    view = trained(tmp_path, {**SPEC, "pictures": pictures})
    cards = {card.title.partition(":")[0]: card for card in album(view, at(view, step=2)).cards}
    values = view.run.picture("amount", 2).values.sum(1)  # one channel
    assert cards["amount"].low == 0.0
    assert cards["amount"].high >= np.abs(values).max() * (1 - 1e-6)
    assert cards["signed"].low == -cards["signed"].high < 0
    pane = PicturesPane(lambda **_: None)
    pane.refresh(shown(view, step=2))
    assert pane.view.html.count('class="ramp up"') == 1
    assert 'class="ramp"' in pane.view.html


def test_a_long_category_stays_in_its_tile(open_page: Callable[..., Any]) -> None:
    tile = Tile(sample=0, label="a" * 60, prediction="b" * 60)
    page = open_page(viewport={"width": 900, "height": 400})
    page.set_content(f"<style>{GALLERY}</style>{gallery(Album('eyes', 0, 0, (tile,)))}")
    sizes = page.locator(".tile").evaluate("e => [e.scrollWidth, e.clientWidth, e.offsetWidth]")
    assert sizes[0] <= sizes[1]
    assert sizes[2] <= 120

"""`run.plot`, `slot.plot` and `group.plot`: HoloViews elements with the tables' numbers."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree as ET

import holoviews as hv
import numpy as np
import pandas as pd
import pytest
import torch
from bokeh.models import ContinuousColorMapper
from torch import nn

import comgra_decl as comgra
from comgra_decl import viewer
from comgra_decl.errors import MissingPackageError, UnknownNameError
from comgra_decl.query import Group, Run, open_group, open_run
from comgra_decl.viewer import plotting
from comgra_decl.viewer.elements import as_lines, distributions_of
from comgra_decl.viewer.palette import KINDS
from comgra_decl.viewer.plotting import plotted, save, shaded
from tests.support.fake_run import FakeRun
from tests.support.shortened import shortened

PATIENCE = 30_000  # milliseconds, on a busy machine


@pytest.fixture
def run(fake: FakeRun) -> Run:
    return open_run(fake.path)


@pytest.fixture
def group(tmp_path: Path) -> Group:
    for number in range(3):
        fake = FakeRun(tmp_path / "group" / f"run{number}", nodes=("net", "head"), seed=number)
        fake.write(6, commit=3)
        fake.close()
    return open_group(tmp_path / "group")


def dimensions(element: Any) -> list[str]:
    return [str(dimension) for dimension in element.dimensions()]


def test_a_series_has_the_numbers_and_names_of_the_table(run: Run) -> None:
    curve = plotted(run).series("head", "std")
    expected = run.series("head", "std")
    assert isinstance(curve, hv.Curve)
    assert dimensions(curve) == ["step", "std"]
    table = curve.dframe()
    np.testing.assert_array_equal(table["step"], expected.index)
    np.testing.assert_array_equal(table["std"], expected)


def test_a_heat_map_has_a_row_for_each_slot(run: Run) -> None:
    mesh = plotted(run).heat("l2", of="grad")
    expected = run.heat("l2", of="grad")
    assert dimensions(mesh) == ["step", "slot", "l2", "tensor"]
    found = mesh.dimension_values("l2", flat=False)
    np.testing.assert_allclose(found, expected.to_numpy().T)
    assert len(mesh.interface.coords(mesh, "step", edges=True)) == len(expected) + 1


def boxes_of(graph: Any) -> pd.DataFrame:
    """Return the table of the boxes of a graph."""
    parts = graph.traverse(lambda part: part, [hv.Rectangles])
    (found,) = (part.dframe() for part in parts if "box" in dimensions(part))
    return found


def test_the_graph_has_the_boxes_of_the_viewer_and_their_values(run: Run) -> None:
    overlay = plotted(run).graph(step=3, statistic="l2")
    boxes = boxes_of(overlay).set_index("box")
    assert {"embed", "head"} <= {*boxes.index}
    assert {*boxes["kind"]} <= {*KINDS}
    for box in ("embed", "head"):
        value = run.series(box, "l2")[3]
        assert boxes.loc[box, "l2"] == pytest.approx(value)
        assert float(str(boxes.loc[box, "shown"])) == pytest.approx(value, rel=0.01)
    assert len({*boxes["fill"]}) > 1
    assert (boxes["right"] > boxes["x"]).all()
    by_kind = boxes_of(plotted(run).graph(step=3))
    assert {*by_kind["edge"]} <= {*KINDS.values()}
    assert not any(by_kind["shown"])


def test_expanding_a_group_expands_those_around_it(tmp_path: Path) -> None:
    inner = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    model = nn.ModuleDict({"stem": nn.Linear(4, 4), "blocks": nn.Sequential(*inner)})
    spec = {"nodes": {"all": {"select": "**"}}, "rules": "off"}
    with comgra.trace(spec, root=tmp_path) as session:
        model["blocks"](model["stem"](torch.ones(3, 4))).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    plots = plotted(open_run(session.path or ""))
    folded = boxes_of(plots.graph(expanded=[]))["box"].tolist()
    group = next(box for box in folded if box.endswith("blocks"))
    boxes = boxes_of(plots.graph(expanded=[f"{group}.1"]))["box"].tolist()
    assert {f"{group}.0", f"{group}.1.0", f"{group}.1.1"} <= {*boxes}


def test_the_colours_of_kinds_are_those_of_the_viewer() -> None:
    css = (Path(viewer.__file__).parent / "components" / "graph.css").read_text()
    assert re.findall(r"--kind-(\w+): (#\w+);", css) == [*KINDS.items()]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"step": 999}, "step 999 was not recorded; nearest: "),
        ({"statistic": "sdt"}, "did you mean 'std'"),
        ({"statistic": "std", "of": "backward"}, "'backward' is not a pass"),
        ({"expanded": ["nowhere"]}, "'nowhere' is not a group that can be expanded"),
        ({"type": "none"}, "none"),
    ],
)
def test_a_graph_that_does_not_exist_is_explained(
    run: Run, asked: dict[str, Any], why: str
) -> None:
    with pytest.raises(UnknownNameError, match=why):
        plotted(run).graph(**asked)


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """Two runs of a model of tokens, with pictures, slices of the loss and an intervention."""
    root = tmp_path_factory.mktemp("read")
    target = {"token": "next", "position": 3}
    spec = {
        "nodes": {"all": {"select": "**", "values": True}},
        "checkpoints": {"every": 1},
        "probes": {"words": {"samples": {"count": 2}, "schedule": {"first": 2}}},
        "pictures": {
            "why": {"method": "saliency", "of": "words", "target": target},
            "each": {"method": "saliency", "of": "words", "target": target | {"position": "all"}},
            "line": {"method": "loss_slice", "of": "words", "points": 5},
            "valley": {
                "method": "loss_slice", "of": "words", "points": 5,
                "directions": ["random", "random"],
            },
            "bend": {"method": "hessian", "of": "words"},
        },
        "interventions": {
            "off": {
                "of": "words", "select": "1", "do": "zero", "into": "2", "sweep": ["node", "into"],
            }
        },
    }  # fmt: skip
    runs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        tokens = torch.randint(9, (4, 6))
        model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with comgra.trace(spec, root=root, group="g", name=f"seed{seed}") as session:
            for _ in range(2):
                optimizer.zero_grad()
                answer = model(tokens).flatten(0, 1)
                nn.functional.cross_entropy(answer, tokens.roll(-1, 1).flatten()).backward()
                optimizer.step()
        runs.append(open_run(session.path or ""))
    return runs[0], runs[1]


@pytest.mark.slow
def test_a_slice_of_the_loss_has_the_numbers_and_places_of_the_picture(
    read: tuple[Run, Run],
) -> None:
    run, _ = read
    found = run.picture("valley", 1)
    (mesh,) = plotted(run).landscape("valley").traverse(lambda part: part, [hv.QuadMesh])
    np.testing.assert_allclose(mesh.dimension_values("loss", flat=False), found.values[0])
    places = sorted({*mesh.dimension_values("first")})
    np.testing.assert_allclose(places, found.facts["coordinates"], atol=1e-12)
    line = plotted(run).landscape("line", step=0)
    np.testing.assert_allclose(line.dimension_values("loss"), run.picture("line", 0).values[0])
    over, density = plotted(run).landscape("bend")
    assert dimensions(over) == ["step", "value"]
    assert [*over.dimension_values("step")] == [0, 1]
    area = np.trapezoid(density.dimension_values("value"), density.dimension_values(0))
    assert area == pytest.approx(1, abs=0.02)


def test_a_text_has_a_number_for_each_token(read: tuple[Run, Run]) -> None:
    run, _ = read
    table = run.token_attributions("why", 1)
    here = table.xs(1, level="sample")
    (boxes,) = plotted(run).text("why", sample=1).traverse(lambda part: part, [hv.Rectangles])
    assert [*boxes.dimension_values("token")] == [str(word) for word in here["token"]]
    np.testing.assert_allclose(boxes.dimension_values("value"), here["value"], rtol=1e-5)
    rows = plotted(run).text("each", sample=1)
    assert rows.dimension_values("value", flat=False).shape == (5, 6)


def test_a_graph_can_be_coloured_by_what_the_viewer_offers(read: tuple[Run, Run]) -> None:
    run, other = read
    boxes = boxes_of(plotted(run).graph(colour="difference", other=other)).set_index("box")
    mine, its = (each.series("1", "std")[1] for each in read)
    shown = float(str(boxes.loc["1", "shown"]).replace("\u2212", "-").rstrip("%"))
    assert shown == pytest.approx(100 * (mine - its) / ((mine + its) / 2), rel=0.01)
    keys = [slot.key for slot in run.arrays.slots]
    place = next(i for i, key in enumerate(keys) if key.node == "1" and key.role == "output")
    away = run.arrays.unusual(1, "std")[place]
    unusual = boxes_of(plotted(run).graph(colour="unusual")).set_index("box")
    assert str(unusual.loc["1", "shown"]).endswith(f"#{np.nanargmax(abs(away))}")
    assert len(boxes_of(plotted(run).graph(colour="findings"))) == len(boxes)
    flows = plotted(run).graph(colour="effects:off").traverse(lambda part: part, [hv.Path])
    assert len(flows) == 3, "edges with and without a gradient, and the one between 1 and 2"


@pytest.mark.parametrize(
    ("asked", "error", "why"),
    [
        ({"colour": "tiem"}, UnknownNameError, "'tiem' does not colour this graph. What does"),
        ({"colour": "memory"}, UnknownNameError, "What does: 'difference', 'findings'"),
        ({"colour": "difference"}, ValueError, "needs another run if and only if"),
        ({"colour": "findings", "statistic": "std"}, ValueError, "has no statistic, got 'std'"),
    ],
)
def test_a_colour_that_a_graph_does_not_have_is_explained(
    read: tuple[Run, Run], asked: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        plotted(read[0]).graph(**asked)


@pytest.mark.parametrize(
    ("view", "asked", "why"),
    [
        ("text", {"name": "valley"}, "no picture 'valley' with tokens. Pictures .*: 'why'"),
        ("text", {"name": "why", "sample": 2}, "there is no sample 2 at step 1; there are 2"),
        ("text", {"name": "why", "step": 7}, "step 7 has no record of a probe"),
        ("text", {"name": "why", "node": "2"}, "with tokens of '2'"),
        ("landscape", {"name": "why"}, "does not show the whole model"),
        ("landscape", {"name": "vally"}, "did you mean 'valley'"),
    ],
)  # fmt: skip
def test_a_text_or_landscape_that_does_not_exist_is_explained(
    read: tuple[Run, Run], view: str, asked: dict[str, Any], why: str
) -> None:
    with pytest.raises(UnknownNameError, match=why):
        getattr(plotted(read[0]), view)(**asked)


class _Attending(nn.Module):
    """A model of tokens with attention, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 9)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        mixed, _ = self.attn(x, x, x, average_attn_weights=False)
        return cast(torch.Tensor, self.head(self.norm(x + mixed)))


@pytest.fixture(scope="module")
def attending(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with attention weights, a logit lens, measured memory and a profile."""
    spec = {
        "nodes": {"all": {"select": "**", "values": True}},
        "probes": {"words": {"samples": {"count": 3}, "schedule": {"first": 9}}},
        "pictures": {
            "guess": {
                "method": "logit_lens", "of": "words", "select": "embed", "norm": "norm",
                "head": "head",
            }
        },
        "memory": {"steps": [1, 2]},
        "profile": {"steps": [3, 4]},
    }  # fmt: skip
    torch.manual_seed(0)
    model, tokens = _Attending(), torch.randint(9, (4, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with comgra.trace(spec, root=tmp_path_factory.mktemp("attending")) as session:
        for _ in range(6):  # those that are measured are not recorded
            optimizer.zero_grad()
            answer = model(tokens).flatten(0, 1)
            nn.functional.cross_entropy(answer, tokens.flatten()).backward()
            optimizer.step()
    return open_run(session.path or "")


def test_attention_is_drawn_as_cells_lines_and_small_maps(attending: Run) -> None:
    plots = plotted(attending)
    slot = next(
        s for s in attending.arrays.slots if "attn" in s.key.node and s.shape[1:] == (2, 5, 5)
    )
    weights = attending.slot(slot.key.node, role=slot.key.role).value(5)[1]  # of sample 1
    cells = plots.attention("attn", head=1, sample=1)
    drawn = cells.dimension_values("weight", flat=False)
    np.testing.assert_allclose(drawn, weights[1], rtol=1e-6)
    tokens = attending.slot("input", role="input").value(5)[1]
    names = cells.dimension_values("key", flat=False)[0]
    assert [*names] == [f"{i} {token}" for i, token in enumerate(tokens)]
    lines = plots.attention_lines("attn", sample=1).traverse(lambda part: part, [hv.Segments])
    assert [part.label for part in lines] == ["head 0", "head 1"]
    for part, mine in zip(lines, weights, strict=True):
        table = part.dframe()
        np.testing.assert_allclose(
            table["weight"], mine[table["y"].astype(int), table["key"].astype(int)], rtol=1e-6
        )
        assert len(table) == (mine >= 0.02 * mine.max()).sum()
    small = plots.attention(sample=1).dimension_values(2, flat=False)
    np.testing.assert_allclose(small[:5, 6:11], weights[1] / weights[1].max(), rtol=1e-6)


def test_a_lens_has_the_tokens_and_probabilities_of_each_layer(attending: Run) -> None:
    overlay = plotted(attending).lens("guess", sample=2)
    (cells,) = overlay.traverse(lambda part: part, [hv.QuadMesh])
    (words,) = overlay.traverse(lambda part: part, [hv.Labels])
    found = attending.picture("guess", 5)
    np.testing.assert_allclose(
        cells.dimension_values("probability", flat=False)[0], np.exp(found.values[2]), rtol=1e-5
    )
    assert len(words) == 5


def test_attention_and_lenses_are_saved_with_their_tokens(attending: Run, tmp_path: Path) -> None:
    plots, tokens = plotted(attending), attending.slot("input", role="input").value(5)[0]
    drawn = {
        "small": (plots.attention(), ["attention, sample 0 at step 5"]),
        "cells": (plots.attention("attn"), [f"{i} {token}" for i, token in enumerate(tokens)]),
        "lines": (plots.attention_lines("attn", head=1), [str(token) for token in tokens]),
        "lens": (plots.lens("guess"), [f"{i} {token}" for i, token in enumerate(tokens)]),
    }
    for name, (element, texts) in drawn.items():
        image = save(element, tmp_path / f"{name}.svg").read_text()
        assert all(f"<!-- {text} -->" in image for text in texts), name


def test_an_embedding_is_that_of_the_run_in_one_frame(attending: Run) -> None:
    found = attending.embedding("embed")
    for place, step in enumerate((0, 5)):
        overlay = plotted(attending).embedding("embed", step=step)
        table = overlay.dframe().sort_values("sample")
        np.testing.assert_allclose(table[["first", "second"]], found.values[place])
    assert dimensions(overlay) == ["label", "first", "second", "sample"]


def test_stacks_add_up_to_the_memory_and_the_time_of_each_step(attending: Run) -> None:
    memory = attending.memory(by="step")
    areas = plotted(attending).memory().traverse(lambda part: part, [hv.Area])
    sizes = {part.label: part.dframe()["size"][1::4].to_numpy() for part in areas}
    for part, drawn in sizes.items():
        np.testing.assert_allclose(drawn, memory[part] / 1e6)
    top = max(part.dframe()["to"].max() for part in areas)
    assert top == pytest.approx(memory.sum(axis=1).max() / 1e6)
    times = attending.profile(by="step")
    drawn = plotted(attending).times().traverse(lambda part: part, [hv.Area])
    assert [part.label for part in drawn] == ["data", "forward", "backward", "optimizer", "other"]
    for part in drawn:
        np.testing.assert_allclose(part.dframe()["size"][1::4], times[part.label])
    course = plotted(attending).memory("moment").traverse(lambda part: part, [hv.Area])
    assert len(course) > len(areas)


@pytest.mark.parametrize(
    ("view", "asked", "why"),
    [
        ("attention", {"node": "atn"}, "'atn' has no attention weights; did you mean 'attn'"),
        ("attention", {"node": "attn", "head": 2}, "there is no head 2; there are 2"),
        ("attention", {"head": 1}, "a head needs a node"),
        ("attention", {"sample": 9}, "no attention weights of sample 9"),
        ("attention", {"step": 7}, "step 7 was not recorded; the last ones: 0, 5"),
        ("lens", {"name": "gues"}, "no logit lens 'gues'; did you mean 'guess'"),
        ("embedding", {"node": "embed", "step": 7}, "step 7 has no values of 'embed'"),
        ("embedding", {"node": "embed", "method": "pac"}, "did you mean 'pca'"),
    ],
)
def test_what_a_view_of_the_network_does_not_have_is_explained(
    attending: Run, view: str, asked: dict[str, Any], why: str
) -> None:
    with pytest.raises(UnknownNameError, match=why):
        getattr(plotted(attending), view)(**asked)


@pytest.mark.filterwarnings("error")
def test_a_tensor_of_nothing_but_nan_says_so_in_every_picture(tmp_path: Path) -> None:
    name = "part." * 40 + "last"
    model = nn.Sequential()
    model.add_module("first", nn.Linear(2, 3))
    spec = {"nodes": {"all": {"select": "**", "values": True}}}
    with comgra.trace(spec, root=tmp_path) as session:
        out = model(torch.full((4, 2), torch.nan))
        comgra.node(out * 1, name)
        out.sum().backward()
    run = open_run(session.path or "")
    plots = plotted(run.slot(name))
    (tmp_path / "images").mkdir()
    for kind, element in {
        "preview": plots.preview(0), "histogram": plots.histogram(0), "cloud": plots.cloud(0),
    }.items():  # fmt: skip
        save(element, tmp_path / "images" / f"{kind}.png")
        image = save(element, tmp_path / "images" / f"{kind}.svg").read_text()
        assert "no finite values" in image or "12 of 12 values in all samples" in image, kind
        assert "part." * 20 not in image, "a long name is cut"
    with pytest.raises(UnknownNameError, match="12 of 12 values at step 0 are NaN or infinite"):
        plotted(run).embedding(name)


def test_the_distribution_of_one_record_has_a_width(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "run", nodes=("head",))
    fake.write(1)
    fake.close()
    slot = open_run(tmp_path / "run").slot("head")
    bands = plotted(slot).distribution().traverse(lambda part: part, [hv.Area])
    for band in bands:
        steps = band.dimension_values("step")
        assert steps.min() < slot.histograms()[0][0] < steps.max()


def test_without_a_measurement_there_are_no_stacks_and_no_attention(run: Run) -> None:
    for view in ("memory", "times", "attention"):
        with pytest.raises(UnknownNameError):
            getattr(plotted(run), view)()


def test_the_metrics_are_an_overlay_of_curves(run: Run) -> None:
    overlay = plotted(run).kpis()
    table = run.kpis()
    assert dimensions(overlay)[0] == "metric"
    assert list(overlay.keys()) == list(dict.fromkeys(table["name"]))
    for name, curve in overlay.items():
        mine = table[table["name"] == name]
        np.testing.assert_array_equal(curve.dframe()["value"], mine["value"])
    one = plotted(run).kpis("loss")
    assert list(one.keys()) == ["loss"]


def test_metrics_of_other_sizes_get_figures_of_their_own_if_asked(tmp_path: Path) -> None:
    numbers = {"loss": [2.0, 1.0], "error": [0.5, 0.2], "tokens": [6e8, 7e8], "rate": [1e-3, 1e-3]}

    class Sized(FakeRun):
        def _kpis(self, slots: Any, tensors: Any, step: int) -> dict[str, float]:
            return {name: values[step] for name, values in numbers.items()}

    fake = Sized(tmp_path / "g" / "run")
    fake.write(2, evals=False)
    fake.close()
    plots = plotted(open_run(fake.path))
    together = plots.kpis("loss", "error", apart=None)
    assert isinstance(together, hv.NdOverlay)
    assert isinstance(plots.kpis(), hv.NdOverlay)
    layout = plots.kpis(apart=None)
    assert isinstance(layout, hv.Layout)
    drawn = {str(part.label): part.dimension_values("value").tolist() for part in layout}
    assert drawn == numbers
    heights = {}
    for part in layout:
        figure = hv.render(part, backend="bokeh")
        heights[part.label] = figure.y_range.start, figure.y_range.end
    assert heights["rate"] == pytest.approx((0.5e-3, 1.5e-3))
    assert all(low < min(numbers[name]) for name, (low, _) in heights.items())
    highest = {name: high / max(numbers[name]) for name, (_, high) in heights.items()}
    assert all(1 < ratio < 2 for ratio in highest.values())


def test_smoothing_is_the_debiased_moving_average_of_tensorboard(run: Run) -> None:
    raw = plotted(run).kpis("loss")["loss"].dframe()["value"].to_numpy()
    found = plotted(run).kpis("loss", smoothing=0.6)["loss"].dframe()["value"].to_numpy()
    last, weight = 0.0, 0.0
    for number, value in enumerate(raw):
        last, weight = 0.6 * last + 0.4 * value, 0.6 * weight + 0.4
        assert found[number] == pytest.approx(last / weight)
    with pytest.raises(ValueError, match="smoothing must be at least 0 and less than 1, got 1"):
        plotted(run).kpis("loss", smoothing=1)


def test_the_samples_of_a_tensor_are_curves_and_points(run: Run) -> None:
    overlay = plotted(run.slot("head")).samples("mean")
    expected = run.slot("head").samples("mean")
    assert list(overlay.keys()) == list(expected.dropna(axis=1, how="all").columns)
    np.testing.assert_array_equal(overlay[0].dframe()["mean"], expected[0])
    step = int(run.steps[3])
    points = plotted(run).cloud("head", step=step, x="mean", y="l2").dframe()
    row = run.slot("head").row(step)
    np.testing.assert_allclose(points[["mean", "l2"]], row[["mean", "l2"]])


def test_a_histogram_has_the_counts_and_edges_of_the_slot(run: Run) -> None:
    step = int(run.steps[0])
    found = plotted(run.slot("head")).histogram(step)
    counts, edges = run.slot("head").histogram(step)
    np.testing.assert_array_equal(found.dimension_values("count"), counts)
    np.testing.assert_allclose(found.edges, edges)


def test_a_distribution_shows_the_quantiles_of_the_histograms(run: Run) -> None:
    """The oracle spreads each bin's values evenly over it."""
    overlay = plotted(run.slot("head")).distribution()
    table = overlay.get(2).dframe()
    steps, counts, all_edges = run.slot("head").histograms()
    np.testing.assert_array_equal(table["step"], steps)
    for number in (0, len(steps) - 1):
        edges = all_edges[number]
        values = np.concatenate(
            [
                low + (np.arange(n * 50) + 0.5) / (n * 50) * (high - low)
                for low, high, n in zip(edges[:-1], edges[1:], counts[number], strict=True)
                if n
            ]
        )
        width = edges[1] - edges[0]
        assert table["p50"][number] == pytest.approx(np.median(values), abs=width / 20)


def test_a_metric_of_a_group_is_a_curve_for_each_run(group: Group) -> None:
    overlay = plotted(group).kpi("loss")
    assert list(overlay.keys()) == group.names
    for name, curve in overlay.items():
        table = group[name].kpis()
        mine = table[table["name"] == "loss"]
        np.testing.assert_array_equal(curve.dframe()["loss"], mine["value"])
    series = plotted(group).series("head", "std")
    expected = group["run1"].series("head", "std")
    np.testing.assert_array_equal(series["run1"].dframe()["std"], expected)


def test_what_is_not_there_is_an_error_that_suggests_similar_names(run: Run, group: Group) -> None:
    with pytest.raises(UnknownNameError, match="no metric 'los'; did you mean 'loss'"):
        plotted(run).kpis("los")
    with pytest.raises(UnknownNameError, match="no metric 'los'; did you mean 'loss'"):
        plotted(group).kpi("los")
    with pytest.raises(UnknownNameError, match=r"'gard' is not a pass .* did you mean 'grad'"):
        plotted(run).heat("l2", of="gard")
    with pytest.raises(UnknownNameError, match="no statistic 'q'"):
        plotted(run).cloud("head", step=int(run.steps[0]), y="q")
    with pytest.raises(UnknownNameError, match="no metrics of type 'nothing'"):
        plotted(run).kpis(type="nothing")
    with pytest.raises(ValueError, match=r"smoothing must be .* got 'a'"):
        plotted(run).kpis(smoothing="a")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"folder '.*nowhere' does not exist"):
        save(plotted(run).kpis(), "nowhere/plot.html")
    with pytest.raises(UnknownNameError, match="do not differ in a setting 'lr'"):
        plotted(group).settings("lr", "loss")
    with pytest.raises(UnknownNameError, match="did you mean 'head'"):
        plotted(run).series("haed")


def test_elements_compose_and_link(run: Run) -> None:
    """Selecting steps in one plot selects the same steps in the other."""
    plots = plotted(run)
    overlay = plots.series("head", "std") * plots.series("embed", "std")
    assert isinstance(overlay, hv.Overlay)
    layout = plots.heat("l2") + overlay + plots.kpis()
    assert isinstance(layout, hv.Layout)
    assert hv.render(layout, backend="bokeh") is not None

    steps = run.steps
    linker = hv.link_selections.instance()
    points = hv.Points(run.slot("head").series("std").reset_index(), ["step", "std"])
    other = hv.Points(run.slot("head").series("l2").reset_index(), ["step", "l2"])
    linker(points + other)
    linker.selection_expr = hv.dim("step") <= int(steps[2])
    assert len(linker.filter(other)) == 3


@pytest.mark.slow  # as does a file that is zoomed in
@pytest.mark.browser
def test_a_saved_page_needs_nothing_but_its_file(run: Run, tmp_path: Path, chromium: Any) -> None:
    layout = plotted(run).series("head", "std") + plotted(run).heat("l2")
    path = save(layout, tmp_path / "plots.html")
    context = chromium.new_context(offline=True)
    page = context.new_page()
    asked: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.goto(path.as_uri())
    page.locator(".bk-Figure canvas").first.wait_for(timeout=PATIENCE)
    assert page.locator(".bk-Figure").count() == 2
    context.close()
    others = [url for url in asked if not url.startswith(("data:", "blob:"))]
    assert others == [path.as_uri()]
    assert errors == []


@pytest.mark.slow
def test_a_heat_map_of_many_tensors_fits_the_screen_and_shows_small_values(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "group" / "large", layers=20)
    fake.write(3)
    fake.close()
    found = plotted(open_run(fake.path)).heat("l2")
    plot = hv.render(found, backend="bokeh")
    rows = len(found.dimension_values("slot", expanded=False))
    (axis,) = plot.yaxis
    assert rows > 100
    assert plot.height <= 700
    assert len(axis.ticker.ticks) * 14 <= plot.height
    assert set(axis.major_label_overrides.values()) <= set(found.dimension_values("tensor"))
    values = found.dimension_values("l2")
    (mapper,) = plot.select({"type": ContinuousColorMapper})
    low, high = np.nanquantile(values, [0.01, 0.99])
    assert low <= mapper.low < mapper.high <= np.nanmax(values)
    assert mapper.high == pytest.approx(high, rel=0.05)


def test_a_heat_map_saved_as_an_image_names_its_tensors(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = save(plotted(run).heat("l2"), tmp_path / "heat.svg").read_text()
    for node in run.nodes[:3]:
        assert f"<!-- {node}" in text, "Matplotlib writes each label as a comment"


def test_a_logarithmic_axis_saved_as_an_image_has_numbers_and_no_formulas(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plotting.use("matplotlib")
    values = np.geomspace(1e-3, 50, 240).reshape(6, 40)
    found = distributions_of(values, [f"layer{i}" for i in range(6)], "std", "spread", every=1)
    page = save(found, tmp_path / "spread.svg").read_text()
    assert {"<!-- 0.01 -->", "<!-- 1 -->"} <= {*re.findall("<!-- [^>]* -->", page)}
    assert "$" not in page


@pytest.mark.parametrize("steps", [1, 2])
def test_points_without_neighbours_are_marked(steps: int, tmp_path: Path) -> None:
    """A line through a single point would be invisible."""
    fake = FakeRun(tmp_path / "runs" / "short", nodes=("net", "head"), layers=1)
    fake.write(steps, evals=False)
    fake.close()
    short = open_run(fake.path)
    for curve in (plotted(short).series("head", "std"), plotted(short).kpis("loss")["loss"]):
        figure = hv.render(curve, backend="bokeh")
        markers = [r for r in figure.renderers if type(r.glyph).__name__ == "Scatter"]
        assert len(markers) == (1 if steps == 1 else 0)
    pytest.importorskip("matplotlib")
    figure = hv.render(plotted(short).series("head", "std"), backend="matplotlib")
    markers = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert len(markers) == (1 if steps == 1 else 0)


def test_points_without_neighbours_are_marked_on_an_axis_of_names() -> None:
    curve = as_lines(hv.Curve([("lr0.1-s0", 1.0), ("lr0.1-s1", np.nan), ("lr0.3-s0", 2.0)], "run"))
    figure = hv.render(curve, backend="bokeh")
    (marks,) = [r for r in figure.renderers if type(r.glyph).__name__ == "Scatter"]
    assert list(marks.data_source.data["x"]) == ["lr0.1-s0", "lr0.3-s0"]


@pytest.mark.slow
def test_every_plot_can_be_saved_as_an_image(run: Run, group: Group, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    slot = run.slot("head")
    step = int(run.steps[0])
    plots = {
        "series": plotted(run).series("head", "std"),
        "heat": plotted(run).heat("l2"),
        "kpis": plotted(run).kpis(),
        "cloud": plotted(run).cloud("head", step=step),
        "samples": plotted(slot).samples(),
        "histogram": plotted(slot).histogram(step),
        "distribution": plotted(slot).distribution(),
        "distributions": plotted(run).distributions("std"),
        "kpi": plotted(group).kpi("loss"),
    }
    for (name, element), suffix in zip(
        plots.items(), itertools.cycle(["png", "svg"]), strict=False
    ):
        path = save(element, tmp_path / f"{name}.{suffix}")
        content = path.read_bytes()
        if suffix == "png":
            assert content.startswith(b"\x89PNG")
        else:
            assert ET.fromstring(content).tag.endswith("svg")
    page = save(plots["series"] + plots["heat"] + plots["distributions"], tmp_path / "page.svg")
    assert len(re.findall('id="axes_', page.read_text())) == 4, "three, and the colour bar"
    with pytest.raises(ValueError, match=r"path must end with one of .html, .png"):
        save(plots["kpis"], tmp_path / "plots.gif")


def test_the_properties_lead_here(run: Run, group: Group) -> None:
    assert isinstance(run.plot.series("head"), hv.Curve)
    assert isinstance(run.slot("head").plot.samples(), hv.NdOverlay)
    assert isinstance(group.plot.kpi("loss"), hv.NdOverlay)


def test_reading_numbers_imports_no_plots(fake: FakeRun) -> None:
    code = (
        "import sys, comgra_decl as c; c.open_run(sys.argv[1]).series('head'); "
        "assert 'holoviews' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(fake.path)], check=True)


def test_a_gap_in_the_records_is_a_gap_in_the_curve(run: Run) -> None:
    step = int(run.steps[0])
    series = run.series("aux", "mean")
    found = plotted(run).series("aux", "mean").dframe().set_index("step")["mean"]
    pd.testing.assert_series_equal(found.isna(), series.isna(), check_names=False)
    assert step in found.index


def test_hvplot_draws_the_tables(run: Run) -> None:
    import hvplot.pandas  # noqa: F401 - adds `hvplot` to tables

    metrics: Any = run.kpis()
    overlay = metrics.hvplot.line("step", "value", by="name")
    assert set(overlay.keys()) == set(metrics["name"])
    samples: Any = run.slot("head").samples("mean").reset_index()
    assert hv.render(samples.hvplot.line("step"), backend="bokeh") is not None
    row: Any = run.row(int(run.steps[0])).reset_index()
    assert hv.render(row.hvplot.scatter("mean", "std"), backend="bokeh") is not None


def test_metrics_of_a_group_by_time_and_samples(group: Group) -> None:
    for axis in ("time", "samples"):
        overlay = plotted(group).kpi("loss", x=axis, type="train")
        for run in group:
            records = run.records[run.records["mode"] == "train"]
            expected = records["time"] - run.started
            if axis == "samples":
                expected = records["batch_size"].astype(float).cumsum().shift(1, fill_value=0)
            np.testing.assert_allclose(overlay[run.name].dframe()[axis], expected)
    with pytest.raises(ValueError, match="x must be one of 'step', 'time', 'samples'"):
        plotted(group).kpi("loss", x="hours")  # type: ignore[arg-type]


def test_small_elements_are_not_shaded(run: Run) -> None:
    curve = plotted(run).series("head", "std")
    assert shaded(curve) is curve


def test_many_points_need_datashader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datashader", None)
    with pytest.raises(MissingPackageError, match=r"comgra-decl\[big\]"):
        shaded(hv.Curve(np.zeros(100_001)))


@pytest.mark.slow
def test_many_points_become_an_image_that_covers_them(group: Group, tmp_path: Path) -> None:
    pytest.importorskip("datashader")
    plotted(group)
    rng = np.random.default_rng(0)
    points = hv.Points(rng.uniform(2, 3, (120_000, 2)), ["x", "y"])
    image = shaded(points, dynamic=False)
    assert isinstance(image, hv.RGB)
    assert image.range("x") == pytest.approx((2, 3), abs=0.01)
    alpha = image.dimension_values("A", flat=False)
    assert (alpha > 0).mean() > 0.3
    lines = {name: hv.Curve(rng.normal(size=60_000).cumsum()) for name in "ab"}
    overlay = shaded(hv.NdOverlay(lines, "run"), dynamic=False)
    assert isinstance(overlay, hv.RGB)
    assert save(overlay, tmp_path / "big.html").stat().st_size > 1000


@pytest.fixture
def rates(tmp_path: Path) -> Group:
    """Three runs that differ in a setting."""
    for number, rate in enumerate((0.1, 0.2, 0.4)):
        fake = FakeRun(
            tmp_path / "rates" / f"run{number}", nodes=("net", "head"), seed=number,
            config={"optimizer": {"lr": rate}},
        )  # fmt: skip
        fake.write(4)
        fake.close()
    return open_group(tmp_path / "rates")


def test_parallel_axes_have_a_line_for_each_run(rates: Group) -> None:
    overlay = plotted(rates).parallel("loss")
    (paths,) = overlay.traverse(lambda part: part, [hv.Path])
    table = pd.concat(path.dframe() for path in paths.split())
    points = plotted(rates).settings("config.optimizer.lr", "loss").dframe()
    assert {*table["run"]} == {*points["run"]}
    last = table[table["axis"] == table["axis"].max()].set_index("run")["height"]
    lowest, highest = points.set_index("run")["loss"].agg(["idxmin", "idxmax"])
    assert (last[lowest], last[highest]) == (0, 1)
    with pytest.raises(UnknownNameError, match=r"did you mean 'config\.optimizer\.lr'"):
        plotted(rates).parallel("loss", "config.optimizer.l")


def test_settings_are_points_of_runs(rates: Group) -> None:
    table = rates.plot.settings("config.optimizer.lr", "loss").dframe().set_index("run")
    for run, rate in zip(rates, (0.1, 0.2, 0.4), strict=True):
        kpis = run.kpis()
        expected = kpis[kpis["name"] == "loss"]["value"].iloc[-1]
        assert table.loc[run.name].tolist() == [rate, pytest.approx(expected)]


@pytest.mark.parametrize(
    "suffix",
    [
        pytest.param(".html", marks=pytest.mark.slow),
        pytest.param(".png", marks=pytest.mark.slow),
        ".svg",
    ],
)
def test_plots_of_a_group_are_composed_and_saved(suffix: str, rates: Group, tmp_path: Path) -> None:
    if suffix != ".html":
        pytest.importorskip("matplotlib")
    plots, first = rates.plot, next(iter(rates)).plot
    overlay = plots.kpi("loss") * hv.HLine(1.0)
    assert isinstance(overlay, hv.Overlay)
    both = plots.series("head", "std") * first.series("head", "mean")
    page = (overlay + both + plots.settings("config.optimizer.lr", "loss")).cols(2)
    assert isinstance(page, hv.Layout)
    assert len(page) == 3
    content = save(page, tmp_path / f"group{suffix}").read_bytes()
    if suffix == ".png":
        assert content.startswith(b"\x89PNG")
    elif suffix == ".svg":
        drawing = ET.fromstring(content)
        assert drawing.tag.endswith("svg")
        axes = [e for e in drawing.iter() if e.get("id", "").startswith("axes_")]
        assert len(axes) == 3
        comments = set(re.findall("<!-- (.+?) -->", content.decode()))
        assert {"loss", "run0", "run1", "run2"} <= comments
    else:
        for word in (b"run0", b"run2", b"config.optimizer.lr", b"loss"):
            assert word in content


LARGE: dict[str, Callable[[Run, Group], Any]] = {
    "cloud": lambda run, _: run.plot.cloud("head", step=3),
    "series": lambda run, _: run.plot.series("head", "std"),
    "kpis": lambda run, _: run.plot.kpis(),
    "samples": lambda run, _: run.slot("head").plot.samples("mean"),
    "kpi of a group": lambda _, group: group.plot.kpi("loss"),
    "series of a group": lambda _, group: group.plot.series("head", "std"),
}
"""Plots whose number of points has no bound."""


@pytest.mark.parametrize("name", shortened(LARGE, tried=0))  # each compiles code of its own
def test_large_plots_are_images(
    name: str, run: Run, group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("datashader")
    monkeypatch.setattr(plotting, "MOST_POINTS", 3)
    image = LARGE[name](run, group)
    assert isinstance(image, hv.DynamicMap)
    assert isinstance(image[()], hv.RGB)
    assert (image[()].dimension_values("A") > 0).any()
    if name == "cloud":
        page = image + run.plot.heat("std")
        for suffix in (".html", ".png"):
            assert save(page, tmp_path / f"image{suffix}").stat().st_size > 1000


def points_in(element: Any) -> pd.DataFrame:
    parts = element.traverse(lambda part: part, [lambda part: isinstance(part, hv.Element)])
    return pd.concat([part.dframe() for part in parts])


@pytest.mark.parametrize("name", shortened(LARGE, tried=2))
def test_without_datashader_large_plots_say_that_points_are_left_out(
    name: str, run: Run, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = points_in(LARGE[name](run, group))
    monkeypatch.setattr(plotting, "MOST_POINTS", len(whole) // 2)
    monkeypatch.setattr(plotting, "find_spec", lambda _: None)
    with pytest.warns(UserWarning, match=r"one of [23] .*comgra-decl\[big\]"):
        plot = LARGE[name](run, group)
    table = points_in(plot)
    assert 1 <= len(table) < len(whole)
    assert table.iloc[:, 1].isin(whole.iloc[:, 1]).all()
    assert re.search("one of [23] points", hv.render(plot).title.text)


def test_points_that_are_left_out_are_no_extremes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run.plot.series("head", "std").dframe()["std"]
    monkeypatch.setattr(plotting, "MOST_POINTS", len(whole) // 2)
    monkeypatch.setattr(plotting, "find_spec", lambda _: None)
    with pytest.warns(UserWarning, match="one of 2"):
        table = run.plot.series("head", "std").dframe()["std"]
    assert (table.min(), table.max()) == (whole.min(), whole.max())


@pytest.mark.slow
def test_distributions_of_many_samples_have_boxes_of_all_and_points_of_some(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run.plot.distributions("std", step=3)
    monkeypatch.setattr(plotting, "MOST_POINTS", len(whole.Points.I) // 2)
    some = run.plot.distributions("std", step=3)
    pd.testing.assert_frame_equal(some.Rectangles.I.dframe(), whole.Rectangles.I.dframe())
    assert {*some.Points.I["sample"]} == {0, 2}
    assert "one of 2 samples" in hv.render(some).title.text


RANGES = """() => Bokeh.documents.flatMap((document) =>
  [...document._all_models.values()].filter((model) => model.type == "Figure").map((figure) =>
    [figure.x_range.start, figure.x_range.end]))"""
"""Visible parts of the x axes of all figures."""

PICTURES: dict[str, Callable[[Any], Any]] = {
    "series": lambda run: run.slot("head").plot.series("std"),
    "samples": lambda run: run.slot("head").plot.samples("mean"),
    "histogram": lambda run: run.slot("head").plot.histogram(0),
    "distribution": lambda run: run.slot("head").plot.distribution(),
    "preview": lambda run: run.slot("head").plot.preview(0),
    "heat": lambda run: run.plot.heat("l2", of="grad"),
    "kpis": lambda run: run.plot.kpis(),
    "cloud": lambda run: run.plot.cloud("head", step=0),
}


ZOOMING = """() => {
  const models = Bokeh.documents.flatMap((document) => [...document._all_models.values()]);
  for (const model of models) {
    if (model.type == "PanTool") model.active = false;
    if (model.type == "BoxZoomTool") model.active = true;
  }
}"""
"""Activates the tool that zooms to a box, as its button does."""


@pytest.mark.browser
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["series", "preview"], id="some"),
        pytest.param([*PICTURES], id="all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_every_picture_can_be_zoomed_in_a_saved_file(
    run: Run, tmp_path: Path, chromium: Any, names: list[str]
) -> None:
    context = chromium.new_context(offline=True, viewport={"width": 900, "height": 600})
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    for name in names:
        page.goto(save(PICTURES[name](run), tmp_path / f"{name}.html").as_uri())
        page.locator(".bk-Canvas").first.wait_for()
        page.wait_for_function("() => !!(window.Bokeh && Bokeh.documents[0].is_idle)")
        page.evaluate(ZOOMING)
        before = page.evaluate(RANGES)
        box = page.locator(".bk-Canvas").first.bounding_box()
        x, y = box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.4
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + box["width"] * 0.2, y + box["height"] * 0.2, steps=4)
        page.mouse.up()
        page.wait_for_function(
            f"(before) => JSON.stringify(({RANGES})()) != JSON.stringify(before)", arg=before
        )
        (low, high), (start, end) = page.evaluate(RANGES)[0], before[0]
        assert abs(high - low) < abs(end - start), name
    context.close()


def test_a_preview_is_a_picture_with_the_values(run: Run) -> None:
    slot = run.slot("head")
    values = slot.value(4)
    assert slot.preview(4).axes[0] == "sample"
    drawn = plotted(slot).preview(4).dimension_values("value")
    np.testing.assert_array_equal(np.sort(drawn[~np.isnan(drawn)]), np.sort(values, axis=None))
    one = plotted(slot).preview(4, sample=1)
    assert isinstance(one, hv.Image)
    assert dimensions(one)[:2] == [*slot.preview(4).axes[:0:-1]]
    picture = one.dimension_values("value", flat=False)
    np.testing.assert_array_equal(picture, values[1])

"""Attention weights: what is found, what is drawn, and the tokens next to it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import holoviews as hv
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Run, open_run
from comgra_decl.viewer.components.attention import AttentionView
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.elements import tokens_joined
from comgra_decl.viewer.model.attention import (
    attention,
    has_neurons,
    layer_at,
    layers,
    neurons,
    thumbnails,
    tokens,
)
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.page import create_page
from comgra_decl.viewer.panes.attention import AttentionPane
from comgra_decl.viewer.plotting import save
from tests.support.traced import traced, train

expect = pytest.importorskip("playwright.sync_api").expect

LENGTH, HEADS = 7, 3
NODES = {
    "all": {"select": "**", "capture": ["input", "output"], "values": True},
    "weights": {"select": "*.weights", "values": True, "axes": ["head", "query", "key"]},
}


class Weights(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(2, (HEADS, -1)).transpose(1, 2)
        return (3 * heads @ heads.transpose(-1, -2)).softmax(-1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights, self.mix = Weights(), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.weights(x) @ x.unflatten(2, (HEADS, -1)).transpose(1, 2)
        return self.mix(x + mixed.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(50, 12), Layer(), Layer()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.embed(tokens)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.manual_seed(2)
    model, ids = Net(), torch.randint(0, 50, (4, LENGTH))

    def training() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            optimizer.step()

    return traced(tmp_path_factory.mktemp("attention") / "runs", NODES, training)


@pytest.fixture
def view(run: Run) -> RunView:
    return RunView(run)


def at(node: str = "first.weights", **fields: Any) -> Selection:
    return Selection(step=1, node=node, role="output", **fields)


def test_weights_are_found_in_the_order_of_execution(view: RunView) -> None:
    assert [slot.node for slot in layers(view)] == ["first.weights", "second.weights"]
    second = layer_at(view, at("second.weights"))
    assert second is not None
    assert second.node == "second.weights"
    nearest = {"embed": "first.weights", "second": "second.weights", "second.out": "second.weights"}
    for node, layer in nearest.items():
        found = layer_at(view, at(node))
        assert found is not None
        assert found.node == layer


class Attending(nn.Module):
    """Attends with a softmax that is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.weights = nn.Embedding(50, 12), nn.Softmax(dim=-1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        heads = self.embed(tokens).unflatten(2, (HEADS, -1)).transpose(1, 2)
        return self.weights(heads @ heads.mT) @ heads


def test_a_softmax_module_and_the_function_that_it_calls_are_one_layer(tmp_path: Path) -> None:
    model, ids = Attending(), torch.randint(0, 50, (4, LENGTH))
    both = {**NODES, "called": {"select": {"function": "torch.softmax"}, "values": True}}

    def training() -> None:
        model(ids).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=1e-2).step()

    view = RunView(traced(tmp_path / "runs", both, training))
    assert {"weights", "weights.softmax"} <= {*view.nodes}
    assert [slot.node for slot in layers(view)] == ["weights.softmax"]
    found = layer_at(view, Selection(step=0, node="weights", role="output"))
    assert found is not None
    assert found.node == "weights.softmax"


def test_the_selected_sample_is_shown_with_its_tokens(view: RunView, run: Run) -> None:
    slot = layers(view)[0]
    for batch, sample in (("mean", 0), ("2", 2)):
        found = attention(view, slot, at(batch=batch))
        assert found is not None
        np.testing.assert_array_equal(found.weights, run.value("first.weights", 1)[sample])
        node, role = next((s.node, s.role) for s in view.slots.values() if s.kind == "input")
        ids = run.slot(node, role=role).value(1)[sample]
        assert found.keys == found.queries == tuple(map(str, ids.tolist()))
        np.testing.assert_allclose(found.weights.sum(-1), 1, rtol=1e-5)
    assert attention(view, slot, at(batch="9")) is None


def test_tokens_of_another_length_are_not_taken(view: RunView) -> None:
    assert len(tokens(view, at(), 0, LENGTH)) == LENGTH
    assert tokens(view, at(), 0, LENGTH + 1) == ()


def test_a_thumbnail_shows_the_largest_weight_of_each_block(view: RunView) -> None:
    found = attention(view, layers(view)[0], at())
    assert found is not None
    np.testing.assert_array_equal(thumbnails(found), found.weights)
    big = np.random.default_rng(0).random((2, 60, 49)).astype(np.float32)
    small = thumbnails(type(found)(big, (), (), "", 0))
    expected = [
        [[big[h, 3 * i : 3 * i + 3, 3 * j : 3 * j + 3].max() for j in range(17)] for i in range(20)]
        for h in range(2)
    ]
    np.testing.assert_array_equal(small, np.array(expected, np.float32))


@pytest.fixture
def dashboard(run: Run) -> Dashboard:
    return Dashboard(Catalogue(Path(str(run.path)).parents[1]), query="?section=attention&step=1")


def shown(dashboard: Dashboard) -> AttentionView:
    (pane,) = dashboard.screen.sections["attention"].panes
    assert isinstance(pane, AttentionPane)
    view: AttentionView = pane.view
    return view


def test_the_section_sends_bytes_of_which_255_is_the_largest(
    dashboard: Dashboard, run: Run
) -> None:
    dashboard.change(node="second.weights", batch="1")
    sent = shown(dashboard).shown or {}
    values = run.value("second.weights", 1)[1]
    np.testing.assert_allclose(sent["largest"], values.max((1, 2)), rtol=1e-6)
    read = np.frombuffer(base64.b64decode(sent["weights"]), np.uint8).reshape(values.shape)
    assert (read.max((1, 2)) == 255).all()
    np.testing.assert_allclose(read / 255 * values.max((1, 2), keepdims=True), values, atol=3e-3)
    assert [layer["name"] for layer in shown(dashboard).layers] == [
        "first.weights",
        "second.weights",
    ]
    assert shown(dashboard).chosen == 1


def test_a_click_on_a_layer_selects_its_tensor(dashboard: Dashboard) -> None:
    shown(dashboard)._handle_msg({"layer": 1})
    assert dashboard.state.node == "second.weights"
    nonsense_heads = ({"neurons": HEADS}, {"neurons": -2}, {"neurons": True}, {"neurons": None})
    wrong = ({"layer": 2}, {"layer": -1}, {"layer": True}, {"layer": "1"}, {"leyer": 0})
    for nonsense in (*wrong, *nonsense_heads):
        assert not shown(dashboard).check(nonsense)
        shown(dashboard)._handle_msg(nonsense)
    assert dashboard.state.node == "second.weights"


def test_a_run_without_attention_has_no_such_tab_and_says_why(root: Path) -> None:
    dashboard = Dashboard(Catalogue(root), query="?section=inspect")
    assert 'data-send="attention"' not in dashboard.screen.tabs.html
    dashboard.change(section="attention")
    assert "no attention weights" in shown(dashboard).missing


class Fused(nn.Module):
    """Three heads that share their keys."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 12)
        self.query, self.key = nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        query = self.query(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        key = self.key(x)[:, None]
        return F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.manual_seed(2)
    select = {"function": "F.scaled_dot_product_attention"}
    entry = {"select": select, "capture": ["input", "output"], "values": True}
    nodes = {"all": {"select": "**"}, "fused": {**entry, "attention": {"recompute": True}}}
    model, tokens = Fused(), torch.randint(0, 50, (4, LENGTH))
    return traced(
        tmp_path_factory.mktemp("fused") / "runs", nodes, lambda: train(model, tokens, steps=3)
    )


def test_weights_follow_from_the_queries_and_keys_beside_them(fused: Run) -> None:
    view = RunView(fused)
    (slot,) = layers(view)
    assert has_neurons(view, slot)
    weights = fused.slot(slot.node, role=slot.role).value(1)
    for head in range(HEADS):
        found = neurons(view, slot, at(slot.node, batch="2"), head)
        assert found is not None
        scores = found.query @ found.key.T / 2  # the root of the width
        scores[np.triu_indices(LENGTH, 1)] = -np.inf
        shares = np.exp(scores - scores.max(1, keepdims=True))
        np.testing.assert_allclose(
            shares / shares.sum(1, keepdims=True), weights[2, head], rtol=1e-5, atol=1e-7
        )
    assert neurons(view, slot, at(slot.node, batch="2"), HEADS) is None


def test_weights_without_queries_and_keys_have_no_neurons(view: RunView) -> None:
    slot = layers(view)[0]
    assert not has_neurons(view, slot)
    assert neurons(view, slot, at(), 0) is None


@pytest.mark.browser
@pytest.mark.slow
def test_neurons_of_a_head_are_drawn_with_their_products(
    fused: Run, serve: Callable[..., str], page: Any
) -> None:
    address = serve(lambda: create_page([str(Path(str(fused.path)).parents[1])]))
    page.goto(f"{address}?section=attention&step=1")
    page.get_by_role("button", name="Neurons").click()
    for name in ("Head 2", "Query 5"):
        button = page.get_by_role("button", name=name)
        button.click()
        expect(button).to_have_attribute("aria-pressed", "true")
    view = RunView(fused)
    (slot,) = layers(view)
    found = neurons(view, slot, at(slot.node), 2)
    assert found is not None
    columns = page.locator(".neurons-grid > .column")
    dots = [float(text) for text in columns.nth(2).locator("span").all_inner_texts()]
    np.testing.assert_allclose(dots, found.key @ found.query[5], rtol=6e-3)
    weights = fused.slot(slot.node, role=slot.role).value(1)[0, 2]
    painted = [float(text) for text in columns.nth(3).locator("span").all_inner_texts()]
    np.testing.assert_allclose(painted, weights[5], rtol=6e-3)
    products = page.locator(".vectors").nth(2)
    box = products.bounding_box()
    cell = {"x": box["width"] * 3.5 / 4, "y": box["height"] * 1.5 / LENGTH}
    products.hover(position=cell)
    expect(page.locator(".said")).to_contain_text("key 1")
    said = page.locator(".said").inner_text()
    assert "neuron 3 \u00b7 q \u00d7 k" in said
    assert float(said.rpartition(" ")[2]) == pytest.approx(
        found.query[5, 3] * found.key[1, 3], rel=6e-3
    )
    page.get_by_role("button", name="Matrices").click()
    expect(page.locator(".map canvas")).to_have_count(HEADS)


@pytest.mark.browser
def test_attention_is_drawn_in_three_ways(run: Run, serve: Callable[..., str], page: Any) -> None:
    address = serve(lambda: create_page([str(Path(str(run.path)).parents[1])]))
    page.goto(f"{address}?section=attention&step=1")
    maps = page.locator(".map canvas")
    expect(maps).to_have_count(HEADS)
    box = maps.first.bounding_box()
    assert box["width"] == pytest.approx(box["height"], abs=1)
    ids = run.value("embed", 1)[0].shape[0]
    for side in ("down", "across"):
        assert page.locator(f".map:first-child .labels.{side} span").count() == ids == LENGTH
    maps.nth(1).hover(position={"x": box["width"] - 4, "y": 5})
    weight = run.value("first.weights", 1)[0, 1, 0, LENGTH - 1]
    expect(page.locator(".said")).to_contain_text("head 1 \u00b7 query 0")
    said = float(page.locator(".said").inner_text().rpartition(" ")[2])
    assert said == pytest.approx(weight, abs=5e-3)
    page.get_by_role("button", name="Heads", exact=True).click()
    lines = page.locator(".tokens line")
    expect(lines.first).to_be_attached()
    for head in (1, 2):
        page.get_by_role("button", name=f"Head {head}").click()
    values = run.value("first.weights", 1)[0, 0]
    expect(lines).to_have_count(int((np.rint(values / values.max() * 255) / 255 >= 0.04).sum()))
    page.locator(".tokens li").nth(2).hover()
    row = np.rint(values[2] / values.max() * 255) / 255
    expect(lines).to_have_count(int((row >= 0.04).sum()))
    page.get_by_role("button", name="Model").click()
    expect(page.locator(".thumb")).to_have_count(2 * HEADS)
    page.get_by_role("button", name="second.weights, head 2").click()
    expect(page.locator(".attention header b")).to_have_text("second.weights")
    expect(page.get_by_role("button", name="Head 2")).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_role("button", name="Head 0")).to_have_attribute("aria-pressed", "false")


def test_the_vectors_and_products_of_a_query_are_drawn(fused: Run, tmp_path: Path) -> None:
    (slot,) = layers(RunView(fused))
    plots = fused.plot
    layout = plots.attention_neurons(slot.node, query=3, head=1, step=1, sample=2)
    vectors, products = layout.traverse(lambda part: part, [hv.QuadMesh])
    query, key = (
        fused.slot(slot.node, role=role).value(1)[2] for role in ("input", "input[1]")
    )  # one key for all heads
    np.testing.assert_array_equal(
        vectors.dimension_values("value", flat=False), np.vstack([query[1, 3], key[0]])
    )
    np.testing.assert_array_equal(
        products.dimension_values("product", flat=False), query[1, 3] * key[0]
    )
    weights = fused.slot(slot.node, role=slot.role).value(1)[2, 1, 3]
    names = products.dimension_values("key and its weight", flat=False)[:, 0]
    assert [float(name.rpartition(":")[2]) for name in names] == pytest.approx(weights, rel=1e-2)
    image = save(layout, tmp_path / "neurons.svg").read_text()
    assert all(f"<!-- {name} -->" in image for name in names)
    with pytest.raises(UnknownNameError, match=f"no query {LENGTH}; there are {LENGTH}"):
        plots.attention_neurons(slot.node, query=LENGTH)


def test_the_preset_shows_each_head_of_torchs_attention_as_called_by_default(
    tmp_path: Path,
) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(50, 8), nn.Linear(8, 2)
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            mixed, _ = self.attend(x, x, x)
            return cast(torch.Tensor, self.out(mixed.mean(1)))

    torch.manual_seed(0)
    model, tokens = Classifier(), torch.randint(50, (4, LENGTH))
    x = model.embed(tokens)
    expected = model.attend(x, x, x, average_attn_weights=False)[1].detach().numpy()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with comgra.trace("attention", root=tmp_path) as session:
        nn.functional.cross_entropy(model(tokens), torch.tensor([0, 1, 1, 0])).backward()
        optimizer.step()
    run = open_run(session.path or "")
    (slot,) = layers(RunView(run))
    assert slot.node == "attend.softmax"
    cells = run.plot.attention("attend.softmax", head=1, sample=1)
    np.testing.assert_allclose(
        cells.dimension_values("weight", flat=False), expected[1, 1], rtol=1e-6
    )
    with pytest.raises(UnknownNameError, match=r"queries and keys of .* were not recorded"):
        run.plot.attention_neurons("attend.softmax")


def test_weights_of_an_earlier_preview_are_those_of_the_step_that_is_named(tmp_path: Path) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attend = nn.Embedding(50, 8), nn.MultiheadAttention(8, 2)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens).transpose(0, 1)
            mixed, weights = self.attend(x, x, x, average_attn_weights=False)
            kept.append(weights.detach().numpy())
            return cast(torch.Tensor, mixed)

    torch.manual_seed(0)
    kept: list[Any] = []
    model = Whole()
    batches = [torch.randint(50, (4, LENGTH)) for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with comgra.trace("attention", root=tmp_path, overrides=["schedule.every=1"]) as session:
        for tokens in batches:
            model(tokens).square().mean().backward()
            optimizer.step()
    plots = open_run(session.path or "").plot
    cells = plots.attention("attend", head=1, step=2)
    assert "at step 0" in cells.label
    np.testing.assert_allclose(
        cells.dimension_values("weight", flat=False), kept[0][0, 1], rtol=1e-6
    )
    names = cells.dimension_values("key", flat=False)[0]
    assert [*names] == [f"{i} {token}" for i, token in enumerate(batches[0][0].tolist())]
    (image,) = plots.attention(step=2).traverse(lambda part: part, [hv.Image])
    shown = [name for _, name in image.opts.get("plot").kwargs["yticks"]]
    assert shown == ["attend.softmax", "attend (step 0)"]


def test_attention_between_two_sequences_is_shown(tmp_path: Path) -> None:
    class Crossing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(50, 8), nn.Linear(8, 2)
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True, add_zero_attn=True)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            mixed, _ = self.attend(x[:, :4], x, x)
            mixed = mixed + F.scaled_dot_product_attention(x[:, :4], x, x)
            return cast(torch.Tensor, self.out(mixed))

    model = Crossing()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with comgra.trace("attention", root=tmp_path) as session:
        model(torch.randint(50, (3, LENGTH))).square().mean().backward()
        optimizer.step()
    run = open_run(session.path or "")
    found = {slot.node: slot.shape for slot in layers(RunView(run))}
    assert found == {
        "attend.softmax": (3, 2, 4, LENGTH + 1),
        "Crossing.scaled_dot_product_attention": (1 + 1, 1, 4, LENGTH),  # of the first samples
    }
    values = run.slot("attend.softmax").value(0)
    cells = run.plot.attention("attend.softmax", head=1, sample=1)
    np.testing.assert_array_equal(cells.dimension_values("weight", flat=False), values[1, 1])


def test_vectors_of_as_many_numbers_as_positions_are_no_weights(tmp_path: Path) -> None:
    class Square(nn.Module):
        """Fused attention of two heads, with four positions and four numbers in each vector."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(2, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    model, x = Square(), torch.randn(3, 4, 8)
    q, k, _ = (t.unflatten(2, (2, 4)).transpose(1, 2) for t in model.qkv(x).detach().chunk(3, -1))
    expected = torch.softmax(q @ k.transpose(2, 3) / 2, -1).numpy()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with comgra.trace("attention", root=tmp_path) as session:
        model(x).square().mean().backward()
        optimizer.step()
    run = open_run(session.path or "")
    (slot,) = layers(RunView(run))
    cells = run.plot.attention(slot.node, head=1, sample=1)
    np.testing.assert_allclose(
        cells.dimension_values("weight", flat=False), expected[1, 1], rtol=1e-5
    )
    names = run.slot(slot.node).preview(0).meanings
    assert [axis.name for axis in names] == ["sample", "head", "position", "feature"]


def test_a_head_that_attends_to_nothing_has_no_lines(tmp_path: Path) -> None:
    weights = np.zeros((2, 3, 3), np.float32)
    weights[1] = np.eye(3)
    words = ["a", "b", "c"]
    overlay = tokens_joined(weights, words, words, "lines")
    assert [part.label for part in overlay.traverse(lambda part: part, [hv.Segments])] == ["head 1"]
    for drawn in (overlay, tokens_joined(weights[:1], words, words, "none")):
        save(drawn, tmp_path / "lines.svg")

"""The Data section shows the first recorded batches as the model received them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comgra_decl
from comgra_decl.viewer.model.data import Data, first_batches
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.page import create_page
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.panes.data import DataPane
from tests.viewer.app.test_probe_pictures import pixels

KEPT, BATCH = 6, 10
MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
VALUES = {"nodes": {"all": {"select": "**", "values": True}}, "samples": {"count": KEPT}}
DECLARED = {
    **VALUES,
    "values": {"max_elements": 4096},
    "probes": {"eyes": {"show": {"image": {"mean": MEAN, "std": STD}}, "samples": {"count": 2}}},
}


def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images from 0 to 1, of which the second of the first batch is there twice; and classes."""
    generator = torch.Generator().manual_seed(1)
    plain = torch.rand(count, 3, 8, 8, generator=generator)
    plain[4] = plain[1]
    return plain, torch.randint(0, 3, (count,), generator=generator)


def normalised(plain: torch.Tensor) -> torch.Tensor:
    return (plain - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def trained(
    root: Path,
    net: nn.Module,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    **spec: Any,
) -> RunView:
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    declared = {"rules": "off", "schedule": {"first": 100}, **spec}
    with comgra_decl.trace(declared, root=root) as session:
        for x, target in batches:
            optimizer.zero_grad()
            F.cross_entropy(net(x), target).backward()
            optimizer.step()
    assert session.path is not None
    return RunView(comgra_decl.open_run(session.path))


def of_images(root: Path, **spec: Any) -> RunView:
    torch.manual_seed(0)
    plain, classes = images(6 * BATCH)
    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 3))
    pairs = zip(normalised(plain).split(BATCH), classes.split(BATCH), strict=True)
    return trained(root, net, [*pairs], **{**DECLARED, **spec})


def data(view: RunView) -> Data:
    return first_batches(view, resolve(view, Selection(), {}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    of_images(root)
    return root


@pytest.fixture
def seen(folder: Path) -> RunView:
    return RunView(comgra_decl.open_run(folder))


def recorded(batches: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """What the first records contain: the first samples of each batch."""
    plain, classes = images(6 * BATCH)
    inputs = torch.cat([x[:KEPT] for x in normalised(plain).split(BATCH)[:batches]])
    return inputs, torch.cat([c[:KEPT] for c in classes.split(BATCH)[:batches]])


def test_numbers_are_those_of_the_recorded_samples(seen: RunView) -> None:
    found = data(seen)
    inputs, classes = recorded()
    given, target = found.tensors
    assert found.steps == (0, 1, 2, 3)
    assert (given.shapes, target.shapes) == (((BATCH, 3, 8, 8),), ((BATCH,),))
    assert given.facts is not None
    assert (given.facts.low, given.facts.high) == (float(inputs.min()), float(inputs.max()))
    assert given.facts.mean == pytest.approx(float(inputs.double().mean()))
    assert given.facts.std == pytest.approx(float(inputs.double().std(correction=0)))
    assert np.allclose(
        given.facts.channels,
        [(float(c.mean()), float(c.std(correction=0))) for c in inputs.double().unbind(1)],
    )
    assert (given.facts.repeated, given.facts.samples) == (1, 4 * KEPT)
    assert dict(target.classes) == Counter(map(str, classes.tolist()))


def test_samples_have_their_class_and_the_declared_normalisation_undone(seen: RunView) -> None:
    plain, classes = images(6 * BATCH)
    batches = data(seen).tensors[0].batches
    assert [(b.recorded, b.samples, b.whole) for b in batches] == [(KEPT, BATCH, True)] * 4
    for number, batch in enumerate(batches):
        for tile in batch.tiles:
            place = number * BATCH + tile.sample
            assert tile.label == str(int(classes[place]))
            expected = (plain[place].permute(1, 2, 0) * 255).round()
            assert np.abs(pixels(tile.image) - expected.numpy()).max() <= 1


def test_text_is_shown_as_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 5, (3, 4, 6))
    net = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(24, 2))
    batches = [(x, torch.tensor([0, 1, 0, 1])) for x in ids]
    view = trained(tmp_path, net, batches, tokens={"alphabet": "abcde"}, **VALUES)
    for step, batch in enumerate(data(view).tensors[0].batches):
        assert [tile.text for tile in batch.tiles] == [
            "".join("abcde"[i] for i in row) for row in ids[step].tolist()
        ]


def test_channels_are_recognised_at_either_place(tmp_path: Path) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 3))

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x.permute(0, 3, 1, 2).contiguous())

    torch.manual_seed(0)
    plain, classes = images(BATCH)
    given = normalised(plain).permute(0, 2, 3, 1).contiguous()
    view = trained(tmp_path, Last(), [(given, classes)], **DECLARED)
    found = next(t for t in data(view).tensors if t.shapes[0] == (BATCH, 8, 8, 3))
    tile = found.batches[0].tiles[2]
    expected = (plain[2].permute(1, 2, 0) * 255).round()
    assert np.abs(pixels(tile.image) - expected.numpy()).max() <= 1


def test_a_class_alone_in_a_batch_is_reported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, BATCH, 5)
    sorted_ = [(x[i], torch.full((BATCH,), i)) for i in range(2)]
    view = trained(tmp_path, nn.Linear(5, 2), sorted_, **VALUES)
    assert "the data may not be shuffled" in html_of(view)


def test_without_values_the_numbers_come_from_the_statistics_of_samples(tmp_path: Path) -> None:
    view = of_images(tmp_path, nodes={"all": {"select": "**"}}, probes={}, preview=None)
    given, target = data(view).tensors
    inputs, classes = recorded()
    assert (given.batches, given.counted) == ((), False)
    assert given.shapes == ((BATCH, 3, 8, 8),)
    assert given.facts is not None
    assert target.facts is not None
    assert (given.facts.low, given.facts.high) == (float(inputs.min()), float(inputs.max()))
    assert given.facts.mean == pytest.approx(float(inputs.double().mean()), abs=1e-6)
    assert given.facts.std == pytest.approx(float(inputs.double().std(correction=0)), rel=1e-5)
    assert (target.facts.low, target.facts.high) == (int(classes.min()), int(classes.max()))
    assert "channels, duplicates and classes are unknown" in html_of(view)


def test_large_images_have_a_preview_of_each_batch_and_exact_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.rand(5, 4, 3, 64, 64)
    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32, 2))
    batches = [(each, torch.tensor([0, 1, 0, 1])) for each in x]
    view = trained(tmp_path, net, batches, nodes={"all": {"select": "**"}})
    given = data(view).tensors[0]
    assert [(batch.step, batch.whole) for batch in given.batches] == [(i, False) for i in range(4)]
    assert given.facts is not None
    assert given.facts.low == float(x[:4].min())
    assert given.facts.high == float(x[:4].max())


def test_values_that_are_not_finite_are_counted_without_values(tmp_path: Path) -> None:
    x = torch.rand(2, 4, 5)
    x[1, 2, :2] = torch.nan
    spec = {"nodes": {"all": {"select": "**"}}, "preview": None}
    given = data(trained(tmp_path, nn.Linear(5, 2), [(b, torch.ones(4).long()) for b in x], **spec))
    facts = given.tensors[0].facts
    assert facts is not None
    assert facts.nonfinite == 2
    clean = torch.cat([x[0], x[1, [0, 1, 3]]])
    assert facts.mean == pytest.approx(float(clean.double().mean()), abs=1e-6)


def test_one_thing_is_named_in_the_singular(tmp_path: Path) -> None:
    x = torch.rand(4, 5)
    x[2, 1] = torch.nan
    view = trained(tmp_path, nn.Linear(5, 2), [(x, torch.ones(4).long())], **VALUES)
    shown = html_of(view)
    assert "The first recorded batch<" in shown
    assert ">Step 0. " in shown
    assert "1 value NaN or infinite" in shown


def html_of(view: RunView, act: Callable[..., None] = lambda **_: None) -> str:
    pane = DataPane(act)
    pane.refresh(Shown(view, resolve(view, Selection(), {}), "kind", "linear", None, False))
    return str(pane.view.html)


@pytest.mark.browser
@pytest.mark.slow
def test_a_click_selects_a_sample_and_its_step(
    folder: Path, serve: Callable[..., str], open_page: Callable[..., Any], tmp_path: Path
) -> None:
    page = open_page(viewport={"width": 1280, "height": 800})
    page.goto(serve(lambda: create_page([str(folder)])) + "?section=data")
    page.get_by_text("The first 4 recorded batches").wait_for()
    page.wait_for_function("() => !!(window.Bokeh && Bokeh.documents[0].is_idle)")
    assert page.locator(".tile").count() == 4 * KEPT
    page.screenshot(path=str(tmp_path / "data.png"))
    page.locator('[aria-label="Samples of step 2"] .tile').nth(3).click()
    page.wait_for_url(re.compile(r"step=2\b.*batch=3|batch=3.*step=2\b"))
    page.locator('.tile[aria-pressed="true"]').wait_for()
    assert page.locator('.tile[aria-pressed="true"]').inner_text().startswith("sample 3")

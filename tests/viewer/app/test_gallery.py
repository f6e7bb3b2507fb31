"""The gallery of a probe: inputs as waves, and what models of other kinds predict."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl
from comgra_decl.viewer.model.gallery import Tile, gallery, waves
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.panes.gallery import sample_tile
from tests.probing.attention import TOKENS, Language

EYES = "probe:eyes"
ALPHABET = "abcdefghijk"


def trained(
    root: Path,
    net: nn.Module,
    batch: tuple[Tensor, Any],
    loss: Callable[..., Tensor],
    **spec: Any,
) -> RunView:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    declared = {
        "nodes": {"all": {"select": "**"}},
        "rules": "off",
        "probes": {"eyes": {"samples": {"count": 4}, "schedule": {"every": 1}}},
        **spec,
    }
    x, targets = batch
    with comgra_decl.trace(declared, root=root) as session:
        for _ in range(3):
            optimizer.zero_grad()
            loss(net(x), targets).backward()
            optimizer.step()
    assert session.path is not None
    return RunView(comgra_decl.open_run(session.path))


def outputs(view: RunView, step: int) -> Tensor:
    (root,) = {entry["node"] for entry in view.run.document("modules") if entry["path"] == ""}
    return torch.from_numpy(view.run.value(root, step, type=EYES).copy())


def line(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, outputs))


@pytest.mark.parametrize("count", [6, 100])
@pytest.mark.parametrize(
    ("function", "measure"),
    [
        (F.mse_loss, "squared error"),
        (F.l1_loss, "absolute error"),
        (F.binary_cross_entropy_with_logits, "binary cross-entropy"),
    ],
)
def test_a_single_output_is_shown_with_its_distance_from_the_target(
    function: Callable[..., Tensor], measure: str, count: int, tmp_path: Path
) -> None:
    targets = torch.rand(count, 1).round()
    view = trained(tmp_path, line(1), (torch.randn(count, 5), targets), function)
    tiles = gallery(view, EYES, 2)
    out = outputs(view, 2)
    assert len(tiles) == 4
    for tile, value, target in zip(tiles, out, targets, strict=False):
        shown = value.sigmoid() if measure.startswith("binary") else value
        assert float(tile.prediction.replace("\u2212", "-")) == pytest.approx(
            float(shown), rel=0.01
        )
        assert tile.loss == pytest.approx(float(function(value, target)), rel=1e-5)
        assert tile.measure == measure


def test_a_regression_of_several_numbers_shows_all_of_them(tmp_path: Path) -> None:
    targets = torch.randn(6, 3)
    view = trained(tmp_path, line(3), (torch.randn(6, 5), targets), F.mse_loss)
    out = outputs(view, 2)
    for tile, value, target in zip(gallery(view, EYES, 2), out, targets, strict=False):
        assert tile.prediction.count(",") == 2
        assert tile.loss == pytest.approx(float(F.mse_loss(value, target)), rel=1e-5)


def test_without_a_target_a_number_is_shown_alone(tmp_path: Path) -> None:
    given = {"input": torch.randn(2, 5).tolist()}
    view = trained(
        tmp_path,
        line(1),
        (torch.randn(6, 5), torch.randn(6, 1)),
        F.mse_loss,
        probes={"eyes": {"batch": given}},
    )
    tiles = gallery(view, EYES, 0)
    assert [tile.loss for tile in tiles] == [None, None]
    assert all(tile.prediction for tile in tiles)


def test_a_language_model_predicts_the_next_token(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(TOKENS, (5, 6))

    def loss(scores: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    names = {"alphabet": ALPHABET, "inputs": ["*"]}
    view = trained(tmp_path, Language(), (tokens, tokens), loss, tokens=names)
    scores = outputs(view, 2)
    for tile, row, ids in zip(gallery(view, EYES, 2), scores, tokens, strict=False):
        assert tile.prediction == f"next {ALPHABET[int(row[-1].argmax())]}"
        assert tile.loss == pytest.approx(float(F.cross_entropy(row[:-1], ids[1:])), rel=1e-5)
        assert tile.measure == "next-token loss"
        assert tile.text == "".join(ALPHABET[i] for i in ids)


def test_outputs_of_an_unknown_kind_predict_nothing(tmp_path: Path) -> None:
    net = nn.Conv1d(1, 2, 3)
    batch = torch.randn(6, 1, 32), torch.randn(6, 2, 30)
    tiles = gallery(trained(tmp_path, net, batch, F.mse_loss), EYES, 0)
    assert [(tile.prediction, tile.loss) for tile in tiles] == [("", None)] * 4


@pytest.mark.parametrize("shape", [(400,), (1, 400), (2, 400)])
def test_a_waveform_is_drawn_as_waves(shape: tuple[int, ...], tmp_path: Path) -> None:
    x = torch.randn(6, *shape)
    net = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 3))
    tiles = gallery(trained(tmp_path, net, (x, torch.arange(6) % 3), F.cross_entropy), EYES, 0)
    for tile, value in zip(tiles, x.numpy(), strict=False):
        channels = value.reshape(-1, 400)
        assert not tile.image
        assert len(tile.waves) == len(channels)
        low, high = channels.min(), channels.max()
        assert max(wave.max() for wave in tile.waves) == 1
        assert min(wave.min() for wave in tile.waves) == 0
        begin = channels[0, : -(-400 // 88)]  # 400 places in 88 columns
        ends = (np.array([begin.min(), begin.max()]) - low) / (high - low)
        np.testing.assert_allclose(tile.waves[0][0], ends, rtol=1e-5)
        drawing = ET.fromstring(sample_tile(tile, False).replace("<br>", "")).find("svg")
        assert drawing is not None
        assert len(drawing.findall("path")) == len(channels)


def test_a_wave_has_a_gap_where_it_is_not_finite() -> None:
    (wave,) = waves(np.array([[0.0, np.nan, 1.0, np.inf, 0.5]]))
    np.testing.assert_array_equal(wave[:, 0], [0, np.nan, 1, np.nan, 0.5])
    html = sample_tile(Tile(0, waves=(wave,)), False)
    assert html.count("M") == 3  # three pieces
    (flat,) = waves(np.zeros((1, 3)))
    np.testing.assert_array_equal(flat, np.full((3, 2), 0.5))

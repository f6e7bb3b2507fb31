"""Rules about pictures: hand-computed numbers, and a model that looks at a planted mark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import ProbeError, SpecError
from comgra_decl.hooks.probing.checks import agreement, checked, declared_mask, outside
from comgra_decl.hooks.probing.subject import Drawn, Map
from comgra_decl.rules import diagnose
from comgra_decl.spec import load_spec

NAMES = ("attribution_outside_mask", "attributions_disagree", "completeness_gap")


def test_the_share_outside_a_mask_is_a_mean_over_the_samples() -> None:
    mask = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    first, second = [[-3.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]
    values = torch.tensor([first, second])
    assert outside(Map(None, "input", values), mask) == (1 / 4 + 3 / 4) / 2
    two_channels = torch.stack([values, values], 1)
    assert outside(Map(None, "input", two_channels), mask) == 0.5
    each = torch.stack([mask, 1 - mask])
    assert outside(Map(None, "input", values), each) == (1 / 4 + 1 / 4) / 2


def test_a_mask_is_averaged_over_the_places_of_a_smaller_map() -> None:
    mask = torch.zeros(4, 4)
    mask[:2, :2] = 1  # the first place
    mask[:2, 2] = 1  # half of the second place
    values = torch.tensor([[[2.0, 4.0], [0.0, 2.0]]])
    assert outside(Map("conv", "output", values), mask, resized=True) == (0.5 * 4 + 2) / 8
    assert outside(Map("conv", "output", values), mask) is None
    tokens = torch.tensor([[[1.0, 1.0], [3.0, 3.0], [0.0, 0.0]]])
    assert outside(Map("embed", "output", tokens), torch.tensor([1.0, 0.0, 0.0])) == 0.75
    assert outside(Map(None, "input", torch.zeros(1, 4, 4)), mask) is None
    columns = torch.tensor([[1.0, 3.0], [2.0, 0.0]])  # two samples with two features each
    assert outside(Map(None, "input", columns), torch.tensor([1.0, 0.0])) == (3 / 4 + 0) / 2
    each = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert outside(Map(None, "input", columns), each) == (3 / 4 + 1) / 2
    assert outside(Map(None, "input", columns), torch.ones(4, 4)) is None
    assert outside(Map("fc", "output", torch.ones(1, 7)), mask) is None


def test_agreement_is_the_mean_rank_correlation_of_magnitudes() -> None:
    random = np.random.default_rng(0)
    one, two = random.integers(-4, 5, (3, 2, 5, 4)), random.normal(size=(3, 5, 4))
    wanted = [
        spearmanr(np.abs(x).sum(0).ravel(), np.abs(y).ravel()).statistic
        for x, y in zip(one, two, strict=True)
    ]
    assert agreement(one.astype(float), two) == pytest.approx(np.mean(wanted), rel=1e-12)
    assert agreement(np.array([[1.0, 2.0, 3.0]]), np.array([[-9.0, -5.0, -1.0]])) == -1
    assert agreement(np.ones((1, 3)), np.array([[1.0, 2.0, 3.0]])) is None
    assert agreement(np.ones((1, 3)), np.ones((1, 4))) is None


def test_only_pictures_of_the_same_outputs_are_compared() -> None:
    def of(target: Any, **facts: Any) -> Drawn:
        values = torch.tensor([[1.0, 2.0, 3.0]])
        return Drawn([Map(None, "input", values)], {"method": "m", "target": target, **facts})

    found = checked(
        {"a": of([1]), "b": of([1]), "c": of([2], gap=[0.5], difference=[-2.0])}, mask=None
    )
    assert found["pairs"] == [["a", "b", pytest.approx(1)]]
    assert found["pictures"]["c"] == {"method": "m", "gap": 0.5, "difference": 2.0}


class Pixels(nn.Module):
    """Its output is a weighted sum of the pixels, so that its pictures can be computed by hand."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        weights = torch.zeros(2, 4, 4)
        weights[0, 0, :] = 1.0
        weights[0, 3, 0] = 12.0
        self.register_buffer("weights", weights)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x[:, 0, None] * self.weights).sum((2, 3))


class Steep(nn.Module):
    """A step of a sigmoid between the baseline and the input, which two points miss."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        score = torch.sigmoid(80 * (x.mean((1, 2, 3)) - 0.5))
        return self.scale * torch.stack([score, 0 * score], 1)


def found(tmp_path: Path, model: nn.Module, steps: int = 22, **spec: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x, labels = torch.ones(6, 1, 4, 4), torch.zeros(6, dtype=torch.int64)
    with comgra.trace({"schedule": {"first": 30}, **spec}, root=tmp_path) as session:
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(x), labels).backward()
            optimizer.step()
    assert session.path is not None
    findings = diagnose(comgra.open_run(session.path)).findings
    return {f.rule: f for f in findings if f.rule in NAMES}


TOP_ROW = [[1, 1, 1, 1], [0] * 4, [0] * 4, [0] * 4]
PROBE = {"samples": {"count": 2}, "schedule": {"first": 30}}


def test_a_model_that_looks_elsewhere_is_reported_with_the_share(tmp_path: Path) -> None:
    pictures = {"map": {"method": "input_x_gradient", "of": "eyes", "target": 0}}
    probes = {"eyes": {**PROBE, "mask": TOP_ROW}}
    (finding,) = found(tmp_path, Pixels(), probes=probes, pictures=pictures).values()
    assert finding.rule == "attribution_outside_mask"
    assert finding.evidence["share"] == pytest.approx(12 / 16)
    assert "75% of the attribution in the picture 'map'" in finding.message


def test_an_untrained_model_may_look_anywhere(tmp_path: Path) -> None:
    pictures = {"map": {"method": "input_x_gradient", "of": "eyes", "target": 0}}
    probes = {"eyes": {**PROBE, "mask": TOP_ROW}}
    assert found(tmp_path, Pixels(), 20, probes=probes, pictures=pictures) == {}


def test_a_model_that_looks_inside_the_mask_is_not(tmp_path: Path) -> None:
    pictures = {"map": {"method": "input_x_gradient", "of": "eyes", "target": 0}}
    probes = {"eyes": {**PROBE, "mask": (1 - np.array(TOP_ROW)).tolist()}}
    assert found(tmp_path, Pixels(), probes=probes, pictures=pictures) == {}


@pytest.mark.slow
def test_too_few_points_of_integrated_gradients_are_reported(tmp_path: Path) -> None:
    line = {"method": "integrated_gradients", "of": "eyes", "target": 0}
    probes = {"eyes": PROBE}
    few = {"line": {**line, "points": 2}}
    (finding,) = found(tmp_path / "few", Steep(), probes=probes, pictures=few).values()
    assert finding.rule == "completeness_gap"
    assert finding.evidence["difference"] == pytest.approx(1, abs=0.01)
    assert finding.evidence["gap"] == pytest.approx(1, abs=0.01)  # no point sees the step
    many = {"line": {**line, "points": 200}}
    assert found(tmp_path / "many", Steep(), probes=probes, pictures=many) == {}


class Opposed(nn.Module):
    """Depends most steeply on the pixels that are smallest."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        ramp = torch.linspace(1.0, 2.0, 16).reshape(4, 4)
        score = (torch.exp(-6 * ramp * x[:, 0])).sum((1, 2)) + (ramp**3 * x[:, 0].detach()).sum(
            (1, 2)
        )
        return self.scale * torch.stack([score, 0 * score], 1)


@pytest.mark.slow
def test_two_methods_that_rank_the_pixels_in_opposite_order_are_reported(tmp_path: Path) -> None:
    pictures = {
        "gradient": {"method": "saliency", "of": "eyes", "target": 0},
        "cover": {
            "method": "occlusion",
            "of": "eyes",
            "target": 0,
            "window": [1, 1],
        },
    }
    (finding,) = found(tmp_path, Opposed(), probes={"eyes": PROBE}, pictures=pictures).values()
    assert finding.rule == "attributions_disagree"
    assert finding.evidence["correlation"] == pytest.approx(-1)


def test_masks_are_checked(tmp_path: Path) -> None:
    np.save(tmp_path / "mask.npy", np.eye(3))
    mask = declared_mask(str(tmp_path / "mask.npy"))
    assert mask is not None
    assert torch.equal(mask, torch.eye(3).double())
    with pytest.raises(ProbeError, match="only 0 and 1"):
        declared_mask([[0.5]])
    with pytest.raises(ProbeError, match="cannot be read as a regular array"):
        declared_mask([[1], [1, 0]])
    with pytest.raises(SpecError, match=r"the path of a .npy file, got 'mask.png'"):
        load_spec({"probes": {"eyes": {"mask": "mask.png", "samples": {"count": 1}}}})

"""A picture takes exactly the forward and backward passes that its documentation states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.recording import EVERYTHING, recording


class Passes:
    """Counts the passes of all models whose output goes through `counted`."""

    forward = 0
    backward = 0


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        Passes.forward += 1
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        Passes.backward += 1
        return gradients[0]


def counted(x: Tensor) -> Tensor:
    found: Tensor = Counted.apply(x)  # type: ignore[no-untyped-call]
    return found


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return counted(self.head(self.conv(x).relu().mean((2, 3))))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return counted(self.head(self.norm(hidden)))


def passes(model: nn.Module, x: Tensor, labels: Tensor, *pictures: dict[str, Any]) -> list[int]:
    """Return the passes of one training step with a probe, less those of the step itself."""
    spec = {
        "probes": {"eyes": {"samples": {"count": 2}}},
        "pictures": {f"p{i}": {"of": "eyes", **each} for i, each in enumerate(pictures)},
    }
    Passes.forward = Passes.backward = 0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recording({**EVERYTHING, **spec}) as found:
        out = model(x)
        F.cross_entropy(out if out.dim() == 2 else out.transpose(1, 2), labels).backward()
        optimizer.step()
    assert not [warning for warning in found.report["warnings"] if "probe" in warning]
    return [Passes.forward - 1, Passes.backward - 1]


def of_images(*pictures: dict[str, Any]) -> list[int]:
    torch.manual_seed(0)
    return passes(Image(), torch.randn(4, 1, 6, 6), torch.arange(4) % 3, *pictures)


def of_words(*pictures: dict[str, Any]) -> list[int]:
    torch.manual_seed(0)
    tokens = torch.randint(7, (4, 5))
    return passes(Words(), tokens, tokens, *pictures)


IMAGES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "grad_cam": ({"select": "conv"}, (1, 1)),
    "saliency": ({}, (1, 1)),
    "input_x_gradient": ({}, (1, 1)),
    "guided_backprop": ({}, (1, 1)),
    "guided_grad_cam": ({"select": "conv"}, (2, 2)),
    "integrated_gradients": ({"points": 7}, (8, 7)),
    "occlusion": ({"window": [3, 3], "stride": 3}, (4, 0)),
}
WORDS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "saliency": ({"target": {"token": "top"}}, (1, 1)),
    "input_x_gradient": ({"target": {"token": 3, "rather_than": 2}}, (1, 1)),
    "integrated_gradients": ({"target": {"token": "next", "position": 0}, "points": 4}, (5, 4)),
    "occlusion": ({"target": {"token": "top"}, "window": [1]}, (5, 0)),
    "attention_rollout": ({}, (1, 0)),
    "logit_lens": ({}, (1, 0)),
    "hessian": ({"points": 4, "vectors": 2}, (1, 1 + 4 * 2)),
    "loss_slice": ({"points": 5}, (5, 0)),
}
CAPTUM: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "Saliency": ({}, (1, 1)),
    "LayerGradCam": ({"select": "conv"}, (1, 1)),
}


def test_the_record_takes_one_pass() -> None:
    assert of_images() == of_words() == [1, 0]


@pytest.mark.parametrize("target", ["top", "label", "loss", 1])
@pytest.mark.parametrize("method", IMAGES)
def test_a_picture_of_images_takes_its_passes_whatever_the_target(
    method: str, target: str | int
) -> None:
    spec, (forward, backward) = IMAGES[method]
    found = of_images({"method": method, "target": target, **spec})
    assert found == [1 + forward, backward]


@pytest.mark.parametrize("method", WORDS)
def test_a_picture_of_tokens_takes_its_passes(method: str) -> None:
    spec, (forward, backward) = WORDS[method]
    assert of_words({"method": method, **spec}) == [1 + forward, backward]


@pytest.mark.parametrize("name", CAPTUM)
@pytest.mark.parametrize("target", ["top", "label"])
def test_a_class_of_captum_takes_no_passes_besides_its_own(name: str, target: str) -> None:
    pytest.importorskip("captum.attr")
    spec, (forward, backward) = CAPTUM[name]
    method = {"_target_": f"captum.attr.{name}"}
    assert of_images({"method": method, "target": target, **spec}) == [1 + forward, backward]


def test_several_pictures_share_nothing_but_the_pass_of_the_record() -> None:
    chosen = [{"method": name, **IMAGES[name][0]} for name in ("grad_cam", "saliency", "occlusion")]
    assert of_images(*chosen) == [1 + 1 + 1 + 4, 1 + 1]
    assert of_images(
        {"method": "saliency", "target": "loss"}, {"method": "saliency", "target": "label"}
    ) == [3, 2]

"""The units of a layer are its channels, wherever the network has them, however small a map is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import comgra_decl as comgra


class Turned(nn.Module):
    """Moves the channels behind the places, as Swin transformers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.movedim(1, -1).contiguous()


def conv(channels: int, *more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), *more)


# A model, the shape of its input, the node, and the dim of the channels in the node's output.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, int]] = {
    "3 wide": (lambda: conv(6), (1, 5, 3), "0", 1),
    "3 wide and many channels": (lambda: conv(64), (1, 10, 3), "0", 1),
    "an activation": (lambda: conv(6, nn.ReLU()), (1, 7, 3), "1", 1),
    "a norm": (lambda: conv(6, nn.BatchNorm2d(6)), (1, 5, 3), "1", 1),
    "a container": (lambda: nn.Sequential(conv(6, nn.ReLU())), (1, 5, 3), "0", 1),
    "a signal": (lambda: nn.Sequential(nn.Conv1d(1, 6, 3)), (1, 9), "0", 1),
    "an activation of a signal": (
        lambda: nn.Sequential(nn.Conv1d(1, 6, 3), nn.Tanh()), (1, 9), "1", 1
    ),
    "a volume": (lambda: nn.Sequential(nn.Conv3d(1, 6, 1), nn.GELU()), (1, 2, 5, 3), "1", 1),
    "channels last": (
        lambda: conv(6, Turned(), nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU()), (1, 5, 3), "4", 3
    ),
    "tokens": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU()), (5, 4), "1", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_units_are_the_channels(name: str) -> None:
    make, shape, node, dim = CASES[name]
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(9, *shape)
    run = comgra.look(
        model, x, spec={"nodes": {"all": {"select": "**"}}},
        pictures={"dream": {"method": "maximise", "select": node, "points": 1, "units": [5]}},
    )  # fmt: skip
    whole = nn.Sequential(*model.children())[: int(node) + 1](x).detach().movedim(dim, 1).numpy()
    flat = whole.reshape(9, whole.shape[1], -1)

    top = run.picture("top_samples", 0, node).values
    np.testing.assert_array_equal(top[:, 0, 0], flat.max(2).argmax(0))
    np.testing.assert_allclose(top[:, 0, 1], flat.max((0, 2)), rtol=1e-5)
    np.testing.assert_array_equal(
        run.picture("dead_units", node=node).values[:, 0], (flat <= 0).all((0, 2))
    )
    expected = np.corrcoef(np.moveaxis(flat, 1, 0).reshape(flat.shape[1], -1))
    np.testing.assert_allclose(run.picture("coactivation", 0, node).values, expected, atol=1e-5)
    begun = run.picture("dream", 0, node).facts["start"]
    assert begun == pytest.approx([_mean_of_unit(model, x, node, dim, 5)], rel=1e-4, abs=1e-6)


def _mean_of_unit(model: nn.Module, x: torch.Tensor, node: str, dim: int, unit: int) -> float:
    """The unit's mean for the input from which the ascent begins."""
    generator = torch.Generator().manual_seed(0)
    mean, scale = x.mean(0, keepdim=True), float(x.double().std(correction=0))
    drawn = torch.randn(mean.shape, generator=generator, dtype=torch.float64)
    start = mean + NOISE * scale * drawn.to(mean.dtype)
    out = nn.Sequential(*model.children())[: int(node) + 1](start)
    return float(out.detach().select(dim, unit).mean())


NOISE = 0.1  # the default of `maximise`


def test_a_colour_image_is_one_where_nothing_else_says_so() -> None:
    class Colours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x.movedim(-1, 1))

    spec = {"nodes": {"all": {"select": "**", "capture": ["input", "output"], "values": True}}}
    run = comgra.look(Colours(), torch.rand(2, 9, 8, 3), spec=spec)
    role = next(slot.role for slot in run.slots.itertuples() if slot.kind == "input")
    node = next(slot.node for slot in run.slots.itertuples() if slot.kind == "input")
    assert run.slot(node, role=role).preview(0).axes == ("sample", "height", "width", "channel")
    run = comgra.look(nn.Conv2d(9, 4, 3, padding=1), torch.rand(2, 9, 8, 3), spec=spec)
    for slot in run.slots.itertuples():
        axes = run.slot(slot.node, role=slot.role).preview(0).axes
        assert axes == ("sample", "channel", "height", "width"), slot

"""The units of a layer are its channels, wherever the network has them, however small a map is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

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


QUICK = ("3 wide", "an activation of a signal", "channels last", "tokens")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
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
    given = next(slot for slot in run.slots.itertuples() if slot.kind == "input")
    assert run.slot(str(given.node), role=str(given.role)).preview(0).axes == (
        "sample",
        "height",
        "width",
        "channel",
    )
    run = comgra.look(nn.Conv2d(9, 4, 3, padding=1), torch.rand(2, 9, 8, 3), spec=spec)
    for slot in run.slots.itertuples():
        axes = run.slot(str(slot.node), role=str(slot.role)).preview(0).axes
        assert axes == ("sample", "channel", "height", "width"), slot


class Head(nn.Module):
    """A layer that may return a tuple, and a linear layer on the mean over all places."""

    def __init__(self, layer: nn.Module, channels: int, dim: int) -> None:
        super().__init__()
        self.layer, self.head, self.dim = layer, nn.Linear(channels, 3), dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(x)
        found = (found[0] if isinstance(found, tuple) else found).movedim(self.dim, -1)
        weights = torch.linspace(1, 2, found[0, ..., 0].numel()).reshape(found.shape[1:-1])
        return self.head((found**2 * weights[..., None]).flatten(1, -2).mean(1))


class InTuple(nn.Module):
    """A convolution whose map is the first entry of a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.conv(x)
        return found, found.mean()


CAMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "GRU": (lambda: nn.GRU(5, 7, batch_first=True), (6, 5), 7, 2),
    "LSTM": (lambda: nn.LSTM(5, 7, batch_first=True), (6, 5), 7, 2),
    "linear": (lambda: nn.Linear(5, 7), (6, 5), 7, 2),
    "channels last": (lambda: nn.Linear(5, 7), (4, 6, 5), 7, 3),
    "signal": (lambda: nn.Conv1d(2, 7, 3), (2, 9), 7, 1),
    "map in a tuple": (InTuple, (1, 5, 3), 6, 1),
}


@pytest.mark.parametrize(
    "name", [n if n in ("GRU", "linear") else pytest.param(n, marks=pytest.mark.slow) for n in CAMS]
)
def test_grad_cam_weights_the_channels_of_the_first_tensor(name: str) -> None:
    make, shape, channels, dim = CAMS[name]
    torch.manual_seed(0)
    model, x = Head(make(), channels, dim), torch.randn(4, *shape)
    run = comgra.look(
        model, x, loss=lambda output: output.logsumexp(1).sum(),
        spec={"nodes": {"all": {"select": "**", "capture": ["output", "output_grad"]}}},
        pictures={"cam": {"method": "grad_cam", "select": "layer", "target": 1}},
    )  # fmt: skip
    kept: list[torch.Tensor] = []

    def keep(_module: nn.Module, _args: object, output: object) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        assert isinstance(tensor, torch.Tensor)
        tensor.retain_grad()
        kept.append(tensor)

    handle = model.layer.register_forward_hook(keep)
    over = [each for each in range(1, 1 + len(shape)) if each != dim]
    measures: dict[str, Callable[[Tensor], Tensor]] = {
        "cam": lambda out: out[:, 1].sum(),
        "loss_cam": lambda out: out.logsumexp(1).sum(),
    }
    for picture, explained in measures.items():
        explained(model(x)).backward()
        value = kept.pop()
        assert value.grad is not None
        expected = (value.grad.mean(over, keepdim=True) * value).sum(dim).detach()
        found = run.picture(picture, 0, "layer") if picture == "cam" else None
        if found is None and name not in ("GRU", "LSTM", "map in a tuple"):
            found = run.picture("loss_cam", 0, "layer", type="train")
        if found is not None:
            np.testing.assert_allclose(found.values, expected, atol=1e-6)
            assert len(found.axes) == expected.dim()
    handle.remove()


def test_what_has_no_gradient_and_what_has_no_numbers_are_told_apart() -> None:
    class Counting(nn.Module):
        def forward(self, x: torch.Tensor) -> list[int]:
            return [*x.shape]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counting, self.layer = Counting(), nn.Conv2d(1, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).mean((2, 3)) + len(self.counting(x))

    cam = {"method": "grad_cam", "select": "counting"}
    run = comgra.look(Net(), torch.randn(2, 1, 3, 3), pictures={"cam": cam})
    with pytest.raises(comgra.ComgraError, match="counting returns no tensor of floating-point"):
        run.picture("cam", 0)

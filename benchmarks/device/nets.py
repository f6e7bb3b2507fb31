"""The nets that are trained on a device, in the target sizes and in tiny ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.device.places import Place
from benchmarks.nets import Gpt, Training, next_token_loss


@dataclass(frozen=True, kw_only=True)
class GptSize:
    """Size of a transformer and its batches: `batch` rows of `time` tokens."""

    tokens: int
    width: int
    blocks: int
    heads: int
    batch: int
    time: int
    half: bool = True
    tied: bool = True


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """All sizes used in a benchmark run.

    Attributes:
        gpt2: GPT-2 124M.
        medium: GPT-2 350M.
        narrow: a transformer limited by kernel launches.
        shallow: four layers, for counting kernels.
        mlp: number of layers, width, and rows per batch.
        pointwise: the same for a net that is bound by the device's memory.
        rows: (dtype, shape) pairs for which raw sums are timed.
        huge: [samples, elements] of a tensor with too many samples to record individually.
        block: steps per block.
        many: steps of the training with a budget.
        copies: largest total size in bytes of the tensors that are summed in turn.
    """

    gpt2: GptSize
    medium: GptSize
    narrow: GptSize
    shallow: GptSize
    mlp: tuple[int, int, int]
    pointwise: tuple[int, int, int]
    rows: tuple[tuple[torch.dtype, tuple[int, int]], ...]
    huge: tuple[int, int]
    block: int
    many: int
    copies: int


_GPT2 = GptSize(tokens=50257, width=768, blocks=12, heads=12, batch=8, time=1024)
_NARROW = GptSize(
    tokens=128, width=256, blocks=12, heads=4, batch=4, time=64, half=False, tied=False
)
_F32, _BF16 = torch.float32, torch.bfloat16

FULL = Sizes(
    gpt2=_GPT2,
    medium=replace(_GPT2, width=1024, blocks=24, heads=16),
    narrow=_NARROW,
    shallow=replace(_NARROW, blocks=4),
    mlp=(6, 64, 32),
    pointwise=(12, 4096, 12_288),
    rows=(
        (_F32, (8, 12_500_000)),
        (_F32, (8, 786_432)),
        (_F32, (64, 4096)),
        (_F32, (8192, 768)),
        (_F32, (8192, 3072)),
        (_F32, (32_768, 1024)),
        (_F32, (100_000, 64)),
        (_BF16, (8, 12_500_000)),
        (_BF16, (8, 51_463_168)),
        (_BF16, (8, 786_432)),
        (_BF16, (8192, 768)),
        (_BF16, (8192, 3072)),
        (_BF16, (32_768, 1024)),
        (_BF16, (100_000, 64)),
    ),
    huge=(16_000_000, 64),
    block=8,
    many=1000,
    copies=4 << 30,
)

_TINY_GPT = GptSize(tokens=32, width=16, blocks=1, heads=2, batch=2, time=8)
_TINY_NARROW = GptSize(
    tokens=32, width=16, blocks=1, heads=2, batch=2, time=8, half=False, tied=False
)

TINY = Sizes(
    gpt2=_TINY_GPT,
    medium=_TINY_GPT,
    narrow=_TINY_NARROW,
    shallow=_TINY_NARROW,
    mlp=(6, 8, 4),
    pointwise=(4, 8, 4),
    rows=((_F32, (8, 1000)), (_F32, (100, 16)), (_BF16, (8, 1000)), (_BF16, (100, 16))),
    huge=(10_000, 4),
    block=2,
    many=30,
    copies=1 << 20,
)


def gpt(place: Place, size: GptSize, *, dropout: float = 0.0) -> Training:
    """Return a transformer with fused AdamW and mixed precision, the usual setup."""
    torch.manual_seed(0)
    model = Gpt(
        tokens=size.tokens,
        width=size.width,
        blocks=size.blocks,
        heads=size.heads,
        context=size.time,
        tied=size.tied,
        dropout=dropout,
    ).to(place.name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    texts = [
        torch.randint(0, size.tokens, (size.batch, size.time + 1), device=place.name)
        for _ in range(4)
    ]
    return Training(
        model,
        optimizer,
        next_token_loss,
        [(text[:, :-1], text[:, 1:]) for text in texts],
        autocast=place.half if size.half else None,
        seed=1,
    )


def mlp(place: Place, size: tuple[int, int, int]) -> Training:
    """Return linear layers with ReLU between them, trained with Adam."""
    layers, width, batch = size
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*parts[:-1]).to(place.name)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    pairs = [(_random(place, batch, width), _random(place, batch, width)) for _ in range(4)]
    return Training(model, optimizer, functional.mse_loss, pairs, seed=1)


def pointwise(place: Place, size: tuple[int, int, int]) -> Training:
    """Return alternating layer norms and GELUs, trained with SGD.

    A full-size step takes a GPU a few milliseconds, several times as long as the host needs to
    launch it. Reading every output and gradient adds a third to the device's time.
    """
    layers, width, batch = size
    torch.manual_seed(0)
    pairs = [(nn.LayerNorm(width), nn.GELU()) for _ in range(layers // 2)]
    model = nn.Sequential(*(part for pair in pairs for part in pair)).to(place.name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = [(_random(place, batch, width), _random(place, batch, width)) for _ in range(2)]
    return Training(model, optimizer, functional.mse_loss, data, seed=1)


def _random(place: Place, *shape: int) -> Tensor:
    return torch.randn(*shape, device=place.name)

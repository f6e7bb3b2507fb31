"""Nets made of `torch.nn` layers, each with one kind of layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from benchmarks.neutrality.program import Program, usual
from benchmarks.neutrality.zoo.collection import Collection

LAYERS = Collection()
_BATCH = 6


def classify(model: nn.Module, *shape: int, classes: int = 4) -> Program:
    """Return a training run that classifies random inputs [batch, *shape]."""

    def loss(net: nn.Module) -> Tensor:
        return F.cross_entropy(net(torch.randn(_BATCH, *shape)), torch.randint(classes, (_BATCH,)))

    return usual(model, loss)


def shrink(model: nn.Module, *shape: int) -> Program:
    """Return a training run that minimizes the outputs for random inputs."""
    return usual(model, lambda net: net(torch.randn(_BATCH, *shape)).square().mean())


def between(*middle: nn.Module, width: int = 16) -> nn.Sequential:
    """Return layers between two linear ones."""
    return nn.Sequential(nn.Linear(8, width), *middle, nn.Linear(width, 4))


def images(*layers: nn.Module, channels: int = 8) -> nn.Sequential:
    """Return layers on maps [batch, channels, 8, 8] between a convolution and a head."""
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 4))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, *head)


def _of_images(name: str, make: Callable[[], nn.Module], *, channels: int = 8) -> None:
    LAYERS[name] = lambda: classify(images(make(), channels=channels), 3, 8, 8)


def _of_vectors(name: str, make: Callable[[], nn.Module]) -> None:
    LAYERS[name] = lambda: classify(between(make()), 8)


_of_images("batch-norm-2d", lambda: nn.BatchNorm2d(8))
_of_images("batch-norm-cumulative", lambda: nn.BatchNorm2d(8, momentum=None))
_of_images("batch-norm-no-statistics", lambda: nn.BatchNorm2d(8, track_running_stats=False))
_of_images("instance-norm", lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True))
_of_images("group-norm", lambda: nn.GroupNorm(2, 8))
_of_images("local-response-norm", lambda: nn.LocalResponseNorm(3))
_of_images("depthwise-conv", lambda: nn.Conv2d(8, 8, 3, groups=8, padding="same"))
_of_images("dilated-conv", lambda: nn.Conv2d(8, 8, 3, dilation=2, padding_mode="reflect"))
_of_images("conv-transpose", lambda: nn.ConvTranspose2d(8, 8, 3, stride=2, output_padding=1))
_of_images("max-pool", lambda: nn.MaxPool2d(3, 2))
_of_images("average-pool", lambda: nn.AvgPool2d(3, 2, ceil_mode=True))
_of_images("adaptive-pool", lambda: nn.AdaptiveMaxPool2d((3, None)))
_of_images("lp-pool", lambda: nn.LPPool2d(2.0, 2))
_of_images("fractional-pool", lambda: nn.FractionalMaxPool2d(2, output_ratio=0.5))
_of_images("dropout-2d", lambda: nn.Dropout2d(0.3))
_of_images("upsample", lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True))
_of_images("pixel-shuffle", lambda: nn.PixelShuffle(2), channels=2)
_of_images("channel-shuffle", lambda: nn.ChannelShuffle(4))
_of_images("padding", lambda: nn.Sequential(nn.CircularPad2d(1), nn.ZeroPad2d(1)))
_of_images("softmax-2d", nn.Softmax2d)
_of_vectors("batch-norm-1d", lambda: nn.BatchNorm1d(16))
_of_vectors("layer-norm", lambda: nn.LayerNorm(16))
_of_vectors("rms-norm", lambda: nn.RMSNorm(16))
_of_vectors("dropout", lambda: nn.Dropout(0.3, inplace=True))
_of_vectors("alpha-dropout", lambda: nn.Sequential(nn.SELU(), nn.AlphaDropout(0.2)))
_of_vectors("prelu", lambda: nn.PReLU(16))
_of_vectors("rrelu", lambda: nn.RReLU(inplace=True))
_of_vectors("glu", lambda: nn.Sequential(nn.Linear(16, 32), nn.GLU()))
_of_vectors("unflatten", lambda: nn.Sequential(nn.Unflatten(1, (4, 4)), nn.Flatten()))
_of_vectors("threshold", lambda: nn.Threshold(0.1, 20.0, inplace=True))
_of_vectors("identity", nn.Identity)


@LAYERS
def mlp() -> Program:
    """Linear layers, batch norm, in-place ReLU, dropout."""
    middle = (nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(16, 16))
    return classify(between(*middle), 8)


@LAYERS
def activations() -> Program:
    """Every activation without parameters, one after the other."""
    kinds = (nn.ELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardtanh, nn.Hardswish, nn.LeakyReLU)
    more = (nn.LogSigmoid, nn.ReLU6, nn.CELU, nn.GELU, nn.Sigmoid, nn.SiLU, nn.Mish, nn.Softplus)
    last = (nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Softmin)
    return classify(between(*(kind() for kind in (*kinds, *more, *last))), 8)


@LAYERS
def conv_1d() -> Program:
    """Signals."""
    body = (nn.Conv1d(2, 8, 5, stride=2), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.AdaptiveAvgPool1d(1))
    return classify(nn.Sequential(*body, nn.Flatten(), nn.Linear(8, 4)), 2, 40)


@LAYERS
def conv_3d() -> Program:
    """Volumes."""
    body = (nn.Conv3d(1, 4, 3), nn.BatchNorm3d(4), nn.ReLU(), nn.AdaptiveAvgPool3d(1))
    return classify(nn.Sequential(*body, nn.Flatten(), nn.Linear(4, 4)), 1, 6, 6, 6)


@LAYERS
def channels_last() -> Program:
    """The channels-last memory format."""
    model = images(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(inplace=True))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def loss(net: nn.Module) -> Tensor:
        x = torch.randn(_BATCH, 3, 8, 8).to(memory_format=torch.channels_last)
        return F.cross_entropy(net(x), torch.randint(4, (_BATCH,)))

    return usual(model, loss)


class _Unpooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.MaxPool2d(2, return_indices=True)
        self.up = nn.MaxUnpool2d(2)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        pooled, where = self.down(self.conv(x))
        return self.up(pooled, where)


@LAYERS
def unpooling() -> Program:
    """Integers as a second output."""
    return shrink(_Unpooling(), 3, 8, 8)


@LAYERS
def fold() -> Program:
    """Split images into patches and put them back together."""
    body = (nn.Unfold(3, padding=1), nn.Dropout(0.1), nn.Fold((8, 8), 3, padding=1))
    return shrink(nn.Sequential(nn.Conv2d(3, 3, 1), *body), 3, 8, 8)


@LAYERS
def embedding() -> Program:
    """A table with a padding row and a maximum norm, which modifies it in the forward pass."""
    table = nn.Embedding(20, 8, padding_idx=0, max_norm=1.0, scale_grad_by_freq=True)
    net = nn.Sequential(table, nn.Flatten(), nn.Linear(40, 1))
    return usual(net, lambda m: m(torch.randint(20, (_BATCH, 5))).square().mean())


def _sparse(table: nn.Module) -> Program:
    model = nn.Sequential(table)

    def loss(net: nn.Module) -> Tensor:
        return net(torch.randint(20, (_BATCH, 5))).square().sum()

    return usual(model, loss, optimizer=torch.optim.SparseAdam)


@LAYERS
def embedding_sparse() -> Program:
    """Sparse gradients."""
    return _sparse(nn.Embedding(20, 8, sparse=True))


@LAYERS
def embedding_bag_sparse() -> Program:
    """Sparse gradients of bags."""
    return _sparse(nn.EmbeddingBag(20, 8, sparse=True, mode="sum"))


@LAYERS
def embedding_bag() -> Program:
    """Bags of different sizes, with weights."""
    model = nn.EmbeddingBag(20, 8, mode="sum")

    def loss(net: nn.Module) -> Tensor:
        words, starts = torch.randint(20, (12,)), torch.tensor([0, 3, 3, 8])
        return net(words, starts, per_sample_weights=torch.rand(12)).square().mean()

    return usual(model, loss)


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Bilinear(8, 6, 4)
        self.near, self.far = nn.CosineSimilarity(), nn.PairwiseDistance()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.both(x, y)
        return z, self.near(z, y[:, :4]), self.far(z, x[:, :4])


@LAYERS
def bilinear() -> Program:
    """Two inputs, distances."""

    def loss(net: nn.Module) -> Tensor:
        parts = net(torch.randn(_BATCH, 8), torch.randn(_BATCH, 6))
        return torch.stack([part.square().mean() for part in parts]).sum()

    return usual(_Pair(), loss)


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.AdaptiveLogSoftmaxWithLoss(16, 60, [10, 30])

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.head(self.body(x), y)
        return found


@LAYERS
def adaptive_softmax() -> Program:
    """A loss with parameters that returns a named tuple."""
    return usual(_Words(), lambda m: m(torch.randn(40, 8), torch.randint(60, (40,)))[1])


@LAYERS
def ctc() -> Program:
    """Sequences of unknown alignment."""
    model = nn.Sequential(nn.Linear(8, 6), nn.LogSoftmax(-1))
    lengths = torch.full((_BATCH,), 12), torch.full((_BATCH,), 4)

    def loss(net: nn.Module) -> Tensor:
        given = net(torch.randn(12, _BATCH, 8)), torch.randint(1, 6, (_BATCH, 4))
        return F.ctc_loss(*given, *lengths)

    return usual(model, loss)


@LAYERS
def triplets() -> Program:
    """One net called three times, with a loss module."""
    criterion = nn.TripletMarginLoss()
    draw = (_BATCH, 8)
    return usual(
        between(nn.Tanh()),
        lambda m: criterion(*(m(torch.randn(*draw)) for _ in range(3))),
    )


@LAYERS
def weight_norm() -> Program:
    """Parametrized weights."""
    inner = parametrizations.weight_norm(nn.Linear(16, 16))
    return replace(classify(between(inner), 8), calls_before=1)


@LAYERS
def spectral_norm() -> Program:
    """Weights that a power iteration normalizes, which changes buffers in the forward pass."""
    inner = parametrizations.spectral_norm(nn.Linear(16, 16))
    return replace(classify(between(inner), 8), calls_before=1)


@LAYERS
def orthogonal() -> Program:
    """Orthogonal weights."""
    inner = parametrizations.orthogonal(nn.Linear(16, 16))
    return replace(classify(between(inner), 8), calls_before=1)


@LAYERS
def pruned() -> Program:
    """Weights under a mask, computed by a torch hook."""
    inner = nn.Linear(16, 16)
    prune.random_unstructured(inner, "weight", amount=0.5)
    return classify(between(inner), 8)


@LAYERS
def lazy() -> Program:
    """Layers that learn their size from the first batch."""
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(4))
    model(torch.randn(2, 3, 8, 8))
    return replace(classify(model, 3, 8, 8), calls_before=1)


@LAYERS
def double_precision() -> Program:
    """float64."""
    model = between(nn.Tanh()).double()
    return usual(model, lambda m: m(torch.randn(_BATCH, 8).double()).square().mean())


@LAYERS
def bfloat16() -> Program:
    """A model whose parameters are bfloat16."""
    model = between(nn.LayerNorm(16), nn.GELU()).bfloat16()
    return usual(model, lambda m: m(torch.randn(_BATCH, 8).bfloat16()).float().square().mean())


@LAYERS
def complex_numbers() -> Program:
    """Complex parameters and activations."""
    model = between().to(torch.complex64)
    return usual(model, lambda m: m(torch.randn(_BATCH, 8, dtype=torch.cfloat)).abs().mean())

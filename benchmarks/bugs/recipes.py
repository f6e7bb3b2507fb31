"""Healthy training runs, each kind in two forms for tuning rules; `reported.py` has a third one.

The two forms of a kind differ in architecture, data, optimizer and seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.bugs import adversarial, data, nets
from benchmarks.bugs.setup import Data, Setup

Half = Literal["tune", "second", "report"]
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adam(rate: float, decay: float = 0.0) -> Optimizer:
    """Return a factory for AdamW with this learning rate."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=rate, weight_decay=decay)


def sgd(rate: float, momentum: float = 0.9) -> Optimizer:
    """Return a factory for SGD with this learning rate."""
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=momentum)


def kind(name: str, half: Half) -> Setup:
    """Return a healthy training run of a given kind."""
    if half == "report":
        from benchmarks.bugs.reported import REPORTED

        return REPORTED[name]()
    return KINDS[name, half]()


def mlp_tune() -> Setup:
    """ReLU, Adam, points around centres."""
    x, y = data.blobs(1)
    return Setup(nets.Plain([20, 32, 32, 4]), Data(x, y), F.cross_entropy, adam(3e-3))


def mlp_second() -> Setup:
    """GELU, dropout, SGD, rings."""
    x, y = data.rings(101)
    model = nets.Plain([12, 48, 32, 24, 3], act=nn.GELU, drop=0.1)
    return Setup(model, Data(x, y, 64, seed=7), nn.CrossEntropyLoss(), sgd(0.1), steps=160)


def tanh_tune() -> Setup:
    """Tanh, three layers, Adam."""
    x, y = data.blobs(2, features=12, classes=3, far=0.8)
    model = nets.Plain([12, 40, 40, 40, 3], act=nn.Tanh)
    return Setup(model, Data(x, y), F.cross_entropy, adam(3e-3))


def tanh_second() -> Setup:
    """Tanh and sigmoid-like gates, SGD, regression."""
    x, y = data.waves(102)
    model = nets.Plain([6, 64, 32, 1], act=nn.Tanh)
    return Setup(model, Data(x, y, 48, seed=8), nn.MSELoss(), sgd(0.05), steps=150)


def regress_tune() -> Setup:
    """ReLU, Adam, a teacher's outputs."""
    x, y = data.teacher(3)
    return Setup(nets.Plain([16, 32, 32, 1]), Data(x, y), F.mse_loss, adam(3e-3))


def regress_second() -> Setup:
    """LayerNorm, SiLU, sines, Huber loss."""
    x, y = data.waves(103)
    model = nets.Plain([6, 48, 48, 48, 1], act=nn.SiLU, norm=nn.LayerNorm)
    return Setup(model, Data(x, y, 64, seed=9), nn.SmoothL1Loss(), adam(2e-3), steps=150)


def batchnorm_tune() -> Setup:
    """BatchNorm between the layers."""
    x, y = data.blobs(4, classes=5)
    model = nets.Plain([20, 32, 32, 5], norm=nn.BatchNorm1d, drop=0.2)
    return Setup(model, Data(x, y), F.cross_entropy, adam(3e-3))


def batchnorm_second() -> Setup:
    """Convolutions with BatchNorm, SGD."""
    x, y = data.images(104, channels=2)
    model = nets.Images([2, 8, 12, 16], 4, norm=nn.BatchNorm2d, stride=2)
    return Setup(model, Data(x, y, 32, seed=10), nn.CrossEntropyLoss(), sgd(0.05), steps=110)


def cnn_tune() -> Setup:
    """Two convolutions with pooling."""
    x, y = data.images(5)
    return Setup(nets.Images([1, 8, 16], 4), Data(x, y), F.cross_entropy, adam(1e-2), steps=90)


def cnn_second() -> Setup:
    """Three convolutions with strides and GroupNorm."""
    x, y = data.images(105, size=14, channels=3)
    model = nets.Images(
        [3, 12, 16, 24], 4, norm=lambda n: nn.GroupNorm(4, n), act=nn.LeakyReLU, stride=2
    )
    return Setup(model, Data(x, y, 48, seed=11), nn.CrossEntropyLoss(), sgd(0.05), steps=110)


def recurrent_tune() -> Setup:
    """A cell with tanh over ten positions."""
    x, y = data.sequences(6)
    model = nets.Recurrent(4, 24, 2)
    return Setup(model, Data(x, y), F.cross_entropy, adam(5e-3), clip=1.0, steps=100)


def recurrent_second() -> Setup:
    """A cell with ReLU over fourteen positions."""
    x, y = data.sequences(106, length=14, features=3, classes=3)
    model = nets.Recurrent(3, 32, 3, "relu")
    return Setup(model, Data(x, y, 48, seed=12), nn.CrossEntropyLoss(), adam(3e-3), clip=1.0)


def gated_tune() -> Setup:
    """A GRU."""
    x, y = data.sequences(7, length=8)
    model = nets.Recurrent(4, 20, 2, "gru")
    return Setup(model, Data(x, y), F.cross_entropy, adam(1e-2), steps=80)


def gated_second() -> Setup:
    """An LSTM."""
    x, y = data.sequences(107, length=10, features=5, classes=3)
    model = nets.Recurrent(5, 24, 3, "lstm")
    return Setup(model, Data(x, y, 40, seed=13), nn.CrossEntropyLoss(), adam(1e-2), steps=80)


def transformer_tune() -> Setup:
    """Two blocks, one class per sequence."""
    x, y = data.tokens(8)
    model = nets.Transformer(10, 12)
    return Setup(model, Data(x, y), F.cross_entropy, adam(1e-3, 0.01), clip=1.0)


def transformer_second() -> Setup:
    """Three causal blocks, the next token, warm-up."""
    x, y = data.text(108)
    model = nets.Transformer(12, 16, size=48, depth=3, classes=12, causal=True, drop=0.1)
    return Setup(
        model,
        Data(x, y, 24, seed=14),
        nn.CrossEntropyLoss(),
        adam(2e-3, 0.1),
        clip=1.0,
        rate=lambda step: min(1.0, (step + 1) / 20),
    )


def residual_tune() -> Setup:
    """Linear residual blocks with LayerNorm."""
    x, y = data.blobs(9, classes=6)
    model = nets.Residual(20, 32, 3, 6, conv=False)
    return Setup(model, Data(x, y), F.cross_entropy, adam(2e-3))


def residual_second() -> Setup:
    """Residual convolutions with BatchNorm."""
    x, y = data.images(109, size=8)
    model = nets.Residual(1, 12, 4, 4, conv=True)
    return Setup(model, Data(x, y, 32, seed=15), nn.CrossEntropyLoss(), sgd(0.02), steps=100)


def autoencoder_tune() -> Setup:
    """A code of five numbers for twenty-four features."""
    x, y = data.low_rank(10)
    return Setup(nets.Autoencoder(24, 32, 6), Data(x, y), F.mse_loss, adam(5e-3))


def autoencoder_second() -> Setup:
    """Tanh, wider, L1 loss."""
    x, y = data.low_rank(110, features=40, rank=8)
    model = nets.Autoencoder(40, 64, 10, act=nn.Tanh)
    return Setup(model, Data(x, y, 64, seed=16), nn.L1Loss(), adam(5e-3), steps=150)


def binary_tune() -> Setup:
    """One logit per sample."""
    x, y = data.blobs(11, classes=2, far=0.5)
    model = nets.Plain([20, 24, 24, 1])
    loss = nn.BCEWithLogitsLoss()
    return Setup(model, Data(x, y[:, None].float()), loss, adam(3e-3))


def binary_second() -> Setup:
    """Four independent binary labels per sample, functional loss."""
    x, _ = data.teacher(111, features=14)
    w = torch.randn(14, 4, generator=torch.Generator().manual_seed(111))
    y = (x @ w > 0).float()
    model = nets.Plain([14, 40, 32, 4], act=nn.GELU)
    loss = F.binary_cross_entropy_with_logits
    return Setup(model, Data(x, y, 64, seed=17), loss, sgd(0.2), steps=150)


def sigmoid_tune() -> Setup:
    """A sigmoid and a loss for probabilities, used correctly."""
    setup = binary_tune()
    setup.model.last = nn.Sigmoid()
    setup.loss = nn.BCELoss()
    return setup


def sigmoid_second() -> Setup:
    """Probabilities of four binary labels."""
    setup = binary_second()
    setup.model.last = nn.Sigmoid()
    setup.loss = F.binary_cross_entropy
    return setup


def gan_tune() -> Setup:
    """A small generator and discriminator."""
    return adversarial.setup(adversarial.Pair(size=24, noise=4, seed=12))


def gan_second() -> Setup:
    """A wider pair, different data."""
    return adversarial.setup(adversarial.Pair(size=48, noise=8, seed=112, rate=1e-3))


KINDS: dict[tuple[str, Half], Callable[[], Setup]] = {
    ("mlp", "tune"): mlp_tune,
    ("mlp", "second"): mlp_second,
    ("tanh", "tune"): tanh_tune,
    ("tanh", "second"): tanh_second,
    ("regress", "tune"): regress_tune,
    ("regress", "second"): regress_second,
    ("batchnorm", "tune"): batchnorm_tune,
    ("batchnorm", "second"): batchnorm_second,
    ("cnn", "tune"): cnn_tune,
    ("cnn", "second"): cnn_second,
    ("recurrent", "tune"): recurrent_tune,
    ("recurrent", "second"): recurrent_second,
    ("gated", "tune"): gated_tune,
    ("gated", "second"): gated_second,
    ("transformer", "tune"): transformer_tune,
    ("transformer", "second"): transformer_second,
    ("residual", "tune"): residual_tune,
    ("residual", "second"): residual_second,
    ("autoencoder", "tune"): autoencoder_tune,
    ("autoencoder", "second"): autoencoder_second,
    ("binary", "tune"): binary_tune,
    ("binary", "second"): binary_second,
    ("sigmoid", "tune"): sigmoid_tune,
    ("sigmoid", "second"): sigmoid_second,
    ("gan", "tune"): gan_tune,
    ("gan", "second"): gan_second,
}

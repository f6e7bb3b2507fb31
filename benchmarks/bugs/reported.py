"""The third form of each healthy training run, for reporting and never for tuning.

Each differs from the other two in data, seed, width and depth or batch, and optimizer or rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.bugs import adversarial, data, nets
from benchmarks.bugs.recipes import adam, sgd
from benchmarks.bugs.setup import Data, Setup


def _nadam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.NAdam(parameters, lr=2e-3)


def _rmsprop(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-3)


def mlp() -> Setup:
    """Three hidden layers, ReLU, NAdam."""
    x, y = data.blobs(201, features=16, classes=5, far=1.0)
    model = nets.Plain([16, 40, 40, 24, 5])
    return Setup(model, Data(x, y, 48, seed=21), F.cross_entropy, _nadam, steps=130)


def tanh() -> Setup:
    """Tanh, a teacher's outputs, Adam."""
    x, y = data.teacher(202, features=10)
    model = nets.Plain([10, 48, 48, 1], act=nn.Tanh)
    return Setup(model, Data(x, y, seed=22), nn.MSELoss(), adam(2e-3), steps=140)


def regress() -> Setup:
    """GELU, another teacher, SGD."""
    x, y = data.teacher(203, features=24, noise=0.05)
    model = nets.Plain([24, 64, 48, 1], act=nn.GELU)
    return Setup(model, Data(x, y, 48, seed=23), F.mse_loss, sgd(0.05), steps=150)


def batchnorm() -> Setup:
    """BatchNorm between three layers, LeakyReLU, SGD."""
    x, y = data.blobs(204, features=14, classes=3, far=0.9)
    model = nets.Plain([14, 48, 32, 32, 3], norm=nn.BatchNorm1d, act=nn.LeakyReLU)
    return Setup(model, Data(x, y, 48, seed=24), F.cross_entropy, sgd(0.05))


def cnn() -> Setup:
    """Three convolutions with pooling, two channels, RMSprop."""
    x, y = data.images(205, size=10, channels=2)
    model = nets.Images([2, 10, 14, 20], 4)
    return Setup(model, Data(x, y, 40, seed=25), F.cross_entropy, _rmsprop, steps=100)


def recurrent() -> Setup:
    """A cell with tanh over twelve positions of six features."""
    x, y = data.sequences(206, length=12, features=6)
    model = nets.Recurrent(6, 28, 2)
    return Setup(model, Data(x, y, 40, seed=26), F.cross_entropy, adam(4e-3), clip=0.5, steps=110)


def gated() -> Setup:
    """A GRU, three classes."""
    x, y = data.sequences(207, length=9, features=3, classes=3)
    model = nets.Recurrent(3, 28, 3, "gru")
    return Setup(model, Data(x, y, 48, seed=27), F.cross_entropy, adam(8e-3), clip=1.0, steps=90)


def transformer() -> Setup:
    """Three blocks, one of five classes per sequence, a short warm-up."""
    x, y = data.tokens(208, length=14, count=9, classes=5)
    model = nets.Transformer(9, 14, size=40, depth=3, classes=5)
    return Setup(
        model,
        Data(x, y, 48, seed=28),
        F.cross_entropy,
        adam(1.5e-3, 0.05),
        clip=1.0,
        steps=110,
        rate=lambda step: min(1.0, (step + 1) / 10),
    )


def residual() -> Setup:
    """Three residual blocks of convolutions, two channels, Adam."""
    x, y = data.images(209, size=9, channels=2)
    model = nets.Residual(2, 14, 3, 4, conv=True)
    return Setup(model, Data(x, y, 40, seed=29), F.cross_entropy, adam(2e-3), steps=90)


def autoencoder() -> Setup:
    """ELU, a code of eight numbers for thirty-two features."""
    x, y = data.low_rank(210, features=32, rank=6)
    model = nets.Autoencoder(32, 40, 8, act=nn.ELU)
    return Setup(model, Data(x, y, 48, seed=30), F.mse_loss, adam(4e-3), steps=130)


def binary() -> Setup:
    """One logit per sample, three layers of SiLU, SGD."""
    x, y = data.blobs(211, features=18, classes=2, far=0.6)
    model = nets.Plain([18, 32, 24, 16, 1], act=nn.SiLU)
    batches = Data(x, y[:, None].float(), 48, seed=31)
    return Setup(model, batches, nn.BCEWithLogitsLoss(), sgd(0.1), steps=140)


def sigmoid() -> Setup:
    """The same with probabilities."""
    setup = binary()
    setup.model.last = nn.Sigmoid()
    setup.loss = nn.BCELoss()
    return setup


def gan() -> Setup:
    """Different widths, noise and rate."""
    return adversarial.setup(adversarial.Pair(size=36, noise=6, seed=212, rate=1.5e-3))


REPORTED: dict[str, Callable[[], Setup]] = {
    form.__name__: form
    for form in (
        mlp,
        tanh,
        regress,
        batchnorm,
        cnn,
        recurrent,
        gated,
        transformer,
        residual,
        autoencoder,
        binary,
        sigmoid,
        gan,
    )
}

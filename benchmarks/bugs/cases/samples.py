# mypy: disable-error-code="arg-type, assignment, index, misc, operator, union-attr"
# mypy: no-warn-unused-ignores
# ruff: noqa: ARG005  (callbacks take the arguments of their callers)
"""Bugs in the data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.bugs.case import bug
from benchmarks.bugs.recipes import adam, sgd
from benchmarks.bugs.setup import Pair, Setup


@bug(
    "labels",
    "no_better_than_guessing",
    "loss_not_falling",
    "overfitting",
    on=("mlp", "batchnorm"),
    steps=(0, 119),
)
def labels_shuffled(setup: Setup) -> None:
    """In every batch, targets belong to different samples."""
    random = torch.Generator().manual_seed(5)

    def prepare(x: Tensor, y: Tensor) -> Pair:
        return x, y[torch.randperm(len(y), generator=random)]

    setup.data.prepare = prepare


@bug(
    "labels",
    "no_better_than_guessing",
    "overfitting",
    "loss_not_falling",
    on=("mlp", "residual"),
    steps=(0, 119),
)
def labels_random(setup: Setup) -> None:
    """Every sample has its own random label, which the net can only memorize."""
    random = torch.Generator().manual_seed(6)
    setup.data.y = setup.data.y[torch.randperm(len(setup.data.y), generator=random)]
    setup.data.x, setup.data.y = setup.data.x[-256:], setup.data.y[-256:]
    setup.optimizer = adam(5e-3)


@bug("labels", "single_class", on=("cnn", "gated"))
def labels_equal(setup: Setup) -> Sequence[str]:
    """All targets are 0."""
    setup.data.y = torch.zeros_like(setup.data.y)
    return ["target"]


@bug("labels", "class_imbalance", on=("mlp", "cnn"))
def classes_imbalanced(setup: Setup) -> Sequence[str]:
    """Almost all samples belong to one class."""
    keep = (setup.data.y == 0) | (torch.arange(len(setup.data.y)) % 16 == 0)
    x, y = setup.data.x[keep], setup.data.y[keep]
    setup.data.x, setup.data.y = x.repeat(3, *[1] * (x.dim() - 1)), y.repeat(3)
    return ["target"]


@bug("inputs", "input_scale", on=("mlp", "cnn"))
def input_unnormalised(setup: Setup) -> Sequence[str]:
    """Inputs from 0 to 255 and above."""
    setup.data.x = setup.data.x * 60 + 128
    return ["input"]


@bug("inputs", "input_scale", on=("regress", "regress"))
def one_huge_feature(setup: Setup) -> Sequence[str]:
    """One feature is of the order of ten thousand."""
    setup.data.x = setup.data.x.clone()
    setup.data.x[:, 2] = setup.data.x[:, 2] * 1e4 + 2e4
    return ["input"]


@bug("inputs", "input_scale", "evaluation_gap", on=("tanh", "mlp"))
def input_too_small(setup: Setup) -> Sequence[str]:
    """Inputs are divided by 255 twice."""
    setup.data.x = setup.data.x / 255**2
    return ["input"]


@bug("order", "unshuffled", "single_class", on=("mlp", "batchnorm"))
def not_shuffled(setup: Setup) -> Sequence[str]:
    """Batches are sorted by class."""
    order = setup.data.y.argsort()
    setup.data.x, setup.data.y = setup.data.x[order], setup.data.y[order]
    setup.data.shuffle = False
    return ["target"]


@bug("order", "unshuffled", on=("regress", "tanh"))
def not_shuffled_numbers(setup: Setup) -> Sequence[str]:
    """Batches are sorted by a numeric target."""
    order = setup.data.y[:, 0].argsort()
    setup.data.x, setup.data.y = setup.data.x[order], setup.data.y[order]
    setup.data.shuffle = False
    return ["target"]


@bug("order", "repeated_batch", on=("cnn", "gated"))
def one_batch_again_and_again(setup: Setup) -> Sequence[str]:
    """The loader's iterator is recreated in each step with the same seed."""
    batch = setup.data.batch
    first = batch(0)
    setup.data.prepare = lambda x, y: first
    return ["input", "target"]


@bug("over-fitting", "overfitting", on=("binary", "tanh"), steps=(0, 115))
def too_few_samples(setup: Setup) -> None:
    """A large network and 32 samples, with noise."""
    setup.data.x, setup.data.y = setup.data.x[-160:], setup.data.y[-160:]
    random = torch.Generator().manual_seed(8)
    order = torch.randperm(160, generator=random)[:96]
    y = setup.data.y.clone()
    y[order] = y[order.flip(0)]
    setup.data.y, setup.data.size = y, 16
    setup.optimizer, setup.steps = adam(1e-2), 200


@bug("preparation", "evaluation_gap", on=("cnn", "mlp"), steps=(0, 60))
def evaluation_prepared_otherwise(setup: Setup) -> Sequence[str]:
    """Evaluation inputs are not normalized, unlike training inputs."""
    setup.data.prepare_validation = lambda x, y: (x * 50 + 120, y)
    return ["*"]


@bug("preparation", "evaluation_gap", on=("batchnorm", "residual"), steps=(0, 60))
def running_statistics_lag(setup: Setup) -> Sequence[str]:
    """BatchNorm's running statistics hardly move while the inputs drift."""
    setup.data.x = setup.data.x * 8
    for module in setup.model.modules():
        if hasattr(module, "running_var"):
            module.momentum = 1e-4
    return ["*"]


@bug("batch size", "small_batch_norm", on=("batchnorm", "batchnorm"))
def batchnorm_of_two(setup: Setup) -> Sequence[str]:
    """BatchNorm over two samples."""
    from benchmarks.bugs.nets import Images, Plain

    if isinstance(setup.model, Images):
        from torch import nn

        setup.model = Plain([288, 24, 24, 4], norm=nn.BatchNorm1d)
    assert isinstance(setup.model, Plain)
    setup.data.size = 2
    return ["norms.*"]


@bug(
    "odd batch",
    "loss_spike",
    "exploding_gradient",
    "input_scale",
    on=("regress", "cnn"),
    steps=(40, 80),
)
def one_odd_batch(setup: Setup) -> None:
    """One batch in sixty is a thousand times too large."""
    seen = [0]

    def prepare(x: Tensor, y: Tensor) -> Pair:
        seen[0] += 1
        return (x * 1000, y) if seen[0] % 60 == 0 else (x, y)

    setup.data.prepare = prepare


@bug(
    "output collapse",
    "one_answer",
    "input_independence",
    "dead_units",
    on=("mlp", "gated"),
    steps=(0, 60),
)
def always_one_class(setup: Setup) -> Sequence[str]:
    """The last bias starts so large that every sample is assigned to one class."""
    head = setup.model.head
    assert isinstance(head.bias, Tensor)
    with torch.no_grad():
        head.bias[1] = 12.0
    setup.optimizer = sgd(0.01, 0.0)
    return ["head", "last", "Plain", "Recurrent", "drop", "acts.*"]

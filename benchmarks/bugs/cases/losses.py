# mypy: disable-error-code="arg-type, assignment, index, misc, operator, union-attr"
# mypy: no-warn-unused-ignores
# ruff: noqa: ARG001, ARG005  (callbacks take the arguments of their callers)
"""Bugs in losses and outputs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.bugs.adversarial import Pair
from benchmarks.bugs.adversarial import setup as adversarial
from benchmarks.bugs.case import bug
from benchmarks.bugs.nets import Block, Transformer
from benchmarks.bugs.setup import Setup


def _turned(setup: Setup) -> None:
    loss = setup.loss
    setup.loss = lambda answer, target: -loss(answer, target)


@bug("wrong sign", "negative_loss", on=("mlp", "cnn"), steps=(0, 5))
def wrong_sign(setup: Setup) -> None:
    """A negated cross-entropy."""
    _turned(setup)


@bug("wrong sign", "negative_loss", on=("regress", "autoencoder"), steps=(0, 20))
def wrong_sign_of_distance(setup: Setup) -> None:
    """A negated distance: the outputs diverge."""
    _turned(setup)


@bug("softmax twice", "probabilities_as_logits", on=("mlp", "cnn"))
def softmax_twice(setup: Setup) -> Sequence[str]:
    """A cross-entropy for logits receives probabilities."""
    setup.model.last = nn.Softmax(-1)
    return ["last", "Plain", "Images"]


@bug("sigmoid twice", "probabilities_as_logits", "sigmoid_twice", on=("binary", "binary"))
def sigmoid_twice(setup: Setup) -> Sequence[str]:
    """A binary cross-entropy for logits receives probabilities."""
    setup.model.last = nn.Sigmoid()
    return ["last", "Plain"]


@bug("wrong answer", "rectified_answer", on=("regress", "binary"))
def rectified_answer(setup: Setup) -> Sequence[str]:
    """A ReLU after the last layer."""
    setup.model.last = nn.ReLU()
    return ["last", "Plain"]


@bug("wrong loss", "initial_loss", on=("mlp", "batchnorm"))
def loss_summed(setup: Setup) -> None:
    """The loss is summed over the batch."""
    setup.loss = lambda answer, target: F.cross_entropy(answer, target, reduction="sum")


@bug("broadcasting", "silent_broadcasting", on=("regress", "tanh"))
def silent_broadcasting(setup: Setup) -> Sequence[str]:
    """Outputs are [N, 1], targets [N]."""
    setup.data.y = setup.data.y[:, 0]
    setup.loss = lambda answer, target: ((answer - target) ** 2).mean()
    return ["head", "last", "Plain"]


@bug(
    "attention",
    "attention_collapse",
    on=("transformer", "transformer"),
)
def attention_collapses(setup: Setup) -> Sequence[str]:
    """Attention logits are a thousand times too large: scaled in the wrong direction."""
    assert isinstance(setup.model, Transformer)
    for block in setup.model.blocks:
        assert isinstance(block, Block)
        block.attn.scale = 2000.0
    return ["blocks.*.attn.weights"]


@bug("residual", "branch_ignored", on=("transformer", "transformer"), steps=(0, 30))
def branch_ignored(setup: Setup) -> Sequence[str]:
    """A block's second branch contributes almost nothing."""
    block = setup.model.blocks[1]  # type: ignore[index]
    block.mlp[2].register_forward_hook(lambda module, inputs, output: output * 1e-5)
    return ["blocks.1.mlp*"]


@bug(
    "mode collapse",
    "input_independence",
    "collapsing_output",
    on=("gan", "gan"),
    steps=(0, 115),
)
def mode_collapse(setup: Setup) -> Sequence[str]:
    """The generator is trained far harder than the discriminator and collapses to one output."""
    first = setup.model.generator[0]
    pair = Pair(
        size=first.out_features,
        noise=first.in_features,
        seed=setup.data.seed,
        generator_times=10.0,
        discriminate=False,
    )
    changed = adversarial(pair)
    setup.model, setup.run, setup.optimizer = changed.model, changed.run, changed.optimizer
    return ["generator*"]


@bug(
    "mode collapse",
    "input_independence",
    "input_scale",
    "collapsing_output",
    on=("gan", "gan"),
    steps=(0, 30),
)
def noise_unheard(setup: Setup) -> Sequence[str]:
    """The noise is too small to have an effect."""
    first = setup.model.generator[0]
    pair = Pair(first.out_features, first.in_features, setup.data.seed, noise_scale=1e-4)
    changed = adversarial(pair)
    setup.model, setup.run = changed.model, changed.run
    return ["generator*", "input*"]


@bug("dropout", "heavy_dropout", on=("batchnorm", "mlp"))
def dropout_inverted(setup: Setup) -> Sequence[str]:
    """Dropout receives the share to keep instead of the share to drop."""
    setup.model.drop = nn.Dropout(0.9)
    return ["drop"]


@bug(
    "batch mixing",
    "loss_not_falling",
    "batch_mixing",
    "overfitting",
    on=("recurrent", "gated"),
    steps=(0, 110),
)
def batch_mixed(setup: Setup) -> None:
    """A view instead of a transpose: positions of different samples are mixed."""
    model = setup.model

    def mixed(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        x = inputs[0]
        return (x.reshape(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1),)

    model.register_forward_pre_hook(mixed)

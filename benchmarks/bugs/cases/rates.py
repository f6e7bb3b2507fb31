# mypy: disable-error-code="arg-type, assignment, index, misc, operator, union-attr"
# mypy: no-warn-unused-ignores
# ruff: noqa: ARG005  (callbacks take the arguments of their callers)
"""Bugs in learning rates, optimizers and the training loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from benchmarks.bugs.case import bug, weighted
from benchmarks.bugs.recipes import adam, sgd
from benchmarks.bugs.setup import Setup

_TOO_LARGE = (
    "large_update",
    "loss_diverges",
    "exploding_gradient",
    "nonfinite",
    "growing_weight",
    "loss_oscillates",
    "loss_spike",
)


@bug("learning rate", *_TOO_LARGE, on=("regress", "mlp"), steps=(0, 60))
def rate_too_high(setup: Setup) -> None:
    """SGD with a rate of 5."""
    setup.optimizer = sgd(5.0, 0.9)


@bug("learning rate", *_TOO_LARGE, on=("cnn", "residual"), steps=(0, 60))
def rate_too_high_adam(setup: Setup) -> None:
    """Adam with a rate of 0.5."""
    setup.optimizer = adam(0.5)


@bug("learning rate", "small_update", "loss_not_falling", on=("mlp", "cnn"), steps=(0, 20))
def rate_too_low(setup: Setup) -> None:
    """A rate of 1e-8."""
    setup.optimizer = sgd(1e-8, 0.0)


@bug("momentum", *_TOO_LARGE, on=("binary", "regress"), steps=(0, 119))
def momentum_too_high(setup: Setup) -> None:
    """A momentum of 0.999 at a rate that suits 0.9."""
    setup.optimizer = sgd(0.5, 0.999)


@bug("warm-up", *_TOO_LARGE, "attention_collapse", on=("transformer", "transformer"), steps=(0, 60))
def no_warm_up(setup: Setup) -> None:
    """A transformer at a rate of 0.1 from the first step, without clipping."""
    setup.rate, setup.clip = None, None
    setup.optimizer = adam(0.1)


@bug("clipping", "small_update", "loss_not_falling", on=("tanh", "mlp"), steps=(0, 20))
def clipped_too_hard(setup: Setup) -> None:
    """Gradients are clipped to a norm of 1e-6."""
    setup.optimizer, setup.clip = sgd(0.1), 1e-6


@bug(
    "weight decay",
    "shrinking_weight",
    "activation_drift",
    "input_independence",
    on=("mlp", "batchnorm"),
    steps=(0, 110),
)
def decay_too_strong(setup: Setup) -> Sequence[str]:
    """Every step removes a tenth of every weight."""
    setup.optimizer = adam(2e-3, 50.0)
    return ["*"]


@bug("gradients kept", "accumulated_gradient", on=("mlp", "autoencoder"), steps=(0, 60))
def zero_grad_missing(setup: Setup) -> Sequence[str]:
    """Gradients are never cleared."""
    setup.optimizer, setup.clear = sgd(0.005, 0.0), lambda step: False
    return ["*"]


@bug("gradients kept", "accumulated_gradient", on=("regress", "cnn"), steps=(0, 60))
def zero_grad_rarely(setup: Setup) -> Sequence[str]:
    """Gradients are cleared only every 40 steps, as once per epoch, though each step uses them."""
    setup.clear = lambda step: step % 40 == 39
    return ["*"]


@bug("not trained", "untrained_parameter", "unused_by_optimizer", on=("mlp", "residual"))
def not_in_optimizer(setup: Setup) -> Sequence[str]:
    """One layer is not passed to the optimizer."""
    name, layer = weighted(setup.model)[1]

    def chosen(model: nn.Module) -> Iterator[nn.Parameter]:
        left_out = {id(p) for p in layer.parameters()}
        return (p for p in model.parameters() if id(p) not in left_out)

    setup.handed = chosen
    return [name]


@bug("not trained", "frozen_parameters", on=("cnn", "transformer"))
def frozen_by_mistake(setup: Setup) -> Sequence[str]:
    """All layers but the last are frozen without having been trained."""
    setup.model.requires_grad_(False)
    weighted(setup.model)[-1][1].requires_grad_(True)
    return ["*"]


class _Cut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


@bug("detached", "detached", "untrained_parameter", on=("mlp", "cnn"))
def detached_features(setup: Setup) -> Sequence[str]:
    """The output of the middle layers is detached."""
    setup.model.acts[1] = _Cut()  # type: ignore[operator,index]
    return ["layers.*", "convs.*", "norms.*", "acts.*", "pool"]


@bug("detached", "detached", "untrained_parameter", on=("transformer", "transformer"))
def embedding_not_trained(setup: Setup) -> Sequence[str]:
    """Embeddings are looked up without gradients."""
    table = setup.model.tokens
    assert isinstance(table, nn.Embedding)
    look_up = table.forward
    table.forward = torch.no_grad()(look_up)  # type: ignore[method-assign]
    return ["tokens"]


@bug("not trained", "untrained_parameter", on=("autoencoder", "tanh"))
def module_never_called(setup: Setup) -> Sequence[str]:
    """A second head has parameters and is never used."""
    setup.model.second_head = nn.Linear(8, 8)
    return ["second_head"]


@bug("evaluation mode", "training_in_evaluation_mode", on=("batchnorm", "residual"), steps=(19, 70))
def left_in_evaluation_mode(setup: Setup) -> Sequence[str]:
    """After the first evaluation the model is never switched back to training."""
    if not any(isinstance(m, nn.BatchNorm2d | nn.Dropout) for m in setup.model.modules()):
        setup.model = nn.Sequential(setup.model, nn.Dropout(0.2))
    setup.back_to_training = False
    return ["*"]

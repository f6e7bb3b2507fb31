# mypy: disable-error-code="arg-type, assignment, index, misc, operator, union-attr"
# mypy: no-warn-unused-ignores
"""Bugs of initialization and of activation functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.bugs.case import bug, weighted
from benchmarks.bugs.nets import Recurrent
from benchmarks.bugs.setup import Setup


def _scale(module: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter *= factor


@bug("initialisation", "poor_initialisation", on=("mlp", "cnn"))
def layer_too_large(setup: Setup) -> Sequence[str]:
    """One layer's weights are two hundred times too large."""
    name, layer = weighted(setup.model)[1]
    _scale(layer, 200.0)
    return [name]


@bug("initialisation", "poor_initialisation", "vanishing_gradient", on=("tanh", "regress"))
def weights_too_small(setup: Setup) -> Sequence[str]:
    """All weights are a hundred times too small."""
    _scale(setup.model, 0.01)
    return ["*"]


@bug("initialisation", "initial_loss", on=("mlp", "transformer"))
def head_too_large(setup: Setup) -> None:
    """The last layer starts fifteen times too large."""
    _scale(weighted(setup.model)[-1][1], 15.0)


@bug(
    "initialisation",
    "all_zero",
    "untrained_parameter",
    "input_independence",
    "identical_units",
    on=("mlp", "binary"),
)
def all_weights_zero(setup: Setup) -> Sequence[str]:
    """All weights start at zero."""
    for _, layer in weighted(setup.model):
        _scale(layer, 0.0)
    return ["*"]


@bug("initialisation", "identical_units", on=("regress", "cnn"))
def symmetric_units(setup: Setup) -> Sequence[str]:
    """In each of two consecutive hidden layers, all weights start equal."""
    layers = weighted(setup.model)
    for _, layer in layers[:2]:
        assert isinstance(layer.weight, Tensor)
        assert isinstance(layer.bias, Tensor)
        nn.init.constant_(layer.weight, 0.1)
        nn.init.zeros_(layer.bias)
    return [name for name, _ in layers[:2]] + ["acts.*", "norms.*", "drop", "pool"]


@bug("dead units", "dead_units", "all_zero", on=("mlp", "recurrent"))
def dead_rectifier(setup: Setup) -> Sequence[str]:
    """Large negative biases kill their units."""
    if isinstance(setup.model, Recurrent):
        assert isinstance(setup.model.cell, nn.RNNCell)
        nn.init.constant_(setup.model.cell.bias_hh, -20.0)
        setup.model.cell.nonlinearity = "relu"
        return ["cell"]
    name, layer = weighted(setup.model)[1]
    assert isinstance(layer.bias, Tensor)
    nn.init.constant_(layer.bias, -20.0)
    return [name, "acts.1", "layers.0"]


@bug("dead units", "dead_units", "all_zero", on=("cnn", "mlp"))
def dead_by_offset(setup: Setup) -> Sequence[str]:
    """Most of the first layer's units never fire for any input."""
    setup.model.acts = nn.ModuleList(nn.ReLU() for _ in setup.model.acts)  # type: ignore[union-attr]
    name, layer = weighted(setup.model)[0]
    assert isinstance(layer.bias, Tensor)
    with torch.no_grad():
        layer.bias[: len(layer.bias) * 3 // 4] = -30.0
    return [name, "acts.0", "norms.0"]


@bug("saturation", "saturated", "poor_initialisation", on=("tanh", "tanh"))
def saturated_tanh(setup: Setup) -> Sequence[str]:
    """The input of the second layer's tanh is sixty times too large."""
    name, layer = weighted(setup.model)[1]
    _scale(layer, 60.0)
    return [name, "acts.1"]


@bug("vanishing gradients", "vanishing_gradient", on=("mlp", "batchnorm"))
def deep_sigmoid(setup: Setup) -> Sequence[str]:
    """Nine layers of sigmoids."""
    first, last = setup.data.x[0].numel(), int(setup.data.y.max()) + 1
    from benchmarks.bugs.nets import Plain

    wide = 24 if first > 20 else 32
    setup.model = Plain([first, *[wide] * 9, last], act=nn.Sigmoid)
    return ["*"]


@bug(
    "exploding recurrence",
    "exploding_gradient",
    "poor_initialisation",
    "nonfinite",
    "loss_diverges",
    on=("recurrent", "recurrent"),
)
def exploding_recurrence(setup: Setup) -> Sequence[str]:
    """The recurrent weights multiply the hidden state by three."""
    model = setup.model
    assert isinstance(model, Recurrent)
    assert isinstance(model.cell, nn.RNNCell)
    model.cell.nonlinearity = "relu"
    setup.clip = None
    with torch.no_grad():
        model.cell.weight_hh.copy_(3.0 * torch.eye(model.size))
    return ["*"]

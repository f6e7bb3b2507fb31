# mypy: disable-error-code="arg-type, assignment, index, misc, operator, union-attr"
# mypy: no-warn-unused-ignores
"""Numerical bugs: NaN, infinity, and overflow or underflow of small formats."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.bugs.case import bug, weighted
from benchmarks.bugs.recipes import sgd
from benchmarks.bugs.setup import Setup


class _Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x.relu() + 0.0)


class _Share(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.relu()
        return x / x.sum(1, keepdim=True)


class _Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt((x * (x > 0)) ** 2) + x


@bug("NaN", "nonfinite", on=("mlp", "tanh"), steps=(0, 0))
def log_of_zero(setup: Setup) -> Sequence[str]:
    """A logarithm of a value that may be zero."""
    setup.model.acts[1] = _Log()  # type: ignore[operator,index]
    return ["acts.1"]


@bug("NaN", "nonfinite", on=("regress", "autoencoder"), steps=(0, 10))
def zero_by_zero(setup: Setup) -> Sequence[str]:
    """Samples whose features are all zero are divided by their sum."""
    setup.data.x = setup.data.x.clone()
    setup.data.x[::7] = 0
    if hasattr(setup.model, "acts"):
        setup.model.acts[0] = _Share()  # type: ignore[operator,index]
        nn.init.zeros_(weighted(setup.model)[0][1].bias)  # type: ignore[arg-type]
        return ["acts.0"]
    setup.model.encoder[1] = _Share()  # type: ignore[operator]
    nn.init.zeros_(weighted(setup.model)[0][1].bias)  # type: ignore[arg-type]
    return ["encoder.1"]


@bug("NaN", "nonfinite", on=("binary", "cnn"), steps=(0, 3))
def gradient_of_root(setup: Setup) -> Sequence[str]:
    """The gradient of a square root at zero is infinite; the value is not."""
    setup.model.acts[1] = _Norm()  # type: ignore[operator,index]
    return ["layers.1", "convs.1", "acts.1", "norms.1", "pool"]


def _half(setup: Setup, *, scale: float) -> None:
    setup.model = setup.model.half()
    loss, prepared = setup.loss, setup.data
    prepared.x = prepared.x.half()
    setup.loss = lambda answer, target: loss(answer.float(), target) * scale


@bug("half precision", "half_overflow", "nonfinite", on=("mlp", "mlp"), steps=(0, 3))
def half_overflows(setup: Setup) -> Sequence[str]:
    """The second layer's output overflows in float16."""
    _, layer = weighted(setup.model)[1]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter *= 5000
    setup.data.x = setup.data.x * 60
    _half(setup, scale=1.0)
    setup.optimizer = sgd(1e-3, 0.0)
    return ["layers.*", "acts.*", "norms.*"]


@bug(
    "half precision",
    "half_underflow",
    "untrained_parameter",
    on=("mlp", "tanh"),
    steps=(0, 20),
)
def half_underflows(setup: Setup) -> Sequence[str]:
    """Unscaled float16 gradients of a small loss."""
    _half(setup, scale=1e-5)
    setup.optimizer = sgd(1e-2, 0.0)
    if setup.data.y.is_floating_point():
        setup.data.y = setup.data.y.half()
    return ["*"]


@bug("half precision", "gradient_scale", on=("mlp", "cnn"), steps=(0, 20))
def every_step_skipped(setup: Setup) -> None:
    """A root of zero in the loss has no finite slope, and mixed precision skips every step."""
    loss = setup.loss
    setup.loss = lambda out, y: loss(out, y) + torch.sqrt((0 * out).square()).sum()
    setup.scaler = lambda: torch.amp.GradScaler("cpu", init_scale=2.0**10)


@bug("half precision", "nonfinite", "half_overflow", on=("cnn", "regress"), steps=(0, 3))
def scaled_too_much(setup: Setup) -> Sequence[str]:
    """The loss is scaled by 2^24, which float16 gradients cannot hold."""
    _half(setup, scale=2.0**24)
    setup.optimizer = sgd(1e-6, 0.0)
    return ["*"]

# mypy: disable-error-code="arg-type, assignment, index, misc, operator, union-attr"
# mypy: no-warn-unused-ignores
# ruff: noqa: ARG005  (callbacks take the arguments of their callers)
"""Training runs without a bug, although some look as if they had one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.bugs.case import HEALTHY, Healthy, healthy, weighted
from benchmarks.bugs.recipes import KINDS, adam, sgd
from benchmarks.bugs.setup import Pair, Setup

for _name in dict.fromkeys(name for name, _ in KINDS):
    HEALTHY[_name] = Healthy(_name, {"tune": _name, "second": _name, "report": _name})


@healthy("cnn", "transformer")
def in_bfloat16(setup: Setup) -> None:
    """Mixed precision."""
    setup.cast = lambda: torch.autocast("cpu", torch.bfloat16)


@healthy("mlp", "cnn")
def in_float16(setup: Setup) -> None:
    """Mixed precision whose initial scale is far too large, so that steps are skipped."""
    setup.cast = lambda: torch.autocast("cpu", torch.float16)
    setup.scaler = lambda: torch.amp.GradScaler("cpu", init_scale=2.0**24)


@healthy("mlp", "regress")
def accumulated_on_purpose(setup: Setup) -> None:
    """Four batches per optimizer step."""
    setup.parts, setup.steps = 4, setup.steps // 2


@healthy("cnn", "residual")
def fine_tuned(setup: Setup) -> None:
    """The first layers are pretrained and frozen."""
    from benchmarks.bugs.setup import train

    steps, setup.steps = setup.steps, 60
    train(setup, lambda name, value: None)
    setup.steps = steps
    weighted(setup.model)[0][1].requires_grad_(False)


@healthy("regress", "cnn")
def plain_descent(setup: Setup) -> None:
    """SGD without momentum."""
    setup.optimizer = sgd(0.05, 0.0)


@healthy("transformer", "mlp")
def with_decay(setup: Setup) -> None:
    """A typical weight decay."""
    setup.optimizer = adam(1e-3, 0.1)


@healthy("tanh", "regress")
def one_cycle(setup: Setup) -> None:
    """A learning rate that rises, then falls to zero."""
    steps = setup.steps
    setup.rate = lambda step: max(
        1e-3, min((step + 1) / (0.3 * steps), (steps - step) / (0.7 * steps))
    )


@healthy("binary", "cnn")
def few_per_batch(setup: Setup) -> None:
    """Small batches."""
    setup.data.size = 8


@healthy("autoencoder", "mlp")
def augmented(setup: Setup) -> None:
    """Noise is added to every batch."""
    random = torch.Generator().manual_seed(9)

    def prepare(x: Tensor, y: Tensor) -> Pair:
        return x + 0.1 * torch.randn(x.shape, generator=random), y

    setup.data.prepare = prepare


@healthy("residual", "transformer")
def zero_branches(setup: Setup) -> None:
    """Residual branches start at zero on purpose."""
    for name, module in weighted(setup.model):
        if name.endswith(("branch.3", "mlp.2", "attn.out")):
            assert isinstance(module.weight, Tensor)
            assert isinstance(module.bias, Tensor)
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)


@healthy("gated", "batchnorm")
def other_seed(setup: Setup) -> None:
    """A different initialization of the weights."""
    for module in setup.model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

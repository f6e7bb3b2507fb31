"""Small models with everything that a careless copy would disturb, and their training."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode

CLASSES = 3


class Conv(nn.Module):
    """Batch norms, one of them frozen, dropout, an in-place ReLU, a counter, a closure."""

    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.frozen = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=inplace)
        self.drop = nn.Dropout(0.3)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.head = nn.Linear(6, CLASSES)
        self.calls = 0
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        noise = torch.rand(1, generator=self.generator) + random.random() + np.random.rand()
        x = self.relu(self.frozen(self.bn(self.conv1(x * (1 + 1e-3 * float(noise))))))
        return self.head(torch.relu_(self.conv2(self.drop(x))).mean((2, 3)))


class Recurrent(nn.Module):
    """Tokens, an LSTM, and an untied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0][:, -1])


class Transformer(nn.Module):
    """Tokens, and one of torch's layers that has a native kernel in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)).mean(1))


class Tied(nn.Module):
    """A head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).mean(1))


def reparametrised() -> nn.Module:
    """Both forms of weight norm, spectral norm and a pruned layer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older form, which programs still use
        older = nn.utils.weight_norm(nn.Linear(64, 8))
    pruned = prune.random_unstructured(nn.Linear(8, 8), "weight", amount=0.5)
    return nn.Sequential(
        nn.Flatten(),
        older,
        nn.ReLU(),
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        pruned,
        nn.Tanh(),
        nn.Linear(8, CLASSES),
    )


def images(batch: int = 12) -> Tensor:
    return torch.randn(batch, 1, 8, 8)


def tokens(batch: int = 12) -> Tensor:
    return torch.randint(11, (batch, 5))


Inputs = Callable[[], Tensor]

MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "conv": (Conv, images),
    "recurrent": (Recurrent, tokens),
    "transformer": (Transformer, tokens),
    "tied": (Tied, tokens),
    "reparametrised": (reparametrised, images),
}


@dataclass
class Trained:
    """What a training run leaves behind."""

    model: nn.Module
    losses: list[float] = field(default_factory=list)
    hooked: int = 0  # calls of a hook of the program
    everywhere: int = 0  # calls of a hook of the program on all modules
    seen: int = 0  # calls that a function mode of the program has seen
    drawn: list[Any] = field(default_factory=list)  # of each generator, at the end

    def state(self) -> dict[str, Any]:
        """Return everything that must be the same to the last bit."""
        return {
            "tensors": [t.detach().numpy().tobytes() for t in self.model.state_dict().values()],
            "gradients": [
                None if p.grad is None else p.grad.numpy().tobytes()
                for p in self.model.parameters()
            ],
            "flags": [(m.training, *hook_counts(m)) for m in self.model.modules()],
            "requires": [p.requires_grad for p in self.model.parameters()],
            "losses": self.losses,
            "calls": getattr(self.model, "calls", 0),
            "hooked": (self.hooked, self.everywhere),
            "drawn": self.drawn,
        }


def hook_counts(module: nn.Module) -> tuple[int, ...]:
    tables = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return tuple(map(len, tables))


class Counting(TorchFunctionMode):
    """One of the program's modes, which must not see the copy."""

    def __init__(self, result: Trained) -> None:
        super().__init__()
        self._result = result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._result.seen += 1
        return func(*args, **(kwargs or {}))


def train(name: str, steps: int = 5) -> Trained:
    """Train one of `MODELS` with everything that a program may add to its training."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    make, inputs = MODELS[name]
    result = Trained(make())
    model = result.model

    def counted(*_: Any) -> None:
        result.hooked += 1

    def counted_everywhere(*_: Any) -> None:
        result.everywhere += 1

    model.register_forward_hook(counted)
    next(model.children()).register_forward_pre_hook(counted)
    everywhere = nn.modules.module.register_module_forward_hook(counted_everywhere)
    if isinstance(model, Conv):
        model.frozen.eval()
        model.frozen.requires_grad_(False)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9
    )
    try:
        with Counting(result):
            for _ in range(steps):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs()), torch.randint(CLASSES, (12,)))
                loss.backward()
                optimizer.step()
                result.losses.append(loss.item())
    finally:
        everywhere.remove()
    generators = [m.generator for m in model.modules() if isinstance(m, Conv)]
    result.drawn = [
        torch.rand(2).tolist(),
        random.random(),
        np.random.rand(),
        *(torch.rand(2, generator=generator).tolist() for generator in generators),
    ]
    return result

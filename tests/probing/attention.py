"""A small transformer with all that interventions have to deal with, and changes by plain hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TOKENS, WIDTH, HEADS, CLASSES = 11, 8, 4, 3
Change = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads = HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(inplace=True), nn.Linear(12, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Language(nn.Module):
    """Predicts the next token at each position."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Classifier(nn.Module):
    """Also has a layer that is called twice, one that returns a tuple, and one that has no use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.unused = nn.Linear(WIDTH, 2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.lstm(self.drop(torch.relu_(self.twice(self.twice(x)))))[0]
        self.unused(x)
        return self.head(x[:, -1])


@contextmanager
def hooked(
    model: nn.Module, changes: list[tuple[str, str, Change]], *, call: int | None = None
) -> Iterator[None]:
    """Change outputs and inputs of modules with torch's own hooks."""
    handles = []
    for path, role, change in changes:
        module, calls = model.get_submodule(path), iter(range(99))

        def output(
            _: nn.Module, __: Any, out: Any, change: Change = change, calls: Any = calls
        ) -> Any:
            if call not in (None, next(calls)):
                return None
            return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

        def given(_: nn.Module, args: Any, change: Change = change) -> Any:
            return (change(args[0]), *args[1:])

        if role == "output":
            handles.append(module.register_forward_hook(output))
        else:
            handles.append(module.register_forward_pre_hook(given))
    yield
    for handle in handles:
        handle.remove()


def outputs(model: nn.Module, tokens: Tensor) -> dict[str, list[Tensor]]:
    """Return the first output of each call of each module; the hooks come after other hooks."""
    found: dict[str, list[Tensor]] = {}
    handles = []
    for path, module in model.named_modules():

        def keep(_: nn.Module, __: Any, out: Any, path: str = path) -> None:
            first = out[0] if isinstance(out, tuple) else out
            found.setdefault(path, []).append(first.detach().clone())

        handles.append(module.register_forward_hook(keep))
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    return found

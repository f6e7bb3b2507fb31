"""The training runs to measure: small, seeded, and independent of the tool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Training:
    """A training loop as a user would write it, independent of any tool.

    `batches` are pairs of input [B, ...] and target, used in turn. `autocast` is the dtype of mixed
    precision, or None. If `seed` is set, each reset also restores the random numbers that the
    training draws.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    criterion: Criterion
    batches: Sequence[tuple[Tensor, Tensor]]
    taken: int = 0
    autocast: torch.dtype | None = None
    seed: int | None = None
    _initial: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._initial = {name: t.detach().clone() for name, t in self.model.state_dict().items()}

    @property
    def batch_size(self) -> int:
        """Samples per batch."""
        return int(self.batches[0][0].shape[0])

    def step(self) -> Tensor:
        """Run one complete training step and return its loss, a scalar still on the graph."""
        x, y = self.batches[self.taken % len(self.batches)]
        self.taken += 1
        self.optimizer.zero_grad()
        loss = self._loss(x, y)
        loss.backward()
        self.optimizer.step()
        return loss

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.autocast is None:
            return self.criterion(self.model(x), y)
        with torch.autocast(x.device.type, self.autocast):
            return self.criterion(self.model(x), y)

    def reset(self) -> None:
        """Restore the initial parameters, optimizer state and data, in the same memory.

        Every block thus trains on the same numbers, and the losses of all tools can be compared bit
        by bit.
        """
        self.taken = 0
        self.model.load_state_dict(self._initial)
        self.model.zero_grad()
        self.optimizer.state.clear()
        if self.seed is not None:
            torch.manual_seed(self.seed)


@dataclass(frozen=True)
class Scenario:
    """A training run to measure.

    Attributes:
        block_seconds: duration of one block.
        records: number of recorded steps for measuring the bytes per step.
    """

    name: str
    description: str
    build: Callable[[], Training]
    block_seconds: float
    records: int


class Mlp(nn.Module):
    """Seven layers (four linear, three ReLU), 10.5k parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 16),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, 16] to [B, 16]."""
        return torch.as_tensor(self.layers(x))


def build_mlp() -> Training:
    """A step so short (about 0.15 ms) that every call of a tool matters: the worst case."""
    torch.manual_seed(0)
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [(torch.randn(32, 16), torch.randn(32, 16)) for _ in range(64)]
    return Training(model, optimizer, functional.mse_loss, batches)


def build_tutorial() -> Training:
    """The recurrent sum task of `examples/tutorial`: five iterations per step, batch 64."""
    from examples.tutorial.train import RunningSum, make_batch

    torch.manual_seed(0)
    model = RunningSum(width=30, activation_on_last_layer=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    generator = torch.Generator().manual_seed(0)
    batches = [make_batch(64, 5, generator) for _ in range(16)]
    return Training(model, optimizer, nn.BCELoss(), batches)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, *, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, T, D] to [B, T, D]."""
        batch, time, width = x.shape
        split = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return torch.as_tensor(self.proj(mixed.transpose(1, 2).reshape(batch, time, width)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, *, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads=heads, dropout=dropout)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, T, D] to [B, T, D]."""
        x = x + self.attn(self.ln1(x))
        return torch.as_tensor(x + self.mlp(self.ln2(x)))


class Gpt(nn.Module):
    """A transformer; by default 12 blocks, width 256, 9.6M parameters.

    With `tied`, the head shares the weight of the embedding and has no bias, as in GPT-2.
    """

    def __init__(
        self,
        *,
        tokens: int = 128,
        width: int = 256,
        blocks: int = 12,
        heads: int = 4,
        context: int = 64,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tok = nn.Embedding(tokens, width)
        self.pos = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            Block(width, heads=heads, dropout=dropout) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=not tied)
        if tied:
            nn.init.normal_(self.tok.weight, std=0.02)
            self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Maps token ids [B, T] to logits [B, T, tokens]."""
        # Positions are expanded to the batch: comgra requires a batch dimension on every tensor.
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        x = self.tok(ids) + self.pos(positions)
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(self.norm(x)))


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of logits [B, T, tokens] against ids [B, T]."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def build_transformer() -> Training:
    """Batches of 4 rows with 64 tokens: tensors so large that reading them dominates the cost."""
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    texts = [torch.randint(0, 128, (4, 65)) for _ in range(16)]
    batches = [(text[:, :-1], text[:, 1:]) for text in texts]
    return Training(model, optimizer, next_token_loss, batches)


SCENARIOS = (
    Scenario("tutorial", "recurrent sum task, 5 iterations, batch 64", build_tutorial, 1.0, 1024),
    Scenario("mlp", "7-layer MLP, 10.5k parameters, batch 32", build_mlp, 1.0, 1024),
    Scenario("transformer", "12 layers, d=256, batch 4 x 64 tokens", build_transformer, 2.5, 128),
)
"""All scenarios, in the order in which they are run and reported."""

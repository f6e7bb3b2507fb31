"""Tag the rows of a table with eight labels, each of which is rare."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CASES = (
    "healthy",
    "softmax_cross_entropy",
    "sigmoid_twice",
    "pos_weight_inverted",
    "loss_summed",
    "gradients_not_cleared",
    "variant_pos_weight_auxiliary",
)
COLUMNS, LABELS, ROWS = 20, 8, 8000
STEPS, BATCH = 350, 128


def make_table() -> tuple[Tensor, Tensor]:
    """Return standardized columns and labels, of which about one in fourteen is set."""
    columns = torch.randn(ROWS, COLUMNS)
    hidden = torch.tanh(columns @ torch.randn(COLUMNS, 12) / 2)
    scores = hidden @ torch.randn(12, LABELS) + columns @ torch.randn(COLUMNS, LABELS) / 4
    scores = scores + 0.2 * torch.randn_like(scores)
    return columns, (scores > scores.quantile(0.93, dim=0)).float()


class Tagger(nn.Module):
    """An MLP with batch norm; `amount` is an auxiliary head that counts the labels."""

    def __init__(self, auxiliary: bool, size: int = 96) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(COLUMNS, size),
            nn.BatchNorm1d(size),
            nn.ReLU(),
            nn.Linear(size, size),
            nn.BatchNorm1d(size),
            nn.ReLU(),
        )
        self.tags = nn.Linear(size, LABELS)
        self.amount = nn.Linear(size, 1) if auxiliary else None

    def forward(self, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.body(columns)
        return self.tags(x), None if self.amount is None else self.amount(x)[:, 0]


def loss_of(logits: Tensor, labels: Tensor, case: str, weight: Tensor | None) -> Tensor:
    if case == "softmax_cross_entropy":
        return F.cross_entropy(logits, labels)
    if case == "sigmoid_twice":
        logits = torch.sigmoid(logits)
    reduction = "sum" if case == "loss_summed" else "mean"
    return F.binary_cross_entropy_with_logits(
        logits, labels, pos_weight=weight, reduction=reduction
    )


@torch.no_grad()
def f1(model: Tagger, columns: Tensor, labels: Tensor, case: str) -> float:
    """The mean over the labels of F1, with a label given where its probability is above 1/2."""
    model.eval()
    given = (model(columns)[0] > 0).float()
    if case == "sigmoid_twice":
        given = (torch.sigmoid(torch.sigmoid(model(columns)[0])) > 0.5).float()
    both = (given * labels).sum(0)
    return float((2 * both / (given.sum(0) + labels.sum(0)).clamp(min=1)).mean())


def main(case: str) -> None:
    torch.manual_seed(0)
    columns, labels = make_table()
    split = ROWS * 4 // 5
    auxiliary = case == "variant_pos_weight_auxiliary"
    model = Tagger(auxiliary)
    share = labels[:split].mean(0)
    weight: Tensor | None = None
    if auxiliary:
        weight = ((1 - share) / share).sqrt()
    elif case == "pos_weight_inverted":
        weight = share / (1 - share)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(STEPS):
        rows = torch.randint(0, split, (BATCH,))
        logits, amount = model(columns[rows])
        loss = loss_of(logits, labels[rows], case, weight)
        if amount is not None:
            loss = loss + 0.05 * F.mse_loss(amount, labels[rows].sum(1))
        if case != "gradients_not_cleared":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"quality (mean F1): {f1(model, columns[split:], labels[split:], case):.3f}")


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "healthy"
    assert chosen in CASES, CASES
    main(chosen)

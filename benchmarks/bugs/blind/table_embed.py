"""Classify rows of a table with two categorical and six numeric columns."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CASES = (
    "healthy",
    "labels_joined_by_position",
    "numeric_unscaled",
    "no_nonlinearity",
    "embeddings_in_a_list",
    "variant_sparse_embeddings",
)
SHOPS, GOODS, NUMERIC, CLASSES = 40, 25, 6, 4
STEPS, BATCH, ROWS = 350, 128, 6000


def make_table() -> tuple[Tensor, Tensor, Tensor]:
    """Return the categories, the numeric columns in their own units, and the classes."""
    categories = torch.stack([torch.randint(0, n, (ROWS,)) for n in (SHOPS, GOODS)], 1)
    numeric = torch.randn(ROWS, NUMERIC)
    shop, goods = torch.randn(SHOPS, CLASSES), torch.randn(GOODS, CLASSES)
    mixed = numeric[:, :CLASSES] * shop[categories[:, 0]] + goods[categories[:, 1]]
    mixed = mixed + 1.5 * torch.relu(numeric[:, 2:]) * torch.sign(numeric[:, :1])
    labels = (2 * mixed + 0.5 * torch.randn(ROWS, CLASSES)).argmax(1)
    units = torch.tensor([20000.0, 0.01, 1.0, 300.0, 1.0, 0.05])
    return categories, numeric * units + 3 * units, labels


class TableModel(nn.Module):
    """One embedding for each categorical column, then an MLP over everything."""

    def __init__(self, case: str, size: int = 64) -> None:
        super().__init__()
        sparse = case == "variant_sparse_embeddings"
        tables = [nn.Embedding(n, 6, sparse=sparse) for n in (SHOPS, GOODS)]
        if case == "embeddings_in_a_list":
            for table in tables:
                nn.init.normal_(table.weight, std=0.05)
        else:
            tables = nn.ModuleList(tables)  # type: ignore[assignment]
        self.tables = tables
        act = nn.Identity if case == "no_nonlinearity" else nn.ReLU
        self.body = nn.Sequential(
            nn.Linear(12 + NUMERIC, size), act(), nn.Linear(size, size), act()
        )
        self.head = nn.Linear(size, CLASSES)

    def forward(self, categories: Tensor, numeric: Tensor) -> Tensor:
        embedded = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        return self.head(self.body(torch.cat([*embedded, numeric], 1)))


def make_optimizers(model: TableModel, case: str) -> list[torch.optim.Optimizer]:
    if case == "variant_sparse_embeddings":
        dense = [*model.body.parameters(), *model.head.parameters()]
        sparse = [table.weight for table in model.tables]
        return [
            torch.optim.AdamW(dense, lr=3e-3, weight_decay=1e-3),
            torch.optim.SparseAdam(sparse, lr=1e-2),
        ]
    return [torch.optim.Adam(model.parameters(), lr=3e-3)]


@torch.no_grad()
def accuracy(model: TableModel, categories: Tensor, numeric: Tensor, labels: Tensor) -> float:
    model.eval()
    return float((model(categories, numeric).argmax(1) == labels).float().mean())


def main(case: str) -> None:
    torch.manual_seed(0)
    categories, numeric, labels = make_table()
    split = ROWS * 4 // 5
    if case != "numeric_unscaled":
        numeric = (numeric - numeric[:split].mean(0)) / numeric[:split].std(0)
    train_labels = labels[:split]
    if case == "labels_joined_by_position":
        by_shop = categories[:split, 0].argsort()  # the labels come from a file sorted by shop
        train_labels = train_labels[by_shop]
    model = TableModel(case)
    optimizers = make_optimizers(model, case)
    for step in range(STEPS):
        rows = torch.randint(0, split, (BATCH,))
        out = model(categories[rows], numeric[rows])
        loss = F.cross_entropy(out, train_labels[rows])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f}")
    score = accuracy(model, categories[split:], numeric[split:], labels[split:])
    print(f"quality (accuracy): {score:.3f}")


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "healthy"
    assert chosen in CASES, CASES
    main(chosen)

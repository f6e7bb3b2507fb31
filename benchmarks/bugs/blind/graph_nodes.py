"""Classify the nodes of a directed graph: a node's class depends on who points to it."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CASES = (
    "healthy",
    "messages_flow_backwards",
    "unlabelled_counted",
    "sums_instead_of_means",
    "too_deep",
    "variant_dropped_edges_swa",
)
NODES, CLASSES, FEATURES = 800, 5, 16
STEPS = 200


def make_graph() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return features, edges, labels and which nodes are labelled; some nodes have many edges."""
    groups = torch.randint(0, CLASSES, (NODES,))
    centers = torch.randn(CLASSES, FEATURES)
    features = centers[groups] + 1.8 * torch.randn(NODES, FEATURES)
    labels = torch.randint(0, CLASSES, (NODES,))
    sources, targets = [], []
    for node in range(NODES):
        count = int(torch.randint(4, 14, (1,))) if torch.rand(1) < 0.9 else 90
        members = (groups == labels[node]).nonzero()[:, 0]
        mostly = members[torch.randint(0, len(members), (count,))]
        anyone = torch.randint(0, NODES, (count,))
        sources.append(torch.where(torch.rand(count) < 0.65, mostly, anyone))
        targets.append(torch.full((count,), node))
    edges = torch.stack([torch.cat(sources), torch.cat(targets)])
    return features, edges, labels, torch.rand(NODES) < 0.4


class GraphLayer(nn.Module):
    """Adds up the messages that reach a node, divides by their number, keeps the node itself."""

    def __init__(self, fan_in: int, fan_out: int, case: str) -> None:
        super().__init__()
        self.case = case
        self.message = nn.Linear(fan_in, fan_out)
        self.own = nn.Linear(fan_in, fan_out)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        if self.case == "messages_flow_backwards":
            source, target = target, source
        message = self.message(x)
        total = torch.zeros_like(message).index_add(0, target, message[source])
        count = torch.bincount(target, minlength=len(x)).clamp(min=1)[:, None]
        if self.case == "too_deep":
            return (total + message) / (count + 1)
        return self.own(x) + (total if self.case == "sums_instead_of_means" else total / count)


class GraphNet(nn.Module):
    """Graph layers with ReLU in between, then a linear layer."""

    def __init__(self, case: str, size: int = 32) -> None:
        super().__init__()
        depth = 14 if case == "too_deep" else 3
        self.layers = nn.ModuleList(
            GraphLayer(FEATURES if i == 0 else size, size, case) for i in range(depth)
        )
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(size, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(torch.relu(layer(x, edges)))
        return self.head(x)


@torch.no_grad()
def accuracy(model: nn.Module, graph: tuple[Tensor, Tensor, Tensor, Tensor]) -> float:
    """The accuracy on the nodes that were not labelled."""
    features, edges, labels, labelled = graph
    model.eval()
    return float((model(features, edges).argmax(1) == labels)[~labelled].float().mean())


def main(case: str) -> None:
    torch.manual_seed(0)
    graph = make_graph()
    features, edges, labels, labelled = graph
    known = labels.masked_fill(~labelled, 0)
    model = GraphNet(case)
    special = case == "variant_dropped_edges_swa"
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=5e-3)
    for step in range(STEPS):
        kept = edges[:, torch.rand(edges.shape[1]) > 0.2] if special else edges
        logits = model(features, kept)
        if case == "unlabelled_counted":
            loss = F.cross_entropy(logits, known)
        else:
            loss = F.cross_entropy(logits[labelled], known[labelled])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if special and step >= STEPS // 2:
            average.update_parameters(model)
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f}")
    print(f"quality (accuracy): {accuracy(average if special else model, graph):.3f}")


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "healthy"
    assert chosen in CASES, CASES
    main(chosen)

"""Graphs as text: expected graphs as a person would draw them, and recorded graphs.

`a => b` is an edge that carries a gradient, `a -> b` one that carries only values. A node that ran
again in the step is `a:1`, and another of its tensors is `a[1]` or `a.weight`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from comgra_decl.records import SlotKey, Structure
from tests.support.recording import Recording, recording

OUTPUTS = {"nodes": {"all": {"select": "**", "capture": ["output", "output_grad"]}}}
PARAMETERS = {"nodes": {"all": {"select": "**", "capture": ["output", "parameter"]}}}

Forward = Callable[["Net", torch.Tensor], Any]


class Net(nn.Module):
    """Layers a, b, c of width 3, an embedding e, and an injected forward pass."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.c = nn.Linear(3, 3)
        self.e = nn.Embedding(3, 3)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward(self, x)


def arrows(text: str) -> set[str]:
    """Returns the edges of a drawing, separated by commas or lines; chains are allowed."""
    found = set()
    for line in text.replace("\n", ",").split(","):
        words = line.split()
        for source, arrow, sink in zip(words[::2], words[1::2], words[2::2], strict=False):
            found.add(f"{source} {arrow} {sink}")
    return found


def drawn(structure: Structure) -> set[str]:
    """Returns the edges of a recorded graph."""
    names = [_name(key) for key in structure.keys]
    return {f"{names[s]} {'=>' if grad else '->'} {names[t]}" for s, t, grad in structure.edges}


def _name(key: SlotKey) -> str:
    role = key.role.replace(" (earlier step)", "(earlier)")
    for plain in ("output", "input"):
        role = role.removeprefix(plain)
    separator = "" if not role or role[0] in ".[(" else "."
    return key.node + separator + role + (f":{key.iteration}" if key.iteration else "")


def follow(forward: Forward, spec: dict[str, Any] = OUTPUTS) -> set[str]:
    """Trains a `Net` with this forward pass for one step and returns the graph."""
    return train(Net(forward), spec)


def train(model: nn.Module, spec: dict[str, Any] = OUTPUTS) -> set[str]:
    """Trains any model on four inputs of width 3 for one step and returns the graph."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with followed(spec) as run:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert run.faults == []
    return drawn(run.structures[0])


def followed(spec: dict[str, Any] = OUTPUTS) -> Any:
    """Records every step of a block."""
    return recording(spec, schedule={"first": 1000})


def graphs(run: Recording) -> list[set[str]]:
    """Returns the graph that each training record refers to."""
    assert run.faults == []
    by_hash = {structure.hash: drawn(structure) for structure in run.structures}
    return [by_hash[step.info.structure or ""] for step in run.of("train")]

"""A training traced through the public door and read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.query import Run


def traced(root: Path, nodes: Mapping[str, Any], training: Callable[[], Any], **spec: Any) -> Run:
    """Runs `training` with every step recorded, the entries `nodes` and other keys of the spec."""
    declared = {"nodes": dict(nodes), "schedule": {"first": 1_000_000}, **spec}
    with comgra.trace(declared, root=root, group="g") as session:
        training()
    assert session.path is not None
    return comgra.open_run(session.path)


def train(model: nn.Module, *inputs: torch.Tensor, steps: int = 1) -> None:
    """A few steps of plain gradient descent on the sum of squares of what the model returns."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(*inputs).square().sum().backward()
        optimizer.step()


def roles(run: Run, node: str, pass_: str = "forward") -> list[str]:
    """The roles of a node in a pass, in order of appearance."""
    slots = run.slots
    return list(slots.role[(slots.node == node) & (slots["pass"] == pass_)])

"""A training run traced through the public API and read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.query import Run


def traced(root: Path, nodes: Mapping[str, Any], training: Callable[[], Any], **spec: Any) -> Run:
    """Run `training` with every step recorded; `nodes` and `spec` are keys of the spec."""
    declared = {"nodes": dict(nodes), "schedule": {"first": 1_000_000}, **spec}
    with comgra.trace(declared, root=root, group="g") as session:
        training()
    assert session.path is not None
    return comgra.open_run(session.path)


def train(model: nn.Module, *inputs: torch.Tensor, steps: int = 1) -> None:
    """Run a few steps of gradient descent on the sum of squares of the model's output."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(*inputs).square().sum().backward()
        optimizer.step()


def roles(run: Run, node: str, pass_: str = "forward") -> list[str]:
    """Return the roles of a node in a pass, in order of appearance."""
    slots = run.slots
    return list(slots.role[(slots.node == node) & (slots["pass"] == pass_)])

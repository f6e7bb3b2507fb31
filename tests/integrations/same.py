"""Shared by the programs in this folder: trains twice, and compares the results."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from comgra_decl.query import Run


def seeded(training: Callable[[], Any], door: AbstractContextManager[Any] | None = None) -> Any:
    """Returns the result of `training`, and the state of all generators after it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with door or nullcontext():
        result = training()
    return result, torch.get_rng_state(), random.random()


def bits(tensor: torch.Tensor) -> bytes:
    """Returns the dtype, shape and bytes of a tensor."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def same(first: Any, second: Any) -> bool:
    """Whether two results are the same, with tensors compared bit for bit."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and bits(first) == bits(second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def summary(run: Run) -> dict[str, Any]:
    """Returns what a test needs to know about a run."""
    records = run.records
    kpis = run.kpis()
    return {
        "steps": [int(step) for step in run.steps],
        "records": [
            [int(step), str(kind), *map(str, tags)]
            for step, kind, tags in zip(records.step, records.type, records.tags, strict=True)
        ],
        "nodes": run.nodes,
        "edges": [[str(a), str(b)] for a, b in run.edges()],
        "kpis": sorted({str(name) for name in kpis.name}),
        "gradients": sorted(set(run.slots.node[run.slots["pass"] == "grad"])),
        "config": run.config,
    }

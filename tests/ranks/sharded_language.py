"""One rank that trains a sharded language model, recorded; started by test_sharded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import comgra_decl as comgra
from tests.probing.attention import TOKENS, Language

SAMPLES, LENGTH = 3, 9
SPEC: dict[str, Any] = {
    "nodes": {
        "all": {"select": "**", "capture": ["input", "output", "parameter"], "values": True},
        "fused": {
            "select": {"function": "F.scaled_dot_product_attention"},
            "attention": {"recompute": True},
            "values": True,
        },
    },
    "schedule": {"first": 2},
    "samples": {"count": SAMPLES},
    "probes": {"eyes": {"samples": {"count": SAMPLES}}},
}


def language() -> Language:
    """The model before training, the same in every process."""
    torch.manual_seed(0)
    return Language()


def words(rank: int) -> torch.Tensor:
    """The batch of a rank, in which tokens repeat."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(TOKENS, (SAMPLES, LENGTH), generator=generator)


def main(out: Path) -> None:
    """Train two steps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tokens = words(dist.get_rank())
    with comgra.trace(SPEC, root=out, group="sharded", name="run"):
        model = language()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            logits = model(tokens)
            F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

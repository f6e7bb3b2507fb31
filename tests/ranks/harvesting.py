"""One rank that harvests from a sharded model; started by test_sharded."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import comgra_decl as comgra
from comgra_decl.errors import CallError


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)).eval()


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 6, generator=generator) for _ in range(3)]


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    found = comgra.harvest(model, batches(rank), out / str(rank), select=["0", "2"])
    whole = net()
    with torch.no_grad():
        first = torch.cat([whole[0](x) for x in batches(rank)])
        second = torch.cat([whole[:3](x) for x in batches(rank)])
    assert np.array_equal(found.read("0"), first.numpy())
    assert np.array_equal(found.read("2"), second.numpy())
    try:
        comgra.look(model, batches(rank)[0])
    except CallError as error:
        sys.stdout.write(str(error))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

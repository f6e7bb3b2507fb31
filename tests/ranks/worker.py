"""One rank of distributed training on the CPU, in several ways: `worker.py OUT WAY ...`.

The results of each way are saved, as numbers that do not depend on tracing, to
`OUT/<way>.<rank>.pt`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import comgra_decl as comgra
from comgra_decl.store import Reader

GLOBAL, FEATURES, STEPS = 8, 6, 4
NODES = {
    "all": {"select": "**", "capture": ["output", "output_grad"], "values": True},
    "weights": {
        "select": "**",
        "capture": ["parameter", "parameter_grad", "update", "optimizer_state"],
        "values": True,
    },
}
SPEC = {"nodes": NODES, "schedule": {"first": 1000}, "samples": {"count": 4}}


class Net(nn.Module):
    """Two blocks, one of which may stay unused."""

    def __init__(self, skip: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, FEATURES))
            for _ in range(2)
        )
        self.spare = nn.Linear(FEATURES, FEATURES)
        self.skip = skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x if self.skip else self.spare(x)


def batch(step: int) -> torch.Tensor:
    """Returns the global batch of a step [8, 6]."""
    return torch.randn(GLOBAL, FEATURES, generator=torch.Generator().manual_seed(step))


def share(step: int) -> torch.Tensor:
    """Returns this rank's part of it."""
    return batch(step).chunk(dist.get_world_size())[dist.get_rank()]


def train(
    model: nn.Module,
    data: Callable[[int], torch.Tensor] = share,
    *,
    accumulate: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
    steps: int = STEPS,
) -> dict[str, torch.Tensor]:
    """Takes some steps of AdamW; returns losses and parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        if accumulate is not None:
            with accumulate():
                model(data(step + 100)).square().mean().backward()
        loss = model(data(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    whole = {name: _local(p).clone() for name, p in model.named_parameters()}
    return {"losses": torch.stack(losses), **whole}


def _local(parameter: torch.Tensor) -> torch.Tensor:
    to_local = getattr(parameter.detach(), "to_local", parameter.detach)
    return to_local()


def net(**arguments: bool) -> Net:
    """A model with the same parameters on every rank."""
    torch.manual_seed(0)
    return Net(**arguments)


def ddp() -> dict[str, torch.Tensor]:
    """Plain data parallelism."""
    return train(DistributedDataParallel(net()))


def no_sync() -> dict[str, torch.Tensor]:
    """Two backward passes per step, only the second of which communicates."""
    model = DistributedDataParallel(net())
    return train(model, accumulate=model.no_sync)


def unused() -> dict[str, torch.Tensor]:
    """A parameter is not used."""
    return train(DistributedDataParallel(net(skip=True), find_unused_parameters=True))


def drifting() -> dict[str, torch.Tensor]:
    """The bug of training in multiple processes without data parallelism."""
    return train(net())


def fsdp(reshard: bool = True) -> dict[str, torch.Tensor]:
    """Sharded parameters, one group per block."""
    from torch.distributed.fsdp import fully_shard

    model = net()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return train(model)


def compiled() -> dict[str, torch.Tensor]:
    """Recorded steps run eagerly on all ranks."""
    return train(DistributedDataParallel(net()))


def dying() -> dict[str, torch.Tensor]:
    """Rank 1 ends abruptly, in the middle of its third step."""
    model = net()
    model.register_forward_hook(Dying())
    return train(model)


def broken() -> dict[str, torch.Tensor]:
    """One sample on rank 1 is bad in step 3, and a parameter is not used."""

    def data(step: int) -> torch.Tensor:
        x = share(step)
        if step == 3 and dist.get_rank() == 1:
            x[2, 1] = float("nan")
        return x

    model = DistributedDataParallel(net(skip=True), find_unused_parameters=True)
    return train(model, data, steps=8)


class Dying:
    """Ends rank 1's process without any notice."""

    calls = 0

    def __call__(self, *_: object) -> None:
        self.calls += 1
        if self.calls == 3 and dist.get_rank() == 1:
            _wait_for_records(2)
            os._exit(7)


def _wait_for_records(count: int) -> None:
    """Waits until this rank's records are on disk."""
    part = Path(sys.argv[1]) / "dying" / "run" / "ranks" / str(dist.get_rank())
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(comgra.ComgraError):  # it is being created
            if Reader(part).view.n >= count:
                return
        time.sleep(0.02)


WAYS: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "ddp": ddp,
    "no_sync": no_sync,
    "unused": unused,
    "drifting": drifting,
    "fsdp": fsdp,
    "fsdp_whole": lambda: fsdp(reshard=False),
    "broken": broken,
    "dying": dying,
}


def main(out: Path, ways: list[str]) -> None:
    """Trains in each way, with and without tracing."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for way in ways:
        plain = WAYS[way]() if way != "dying" else {}
        with comgra.trace(SPEC, root=out, group=way, name="run") as session:
            traced = WAYS[way]()
        result = {"plain": plain, "traced": traced, "path": str(session.path)}
        torch.save(result, out / f"{way}.{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

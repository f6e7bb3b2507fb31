"""One rank of compiled training whose recorded steps stay compiled: `observing.py OUT WAY...`.

Each way trains twice: compiled and recorded, and compiled only. Both are compared with a training
that is uncompiled and recorded; ways that differ in what is compiled share that one.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from comgra_decl.hooks.compiled.observers import Observers
from tests.ranks.worker import FEATURES, NODES, share
from tests.support.recording import Recording, contents, recording

STEPS = 5
SPEC = {
    "nodes": NODES,
    "graph": False,
    "schedule": {"first": 1, "every": 2},
    "samples": {"count": 4},
}


class Block(nn.Module):
    """Its input is used twice, in separate pieces if there are pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(FEATURES, 5), nn.Linear(5, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(torch.tanh(self.one(x)))


class Net(nn.Module):
    """Written without a loop, in which torch would not compile around the graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Block(), Block(), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.sin(self.second(self.first(x) * 2)))
        return result


class Talking(nn.Module):
    """Exchanges tensors with other ranks while it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed import _functional_collectives as collectives

        hidden = self.first(x)
        with torch.no_grad():
            mean = collectives.all_reduce(hidden.mean(dim=0), "avg", [0, 1])
        result: torch.Tensor = self.last(hidden - mean)
        return result


def compiled(net: nn.Module) -> Any:
    return torch.compile(net, backend="aot_eager")


def refused(net: nn.Module) -> Any:
    """Rank 1 cannot compile the code that shows its tensors."""
    from torch._dynamo.backends.debugging import aot_eager

    def backend(graph: torch.fx.GraphModule, inputs: Any, **more: Any) -> Any:
        if dist.get_rank() == 1 and "comgra_decl" in str(graph.graph):
            raise RuntimeError("not on this rank")
        return aot_eager(graph, inputs, **more)

    return torch.compile(net, backend=backend)


def in_place(net: nn.Module) -> nn.Module:
    net.compile(backend="aot_eager")
    return net


def sharded(net: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    assert isinstance(net, Net)
    fully_shard(net.first)
    fully_shard(net.second)
    fully_shard(net)
    return net


def blocks(net: nn.Module) -> nn.Module:
    assert isinstance(net, Net)
    net.first.compile(backend="aot_eager")
    net.second.compile(backend="aot_eager")
    return net


def narrow(net: nn.Module) -> DistributedDataParallel:
    """Buckets so small that torch compiles the model in pieces."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = 100  # type: ignore[attr-defined]
    return DistributedDataParallel(net, bucket_cap_mb=0.0002)


Wrap = Callable[[nn.Module], Any]
WAYS: dict[str, tuple[Wrap, Wrap]] = {  # uncompiled, compiled
    "DDP of a compiled model": (DistributedDataParallel, lambda n: narrow(compiled(n))),
    "compiled DDP": (DistributedDataParallel, lambda n: compiled(narrow(n))),
    "DDP compiled in place": (DistributedDataParallel, lambda n: in_place(narrow(n))),
    "sharded, then compiled": (sharded, lambda n: compiled(sharded(n))),
    "sharded, then compiled in place": (sharded, lambda n: in_place(sharded(n))),
    "compiled blocks, then sharded": (sharded, lambda n: sharded(blocks(n))),
    "DDP, refused on one rank": (DistributedDataParallel, lambda n: narrow(refused(n))),
    "sharded, refused on one rank": (sharded, lambda n: refused(sharded(n))),
    "talking": (DistributedDataParallel, lambda n: narrow(compiled(n))),
}


def train(wrap: Wrap, make: Callable[[], nn.Module], graphs: list[int]) -> list[float]:
    """Trains; appends to `graphs` how many graphs Dynamo has found by each step."""
    torch.manual_seed(0)
    torch.compiler.reset()
    counters.clear()
    model = wrap(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(share(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        graphs.append(counters["stats"]["unique_graphs"])
    return losses


class Uncompiled(NamedTuple):
    """What is recorded where nothing is compiled."""

    truth: Recording
    losses: list[float]


@functools.cache
def uncompiled(plain: Wrap, make: Callable[[], nn.Module]) -> Uncompiled:
    """Trains without compiling, once for all ways that are compared with it."""
    with recording({**SPEC, "compile": "eager"}) as truth:
        losses = train(plain, make, [])
    return Uncompiled(truth, losses)


def compare(way: str, seen: list[str]) -> dict[str, Any]:
    """Trains in one way; appends what compiled code shows to `seen`."""
    plain, wrap = WAYS[way]
    make = Talking if way == "talking" else Net
    graphs: list[int] = []
    plain_graphs: list[int] = []
    truth, expected = uncompiled(plain, make)
    with recording({**SPEC, "compile": "observed"}) as traced:
        losses = train(wrap, make, graphs)
    untraced = train(wrap, make, plain_graphs)
    numbers = range(len(truth.steps))
    return {
        "faults": [*map(repr, (*truth.faults, *traced.faults))],
        "losses": losses == expected == untraced,
        "steps": [step.info.step for step in traced.steps],
        "equal": [contents(traced, n) == contents(truth, n) for n in numbers],
        "shown": sorted({*seen}),
        "graphs": graphs,
        "plain graphs": plain_graphs[-1],
        "warnings": traced.report["warnings"],
    }


def main(out: Path, ways: list[str]) -> None:
    """Writes the outcome of each way to `OUT/RANK.json`."""
    seen: list[str] = []
    read = Observers.read

    def reading(self: Observers, tensor: torch.Tensor, shown: Any) -> int:
        seen.append(self._plans[shown.module].node())
        return read(self, tensor, shown)

    Observers.read = reading  # type: ignore[method-assign]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for way in ways:
        seen.clear()
        found[way] = compare(way, seen)
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

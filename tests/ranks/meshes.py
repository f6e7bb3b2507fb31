"""One rank of training on a device mesh, as `python -m tests.ranks.meshes OUT WAY` runs it.

Trains with and without tracing; saves losses and parameters of both to `OUT/<rank>.pt`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import comgra_decl as comgra

GLOBAL, FEATURES, HIDDEN, STEPS = 8, 6, 8, 3
SPEC = {
    "nodes": {
        "all": {"select": "**", "capture": ["output", "output_grad"], "values": True},
        "weights": {"select": "**", "capture": ["parameter", "parameter_grad"], "values": True},
    },
    "schedule": {"first": 1000},
    "samples": {"count": 2},
}
SIZES = {
    "fsdp tp": {"dp": 2, "tp": 2},
    "tp": {"tp": 2},
    "fsdp tp pp": {"pp": 2, "dp": 2, "tp": 2},
}


class Mlp(nn.Module):
    """A layer whose output tensor parallelism divides, and one that sums the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(FEATURES, HIDDEN), nn.ReLU()
        self.down, self.norm = nn.Linear(HIDDEN, FEATURES), nn.LayerNorm(FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return result


def net() -> nn.ModuleDict:
    """Two blocks with the same parameters in every process."""
    torch.manual_seed(0)
    return nn.ModuleDict({"first": Mlp(), "second": Mlp()})


def batch(step: int) -> torch.Tensor:
    """The global batch of a step [8, 6]."""
    return torch.randn(GLOBAL, FEATURES, generator=torch.Generator().manual_seed(step))


def error(output: torch.Tensor, _target: torch.Tensor | None = None) -> torch.Tensor:
    """The loss: the mean square."""
    return output.square().mean()


class Whole(nn.Module):
    """All blocks, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.blocks["second"](self.blocks["first"](x))
        return result


class Stage(nn.Module):
    """One of the blocks, under the name that it has in the whole."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.blocks = nn.ModuleDict({name: net()[name]})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.blocks[self.name](x)
        return result


def divided(model: Whole | Stage, mesh: DeviceMesh) -> Whole | Stage:
    """The model with tensor parallelism and, if the mesh has `dp`, sharded parameters."""
    # Imported here, because tests that start no ranks import this module for its sizes.
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

    plan: dict[str, ParallelStyle] = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    parallelize_module(model.blocks, mesh["tp"], plan)
    if "dp" in (mesh.mesh_dim_names or ()):
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def share(step: int, mesh: DeviceMesh) -> torch.Tensor:
    """The part of the batch that this rank's data-parallel group sees."""
    if "dp" not in (mesh.mesh_dim_names or ()):
        return batch(step)
    return batch(step).chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]


def train(way: str) -> dict[str, torch.Tensor]:
    """Takes some steps; returns losses and the local parameters."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    sizes = SIZES[way]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    losses: list[torch.Tensor] = []
    if "pp" in sizes:
        number = mesh.get_local_rank("pp")
        model = divided(Stage(("first", "second")[number]), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # with known shapes; the first step would contain a trial otherwise
        like = share(0, mesh).requires_grad_(True)  # what the stages send to each other
        stage = PipelineStage(
            model,
            number,
            2,
            torch.device("cpu"),
            input_args=like if number else like.detach(),
            output_args=like,
            group=mesh.get_group("pp"),
        )
        schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=error)
        for step in range(STEPS):
            example = share(step, mesh)
            optimizer.zero_grad()
            if number == 0:
                schedule.step(example)
            else:
                schedule.step(target=torch.zeros(len(example)), losses=losses)
            optimizer.step()
    else:
        model = divided(Whole(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = error(model(share(step, mesh)))
            loss.backward()
            optimizer.step()
            losses.append(loss)
    found = {name: _local(p) for name, p in model.named_parameters()}
    return {**found, "losses": torch.stack([loss.detach() for loss in losses] or [torch.zeros(1)])}


def _local(parameter: torch.Tensor) -> torch.Tensor:
    to_local = getattr(parameter.detach(), "to_local", parameter.detach)
    result: torch.Tensor = to_local().clone()
    return result


def alone(root: Path) -> Path:
    """Train the same model in one process, recorded; returns the run's folder."""
    spec = {**SPEC, "samples": {"count": GLOBAL}}
    with comgra.trace(spec, root=root, group="alone", name="run") as session:
        model = Whole()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            error(model(batch(step))).backward()
            optimizer.step()
    return Path(str(session.path))


def main(out: Path, way: str, *options: str) -> None:
    """Trains with and without tracing."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plain = train(way)
    overrides = [f"run.root={out}", *options]
    with comgra.trace(SPEC, group="mesh", name="run", overrides=overrides) as session:
        traced = train(way)
    result = {"plain": plain, "traced": traced, "path": session.path and str(session.path)}
    torch.save(result, out / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

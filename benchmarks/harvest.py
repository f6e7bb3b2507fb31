"""The cost of a harvest: `python -m benchmarks.harvest`.

Harvests one layer of a small model and, in alternating rounds, calls the model alone and writes as
many bytes to one file. Nothing is forced to the disk while it is harvested, so the time in which
the system writes all files to the disk is added to that of the harvest, and the file is written
with fsync. All are wall-clock times in seconds; the median of the rounds comes last.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import comgra_decl as comgra

SAMPLES, POSITIONS, WORDS = 32, 256, 100


def seconds(work: Callable[[], object]) -> float:
    """Return how long `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def write(path: Path, size: int) -> None:
    """Write random bytes to a file and the disk."""
    block = os.urandom(8 << 20)
    with path.open("wb") as file:
        for begin in range(0, size, len(block)):
            file.write(block[: size - begin])
        file.flush()
        os.fsync(file.fileno())


def measured(
    model: nn.Module,
    batches: list[Tensor],
    rows: int,
    folder: Path,
    profile: cProfile.Profile | None,
) -> dict[str, float]:
    """Return the seconds of each part of a round."""

    @torch.no_grad()
    def alone() -> None:
        for batch in batches:
            model(batch)

    def harvest() -> None:
        with profile or nullcontext():
            comgra.harvest(model, batches, folder / "harvest", select="1", rows=rows)

    found = {"model": seconds(alone), "harvest": seconds(harvest), "sync": seconds(os.sync)}
    size = sum(each.stat().st_size for each in (folder / "harvest").rglob("*") if each.is_file())
    found["raw write"] = seconds(lambda: write(folder / "raw", size))
    read = comgra.open_harvest(folder / "harvest")
    found["shuffled read"] = seconds(
        lambda: sum(len(x) for x in read.batches("1", 4096, shuffle=0))
    )
    found["beyond the model"] = found["harvest"] + found["sync"] - found["model"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write (a temporary folder)")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, given.width), nn.Linear(given.width, given.width))
    count = -(-given.rows // (SAMPLES * POSITIONS))
    batches = [torch.randint(WORDS, (SAMPLES, POSITIONS)) for _ in range(count)]
    profile, rounds = cProfile.Profile() if given.profile else None, []
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:  # imports what a harvest needs
        comgra.harvest(model, batches[:1], Path(folder) / "first", select="1")
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            rounds.append(measured(model, batches, given.rows, Path(folder), profile))
        print(", ".join(f"{name} {value:.2f}" for name, value in rounds[-1].items()))
    medians = {name: median(each[name] for each in rounds) for name in rounds[0]}
    print(f"{given.rows} rows x {given.width}, float32:", medians)
    if profile is not None:
        profile.print_stats("tottime")


if __name__ == "__main__":
    main()

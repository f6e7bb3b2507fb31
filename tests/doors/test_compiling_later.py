"""A program that warms up and compiles its model at step 5, with every preset and entry point."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from comgra_decl.query import list_runs, open_run
from comgra_decl.spec.loading import presets
from tests.support.forked import forked
from tests.support.shortened import shortened

PROGRAM = """
import sys
from contextlib import nullcontext
from pathlib import Path
from torch import compile
import hydra
import torch
from torch import nn

compiled = []


def backend(graph, _inputs):
    compiled.append(graph)
    return graph.forward


def train():
    torch.manual_seed(0)
    net = model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for step in range(40):
        if step == 5:
            model = compile(net, backend=backend)
        loss = model(torch.randn(4, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    Path("out.txt").write_text(repr([losses, len(compiled)]))


def trace(preset):
    import comgra_decl

    with comgra_decl.trace(preset, overrides=["schedule.first=7"]):
        train()


@hydra.main(version_base=None, config_path=None)
def app(_config):
    train()


if __name__ == "__main__":
    if sys.argv[1:2] == ["trace"]:
        trace(sys.argv[2])
    elif sys.argv[1:]:
        app()
    else:
        train()
"""
"""Its backend leaves the arithmetic unchanged, and counts the graphs it receives."""

DOORS = {
    "environment": ([], {"COMGRA": "{preset} schedule.first=7"}, []),
    "command": (["-m", "comgra_decl", "--spec", "{preset}", "schedule.first=7"], {}, []),
    "trace": ([], {}, ["trace", "{preset}"]),
    "hydra": (
        [],
        {},
        [
            "+comgra={preset}",
            "+comgra.schedule.first=7",
            "hydra.run.dir=.",
            "hydra.output_subdir=null",
        ],
    ),
}
CASES = [
    ("environment", "debug"),
    *(case for case in product(DOORS, presets()) if case != ("environment", "debug")),
]


def outcome(folder: Path, *arguments: str, **environment: str) -> str:
    """Runs the program; returns its losses and the number of compilations."""
    folder.mkdir()
    (folder / "later.py").write_text(PROGRAM)
    done = forked(folder, *arguments, env=environment)
    assert done.returncode == 0, done.stderr
    return (folder / "out.txt").read_text()


@pytest.mark.parametrize("case", shortened(CASES, tried=1), ids="-".join)
def test_a_model_compiled_at_step_5_compiles_once_in_one_run(
    case: tuple[str, str], tmp_path: Path
) -> None:
    door, preset = case
    before, environment, after = DOORS[door]
    line = [word.format(preset=preset) for word in (*before, "later.py", *after)]
    given = {name: word.format(preset=preset) for name, word in environment.items()}
    plain = outcome(tmp_path / "plain", "later.py")
    assert plain.endswith(", 1]")
    assert outcome(tmp_path / "traced", *line, **given) == plain
    runs = list_runs(tmp_path / "traced")
    assert len(runs) == (preset != "off")
    for summary in runs:
        run = open_run(summary.path)
        assert run.state == "finished"
        assert run.steps.tolist()[:7] == [*range(7)], "recorded before and after step 5"
        assert {"0", "1", "2"} <= set(run.nodes)

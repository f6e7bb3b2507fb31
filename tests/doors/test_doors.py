"""Programs that keep references to torch functions end as without tracing, with any entry point."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from comgra_decl.query import list_runs, open_run
from tests.support.forked import forked
from tests.support.shortened import shortened

KEEPING = """
import functools
import json

import torch
from torch import compile, nn

compile_later = functools.partial(torch.compile)
graphs = []


def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward


def helper(loss):
    arguments = locals()
    loss.backward()
    return sorted(arguments), arguments["loss"] is loss


def train(lr=0.1, epochs=40):
    config = locals()
    config["lr"] = "changed by the program"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    compiled, said = [], []
    for step in range(epochs):
        if step == 3:
            compiled = [compile(net, backend=backend), compile_later(net, backend=backend)]
        optimizer.zero_grad()
        for model in compiled or [net]:
            loss_a = model(torch.randn(3, 4)).square().mean()
            loss_b = model(torch.randn(3, 4)).abs().mean()
            said.append(helper(loss_a))
            loss_b.backward()
        optimizer.step()
    return config, said, loss_a.item()


def main(seed=3, name="run"):
    hparams = locals()
    ended = train()
    print("kept", json.dumps([sorted(hparams.items()), ended]), len(graphs))
    print("names", compile.__name__, torch.compile is compile, nn.Module.train.__qualname__)
"""
CALL = '\n\nif __name__ == "__main__":\n    main()\n'
HYDRA = (
    "import hydra\n"
    + KEEPING
    + "\n\n@hydra.main(version_base=None, config_path=None)\ndef app(cfg):\n    main()\n"
    + '\n\nif __name__ == "__main__":\n    app()\n'
)
BLOCK = "import comgra_decl\n" + KEEPING + "\nwith comgra_decl.trace({!r}):\n    main()\n"


@cache
def without_tracing() -> str:
    import tempfile

    folder = Path(tempfile.mkdtemp())
    (folder / "keeping.py").write_text(KEEPING + CALL)
    done = forked(folder, "keeping.py")
    assert done.returncode == 0, done.stderr
    return _printed(done.stdout)


def _printed(output: str) -> str:
    """Returns what the program itself printed; Hydra logs to the same stream."""
    return "\n".join(line for line in output.splitlines() if not line.startswith("["))


@pytest.mark.parametrize("preset", shortened(["debug", "light"], tried=1))
@pytest.mark.parametrize("door", shortened(["environment", "hydra", "command", "block"], tried=2))
def test_a_program_ends_as_without_tracing_and_leaves_one_run(
    door: str, preset: str, tmp_path: Path
) -> None:
    source = {"hydra": HYDRA, "block": BLOCK.replace("{!r}", repr(preset))}
    (tmp_path / "keeping.py").write_text(source.get(door, KEEPING + CALL))
    arguments = {
        "command": ["-m", "comgra_decl", "--spec", preset, "keeping.py"],
        "hydra": ["keeping.py", f"+comgra={preset}"],
    }
    variables = {"COMGRA": preset} if door == "environment" else {}
    done = forked(tmp_path, *arguments.get(door, ["keeping.py"]), env=variables)
    assert done.returncode == 0, done.stderr
    assert _printed(done.stdout) == without_tracing()
    (run,) = list_runs(tmp_path / "runs")
    recorded = open_run(run.path)
    assert (run.state, recorded.report["warnings"]) == ("finished", [])
    assert len(recorded.steps) > {"debug": 10, "light": 0}[preset]

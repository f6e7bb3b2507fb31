"""`comgra-decl look`: a step again, in a process of its own, with the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

import comgra_decl as comgra
from comgra_decl.query import Run
from tests.support.forked import forked

SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.seen += 1
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3))) + self.seen

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
model = Net()
generator = torch.Generator().manual_seed(5)
x = torch.randn(8, 1, 6, 6, generator=generator)
labels = torch.arange(8) % 3
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for _ in range(6):
    optimizer.zero_grad()
    F.cross_entropy(model(x), labels).backward()
    optimizer.step()
print("trained", flush=True)
"""

SPEC = """
nodes:
  all: {select: "**", capture: [output, output_grad, parameter, parameter_grad], values: true}
schedule: {first: 100}
rules: "off"
perturbations: false
"""

NARROW = [
    "nodes={head: {select: head, values: true}}",
    "checkpoints={every: 2}",
    "run.root=runs",
    "run.group=g",
    "run.name=first",
]
PROBE = ["probes.eyes={samples: {count: 4}}", "pictures.s={method: saliency, of: eyes, target: 1}"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that recorded little, and one of the same training with everything."""
    place = tmp_path_factory.mktemp("place")
    (place / "train.py").write_text(SCRIPT)
    (place / "other.py").write_text(SCRIPT.replace("Net", "Other"))
    (place / "wider.py").write_text(SCRIPT.replace("Linear(3, 3)", "Linear(3, 4)"))
    (place / "nothing.py").write_text("print(1)")
    (place / "fails.py").write_text("raise SystemExit(7)")
    (place / "mine.yaml").write_text(SPEC)
    assert command(place, "run", "--spec", "mine.yaml", *NARROW, "train.py").returncode == 0
    whole = ["run.root=runs", "run.group=g", "run.name=whole", *PROBE]
    whole += ["probes.eyes.schedule={every: 1}"]
    assert command(place, "run", "--spec", "mine.yaml", *whole, "train.py").returncode == 0
    return place


def command(place: Path, *arguments: str) -> CompletedProcess[str]:
    return forked(place, "-c", "from comgra_decl.cli.main import main; main()", *arguments)


def everything(run: Run, step: int) -> dict[object, bytes]:
    """Return all values of a step in training and of its probe, as bytes."""
    found: dict[object, bytes] = {}
    for node, role, iteration, pass_ in (info.key for info in run.arrays.slots):
        slot = run.slot(node, role=role, of=pass_, iteration=iteration)
        for type_ in ("train", "probe:eyes"):
            try:
                value = slot.value(step, type=type_)
            except comgra.ComgraError:
                continue
            found[type_, node, role, iteration, pass_] = value.tobytes()
    return found


@pytest.mark.slow
def test_it_records_bit_by_bit_what_the_run_did_not(place: Path) -> None:
    # the script starts with other weights, which the checkpoint replaces
    done = command(place, "look", "--step", "4", "runs/g/first", "--spec", "mine.yaml", *PROBE,
                   "train.py", "1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{place / 'runs/g/first-step-4'}\n"
    assert "trained" not in done.stderr  # it ended after one step
    again = comgra.open_run(place / "runs/g/first-step-4")
    whole = comgra.open_run(place / "runs/g/whole")
    assert again.steps.tolist() == [4]
    assert (again.state, again.damage) == ("finished", [])
    expected = everything(whole, 4)
    assert len(expected) > 20
    assert everything(again, 4) == expected
    assert again.edges() == whole.edges(4)
    first = comgra.open_run(place / "runs/g/first")
    assert np.array_equal(again.slot("head").value(4), first.slot("head").value(4))
    assert again.picture("s", 4).values.any()


ENDS = {
    "another script": (
        ["other.py"],
        3,
        "training step of Net (models called outside evaluations: Other)",
    ),
    "no training": (["nothing.py"], 3, "models called outside evaluations: none"),
    "its own code": (["fails.py"], 7, ""),
    "other shapes": (["wider.py"], 2, "'head.weight' has the shape (3, 3), but (4, 3) in the"),
    "no such step": (["--step", "3"], 2, "step 3 was not recorded with type 'checkpoint'"),
    "no number": (["--step", "x"], 2, "--step must be the number of a step, got 'x'"),
    "no such model": (["--model", "net"], 2, "has no model 'net'; it has: 'Net'"),
    "no folder": (["--to", "train.py/below"], 2, "train.py' is a file, not a folder"),
    "a target": (["--to", "runs"], 2, "'runs' already exists; pass another folder with --to"),
}


@pytest.mark.parametrize("case", ENDS)
def test_what_goes_wrong_is_said_and_leaves_nothing_behind(case: str, place: Path) -> None:
    given, code, said = ENDS[case]
    options = ["--to", "nowhere"] if given[0].endswith(".py") else given
    script = given[0] if given[0].endswith(".py") else "train.py"
    temporary = place / "temporary"
    temporary.mkdir(exist_ok=True)
    call = "from comgra_decl.cli.main import main; main()"
    done = forked(place, "-c", call, "look", *options, "runs/g/first", script,
                  env={"TMPDIR": str(temporary)})  # fmt: skip
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert done.stdout == ""
    assert [*temporary.glob("comgra-look-*")] == []
    assert {p.name for p in (place / "runs/g").iterdir()} <= {"first", "whole", "first-step-4"}
    assert not (place / "nowhere").exists()

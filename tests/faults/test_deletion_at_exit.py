"""When a program ends, the objects that it leaves behind are deleted as usual."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)

    def __del__(self):
        os.write(1, b"the network is deleted\\n")

class Other:
    def __del__(self):
        os.write(1, b"another object is deleted\\n")

other, net = Other(), Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3 * (sys.argv[1] != "nothing")):
    optimizer.zero_grad()
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
if sys.argv[1] == "fails":
    raise RuntimeError("as it is meant to")
"""
DOORS: dict[str, tuple[list[str], dict[str, str]]] = {
    "untraced": ([], {}),
    "environment": ([], {"COMGRA": "debug rules=off"}),
    "command": (["-m", "comgra_decl", "rules=off"], {}),
}
SHORT = [("environment", "trains")]
"""Each case is a Python of its own, because only that has an end of its own."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("door", "does"),
    [
        pytest.param(*each, marks=[] if each in SHORT else [pytest.mark.slow])
        for each in product(DOORS, ["trains", "nothing", "fails"])
    ],
)
def test_objects_that_live_to_the_end_are_deleted_whatever_the_door(
    tmp_path: Path, door: str, does: str
) -> None:
    before, more = DOORS[door]
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, *before, str(script), does],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, **more},
    )
    assert done.returncode == (does == "fails"), done.stderr
    said = sorted(done.stdout.splitlines())
    assert said == ["another object is deleted", "the network is deleted"]

"""Trains on a disk that fails at a given moment: `... failing_program ROOT CALLS CALL MOMENT`.

Prints the losses, then waits until its standard input is closed.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.query import list_runs

STEPS, BEFORE = 40, 10
PATIENCE = 120
SPEC = {
    "nodes": {"all": {"select": "**", "capture": ["output", "parameter"]}},
    "schedule": {"first": 1000},
    "store": {"commit_interval": 0},
    "rules": "off",
}


class Training:
    """A short training run, the same each time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self._model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self._optimizer = torch.optim.SGD(self._model.parameters(), 0.1)
        self.losses: list[float] = []
        self.means: list[float] = []
        self._model[1].register_forward_hook(lambda *seen: self.means.append(seen[2].mean().item()))

    def step(self) -> None:
        """Trains for one step."""
        self._optimizer.zero_grad()
        loss = self._model(torch.randn(8, 4)).square().mean()
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.item())


class Failure(logging.StreamHandler[TextIO]):
    """Writes log lines to standard error, and waits until tracing reports an error."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.happened = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if record.levelno >= logging.ERROR:
            self.happened.set()


def _wait_for_records(root: Path, count: int) -> None:
    ended = time.monotonic() + PATIENCE
    while not any(len(comgra.open_run(run.path).steps) >= count for run in list_runs(root)):
        assert time.monotonic() < ended
        time.sleep(0.01)


def main(root: Path, switch: Path, moment: str) -> None:
    """Trains; the disk fails when the run is created, in the middle, or before it is closed."""
    failure, training = Failure(), Training()
    logging.getLogger("comgra_decl").addHandler(failure)
    if moment == "creation":
        switch.touch()
    with comgra.trace(SPEC, root=root, group="g", name="r"):
        for step in range(STEPS):
            if moment == "middle" and step == BEFORE:
                _wait_for_records(root, BEFORE)
                switch.touch()
            training.step()
        if moment == "end":
            _wait_for_records(root, STEPS)
            switch.touch()
        else:
            assert failure.happened.wait(PATIENCE)
    sys.stdout.write(" ".join(map(str, training.losses)) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2], sys.argv[3]), sys.argv[4])

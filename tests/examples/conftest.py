"""Runs the examples as a user would: as programs, each in its own folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forked import forked

EXAMPLES = Path(__file__).parents[2] / "examples"

SHORT = {  # just long enough for the loss to fall clearly
    "tutorial": ["steps=100", "eval_every=50", "task.eval_size=32"],
    "digits": ["steps=30", "eval_every=15"],
    "watermark": ["steps=60", "eval_every=30"],
    "characters": ["steps=30", "eval_every=15", "eval_batches=2", "batch_size=8", "write=8"],
    "induction": ["steps=120", "batch_size=32"],
    "fact": ["steps=60", "plant.steps=10", "people=20"],
    "starved": ["steps=40", "eval_every=20"],
}


@dataclass(frozen=True)
class Outcome:
    """What a finished training run left behind: its folder, its output, its checkpoint."""

    folder: Path
    printed: str
    checkpoint: dict[str, Any]

    @property
    def losses(self) -> torch.Tensor:
        """The training loss of every step, float32 [steps]."""
        losses = self.checkpoint["losses"]
        assert isinstance(losses, torch.Tensor)
        return losses


Train = Callable[..., Outcome]


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Returns `train(example, *arguments)`, which trains briefly, once per set of arguments."""
    done: dict[tuple[str, ...], Outcome] = {}

    def run(example: str, *arguments: str) -> Outcome:
        key = (example, *arguments)
        if key not in done:
            done[key] = _train(example, arguments, tmp_path_factory.mktemp(example))
        return done[key]

    return run


def _train(example: str, arguments: tuple[str, ...], folder: Path) -> Outcome:
    script = EXAMPLES / example / "train.py"
    command = [str(script), *SHORT[example], "save=checkpoint.pt", *arguments]
    result = forked(folder, *command, env={"HYDRA_FULL_ERROR": "1"})
    assert result.returncode == 0, result.stdout + result.stderr
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    return Outcome(folder, result.stdout, checkpoint)

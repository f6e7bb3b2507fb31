"""Training scripts that do not use comgra_decl, and functions that run them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

TRAINING = """
import torch


def train(steps=12):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(torch.randn(5, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", repr(loss.item()))
"""
"""Trains a small network and prints its last loss with all digits."""

SCRIPT = """
import sys


class Local:
    pass


if __name__ == "__main__":
    print("arguments", sys.argv)
    print("path", sys.path[0])
    print("main", Local.__module__, __file__, __package__, __spec__ and __spec__.name)
"""
"""A script that prints how it was started."""

HYDRA_YAML = f"""
import os
import hydra
{TRAINING}

@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    assert "hydra" not in cfg
    print("cfg", dict(cfg))
    print("cwd", os.getcwd())
    train()


if __name__ == "__main__":
    main()
"""
"""A Hydra application with a plain YAML config."""

HYDRA_DATACLASS = f"""
from dataclasses import dataclass

import hydra
from hydra.core.config_store import ConfigStore
{TRAINING}

@dataclass
class Config:
    lr: float = 0.1


ConfigStore.instance().store(name="config", node=Config)


@hydra.main(version_base=None, config_path=None, config_name="config")
def main(cfg):
    print("cfg", dict(cfg))
    train()


if __name__ == "__main__":
    main()
"""
"""A Hydra application whose config is a dataclass, which accepts no unknown keys."""


def python(
    folder: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder` as a user would, and return the result."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a command."""

    returncode: int | str | None
    stdout: str
    stderr: str


def command(folder: Path, *arguments: str) -> Ended:
    """Run `comgra-decl` in `folder`, within this process, to save importing torch.

    The interpreter state that running a script changes is restored.
    """
    from comgra_decl.cli.main import main

    out, err, code = StringIO(), StringIO(), None
    with redirect_stdout(out), redirect_stderr(err), chdir(folder), interpreter_kept():
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code
    return Ended(code, out.getvalue(), err.getvalue())


@contextmanager
def interpreter_kept() -> Iterator[None]:
    """Restore what `comgra-decl run` and similar commands change, as their process would end."""
    main = sys.modules["__main__"]
    with mock.patch.multiple(sys, argv=[*sys.argv], path=[*sys.path]):
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def plain_loss() -> str:
    """Return the output of the untraced training run."""
    code: dict[str, Any] = {}
    exec(TRAINING, code)
    with redirect_stdout(StringIO()) as out:
        code["train"]()
    return out.getvalue().strip()


def loss_of(output: str) -> str:
    """Return the line with the loss that a training script printed."""
    (line,) = [line for line in output.splitlines() if line.startswith("loss ")]
    return line

"""Entry point of the process that tests one program."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch._dynamo  # imported in advance: optimizers would import it at their first step

from benchmarks.neutrality import trial, zoo

torch.set_num_threads(1)
zoo.preload()


def work(name: str, answer: str) -> None:
    """Test the program `name` and write the verdict to the file `answer`."""
    if not os.environ.get("NEUTRALITY_VERBOSE"):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.dup2(null, sys.stderr.fileno())
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="neutrality-run-") as folder:
        verdict = trial.try_program(name, zoo.builder(name), Path(folder))
    Path(answer).write_text(json.dumps(trial.to_json(verdict)))

"""The public scripts that are tried, as `catalogue.yaml` lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

FILE = Path(__file__).with_name("catalogue.yaml")


class Block(BaseModel):
    """An example that a page of the repository shows, which is run as `example.py`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str
    number: int = 0
    """Of the page's examples in Python, from 0."""
    replace: dict[str, str] = {}
    """Numbers and paths that are made small or local; nothing else is changed."""


class Entry(BaseModel):
    """One script, how it is started and what is known of its loop.

    What a complete record holds is counted by an untraced process; here stands only what nothing
    but reading the script can tell.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    repo: str
    """Owner and name on GitHub."""
    commit: str
    """What was tried."""
    command: str
    """The script and its arguments, relative to `folder`."""
    folder: str = "."
    """The part of the repository that the script needs."""
    at: str = "."
    """Where in `folder` the command is started."""
    block: Block | None = None
    """Where the program is an example on a page."""
    path: tuple[str, ...] = ()
    """Folders below `folder` that hold packages the script imports."""
    shape: str = ""
    """What is particular about its training loop."""
    needs: tuple[str, ...] = ()
    """Packages that are installed beside the environment (`make scripts`)."""
    prepare: tuple[str, ...] = ()
    """Scripts of the repository that are run first, without being watched."""
    data: tuple[dict[str, Any], ...] = ()
    """Files that are made where the script looks for data: `kind` and arguments of `fakes.py`."""
    environment: dict[str, str] = {}
    """Variables that the script is started with."""
    samples: int = 512
    """Size of the data that stands in for downloads."""
    stop: int = 0
    """Ctrl-C after so many optimizer steps; 0 for the script's own end."""
    door: Literal["COMGRA", "hydra"] = "COMGRA"
    """How tracing is switched on."""
    steps: Literal["each", "round", "seen", "backward"] = "each"
    """What is a step: each step of any optimizer; a round in which every optimizer has stepped;
    what the run has counted, where rounds differ (each loss must then be in one of its steps, in
    order, and each step must hold what was seen between its losses); or each backward pass, where
    the script writes its updates by hand or with a library's own."""
    runs: int = 1
    """Runs that one start of the script leaves: one for each process that trains."""
    target: bool = False
    """Whether the loss compares with targets that are given to no model."""
    forward: tuple[str, ...] = ()
    """Classes whose `forward` the script calls directly."""
    evaluated: tuple[str, ...] = ()
    """Parts of models that are only evaluated, each after another model in the same phase, of which
    so many calls are recorded as a training step has."""
    bits: bool = True
    """Whether the steps can be compared bit by bit: not if recorded ones run other kernels."""
    processes: bool = False
    """Whether it starts others, which a process that was forked for it may not."""
    races: bool = False
    """Whether its numbers differ from one start to the next, as those of processes that write to
    the same weights."""
    ends: tuple[int, ...] = (0,)
    """Exit codes of the plain script; with `stop`, those of Ctrl-C are added."""
    ignore: tuple[str, ...] = ()
    """Files that differ from one start to the next, as globs, and lines, as `line:` and a regular
    expression."""
    short: bool = False
    """Whether the script is part of the normal tests."""
    limit: int = 400
    """Seconds of processor time."""


def entries(file: Path = FILE) -> dict[str, Entry]:
    """Returns all entries by name, in the order of the file."""
    content = yaml.safe_load(file.read_text())
    found: dict[str, Entry] = {}
    for repo, listed in content["scripts"].items():
        for name, fields in listed.items():
            assert name not in found, f"{name} is listed twice"
            found[name] = Entry(name=name, repo=repo, commit=content["commits"][repo], **fields)
    return found

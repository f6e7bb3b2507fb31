"""The public scripts, as listed in `catalogue.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

FILE = Path(__file__).with_name("catalogue.yaml")


class Block(BaseModel):
    """An example on a page of the repository, which is run as `example.py`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str
    number: int = 0
    """Index among the page's Python examples, from 0."""
    replace: dict[str, str] = {}
    """Replacements that reduce numbers and make paths local; nothing else is changed."""


class Entry(BaseModel):
    """One script, its command, and facts about its training loop.

    An untraced process determines what a complete record contains. The fields contain only facts
    that require reading the script.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    repo: str
    """Owner and name on GitHub."""
    commit: str
    """The commit that is run."""
    command: str
    """The script and its arguments, relative to `folder`."""
    folder: str = "."
    """The part of the repository that the script needs."""
    at: str = "."
    """Working directory of the command, relative to `folder`."""
    block: Block | None = None
    """The example, if the program is on a page."""
    path: tuple[str, ...] = ()
    """Folders below `folder` with packages that the script imports."""
    shape: str = ""
    """What is special about the script's training loop."""
    needs: tuple[str, ...] = ()
    """Packages installed in addition to the environment (`make scripts`)."""
    prepare: tuple[str, ...] = ()
    """Scripts of the repository to run first, without watching them."""
    data: tuple[dict[str, Any], ...] = ()
    """Generated data files for the script: `kind` and arguments for `fakes.py`."""
    environment: dict[str, str] = {}
    """Additional environment variables."""
    samples: int = 512
    """Number of samples in data that replaces downloads."""
    stop: int = 0
    """Number of optimizer steps after which to send Ctrl-C; 0 to let the script finish."""
    door: Literal["COMGRA", "hydra"] = "COMGRA"
    """How tracing is enabled."""
    steps: Literal["each", "round", "seen", "backward"] = "each"
    """What counts as a step: "each" step of any optimizer; a "round" in which every optimizer has
    stepped; the steps "seen" by the run, where rounds differ (each loss must then be in one of the
    run's steps, in order, and each step must contain what was observed between its losses); or each
    "backward" pass, where the script updates parameters manually or with a library's optimizer."""
    runs: int = 1
    """Number of runs per start of the script: one for each process that trains."""
    target: bool = False
    """Whether the loss uses targets that are not passed to any model."""
    forward: tuple[str, ...] = ()
    """Classes whose `forward` the script calls directly."""
    evaluated: tuple[str, ...] = ()
    """Parts of models that are only evaluated, each after another model in the same phase.

    The record contains no more of their calls than a training step has.
    """
    bits: bool = True
    """Whether steps are bit-comparable; false if recorded steps run different kernels."""
    processes: bool = False
    """Whether the script starts processes, which a forked process must not do."""
    races: bool = False
    """Whether numbers differ between starts, for example because processes write to shared
    weights."""
    ends: tuple[int, ...] = (0,)
    """Valid exit codes of the plain script; with `stop`, those of Ctrl-C are added."""
    ignore: tuple[str, ...] = ()
    """Globs of files that differ between starts, and `line:` with a regular expression for lines
    that do."""
    short: bool = False
    """Whether the script is part of the normal tests."""
    limit: int = 400
    """Limit in seconds of processor time."""


def entries(file: Path = FILE) -> dict[str, Entry]:
    """Return all entries by name, in the order of the file."""
    content = yaml.safe_load(file.read_text())
    found: dict[str, Entry] = {}
    for repo, listed in content["scripts"].items():
        for name, fields in listed.items():
            assert name not in found, f"{name} is listed twice"
            found[name] = Entry(name=name, repo=repo, commit=content["commits"][repo], **fields)
    return found

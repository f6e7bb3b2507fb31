"""Where a run is stored: `<root>/<group>/<name>`, never in a folder that is there already."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from comgra_decl.errors import StoreError

if TYPE_CHECKING:
    from comgra_decl.launch.context import RunContext
    from comgra_decl.spec.run import RunSpec

DEFAULT_GROUP = "default"
"""The group where neither the spec nor the program names one."""


def create_run_folder(run: RunSpec, context: RunContext) -> Path:
    """Creates the folder of a new run and returns its absolute path.

    A name that is taken gets a number: "baseline-2". Creating is what claims a name, so programs
    that start at the same time never share a folder.

    Raises:
        StoreError: it cannot be created.
    """
    root = context.base.absolute() / Path(run.root).expanduser()
    group = root / (run.group or folder_name(context.job))
    try:
        group.mkdir(parents=True, exist_ok=True)
        return _claimed(group, run.name or f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
    except OSError as error:
        raise StoreError(
            f"no run can be created in {group} ({error.strerror}); "
            "choose another place with run.root=FOLDER"
        ) from error


def _claimed(group: Path, name: str) -> Path:
    for candidate in _candidates(name):
        try:
            (group / candidate).mkdir()
        except FileExistsError:
            continue
        return group / candidate
    raise AssertionError("numbers do not run out")


def _candidates(name: str) -> Iterator[str]:
    yield name
    for number in count(2):
        yield f"{name}-{number}"


def folder_name(job: str | None) -> str:
    """Returns the name of a job or script in a form that can name a folder."""
    return re.sub(r"[^\w.+=@-]+", "_", job or "").strip("._")[:100] or DEFAULT_GROUP

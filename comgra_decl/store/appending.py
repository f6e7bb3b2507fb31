"""Going on with a run that exists: what a writer must know of it, and who may not."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from .database import database_path
from .reader import Reader


def discard_unused(path: str | os.PathLike[str], uuid: str) -> None:
    """Takes a run away that this process has just made and that holds no record.

    Args:
        path: the run's folder; it stays if it holds anything else.
        uuid: the run that is meant; any other is left alone.
    """
    reader = Reader(path)
    if reader.meta.uuid != uuid or reader.head["n"]:
        return
    shutil.rmtree(database_path(path))
    with suppress(OSError):
        (Path(path) / "spec.yaml").unlink()
    with suppress(OSError):
        Path(path).rmdir()

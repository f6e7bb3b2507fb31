"""Imports the logs of other tools as runs, to compare them with recorded ones."""

from .tensorboard import Imported, import_tensorboard

__all__ = ["Imported", "import_tensorboard"]

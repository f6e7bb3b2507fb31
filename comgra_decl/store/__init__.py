"""A run on disk: layout, writer, writer thread, reader."""

from .meta import RunMeta
from .reader import Reader, small_cache
from .thread import WriterThread
from .writer import RunWriter

__all__ = ["Reader", "RunMeta", "RunWriter", "WriterThread", "small_cache"]

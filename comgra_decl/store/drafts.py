"""Drafts: folders beside what they become, so that it appears whole, by one rename, or not at all.

A killed program leaves its draft behind; who makes the next one for the same target removes it.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from comgra_decl.errors import ComgraError, StoreError

from .locking import held_alone

_RANDOM = "[a-z0-9_]{8}"
"""How `tempfile` ends a name."""


@contextmanager
def drafted(target: Path, kind: str) -> Iterator[Path]:
    """Yields an empty folder beside `target`; it is gone afterwards, unless it was renamed.

    Args:
        target: what is to be made.
        kind: what is being done: "copying", "exporting".

    Raises:
        StoreError: it cannot be written there; also for errors of the system in the block.
    """
    prefix = f".{kind}-{target.name}-"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent, prefix)
        draft = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    except OSError as error:
        raise StoreError(f"cannot write to {str(target.parent)!r}: {error}") from error
    try:
        with held_alone(draft):
            yield draft
    except OSError as error:
        if isinstance(error, ComgraError):
            raise
        raise StoreError(f"cannot write {str(target)!r}: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _sweep(folder: Path, prefix: str) -> None:
    """Removes drafts whose programs have ended: nobody holds their lock."""
    pattern = re.compile(re.escape(prefix) + _RANDOM)
    for path in [path for path in folder.iterdir() if pattern.fullmatch(path.name)]:
        with suppress(OSError):
            if not path.is_symlink():
                with held_alone(path) as ours:
                    if ours:
                        shutil.rmtree(path, ignore_errors=True)

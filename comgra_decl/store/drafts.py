"""Drafts: temporary folders next to their target, which are renamed when complete.

If a program is killed, its draft remains; the next draft for the same target removes it.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from comgra_decl.errors import ComgraError, StoreError

from .locking import held_alone

_RANDOM = "[a-z0-9_]{8}"
"""Pattern of the suffix appended by `tempfile`."""


@contextmanager
def drafted(target: Path, kind: str) -> Iterator[Path]:
    """Yield an empty folder next to `target` and remove it afterwards, unless it was renamed.

    Folders above the target that are created for it are removed too if they remain empty.

    Args:
        target: folder to create.
        kind: label of the operation: "copying", "exporting".

    Raises:
        StoreError: the folder is not writable, or the block raises an OSError.
    """
    prefix = f".{kind}-{target.name}-"
    created = [*takewhile(lambda folder: not folder.exists(), target.parents)]
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
        with suppress(OSError):  # one is not empty
            for folder in created:
                folder.rmdir()


def _sweep(folder: Path, prefix: str) -> None:
    """Remove drafts of programs that have ended; they are recognised by their free locks."""
    pattern = re.compile(re.escape(prefix) + _RANDOM)
    for path in [path for path in folder.iterdir() if pattern.fullmatch(path.name)]:
        with suppress(OSError):
            if not path.is_symlink():
                with held_alone(path) as ours:
                    if ours:
                        shutil.rmtree(path, ignore_errors=True)

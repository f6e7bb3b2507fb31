"""What experiments with a script have shown of it, noted beside a run: small JSON files."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from comgra_decl.errors import DamagedRunError, StoreError

from .folder import read_file
from .location import Location, Remote
from .remote import Objects

FOLDER = "checks"
EXPERIMENTS = ("batch_mixing", "overfit_one_batch")
"""What there is to be noted."""

_log = logging.getLogger("comgra_decl")

_MOST = 1 << 20  # bytes of such a file that are read


@dataclass(frozen=True)
class NotedCheck:
    """The verdict of an experiment.

    Attributes:
        name: of the experiment, such as "overfit_one_batch".
        outcome: "good", "bad" or "unclear".
        reason: in a sentence, with the numbers that it rests on.
        command: the command line.
        time: when it was made, in unix seconds.
    """

    name: str
    outcome: str
    reason: str
    command: str
    time: float


def note_check(run: Location, check: NotedCheck) -> None:
    """Writes a verdict beside a run; an earlier one of the same experiment gives way.

    Raises:
        StoreError: it cannot be written.
    """
    assert check.name in EXPERIMENTS, check.name
    content = (json.dumps(asdict(check), indent=1) + "\n").encode()
    try:
        if isinstance(run, Remote):
            Objects(run).write(f"{FOLDER}/{check.name}.json", content)
        else:
            _write(run / FOLDER / f"{check.name}.json", content)
    except OSError as error:
        raise StoreError(f"the verdict cannot be noted in {str(run)!r}: {error}") from error


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(path)


def noted_checks(run: Location) -> list[NotedCheck]:
    """Returns the newest verdict of each experiment, by name; what cannot be read is left out."""
    found = (_read(run, name) for name in EXPERIMENTS)
    return [check for check in found if check is not None]


def _read(run: Location, name: str) -> NotedCheck | None:
    try:
        content = _content(run, f"{FOLDER}/{name}.json")
        found = json.loads(content or b"null")
        check = NotedCheck(**found) if isinstance(found, dict) else None
    except DamagedRunError as error:
        _log.warning("comgra: the verdict of %s is left out: %s", name, error)
        return None
    except (ValueError, TypeError, RecursionError):
        return None
    return check if check is not None and _plausible(check, name) else None


def _content(run: Location, name: str) -> bytes | None:
    if isinstance(run, Remote):
        return Objects(run).read(name, most=_MOST)
    return read_file(run, name, most=_MOST)


def _plausible(check: NotedCheck, name: str) -> bool:
    texts = check.name, check.outcome, check.reason, check.command
    return (
        all(isinstance(text, str) for text in texts)
        and check.name == name
        and check.outcome in ("good", "bad", "unclear")
        and type(check.time) in (int, float)
        and 0 <= check.time < 1e11
    )

"""Verdicts of experiments on a training script, stored next to a run as small JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from comgra_decl.errors import DamagedRunError, StoreError

from .folder import read_file
from .location import Location, Remote
from .remote import Objects

FOLDER = "checks"
EXPERIMENTS = ("batch_mixing", "overfit_one_batch")
"""Names of the experiments."""

_MOST = 1 << 20  # maximum number of bytes read from such a file


@dataclass(frozen=True)
class NotedCheck:
    """The verdict of an experiment.

    Attributes:
        name: name of the experiment, such as "overfit_one_batch".
        outcome: "good", "bad" or "unclear".
        reason: a sentence with the numbers that led to the outcome.
        command: the command line.
        time: time of the verdict in Unix seconds.
    """

    name: str
    outcome: str
    reason: str
    command: str
    time: float


def note_check(run: Location, check: NotedCheck) -> None:
    """Store a verdict next to a run, replacing any earlier verdict of the same experiment.

    Raises:
        StoreError: the file cannot be written.
    """
    assert check.name in EXPERIMENTS, check.name
    content = (json.dumps(asdict(check), indent=1) + "\n").encode()
    try:
        if isinstance(run, Remote):
            Objects(run).write(file_of(check.name), content)
        else:
            _write(run / FOLDER / f"{check.name}.json", content)
    except OSError as error:
        raise StoreError(f"cannot store the verdict in {str(run)!r}: {error}") from error


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(path)


@dataclass(frozen=True)
class NotedChecks:
    """Verdicts stored next to a run.

    Attributes:
        verdicts: newest verdict of each experiment, by name.
        damaged: why verdicts cannot be read, including the file names, by experiment.
    """

    verdicts: tuple[NotedCheck, ...] = ()
    damaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def damage(self) -> list[str]:
        """One line per unreadable verdict."""
        return [f"the verdict of {name}: {why}" for name, why in self.damaged.items()]


def noted_checks(run: Location) -> NotedChecks:
    """Read the verdicts stored next to a run.

    Raises:
        StoreError: the run is in an unreachable bucket.
    """
    found: list[NotedCheck] = []
    damaged: dict[str, str] = {}
    for name in EXPERIMENTS:
        try:
            content = _content(run, file_of(name))
            if content is not None:
                found.append(_verdict(content, name))
        except DamagedRunError as error:
            damaged[name] = str(error)
    return NotedChecks(tuple(found), damaged)


def file_of(name: str) -> str:
    """Return the path, below a run, of an experiment's verdict."""
    return f"{FOLDER}/{name}.json"


def _verdict(content: bytes, name: str) -> NotedCheck:
    """Return the verdict in a file; raise DamagedRunError for any other content."""
    try:
        found = json.loads(content)
    except RecursionError:
        raise DamagedRunError(f"{file_of(name)!r} is damaged: nested too deeply") from None
    except ValueError as error:
        raise DamagedRunError(f"{file_of(name)!r} is damaged: not valid JSON ({error})") from None
    keys = {entry.name for entry in fields(NotedCheck)}
    if isinstance(found, dict) and found.keys() == keys:
        check = NotedCheck(**found)
        if _plausible(check, name):
            return check
    raise DamagedRunError(f"{file_of(name)!r} is damaged: it does not contain a verdict of {name}")


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

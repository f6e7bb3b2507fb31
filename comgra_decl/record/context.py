"""The context of a run: how the program was started, and which facts to store about it."""

from __future__ import annotations

import functools
import os
import platform
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypedDict

from comgra_decl.record.placement import create_run_folder
from comgra_decl.record.secrets import without_secrets

__all__ = ["RunContext", "create_run_folder", "gather_facts"]

PACKAGES = ("comgra-decl", "torch", "numpy", "hydra-core", "tensorstore", "lightning")
"""The distributions whose versions are stored with a run if they are installed."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """How the traced program was started.

    Attributes:
        command: the command line, argument by argument.
        config: the program's own configuration, JSON-serialisable.
        job: the name of the job or script, used as the group if the spec names none.
        base: the folder to which a relative `run.root` refers.
        script: the file of the training script, if there is one.
    """

    command: list[str] = field(default_factory=lambda: [*sys.orig_argv])
    config: dict[str, Any] | None = None
    job: str | None = None
    base: Path = field(default_factory=Path.cwd)
    script: Path | None = None

    @classmethod
    def of_script(cls, script: str | Path | None) -> RunContext:
        """Return the context of a script that was started in the current folder."""
        if script is None:
            return cls()
        path = Path(script).resolve()
        return cls(job=path.stem, script=path)


def gather_facts(context: RunContext) -> dict[str, Any]:
    """Return facts about the origin of the run as a JSON-serialisable dict.

    `started` is in Unix seconds. Environment variables are never included, and values on the
    command line that look like secrets are masked.
    """
    return {
        "started": time.time(),
        "command": without_secrets(context.command),
        "script": None if context.script is None else str(context.script),
        "folder": str(Path.cwd()),
        "versions": {"python": platform.python_version(), **_versions()},
        "git": git_facts(context.base if context.script is None else context.script.parent),
        "host": {
            "name": socket.gethostname(),
            "system": platform.platform(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
        },
        "pid": os.getpid(),
    }


@functools.cache
def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


_TIMEOUT = 5.0
"""The timeout for git commands, in seconds."""


class GitFacts(TypedDict):
    """The state of a work tree; `dirty` means that tracked files have changed."""

    commit: str
    branch: str | None
    dirty: bool | None


def git_facts(folder: Path) -> GitFacts | None:
    """Return the state of the work tree that contains `folder`; None if git finds none."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return GitFacts(
        commit=commit,
        branch=_git(folder, "symbolic-ref", "--short", "--quiet", "HEAD"),
        dirty=None if changes is None else bool(changes),
    )


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command; None if it fails or times out."""
    # Without optional locks, `git status` cannot block git commands that the user runs.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            check=True,
            stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.decode(errors="replace").strip()

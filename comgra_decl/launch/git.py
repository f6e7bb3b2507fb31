"""What git knows of the training script."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TypedDict

_TIMEOUT = 5.0
"""Seconds after which an answer from git is not worth waiting for."""


class GitFacts(TypedDict):
    """The state of a work tree; `dirty` is whether tracked files were changed."""

    commit: str
    branch: str | None
    dirty: bool | None


def git_facts(folder: Path) -> GitFacts | None:
    """Returns the state of the work tree that `folder` is in; None if there is none, or no git."""
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
    """Returns what git answers, or None if it does not."""
    # Without optional locks, a status never gets in the way of the user's own git.
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

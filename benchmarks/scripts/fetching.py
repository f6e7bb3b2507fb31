"""Fetch a repository's files at one commit from a cache, a local mirror, or GitHub.

None of these files is part of this repository. The cache is `~/.cache/comgra_decl/scripts`, or the
folder given by `COMGRA_SCRIPTS`; a mirror is a folder of git repositories called `owner+name`.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

CACHE = "COMGRA_SCRIPTS"
MIRROR = "COMGRA_SCRIPTS_MIRROR"


class MissingRepositoryError(Exception):
    """A repository could not be fetched; the message gives the reason."""


def cache() -> Path:
    """Return the cache folder."""
    named = os.environ.get(CACHE)
    return Path(named) if named else Path.home() / ".cache" / "comgra_decl" / "scripts"


def fetched(repo: str, commit: str, *, offline: bool = False) -> Path:
    """Return the folder with all files of a commit, fetching them if necessary.

    Raises:
        MissingRepositoryError: they are not in the cache, and `offline` is set or fetching failed.
    """
    folder = cache() / f"{repo.replace('/', '+')}@{commit[:12]}"
    if folder.is_dir():
        return folder
    if offline:
        raise MissingRepositoryError(f"{repo} is not in {cache()}: make scripts fetches it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        into = Path(scratch) / "tree"
        into.mkdir()
        _unpack(_git_folder(repo, commit, Path(scratch)), commit, into)
        into.rename(folder)
    return folder


def _git_folder(repo: str, commit: str, scratch: Path) -> Path:
    """Return a git folder that contains the commit."""
    mirror = os.environ.get(MIRROR)
    if mirror:
        name = Path(mirror) / repo.replace("/", "+")
        for candidate in (name / "repo" / ".git", name / "repo", name / ".git", name):
            if (candidate / "objects").is_dir():
                return candidate
    folder = scratch / "repository.git"
    _git("init", "--quiet", "--bare", str(folder))
    source = f"https://github.com/{repo}"
    _git("-C", str(folder), "fetch", "--quiet", "--depth=1", source, commit)
    return folder


def _unpack(git: Path, commit: str, into: Path) -> None:
    """Write all files of a commit, except for those that a partial mirror lacks."""
    listed = _git(f"--git-dir={git}", "ls-tree", "-r", "-z", commit).split("\0")
    files = [line.split("\t", 1) for line in listed if line]
    plain = [(facts.split()[2], name) for facts, name in files if facts.split()[1] == "blob"]
    asked = "".join(f"{blob}\n" for blob, _ in plain).encode()
    command = ["git", f"--git-dir={git}", "cat-file", "--batch"]
    answer = subprocess.run(command, input=asked, capture_output=True, check=True).stdout
    at = 0
    for _, name in plain:
        end = answer.index(b"\n", at)
        header, at = answer[at:end].split(), end + 1
        if header[1] == b"missing":
            continue
        size = int(header[2])
        path = into / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(answer[at : at + size])
        at += size + 1


def _git(*arguments: str) -> str:
    quiet = {"GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_NOSYSTEM": "1", "GIT_LFS_SKIP_SMUDGE": "1"}
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, env={**os.environ, **quiet}
        )
    except FileNotFoundError as error:
        raise MissingRepositoryError("git is not installed") from error
    if done.returncode:
        errors = done.stderr.strip().splitlines()
        raise MissingRepositoryError(errors[-1] if errors else f"git ended with {done.returncode}")
    return done.stdout

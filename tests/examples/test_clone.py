"""Trying out the product in a clone leaves nothing that git would track."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES, SHORT

ROOT = EXAMPLES.parent


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this repository's files in a new repository without history."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no clone to copy")
    folder = tmp_path_factory.mktemp("clone")
    for name in _git(ROOT, "ls-files", "examples", ".gitignore", "Makefile", ".ci").splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    _git(folder, "init", "--quiet")
    _git(folder, "add", "--all")
    return folder


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


def _untracked(clone: Path) -> list[str]:
    lines = _git(clone, "status", "--porcelain", "--untracked-files=all").splitlines()
    return [line for line in lines if line.startswith("??")]


@pytest.mark.slow
@pytest.mark.parametrize("example", SHORT)
def test_an_example_leaves_no_untracked_file(example: str, clone: Path) -> None:
    folder = clone / "examples" / example
    for more in (["+comgra=debug"], ["--multirun", "seed=0,1"]):
        done = subprocess.run(
            [sys.executable, "train.py", *more, *SHORT[example]],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert (folder / "runs").is_dir()
    assert (folder / "multirun").is_dir()
    assert _untracked(clone) == []


def test_the_demo_reports_first_that_it_creates_an_environment(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("no make on this machine")
    asked = ["make", "--dry-run", "-C", str(ROOT), "demo", f"VENV={tmp_path / 'venv'}"]
    told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert told.index('echo "Creating an environment') < told.index("-m venv")
    assert told.index("-m venv") < told.index(".ci/install.py")


def test_the_installer_speaks_before_it_does_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    for name in ("run", "call", "Popen"):
        monkeypatch.setattr(subprocess, name, begin)
    monkeypatch.setattr(sys, "argv", ["install.py", ".[examples]"])
    with pytest.raises(KeyboardInterrupt):
        runpy.run_path(str(ROOT / ".ci" / "install.py"), run_name="__main__")
    assert "Installing .[examples] and its dependencies" in capsys.readouterr().err

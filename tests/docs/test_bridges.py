"""The commands, extras and files on the page about other tools exist and are valid."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from benchmarks.extras import declared
from comgra_decl.cli.main import app

PAGE = (Path(__file__).parents[2] / "docs" / "bridges.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def commands() -> Iterator[list[str]]:
    """Yield the words of each command on the page, also those within files."""
    for block in blocks("bash"):
        for line in block.splitlines():
            yield shlex.split(line.partition(" > ")[0], comments=True)
    action, hooks = map(yaml.safe_load, blocks("yml"))
    for step in action:
        yield shlex.split(step["run"])
    for hook in hooks["repos"][0]["hooks"]:
        _, _, script = shlex.split(hook["entry"])
        yield from (shlex.split(part) for part in script.split("&&"))


def test_every_command_is_one() -> None:
    known: Any = get_command(app)
    ours = [words[words.index("comgra-decl") :] for words in commands() if "comgra-decl" in words]
    assert len(ours) > 10
    for _, name, *arguments in ours:
        known.commands[name].make_context(name, arguments)  # else a usage error


def test_every_extra_exists() -> None:
    named = re.findall(r"comgra-decl\[([\w,]+)\]", PAGE)
    assert {extra for each in named for extra in each.split(",")} <= declared().keys()


def test_pre_commit_accepts_the_hooks(tmp_path: Path) -> None:
    pytest.importorskip("pre_commit")
    file = tmp_path / ".pre-commit-config.yaml"
    file.write_text(blocks("yml")[1])
    check = [sys.executable, "-m", "pre_commit", "validate-config", str(file)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

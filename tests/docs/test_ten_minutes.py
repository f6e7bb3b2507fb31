"""The tutorial runs as written: its Python code in one namespace, its commands alongside."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import forked

PAGE = Path(__file__).parents[2] / "docs" / "ten-minutes.md"
BLOCKS = re.findall(r"```(python|bash)\n(.*?)```", PAGE.read_text(), re.DOTALL)
PROGRAM = "import sys; from comgra_decl.cli.main import main; main(sys.argv[1:])"


def command(line: str) -> list[str] | None:
    """Returns the Python arguments for a shell line; None for a server."""
    words = shlex.split(line)
    if words[:2] == ["comgra-decl", "view"]:
        return None
    if words[0] == "comgra-decl":
        return ["-c", PROGRAM, *words[1:]]
    assert words[0] == "python"
    return words[1:]


@pytest.mark.slow
def test_every_block_of_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    namespace: dict[str, Any] = {}
    for language, code in BLOCKS:
        file = re.match(r"# (\w+\.py)\n", code)
        if file is not None:
            Path(file[1]).write_text(code)
        elif language == "python":
            exec(compile(code, str(PAGE), "exec"), namespace)
        else:
            for line in filter(None, map(command, code.splitlines())):
                done = forked(tmp_path, *line)
                assert done.returncode == 0, done.stderr
    for name in ("train", "mine"):
        sys.modules.pop(name, None)
    assert len(BLOCKS) > 10

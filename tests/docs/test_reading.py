"""The examples on the pages about reading runs and about commands work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from comgra_decl.cli.commands.plot import View
from comgra_decl.cli.main import app
from comgra_decl.errors import Exit
from comgra_decl.export import FORMATS
from tests.support.fake_run import FakeRun

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two runs in `runs/train`, the second of which is live."""
    monkeypatch.chdir(tmp_path)
    nodes = ("embed", "cell", "head")
    first, second = (
        FakeRun(Path("runs/train") / name, nodes=nodes, layers=layers)
        for name, layers in (("first", 2), ("second", 3))
    )
    for run in (first, second):
        run.write(12)
    first.close()
    yield tmp_path / "runs"
    second.close()


@pytest.mark.usefixtures("root")
def test_every_example_of_reading_runs() -> None:
    pytest.importorskip("xarray")
    code = re.findall(r"```python\n(.*?)```", (DOCS / "reading.md").read_text(), re.DOTALL)
    assert len(code) > 8
    names: dict[str, object] = {}
    for number, block in enumerate(code):
        exec(compile(block, f"reading.md, block {number}", "exec"), names)
    assert {path.name for path in Path("out").iterdir()} == {"tables", "arrays", "run.npz"}


def test_the_page_of_commands_knows_every_command_and_every_code() -> None:
    page = (DOCS / "commands.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)", page.split("## Exit codes")[0], re.MULTILINE)
    assert set(get_command(app).commands) <= set(rows)  # type: ignore[attr-defined]
    codes = page.split("| code |")[1].split("\n\n")[0]
    assert [int(code) for code in re.findall(r"^\| (\d)", codes, re.MULTILINE)] == list(Exit)
    formats = page.split("| format")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", formats, re.MULTILINE) == list(FORMATS)
    views = page.split("| `--view`")[1].split("\n\n")[0]
    named = [name for row in re.findall(r"^\| (`[^|]+)", views, re.MULTILINE)
             for name in re.findall(r"`([\w-]+)`", row)]  # fmt: skip
    assert sorted(named) == sorted(View)


def test_the_examples_of_commands_are_commands() -> None:
    """Asserts that every option and argument of a line is known, without running the command."""
    page = (DOCS / "commands.md").read_text()
    lines = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
             for line in block.splitlines()]  # fmt: skip
    assert len(lines) == 27
    commands: Any = get_command(app)
    for line in lines:
        program, name, *arguments = shlex.split(line.partition("||")[0], comments=True)
        assert program == "comgra-decl"
        commands.commands[name].make_context(name, arguments)  # else a usage error


def test_no_help_is_read_as_markup() -> None:
    """Asserts that no text in brackets is lost, as `[view]` would be."""
    commands: Any = get_command(app)
    for name, command in commands.commands.items():
        texts = [
            command.help or "",
            *(getattr(each, "help", None) or "" for each in command.params),
        ]
        lost = [text for text in texts if re.search(r"\[/?[a-z#@][^\]]*\]", text)]
        assert not lost, name

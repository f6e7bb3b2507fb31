"""The examples on the pages about reading runs and about commands work."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

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
    formats = page.split("| format")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", formats, re.MULTILINE) == list(FORMATS)


@pytest.mark.usefixtures("root")
def test_the_examples_of_commands_are_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asserts that every option and argument of a line is known, although the runs do not exist."""
    pytest.importorskip("pyarrow")
    from comgra_decl.cli.main import main

    page = (DOCS / "commands.md").read_text()
    lines = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
             for line in block.splitlines()]  # fmt: skip
    assert len(lines) == 18
    for line in lines:
        words = line.partition("#")[0].partition("||")[0].replace("'", "").split()
        with pytest.raises(SystemExit) as ended:
            main([*words[1:], "--help"])
        assert ended.value.code == 0
        with monkeypatch.context() as changed:
            if words[1] == "export":
                changed.setitem(sys.modules, "pyarrow", None)
            with pytest.raises(SystemExit):
                main(words[1:])
        assert "No such option" not in capsys.readouterr().err

"""Commands escape names that a terminal would interpret."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.cli.commands import register
from comgra_decl.cli.main import main
from comgra_decl.visible import visible
from tests.support.hostile import RAW, record
from tests.support.programs import interpreter_kept
from tests.support.shortened import combined

COMMANDS = {
    "ls": (["{root}"], ["{root}/nowhere\x1b[2J"]),
    "index": (["{root}"], ["{root}/nowhere\x1b[2J"], ["{root}", "--to", "{root}/no/\x1b[2J"]),
    "show": (["{run}"], ["{root}/nowhere\x1b[2J"]),
    "diagnose": (["{run}", "--all"], ["{run}", "--rules", "\u202e"]),
    "explain": (["{run}"], ["{root}/nowhere\x1b[2J"]),
    "profile": (["{run}"], ["{root}/nowhere\x1b[2J"]),
    "memory": (["{run}"], ["{root}/nowhere\x1b[2J"]),
    "compare": (["{run}", "{run}"], ["{run}", "{run}", "--name", "\x1b[2J"]),
    "contract": (["{run}"], ["{root}/nowhere\x1b[2J"]),
    "check": (["{run}", "{root}/nowhere\x1b[2J"],),
    "mcp": (["{root}/nowhere\x1b[2J"],),
    "verify": (["{run}"],),
    "thermometer": (["{run}"], ["{run}", "\x1b[2J"]),
    "look": (["{run}", "{script}"],),
    "import": (["{root}/nowhere\x1b[2J", "{out}"],),
    "plot": (["{run}", "{out}/graph.svg"], ["{run}", "{out}/\x1b[2J"]),
    "edit": (["{root}/nowhere\x1b[2J.py:f", "{out}/a.pt", "--change", "{{select: a, do: zero}}"],),
    "harvest": (["{root}/nowhere\x1b[2J.py:f", "{out}", "--select", "**"],),
    "export": (["{run}", "{out}/\x1b[2J.csv", "--format", "csv"], ["{run}", "{out}", "-f", "\x1b"]),
    "send": (["{run}", "\x1b[2J"], ["{run}", "mlflow", "\x1b[2J=1"]),
    "cp": (["{run}", "{out}/\x1b[2J"],),
    "compact": (["{out}/\x1b[2J"],),
    "plan": (["{script}"],),
    "run": (["nowhere\x1b[2J"],),
    "overfit-one-batch": (["--steps", "3", "{script}"],),
    "batch-mixing": (["{script}"],),
    "data": (["{script}"], ["--mean", "\x1b[2J", "{script}"]),
    "view": (["{root}/nowhere\x1b[2J", "--views", "\x1b[2J"],),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which every name is hostile."""
    root = tmp_path_factory.mktemp("hostile") / "runs"
    return record(root, overrides=["profile.steps=3", "memory.steps=4"])


def test_every_command_is_tried() -> None:
    import typer

    app = typer.Typer()
    assert {*register(app)} | {command.name for command in app.registered_commands} == {*COMMANDS}


@pytest.mark.parametrize(("command", "terminal"), combined([*COMMANDS], [True, False], rounds=1))
def test_no_command_lets_a_name_command_the_terminal(
    command: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    terminal: bool,
) -> None:
    if not terminal and command in ("cp", "export", "compact"):
        pytest.skip("a program is given the path as it is")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "train.py").write_text(
        "import torch\nfrom tests.support.hostile import Hostile\nmodel = Hostile()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(4):\n    optimizer.zero_grad()\n"
        "    model(torch.randn(6, 4)).square().mean().backward()\n    optimizer.step()\n"
    )
    if command == "compact":
        main_(["cp", str(run), str(tmp_path / "\x1b[2J")])
    capsys.readouterr()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    names = {"run": run, "root": run.parents[1], "out": tmp_path, "script": tmp_path / "train.py"}
    for arguments in COMMANDS[command]:
        main_([command, *(argument.format(**names) for argument in arguments)])
        told = capsys.readouterr()
        found = re.findall(f".{{0,30}}{RAW}.{{0,30}}", told.out + told.err)
        assert told.out + told.err
        assert not found, [ascii(text) for text in found]


def main_(arguments: list[str]) -> None:
    with suppress(SystemExit), interpreter_kept():
        main(arguments)


@given(st.text())
def test_what_is_visible_stays_and_what_is_not_is_spelt(text: str) -> None:
    shown = visible(text)
    assert not re.search(RAW, shown)
    if not re.search(RAW, text) and text.isascii():
        assert shown == text
    assert visible(shown) == shown


def test_ordinary_text_is_left_alone() -> None:
    for text in (
        "blocks.0.attn",
        "l\u00e4uft\n\tgut",
        "\u5c42 \u05d0\u05d1 \U0001f468\u200d\U0001f469",
    ):
        assert visible(text) == text


def test_a_name_is_in_one_line_of_a_table_and_nothing_of_it_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layout library drops the bell; a line break would forge a line."""
    found = record(tmp_path / "runs")
    found.rename(found.parent / "a\nb\tc\x07d")
    with suppress(SystemExit):
        main(["ls", str(tmp_path / "runs")])
    printed = capsys.readouterr().out
    assert r"/a\nb\tc\x07d" in re.sub(r"\s*\n", "", printed)
    assert sum("finished" in line for line in printed.splitlines()) == 1

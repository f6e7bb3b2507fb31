"""What scripts can rely on: exit codes, and a one-line message for an invalid path."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import pytest
import typer

import comgra_decl as comgra
from comgra_decl.cli.commands import register
from comgra_decl.cli.main import main
from comgra_decl.store.database import newest_version
from tests.support.forked import forked
from tests.support.shortened import combined, shortened

SCRIPTS = ("run", "plan", "overfit-one-batch", "batch-mixing", "thermometer", "data")
RUNS = {
    "show": (),
    "diagnose": (),
    "explain": (),
    "contract": (),
    "check": ("contract.yaml",),
    "profile": (),
    "memory": (),
    "verify": (),
    "compact": (),
    "cp": ("target",),
    "export": ("target", "--format", "csv"),
    "send": ("wandb",),
    "plot": ("target.svg",),
    "thermometer": (),
    "compare": ("other",),
    "look": ("afile",),
}
ROOTS = ("ls", "view", "mcp", "index")
OTHERS = ("edit", "harvest", "import")
"""Commands whose arguments are neither, with tests of their own."""
PAGE = Path(__file__).parents[2] / "docs" / "commands.md"

LEARNS = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 3)
y = x.sum(1, keepdim=True)
for _ in range(300):
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
LEARNS_NOT = LEARNS.replace("lr=0.1", "lr=0.0")
MIXES = LEARNS.replace("model(x) - y", "model(x.softmax(0)) - y").replace(
    "model = torch.nn.Linear(3, 1)",
    """
class Mixes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(3, 1)
    def forward(self, x):
        return self.out(x.softmax(0))
model = Mixes()""",
)
WITHOUT_STEP = "print(1)"
RAISES = "raise SystemExit(7)"


def code(*arguments: str) -> int:
    """Runs a command line and returns its exit code, which is 0 if it returns."""
    try:
        main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file, an empty folder and an unreadable folder."""
    monkeypatch.chdir(tmp_path)
    Path("afile").write_text("hello")
    Path("empty").mkdir()
    Path("closed").mkdir()
    scandir, access = os.scandir, os.access

    def guarded(path: Any = ".") -> Any:
        if not isinstance(path, int) and Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    # Not through its mode, which root ignores, and tests may run as root.
    monkeypatch.setattr(os, "scandir", guarded)
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path).name != "closed" and access(path, mode)
    )
    return tmp_path


def test_every_command_is_tested_here() -> None:
    app = typer.Typer()
    names = set(register(app)) | {command.name for command in app.registered_commands}
    assert names == {*SCRIPTS, *RUNS, *ROOTS, *OTHERS}


WRONG = {
    "nowhere": "does not exist|no script",
    "emty": "did you mean 'empty'",
    "afile": "is a file",
    "afile/x": "does not exist|no script",
    "empty": "no run in|without a __main__",
    "closed": "Permission denied",
}


@pytest.mark.parametrize(
    ("command", "path"), combined([*SCRIPTS, *RUNS, *ROOTS], [*WRONG], rounds=2)
)
def test_a_wrong_path_is_said_at_once(
    command: str, path: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if command in SCRIPTS and path == "afile":
        pytest.skip("any file may be a script")
    if command in ROOTS and path == "empty":
        pytest.skip("a folder that waits for its first run")
    if command == "view" and path in ("nowhere", "emty"):
        pytest.skip("waits for the folder; see below")
    before = sorted(place.rglob("*"))
    assert code(command, path, *RUNS.get(command, ())) == 2
    told = capsys.readouterr()
    if "Usage:" in told.err.splitlines()[0]:  # Typer checks this itself
        assert path == "closed"
        assert "not readable" in told.err
    else:
        first = told.err.splitlines()[0]
        assert first.startswith("comgra")
        assert path in first
        assert re.search(WRONG[path], first), first
    assert "Traceback" not in told.err
    assert not told.out
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("options", [(), ("--spec", "debug"), ("--json",)])
@pytest.mark.parametrize("command", SCRIPTS)
def test_a_command_without_a_script_cannot_be_done(
    command: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert code(command, *options) == 2
    told = capsys.readouterr()
    assert told.err.startswith("comgra")
    assert "usage: " in told.err
    assert not told.out
    assert code(command, "--help") == 0
    assert not capsys.readouterr().err


EMPTY = {
    **{f"{command} RUN": (command, "", *rest) for command, rest in RUNS.items()},
    **{f"{command} SCRIPT": (command, "") for command in SCRIPTS},
    **{f"{command} SCRIPT ARGUMENT": (command, "", "more") for command in SCRIPTS},
    **{f"{command} -m MODULE": (command, "-m", "") for command in SCRIPTS},
    **{f"{command} ROOT": (command, "") for command in ROOTS},
    **{f"{command} TARGET": (command, "{run}", "") for command in ("cp", "export", "plot")},
    "export --profile": ("export", "{run}", "{run}.json", "--format", "trace", "--profile", ""),
    "index --to": ("index", "{run}", "--to", ""),
    "import LOGS": ("import", "", "target"),
    "import TARGET": ("import", "{run}", ""),
    "check CONTRACT": ("check", "{run}", ""),
    "edit TARGET": ("edit", "train.py:data", "", "--change", "{{select: a, do: zero}}"),
    "harvest TARGET": ("harvest", "train.py:data", "", "--select", "**"),
    "compare OTHER": ("compare", "{run}", ""),
    "diagnose --rules": ("diagnose", "{run}", "--rules", ""),
    "view --views": ("view", "{run}", "--views", ""),
    "run --spec": ("run", "--spec", "", "train.py"),
    "plan --spec": ("plan", "--spec", "", "train.py"),
    "overfit-one-batch --for": ("overfit-one-batch", "--for", "", "train.py"),
    "batch-mixing --for": ("batch-mixing", "--for", "", "train.py"),
}


def test_every_argument_that_is_a_path_is_tested_to_be_empty() -> None:
    app = typer.Typer()
    passed_on = register(app)
    paths = {
        f"{name} {parameter}"
        for command in app.registered_commands
        if (name := command.name or "") not in passed_on and command.callback is not None
        for parameter, type_ in get_type_hints(command.callback).items()
        if Path in (type_, *get_args(type_)) or parameter == "rules"
    }
    assert len(paths) > 10
    assert paths <= {case.lower().replace("--", "") for case in EMPTY}


@pytest.mark.parametrize("case", EMPTY)
def test_an_empty_path_is_no_path(
    case: str,
    runs: Path,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (place / "train.py").write_text("")
    monkeypatch.setattr("comgra_decl.viewer.serve.serve", lambda *_, **__: pytest.fail("served"))
    monkeypatch.chdir(runs / "fine")  # `.` refers to a run
    before = sorted(runs.rglob("*"))
    arguments = [argument.format(run=runs / "fine") for argument in EMPTY[case]]
    assert code(*arguments) == 2
    told = capsys.readouterr()
    assert re.search(
        "non-empty|missing script|needs a (value|name)|does not exist|not set|''", told.err
    ), told.err
    assert "Traceback" not in told.err
    assert not told.out
    assert sorted(runs.rglob("*")) == before


@pytest.mark.usefixtures("place")
def test_view_says_that_a_folder_is_not_there_and_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[Path] = []
    monkeypatch.setattr(
        "comgra_decl.viewer.serve.serve", lambda root, **_options: served.append(root)
    )
    assert code("view", "emty", "--no-show") == 0
    assert served == [Path("emty")]
    assert "'emty' does not exist; did you mean 'empty'? The page will" in capsys.readouterr().err
    assert code("view", "empty", "--views", "nowhere.py") == 2
    assert len(served) == 1


# ---- exit codes


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with no findings, a warning and an error, and a damaged run."""
    import torch

    root = tmp_path_factory.mktemp("codes")
    for name, rate in (("fine", 0.1), ("broken", 0.1), ("damaged", 0.1)):
        torch.manual_seed(0)
        with comgra.trace("debug", root=root, group="g", name=name):
            model = torch.nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            for step in range(6):
                loss = model(torch.randn(8, 3)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                if name == "broken" and step == 3:
                    model.weight.grad = torch.full_like(model.weight, float("nan"))
                optimizer.step()
    for path in (root / "g" / "damaged").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(path.read_bytes()[:-9])
    return root / "g"


def severities(run: Path) -> set[str]:
    from comgra_decl.rules import diagnose

    return {finding.severity for finding in diagnose(comgra.open_run(run), None).findings}


@pytest.mark.parametrize(
    ("severity", "fail_on", "expected"),
    [
        (None, "warning", 0),
        ("hint", "warning", 0),
        ("warning", "warning", 3),
        ("warning", "error", 0),
        ("warning", None, 0),
        ("error", "warning", 3),
        ("error", "error", 3),
        ("error", None, 3),
        ("error", "never", 0),
    ],
)
@pytest.mark.parametrize("as_json", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_diagnose_ends_with_what_it_was_told_to_fail_on(
    runs: Path,
    severity: Literal["error", "warning", "hint"] | None,
    fail_on: str | None,
    expected: int,
    *,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dataclasses import replace

    import comgra_decl.rules as rules

    real = rules.diagnose(comgra.open_run(runs / "broken"), None)
    findings = [replace(real.findings[0], severity=severity)] if severity else []
    told = replace(real, findings=findings)
    monkeypatch.setattr(rules, "diagnose", lambda *_a, **_o: told)
    options = ["--no-together", *(["--fail-on", fail_on] if fail_on else [])]
    options += ["--json"] if as_json else []
    assert code("diagnose", str(runs / "fine"), *options) == expected


def test_diagnose_of_real_runs(runs: Path) -> None:
    assert "error" in severities(runs / "broken")
    assert "error" not in severities(runs / "fine")
    assert code("diagnose", str(runs / "broken")) == 3
    assert code("diagnose", str(runs / "fine")) == 0
    assert code("diagnose", str(runs / "fine"), "--fail-on", "sometimes") == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["ls", "{runs}"], 0),
        (["show", "{runs}/fine"], 0),
        (["verify", "{runs}/fine"], 0),
        (["verify", "{runs}/damaged"], 3),
        (["cp", "{runs}/fine", "copy"], 0),
        (["cp", "{runs}/fine", "afile"], 2),
        (["export", "{runs}/fine", "tables", "--format", "csv"], 0),
        (["export", "{runs}/fine", "afile", "--format", "csv"], 2),
        (["export", "{runs}/fine", "tables", "--format", "doc"], 2),
        (["send", "{runs}/fine", "neptune"], 2),
        (["send", "{runs}/fine", "mlflow", "url=x"], 2),
        (["send", "{runs}/fine", "mlflow", "uri"], 2),
        (["thermometer", "{runs}/fine"], 0),
        (["profile", "{runs}/fine"], 2),
        (["memory", "{runs}/fine"], 2),
        (["ls", "--no-such-option"], 2),
        (["no-such-command"], 2),
    ],
)
@pytest.mark.usefixtures("place")
def test_commands_that_take_a_run_end_as_documented(
    arguments: list[str], expected: int, runs: Path
) -> None:
    assert code(*(argument.format(runs=runs) for argument in arguments)) == expected


@pytest.mark.usefixtures("place")
def test_compact_ends_as_documented(runs: Path) -> None:
    assert code("cp", str(runs / "fine"), "small") == 0
    assert code("compact", "small") == 0
    assert code("compact", str(runs / "damaged")) == 2


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("content", shortened(["[[[", "", "null", "{}"], tried=1))
def test_a_damaged_verdict_is_said_by_all_that_read_a_run(
    runs: Path,
    content: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert code("cp", str(runs / "fine"), "damaged") == 0
    assert code("verify", "damaged") == 0
    Path("damaged/checks").mkdir()
    Path("damaged/checks/batch_mixing.json").write_text(content)
    capsys.readouterr()
    run = comgra.open_run("damaged")
    assert run.experiments() == []
    (loss,) = run.damage
    assert run.report["damage"] == [loss]
    assert "checks/batch_mixing.json" in loss
    assert [record.getMessage() for record in caplog.records if loss in record.getMessage()]
    for command, expected in (("show", 0), ("diagnose", 0), ("verify", 3)):
        assert code(command, "damaged") == expected
        told = capsys.readouterr().out
        assert "checks/batch_mixing.json" in told, (command, told)
        assert code(command, "damaged", "--json") == expected
        document = json.loads(capsys.readouterr().out)
        if command == "verify":
            assert document["whole"] is False
            assert [damage["where"] for damage in document["beside"]] == [
                "checks/batch_mixing.json"
            ]
        else:
            assert document["damage"] == [loss]
        if command == "diagnose":
            (answer,) = [
                line
                for line in document["health"]
                if line["question"].startswith("Are the samples")
            ]
            assert answer["colour"] == "unchecked"
            assert "checks/batch_mixing.json" in answer["evidence"]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("version", ["-1", "0", "1", "999999", str(2**70)])
def test_a_version_that_is_not_there_is_said_with_those_that_are(
    runs: Path, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code("cp", "--version", version, str(runs / "fine"), "copy") == 2
    (told,) = capsys.readouterr().err.splitlines()
    newest = newest_version(runs / "fine")
    assert f"has no version {version}; its newest version is {newest}" in told
    assert "verify" in told
    assert not Path("copy").exists()
    assert code("cp", "--version", str(newest), str(runs / "fine"), "copy") == 0


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("command", [["cp"], ["export", "--format", "csv"]])
@pytest.mark.parametrize(
    "target", ["fine", "fine/sub", "fine/a/b", "fine/trace.ocdbt/d", "link/sub"]
)
def test_a_run_is_neither_copied_nor_exported_into_itself(
    runs: Path, command: list[str], target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("link").symlink_to(runs / "fine")
    before = sorted(runs.rglob("*"))
    place = Path("link/sub") if target == "link/sub" else runs / target
    assert code(*command, str(runs / "fine"), str(place)) == 2
    why = "exists" if target == "fine" else "is inside the run"
    assert why in capsys.readouterr().err
    assert sorted(runs.rglob("*")) == before


@pytest.mark.usefixtures("place")
def test_what_a_copy_leaves_out_is_said(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code("cp", str(runs / "fine"), "odd") == 0
    assert not capsys.readouterr().err
    checks = Path("odd/checks")
    checks.mkdir()
    os.mkfifo(checks / "pipe")
    (checks / "link").symlink_to("/etc")
    with (checks / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    (checks / "note.txt").write_text("mine")
    Path("odd/ranks/more").mkdir(parents=True)
    Path("odd/ranks/more/note.txt").write_text("mine too")
    assert code("cp", "odd", "copy", "--json") == 0
    told = capsys.readouterr()
    left_out = json.loads(told.out)["left_out"]
    assert left_out == {
        "checks/link": "it is a link",
        "checks/pipe": "it is a pipe",
        "checks/sparse": f"it claims {1 << 30} bytes but contains none",
    }
    assert told.err.splitlines() == [
        f"comgra-decl: {name} was not copied: {why}" for name, why in left_out.items()
    ]
    copied = {str(path.relative_to("copy")) for path in Path("copy").rglob("*") if path.is_file()}
    assert {"checks/note.txt", "ranks/more/note.txt", "spec.yaml"} <= copied
    assert not {*left_out} & {str(p.relative_to("copy")) for p in Path("copy").rglob("*")}


ENDS: list[tuple[list[str], str, int]] = [
    (["run"], RAISES, 7),
    (["plan", "nodes.mine={select: '0x'}"], LEARNS, 3),
    (["overfit-one-batch"], LEARNS_NOT, 3),
    (["batch-mixing"], WITHOUT_STEP, 4),
    (["thermometer"], LEARNS, 0),
]
MORE_ENDS: list[tuple[list[str], str, int]] = [
    (["run"], LEARNS, 0),
    (["plan"], LEARNS, 0),
    (["plan"], RAISES, 7),
    (["overfit-one-batch"], LEARNS, 0),
    (["overfit-one-batch"], WITHOUT_STEP, 4),
    (["overfit-one-batch"], RAISES, 7),
    (["batch-mixing"], LEARNS, 0),
    (["batch-mixing"], MIXES, 3),
    (["batch-mixing"], RAISES, 7),
    (["thermometer"], WITHOUT_STEP, 3),
    (["data"], LEARNS, 0),
    (["data"], WITHOUT_STEP, 3),
    (["data"], RAISES, 7),
    (["thermometer"], RAISES, 7),
]


@pytest.mark.parametrize(
    ("command", "script", "expected"),
    [*ENDS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_ENDS)],
)
def test_commands_that_run_a_script_end_as_documented(
    command: list[str], script: str, expected: int, place: Path, in_a_program: Callable[..., int]
) -> None:
    (place / "train.py").write_text(script)
    assert in_a_program(*command, "train.py") == expected


@pytest.fixture
def in_a_program(place: Path) -> Callable[..., int]:
    """Runs a command line in a separate process, because scripts change the interpreter."""

    def run(*arguments: str) -> int:
        call = "from comgra_decl.cli.main import main; main()"
        return forked(place, "-c", call, *arguments).returncode

    return run


def test_every_command_has_its_line_in_the_table_of_codes() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("## Exit codes") :]
    assert set(re.findall(r"^\| `([a-z-]+)` \| [02]", table, re.MULTILINE)) == {
        *SCRIPTS,
        *RUNS,
        *ROOTS,
        *OTHERS,
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--port", "99999"), "65535"),
        (("--port", "-1"), "0"),
        (("--address", "not.a.host.invalid"), "unknown network address 'not.a.host.invalid'"),
    ],
)
def test_where_the_viewer_cannot_listen_is_said(
    arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code("view", str(tmp_path), "--no-show", *arguments) == 2
    assert said in " ".join(re.sub("[│╭╰╮╯─]", " ", capsys.readouterr().err).split())


def test_a_link_to_nowhere_is_called_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "newest").symlink_to(tmp_path / "gone")
    assert code("show", str(tmp_path / "newest")) == 2
    assert "is a link to" in " ".join(capsys.readouterr().err.split())

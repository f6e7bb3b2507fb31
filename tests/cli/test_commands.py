"""The command line."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

import comgra_decl as comgra
from comgra_decl.cli.main import main
from comgra_decl.records import StepBatch
from tests.support.fake_run import FakeRun


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two short runs, one of which is damaged."""
    import torch

    root = tmp_path_factory.mktemp("cli") / "runs"
    for name in ("good", "bad"):
        with comgra.trace("debug", root=root, group="digits", name=name):
            model = torch.nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(4):
                loss = model(torch.ones(5, 3)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    for path in (root / "digits" / "bad").rglob("*"):
        if path.is_file():
            path.write_bytes(b"ruined")
    return root


def done(*arguments: str) -> int:
    """Runs a command line and returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_ls_lists_all_runs_even_those_that_cannot_be_read(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert done("ls", str(root)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "state", "records", "last", "step", "started"]
    (good,) = [line for line in lines if line.startswith("digits/good")]
    assert good.split()[1:4] == ["finished", "4", "3"]
    (bad,) = [line for line in lines if line.startswith("digits/bad")]
    assert bad.split()[1] == "damaged"


def test_ls_speaks_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert done("ls", str(root), "--json") == 0
    runs = {run["name"]: run for run in json.loads(capsys.readouterr().out)["runs"]}
    assert runs["good"]["state"] == "finished"
    assert runs["good"]["last_step"] == 3
    assert runs["good"]["records"] == 4
    assert runs["good"]["path"] == str(root / "digits" / "good")
    assert runs["bad"]["state"] == "damaged"
    assert runs["bad"]["error"]


@pytest.mark.parametrize("document", [["a"], "text", {"tool": 3}, {"tool": {"where": [1]}}])
def test_show_survives_documents_of_another_form(
    tmp_path: Path, document: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeRun(tmp_path / "run", nodes=("head",))
    fake.writer.commit([StepBatch.of_documents({"links": document, "imported": document})])
    fake.close()
    assert done("show", str(tmp_path / "run")) == 0
    assert "finished" in capsys.readouterr().out


def test_show_says_what_was_recorded(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert done("show", str(root / "digits" / "good")) == 0
    out = capsys.readouterr().out
    assert "finished" in out
    assert "4, 4 of them training steps (0 to 3)" in out
    assert any(line.split()[:5] == ["Linear", "weight", "forward,", "grad", "parameter"]
               for line in out.splitlines())  # fmt: skip


def test_show_speaks_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert done("show", str(root / "digits" / "good"), "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    run = comgra.open_run(root / "digits" / "good")
    assert shown["steps"] == {"count": 4, "first": 0, "last": 3}
    assert shown["nodes"] == run.nodes
    assert len(shown["slots"]) == len(run.slots)
    assert shown["spec"] == run.spec.model_dump(mode="json")
    assert shown["facts"]["versions"]["python"]
    loss = [kpi for kpi in shown["kpis"] if kpi["name"] == "loss"]
    assert loss[0]["step"] == 3
    assert loss[0]["value"] == pytest.approx(run.kpis().query("name == 'loss'")["value"].iloc[-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "nowhere"], "'nowhere' does not exist"),
        (["show", "nowhere"], "nowhere"),
        (["show", "empty"], "there is no run in 'empty'"),
    ],
)
def test_what_is_not_there_is_said_without_a_traceback(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert done(*arguments) == 2
    assert message in capsys.readouterr().err


def test_a_damaged_run_is_explained(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert done("show", str(root / "digits" / "bad")) == 2
    assert capsys.readouterr().err.startswith("comgra-decl: ")


def test_an_empty_folder_has_no_runs_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert done("ls", str(tmp_path)) == 0
    assert "There are no runs in" in capsys.readouterr().out


def test_runs_of_equally_named_groups_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("a/crash/one", "b/crash/one", "b/crash/two"):
        fake = FakeRun(tmp_path / "r" / path, nodes=("head",))
        fake.write(1)
        fake.close()
    monkeypatch.chdir(tmp_path)
    assert done("ls", "r") == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]}
    assert listed == {"r/a/crash/one", "r/b/crash/one", "crash/two"}


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert done("--version") == 0
    assert capsys.readouterr().out == f"comgra-decl {comgra.__version__}\n"


def test_view_serves_the_folder_on_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from comgra_decl.viewer.serve import Access

    calls = []
    monkeypatch.setattr(
        "comgra_decl.viewer.serve.serve", lambda root, **options: calls.append((root, options))
    )
    assert done("view", "some/where", "--port", "0", "--no-show") == 0
    options = {"port": 0, "access": Access(), "show": False, "views": None}
    assert calls == [(Path("some/where"), options)]


def test_a_port_that_is_taken_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(_root: Path, **_options: Any) -> None:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr("comgra_decl.viewer.serve.serve", serve)
    assert done("view", "runs", "--port", "4000", "--no-show") == 2
    err = capsys.readouterr().err
    assert "cannot listen on 127.0.0.1:4000 (Address already in use)" in err
    assert "--port 0" in err

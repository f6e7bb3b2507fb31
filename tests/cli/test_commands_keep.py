"""The commands that maintain runs: verify, compact, cp, export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from comgra_decl.query import open_run
from tests.cli.test_commands import done
from tests.store.test_compaction import damage
from tests.support.fake_run import FakeRun
from tests.support.forked import forked


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one finished run."""
    root = tmp_path_factory.mktemp("keep") / "runs"
    fake = FakeRun(root / "group" / "run", nodes=("embed", "head"))
    fake.write(20, commit=4)
    fake.close()
    return root


@pytest.fixture
def root(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "runs"))


def test_verify_says_that_a_run_is_whole(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert done("verify", str(root)) == 0
    out = capsys.readouterr().out
    assert str(root / "group" / "run") in out
    assert "yes, everything can be read" in out
    assert done("verify", str(root / "group" / "run"), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["whole"] is True
    assert told["databases"][0]["records"] == 22


def test_verify_explains_damage_and_names_the_rescue(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = root / "group" / "run"
    damage(run, "smp/row/c/21/0/0/0")
    assert done("verify", str(run)) == 3
    out = capsys.readouterr().out
    assert "statistics of individual samples of slots" in out
    assert "checksum" in out
    assert done("verify", str(run), "--json") == 3
    (told,) = json.loads(capsys.readouterr().out)["databases"]
    assert f"comgra-decl cp --version {told['whole_version']} {run} TARGET" in out
    assert told["damages"][0]["records"] == [21, 21]
    version, target = str(told["whole_version"]), tmp_path / "rescued"
    assert done("cp", "--version", version, str(run), str(target), "--json") == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(target)
    assert len(open_run(target).records) == told["whole_records"] == 20
    assert done("verify", str(target)) == 0


def test_verify_names_a_run_that_is_lost(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(root / "group" / "run" / "trace.ocdbt" / "d")
    assert done("verify", str(root)) == 3
    assert "no earlier version is intact" in capsys.readouterr().out


def test_compact_says_what_it_saved(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = open_run(root).heat("std")
    assert done("compact", str(root), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bytes_after"] < told["bytes_before"]
    assert told["files_after"] < told["files_before"]
    assert np.array_equal(open_run(root).heat("std"), before, equal_nan=True)
    assert done("compact", str(root)) == 0
    assert ": reduced from" in capsys.readouterr().out


def test_a_live_run_can_be_copied_but_not_compacted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeRun(tmp_path / "run", nodes=("head",))
    fake.write(5)
    assert done("compact", str(fake.path)) == 2
    assert "cp --compact" in capsys.readouterr().err
    assert done("cp", "--compact", str(fake.path), str(tmp_path / "copy")) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'copy'}\n"
    copy = open_run(tmp_path / "copy")
    assert (copy.state, copy.steps.tolist()) == ("stopped", [0, 1, 2, 3, 4])
    fake.close()


@pytest.mark.parametrize("format_", ["csv", "npz", "zarr"])
def test_export_writes_every_format(
    root: Path, tmp_path: Path, format_: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--nodes", "head", "--format", format_, "--json"]
    assert done("export", str(root), str(tmp_path / "out"), *arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "path": str(tmp_path / "out"),
        "source": str(root / "group" / "run"),
        "format": format_,
        "left_out": {},
    }
    assert (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "nowhere"], "does not exist"),
        (["compact", "empty"], "there is no run in 'empty'"),
        (["cp", "runs", "runs"], "already exists; choose another"),
        (["cp", "runs", "copy", "--version", "999"], "999"),
        (["export", "runs", "empty"], "already exists; choose another"),
        (["export", "runs", "out", "-f", "parqet"], "did you mean 'parquet'"),
        (["export", "runs", "out", "--nodes", "haed", "-f", "npz"], "did you mean 'head'"),
    ],
)
def test_what_cannot_be_done_is_said_without_a_traceback(
    arguments: list[str],
    message: str,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(root.parent)
    Path("empty").mkdir()
    (root / "run").symlink_to(root / "group" / "run")
    assert done(*arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("comgra-decl: ")
    assert message in err


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert done("--help") == 0
    listed = capsys.readouterr().out
    for command in ("verify", "compact", "cp", "export", "ls", "show", "view", "run", "plan"):
        assert f" {command} " in listed


def test_the_shell_completes_commands(tmp_path: Path) -> None:
    code = "import sys; from comgra_decl.cli.main import main; main()"
    words = {"COMP_WORDS": "comgra-decl ver", "COMP_CWORD": "1"}
    told = forked(tmp_path, "-c", code, env={**words, "_COMGRA_DECL_COMPLETE": "complete_bash"})
    assert told.stdout.split() == ["verify"]

"""What a run stores about its circumstances, and where the run is stored."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.errors import StoreError
from comgra_decl.record.context import RunContext, create_run_folder, gather_facts, git_facts
from comgra_decl.record.secrets import MASK, is_secret, masked, without_secrets
from comgra_decl.spec.run import RunSpec, checked_folder_name


def folder(base: Path, *, job: str | None = "train", **run: str) -> Path:
    return create_run_folder(RunSpec.model_validate(run), RunContext(job=job, base=base))


def test_a_run_lies_below_its_root_and_group(tmp_path: Path) -> None:
    path = folder(tmp_path, root="all", group="mine", name="first")
    assert path == tmp_path / "all" / "mine" / "first"
    assert path.is_dir()


def test_what_is_not_said_is_derived(tmp_path: Path) -> None:
    path = folder(tmp_path)
    assert path.parent == tmp_path / "runs" / "train"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", path.name)
    assert folder(tmp_path, job=None).parent == tmp_path / "runs" / "default"


def test_an_absolute_root_is_left_where_it_is(tmp_path: Path) -> None:
    root = tmp_path / "far"
    assert folder(tmp_path / "base", root=str(root), name="x") == root / "train" / "x"


def test_the_home_folder_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder(Path("/nowhere"), root="~/runs", name="x") == tmp_path / "runs/train/x"


def test_no_run_ever_overwrites_another(tmp_path: Path) -> None:
    names = [folder(tmp_path, name="same").name for _ in range(4)]
    assert names == ["same", "same-2", "same-3", "same-4"]


def test_runs_that_start_together_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: folder(tmp_path, name="same"), range(24)))
    assert len(set(paths)) == 24


@given(st.one_of(st.none(), st.text(max_size=120)))
def test_any_job_name_gives_a_valid_group(job: str | None) -> None:
    from comgra_decl.record.placement import folder_name

    assert checked_folder_name(folder_name(job))


def test_a_root_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("not a folder")
    with pytest.raises(StoreError, match=r"cannot create a run in .*runs.*run\.root=FOLDER"):
        folder(tmp_path)


def test_the_facts_of_a_run(tmp_path: Path) -> None:
    context = RunContext.of_script(tmp_path / "train_it.py")
    assert context.job == "train_it"
    facts = gather_facts(context)
    assert facts["versions"]["python"] == sys.version.split()[0]
    assert {"torch", "numpy", "comgra-decl", "tensorstore"} <= set(facts["versions"])
    assert facts["command"] == sys.orig_argv
    assert facts["pid"] == os.getpid()
    assert facts["host"]["cpus"] == os.cpu_count()
    assert abs(facts["started"] - time.time()) < 60
    assert facts["git"] is None
    json.dumps(facts, allow_nan=False)


def test_the_environment_is_never_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-value")
    assert "s3cr3t-value" not in json.dumps(gather_facts(RunContext()))


def git(place: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
    command = ["git", *identity, "-C", str(place), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_git_knows_commit_branch_and_changes(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "topic")
    assert git_facts(tmp_path) is None
    (tmp_path / "sub").mkdir()
    script = tmp_path / "sub" / "train.py"
    script.write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_facts(script.parent) == {"commit": commit, "branch": "topic", "dirty": False}
    (tmp_path / "untracked").write_text("x")
    assert git_facts(script.parent) == {"commit": commit, "branch": "topic", "dirty": False}
    script.write_text("2")
    assert git_facts(script.parent) == {"commit": commit, "branch": "topic", "dirty": True}
    git(tmp_path, "checkout", "-q", "--detach")
    assert git_facts(script.parent) == {"commit": commit, "branch": None, "dirty": True}
    assert gather_facts(RunContext.of_script(script))["git"]["commit"] == commit


def test_without_git_there_are_no_git_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert git_facts(tmp_path / "missing") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_facts(Path(__file__).parent) is None


@pytest.mark.parametrize(
    "name",
    ["password", "db.password", "WANDB_API_KEY", "wandb.api_key", "api-key", "auth_token",
     "hf_token", "github_token", "client_secret", "secret_key", "aws.secret_access_key",
     "credentials", "secret"],
)  # fmt: skip
def test_secrets_are_known_by_their_names(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["lr", "token", "max_tokens", "tokens", "key", "key_dim", "secretary", "author", "pad_token"],
)
def test_ordinary_settings_are_no_secrets(name: str) -> None:
    assert not is_secret(name)


def test_secrets_on_the_command_line_are_masked() -> None:
    command = ["train.py", "--api-key", "abc", "+wandb.api_key=abc", "lr=1", "--password=abc", "x"]
    assert without_secrets(command) == [
        "train.py",
        "--api-key",
        MASK,
        f"+wandb.api_key={MASK}",
        "lr=1",
        f"--password={MASK}",
        "x",
    ]


def test_secrets_in_a_config_are_masked() -> None:
    config = {"db": {"password": "abc", "port": 3}, "list": [{"api_key": "abc"}], "secret": None}
    assert masked(config) == {
        "db": {"password": MASK, "port": 3},
        "list": [{"api_key": MASK}],
        "secret": None,
    }

"""The commands, extras and files on the page about other tools are valid, and the action works."""

from __future__ import annotations

import os
import re
import shlex
import shutil
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

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "bridges.md").read_text()
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())

TRAINING = """
import sys

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
torch.nn.init.constant_(model[0].bias, float(sys.argv[1]) if sys.argv[1:] else BIAS)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(24):
    inputs = torch.randn(32, 4)
    optimizer.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def commands() -> Iterator[list[str]]:
    """Yield the words of each command on the page, also those within files."""
    for block in blocks("bash"):
        for line in block.splitlines():
            yield shlex.split(line.partition(" > ")[0], comments=True)
    _, steps, hooks = map(yaml.safe_load, blocks("yml"))
    for step in steps:
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
    file.write_text(blocks("yml")[2])
    check = [sys.executable, "-m", "pre_commit", "validate-config", str(file)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def programs_path() -> str:
    """Return a PATH on which `python` and `comgra-decl` are those that run the tests."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def acted(folder: Path, step: dict[str, Any], inputs: dict[str, str]) -> tuple[int, str]:
    """Run a step of the action as GitHub's runner does; return its exit code and output."""
    given = {name: each["default"] for name, each in ACTION["inputs"].items()} | inputs
    env = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: given[found[1]], text)
        for name, text in step["env"].items()
    }
    assert not any("${{" in text for text in (*env.values(), step["run"]))
    env |= {"PATH": programs_path(), "GITHUB_STEP_SUMMARY": str(folder / "summary.md")}
    script = folder / "step.sh"
    script.write_text(step["run"])
    bash = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
    done = subprocess.run(
        bash, cwd=folder, env=os.environ | env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_inputs_on_the_page_are_those_of_the_action() -> None:
    use = yaml.safe_load(blocks("yml")[0])[0]
    assert use["with"].keys() <= ACTION["inputs"].keys()
    table = re.search(r"\| input \|.*?\n\n", PAGE, re.DOTALL)
    assert table is not None
    told = {name for row in table[0].splitlines()[2:] for name in re.findall("`([^`]+)`", row)}
    assert told >= ACTION["inputs"].keys()
    used = re.findall(r"inputs\.([\w-]+)", yaml.safe_dump(ACTION["runs"]))
    assert {*used} == ACTION["inputs"].keys()
    assert re.findall(r"\$GITHUB_ACTION_PATH\[(\w+)\]", str(ACTION)) == ["read"]


@pytest.mark.parametrize("name", ["action", "workflow"])
def test_githubs_schema_accepts(name: str, tmp_path: Path) -> None:
    pytest.importorskip("check_jsonschema")
    file = ROOT / "action.yml"
    if name == "workflow":
        file = tmp_path / "workflow.yml"
        steps = [each for block in blocks("yml")[:2] for each in yaml.safe_load(block)]
        job = {"runs-on": "ubuntu-latest", "steps": steps}
        file.write_text(yaml.safe_dump({"on": "push", "jobs": {"test": job}}))
    schema = f"vendor.github-{name}s"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_action_fails_on_a_run_that_leaves_its_contract_or_is_ill(tmp_path: Path) -> None:
    _, record, check = ACTION["runs"]["steps"]
    assert record["if"] == "inputs.script != ''"
    (tmp_path / "train.py").write_text(TRAINING)
    inputs = {"script": "train.py", "arguments": "0.5", "contract": "contract.yaml"}
    code, said = acted(tmp_path, record, inputs)
    assert code == 0, said
    freeze = f'PATH="{programs_path()}" comgra-decl contract runs > contract.yaml'
    subprocess.run(["bash", "-c", freeze], cwd=tmp_path, check=True)
    assert acted(tmp_path, check, inputs)[0] == 0
    assert (tmp_path / "summary.md").read_text().startswith("# ")
    inputs["arguments"] = "-50"
    assert acted(tmp_path, record, inputs)[0] == 0
    code, said = acted(tmp_path, check, inputs)
    assert code == 3
    assert "0/bias/forward left its range at step 0" in said
    inputs |= {"contract": "", "fail-on": "warning"}
    code, said = acted(tmp_path, check, inputs)
    assert (code, "dead" in said) == (3, True)
    assert acted(tmp_path, check, inputs | {"fail-on": "never"})[0] == 0


@pytest.mark.slow
def test_the_hook_refuses_a_push_that_breaks_the_contract(tmp_path: Path) -> None:
    pytest.importorskip("pre_commit")
    if shutil.which("git") is None:
        pytest.skip("needs git")
    env = os.environ | {"PATH": programs_path(), "PRE_COMMIT_HOME": str(tmp_path / "cache")}
    folder = tmp_path / "repository"
    folder.mkdir()

    def ran(*command: str) -> tuple[int, str]:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    (folder / ".pre-commit-config.yaml").write_text(blocks("yml")[2])
    script = folder / "short_training.py"
    script.write_text(TRAINING.replace("BIAS", "0.5"))
    assert ran("git", "init", "--quiet")[0] == 0
    assert ran("python", "-m", "comgra_decl", script.name)[0] == 0
    code, contract = ran("comgra-decl", "contract", "runs")
    (folder / "contract.yaml").write_text(contract)
    assert code == 0
    assert ran("git", "add", ".pre-commit-config.yaml", script.name)[0] == 0
    hook = ("python", "-m", "pre_commit", "run", "contract", "--hook-stage", "pre-push")
    code, said = ran(*hook)
    assert code == 0, said
    script.write_text(TRAINING.replace("BIAS", "-50.0"))
    assert ran("git", "add", script.name)[0] == 0
    code, said = ran(*hook)
    assert code == 1
    assert "0/bias/forward left its range at step 0" in said

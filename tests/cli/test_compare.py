"""`comgra-decl compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from comgra_decl.cli.main import app
from comgra_decl.errors import ComgraError, Exit
from tests.support.fake_run import FakeRun


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two equal runs, and one with another seed and another depth."""
    root = tmp_path_factory.mktemp("compare") / "group"
    for name, layers, seed in (("one", 1, 0), ("same", 1, 0), ("other", 2, 1)):
        fake = FakeRun(root / name, nodes=("embed", "head", name), layers=layers, seed=seed)
        fake.write(6)
        fake.close()
    return root


def test_equal_runs_end_with_success(root: Path) -> None:
    done = CliRunner().invoke(app, ["compare", str(root / "one"), str(root / "same")])
    assert done.exit_code == Exit.DONE
    assert "The runs do not differ by more than rounding" in done.output
    assert "6 steps, 0 to 5" in done.output


def test_the_first_difference_and_the_settings_are_printed(root: Path) -> None:
    done = CliRunner().invoke(app, ["compare", str(root / "one"), str(root / "other")])
    assert done.exit_code == Exit.WANTING
    assert "The runs part at step 0, at " in done.output
    assert "config.model.layers: 1 | 2" in done.output
    assert "Also different at step 0:" in done.output


def test_json_has_everything(root: Path) -> None:
    command = ["compare", str(root / "one"), str(root / "other"), "--json"]
    found = json.loads(CliRunner().invoke(app, command).output)
    assert found["first"]["step"] == 0
    assert found["first"] == found["differences"][0]
    assert found["settings"]["config.model.layers"] == {"here": 1, "there": 2}
    assert found["same_until"] is None
    assert found["gradual"] is False


def test_a_large_tolerance_accepts_everything(root: Path) -> None:
    command = ["compare", str(root / "one"), str(root / "other"), "--tolerance", "1e9"]
    assert CliRunner().invoke(app, command).exit_code == Exit.DONE


def test_names_must_be_pairs(root: Path) -> None:
    done = CliRunner().invoke(app, ["compare", str(root), str(root), "--name", "embed"])
    assert isinstance(done.exception, ComgraError)
    assert "HERE=THERE" in str(done.exception)

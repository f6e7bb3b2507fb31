"""The example that waits for data is told so, and is no longer told so once it is mended."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import comgra_decl as comgra
from comgra_decl.hooks.scalars import automatic
from comgra_decl.query import Run
from tests.examples.conftest import EXAMPLES
from tests.support.uncompiled import uncompiled as uncompiled  # applies to all tests here

FOLDER = EXAMPLES / "starved"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The example's functions; every step that is not recorded is timed."""
    monkeypatch.setattr(automatic, "INTERVAL", 0.0)
    return runpy.run_path(str(FOLDER / "train.py"))


def trained(script: dict[str, Any], root: Path, augment: str, *, share: float) -> Run:
    config = OmegaConf.load(FOLDER / "conf" / "config.yaml")
    config.update({"augment": augment, "steps": 40, "eval_every": 40})
    before = torch.get_num_threads()
    rules = f"rules={{input_bound: {{share: {share}}}}}"
    with comgra.trace("light", root=root, group=augment, overrides=[rules]) as session:
        script["train"](config)
    torch.set_num_threads(before)
    assert session.path is not None
    return comgra.open_run(session.path)


def test_waiting_for_data_is_reported_until_the_whole_batch_is_rotated(
    script: dict[str, Any], tmp_path: Path
) -> None:
    waiting = trained(script, tmp_path, "sample", share=0.15)  # a busy machine delays all phases
    mended = trained(script, tmp_path, "batch", share=0.4)
    (found,) = waiting.findings().query("rule == 'input_bound'").to_dict("records")
    assert "Training waits for data" in found["message"]
    assert "move slow transforms out of the training loop" in found["advice"]
    assert "input_bound" not in set(mended.findings()["rule"])

    def mean(run: Run) -> float:
        return float(run.kpis(automatic=True).query("name == 'time/data'")["value"].median())

    assert mean(mended) < mean(waiting) / 3


def test_rotation_turns_each_image_by_its_own_angle(script: dict[str, Any]) -> None:
    torch.manual_seed(0)
    rows, columns = torch.meshgrid(torch.arange(9) - 4.0, torch.arange(9) - 4.0, indexing="ij")
    ramps = columns.expand(50, 1, 9, 9)  # turned by an angle, x becomes x cos + y sin
    turned = script["rotated"](ramps)[:, 0, 3:6, 3:6]
    basis = torch.stack([columns[3:6, 3:6].flatten(), rows[3:6, 3:6].flatten()], 1)
    solved = torch.linalg.lstsq(basis, turned.flatten(1).T).solution  # [2, images]
    assert torch.allclose(solved.square().sum(0), torch.ones(50), atol=1e-4)
    angles = torch.atan2(solved[1], solved[0]).rad2deg()
    assert angles.abs().max() <= 15
    assert angles.std() > 5

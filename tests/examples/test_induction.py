"""Experiments find the circuit that the example learns, and when it learns it."""

from __future__ import annotations

from pathlib import Path

import pytest

import comgra_decl as comgra
from comgra_decl.query import Run
from tests.examples.conftest import EXAMPLES
from tests.support.forked import forked

LAST = 200


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder, example = tmp_path_factory.mktemp("induction"), EXAMPLES / "induction"
    command = ["-m", "comgra_decl", "--spec", str(example / "heads.yaml"), "schedule.every=100"]
    result = forked(folder, *command, str(example / "train.py"), f"steps={LAST + 1}")
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = (each.parent for each in Path(folder).glob("runs/*/*/spec.yaml"))
    return comgra.open_run(path)


@pytest.mark.slow
def test_the_second_layer_has_the_induction_heads(run: Run) -> None:
    scores = run.induction(LAST)["score"].groupby("node").max()
    assert scores["layers.1"] > 0.6
    assert scores["layers.0"] < 0.3
    assert run.induction(100)["score"].max() < 0.3  # not yet


@pytest.mark.slow
def test_ablation_finds_the_head_before_them_and_paths_lead_to_their_keys(run: Run) -> None:
    effects = run.effects("without", LAST)["mean"]
    _, node, head = effects.index.to_list()[int(effects.argmax())]
    assert node == "layers.0.out"
    assert effects.max() > 0.2
    assert run.effects("without", 100)["mean"].max() < 0.2
    strongest = run.circuit("paths", LAST).links[0]
    assert (strongest.source, strongest.sink) == (f"layers.0.out, head {head}", "layers.1.key")
    assert strongest.effect > 0.2

"""Causal tracing finds the layer in which the example plants a fact."""

from __future__ import annotations

from pathlib import Path

import pytest

import comgra_decl as comgra
from comgra_decl.query import Run
from tests.examples.conftest import EXAMPLES
from tests.support.forked import forked

SMALL = ["steps=200", "plant.steps=100", "people=20", "batch_size=64", "model.layers=3"]


def trained(folder: Path, *options: str, every: int) -> Run:
    example = EXAMPLES / "fact"
    command = ["-m", "comgra_decl", "--spec", str(example / "trace.yaml")]
    command += [f"schedule.every={every}", str(example / "train.py"), *options]
    result = forked(folder, *command)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = (each.parent for each in folder.glob("runs/*/*/spec.yaml"))
    return comgra.open_run(path)


def strongest(run: Run, count: int) -> list[str]:
    """Return the modules of the places that restore most of the planted fact."""
    last = run.effects("trace", int(run.steps[-1]), share=True)["mean"]
    return [node for _, node, _ in last.sort_values(ascending=False).index[:count]]


@pytest.mark.slow
def test_restoring_the_planted_layer_restores_most_of_the_fact(tmp_path: Path) -> None:
    run = trained(tmp_path, *SMALL, "plant.layer=1", every=199)
    assert strongest(run, 1) == ["blocks.1.mlp"]


@pytest.mark.slow
@pytest.mark.parametrize("layer", [1, 2])
def test_it_is_found_wherever_it_was_planted_and_only_then(tmp_path: Path, layer: int) -> None:
    run = trained(tmp_path, f"plant.layer={layer}", every=33)
    assert strongest(run, 1) == [f"blocks.{layer}.mlp"]
    effects = run.effects("trace")["mean"]
    planted = effects.xs(f"blocks.{layer}.mlp", level="node").groupby("step").max()
    assert planted.iloc[-1] > 2 * planted[planted.index < 400].abs().max()

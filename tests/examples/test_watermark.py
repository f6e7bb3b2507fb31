"""The example with a planted mark: its pictures and findings show what the network looks at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import comgra_decl as comgra
from comgra_decl.query import Run
from comgra_decl.rules import diagnose
from tests.examples.conftest import EXAMPLES
from tests.support.forked import forked

FOLDER = EXAMPLES / "watermark"


def recorded(folder: Path, *arguments: str) -> tuple[Run, str]:
    """Train with the example's own spec; return the run and what was printed."""
    command = ["-m", "comgra_decl", "--spec", str(FOLDER / "look.yaml"), f"run.root={folder}"]
    result = forked(folder, *command, str(FOLDER / "train.py"), "steps=401", *arguments)
    assert result.returncode == 0, result.stderr
    return comgra.open_group(folder / "train")[0], result.stdout


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    return recorded(tmp_path_factory.mktemp("marked"))


@pytest.fixture(scope="module")
def covered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    return recorded(tmp_path_factory.mktemp("covered"), "mark=false")


def share_in_corner(run: Run, name: str) -> float:
    """Return the share of a picture's magnitude in the three by three pixels of the corner."""
    magnitude = np.abs(run.picture(name).values)
    return float((magnitude[:, 5:, 5:].sum((1, 2)) / magnitude.sum((1, 2))).mean())


def support_in_corner(run: Run) -> float:
    """Return the share of what supports the class, according to Grad-CAM, in the corner."""
    support = np.maximum(run.picture("cam").values, 0)
    return float((support[:, 5:, 5:].sum((1, 2)) / support.sum((1, 2))).mean())


def threes(printed: str) -> float:
    return float(printed.rpartition("threes ")[2].split("%")[0])


@pytest.mark.slow
def test_threes_without_the_mark_are_not_recognised(
    marked: tuple[Run, str], covered: tuple[Run, str]
) -> None:
    assert threes(marked[1]) < 20
    assert threes(covered[1]) > 50


@pytest.mark.slow
def test_occlusion_shows_the_mark_only_in_the_network_that_has_seen_it(
    marked: tuple[Run, str], covered: tuple[Run, str]
) -> None:
    assert share_in_corner(marked[0], "cover") > 0.5
    assert share_in_corner(covered[0], "cover") < 0.3
    assert marked[0].picture("cover").step == 400
    strongest = np.abs(marked[0].picture("cover").values).reshape(4, -1).argmax(1)
    assert {*strongest.tolist()} <= {6 * 8 + 6, 6 * 8 + 7, 7 * 8 + 6, 7 * 8 + 7}  # in the mark


@pytest.mark.slow
def test_grad_cam_finds_what_supports_the_class_in_the_mark(
    marked: tuple[Run, str], covered: tuple[Run, str]
) -> None:
    assert support_in_corner(marked[0]) > 0.3
    assert support_in_corner(covered[0]) < 0.15
    assert (marked[0].picture("cam").values[:, 5:, 5:] >= 0).all()


def test_the_finding_names_the_picture(marked: tuple[Run, str], covered: tuple[Run, str]) -> None:
    found = [f for f in diagnose(marked[0]).findings if f.rule == "attribution_outside_mask"]
    assert len(found) == 1
    assert "'cover'" in found[0].message
    others = {f.rule for f in diagnose(covered[0]).findings}
    assert "attribution_outside_mask" not in others

"""The Pictures section draws the curvature of a loss and slices through it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from comgra_decl.viewer.model.landscapes import Landscape, density
from comgra_decl.viewer.model.pictures import album
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.panes.pictures import PicturesPane
from tests.viewer.app.test_probe_pictures import SPEC, at, pixels, shown, trained


@pytest.fixture(scope="module")
def curved(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    slices = {"method": "loss_slice", "of": "eyes", "points": 5}
    pictures: dict[str, Any] = {
        "bend": {"method": "hessian", "of": "eyes", "points": 8, "vectors": 2},
        "line": slices,
        "grid": {**slices, "directions": ["random", "random"]},
    }
    return trained(tmp_path_factory.mktemp("runs"), {**SPEC, "pictures": pictures})


def cards(view: RunView, step: int) -> dict[str, Landscape]:
    found = album(view, at(view, step=step))
    assert found.cards == ()  # none of them belongs to a sample
    return {each.title.partition(":")[0]: each for each in found.landscapes}


def test_the_largest_eigenvalue_is_drawn_over_the_steps_above_the_density(curved: RunView) -> None:
    over, peaks = cards(curved, 2)["bend"].curves
    picture = curved.run.picture("bend")
    assert (over.x, over.marked) == ([0, 2, 4], 2)
    assert list(over.y) == picture.values[:, 0].tolist()
    facts = curved.run.picture("bend", 2).facts
    x, y = np.array(peaks.x), np.array(peaks.y)
    assert np.trapezoid(y, x) == pytest.approx(1, abs=1e-3)
    mean = (facts["nodes"] * facts["weights"]).sum(1).mean()
    assert np.trapezoid(x * y, x) == pytest.approx(mean, rel=1e-2)


def test_a_density_of_equal_eigenvalues_is_a_single_peak() -> None:
    x, y = density(np.full((2, 3), 4.0), np.full((2, 3), 1 / 3))
    assert x[y.argmax()] == pytest.approx(4, rel=1e-3)
    assert np.trapezoid(y, x) == pytest.approx(1, abs=1e-3)


def test_slices_have_one_scale_for_all_steps(curved: RunView) -> None:
    for step in (0, 4):
        found = cards(curved, step)
        (curve,) = found["line"].curves
        values = curved.run.picture("line").values
        assert (curve.low, curve.high) == (values.min(), values.max())
        assert list(curve.y) == values[step // 2].tolist()
        grids = curved.run.picture("grid").values
        assert (found["grid"].grid == grids[step // 2]).all()
        assert (found["grid"].low, found["grid"].high) == (grids.min(), grids.max())


def test_the_page_draws_them(curved: RunView) -> None:
    pane = PicturesPane(lambda **_: None)
    pane.refresh(shown(curved, step=4))
    html = pane.view.html
    assert html.count('class="curve"') == 3
    assert "No picture is declared" not in html
    (image,) = re.findall(r'<img src="([^"]*)" alt="grid: loss_slice"', html)
    grid, brightness = curved.run.picture("grid", 4).values[0], pixels(image).sum(2)
    order = np.argsort(grid.ravel())
    assert (np.diff(brightness.ravel()[order].astype(int)) <= 0).all()  # darker where higher

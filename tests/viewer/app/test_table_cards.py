"""Tables in the Pictures section: errors, foreign samples, and the selected node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comgra_decl.errors import UnknownNameError
from comgra_decl.records import COMPUTED_PICTURES
from comgra_decl.viewer.model import table_cards
from comgra_decl.viewer.model.pictures import Album, album
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.panes.pictures import PicturesPane
from comgra_decl.viewer.plotting import plotted
from tests.probing.test_computed_pictures import EYES, trained


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    dream = {"method": "maximise", "of": "eyes", "select": "conv", "units": [4, 0, 1], "points": 3}
    root = tmp_path_factory.mktemp("runs")
    return RunView(trained(root, pictures={"dream": dream}, foreign=["letter"]))


def at(view: RunView, **wanted: Any) -> Selection:
    return replace(resolve(view, Selection(), {}), **wanted)


def tables(view: RunView, node: str) -> dict[str, Any]:
    found: Album = album(view, at(view, step=4, node=node))
    return {table.title: table for table in found.tables}


def test_the_most_confident_errors_lead_to_their_samples(view: RunView) -> None:
    table = tables(view, "act")["most confident errors"]
    wanted = view.run.picture("confident_errors", 4).values
    assert [row[0] for row in table.rows] == [f"{sample:.0f}" for sample in wanted[:12, 0]]
    assert table.samples == tuple(wanted[:12, 0].astype(int))
    assert f"{len(wanted)} of 18 samples" in table.note


def test_the_selected_node_has_tables_of_its_units_concepts_and_separability(view: RunView) -> None:
    found = tables(view, "act")
    units = found["units: act"]
    assert units.rows[0][0] == f"{view.run.picture('unit_effects', 4, 'act').values[0, 0]:.0f}"
    assert units.rows[-1][2] == "\u2013"  # a dead unit has no effect
    assert [row[0] for row in found["concepts: act"].rows] == ["0", "1", "2", "letter"]
    assert len(found["separability: act"].rows) == 3
    assert "units: head" in tables(view, "head")
    assert "units: act" not in tables(view, "head")
    (wanted,) = view.run.picture("foreign_auroc", 4).values
    assert float(found["foreign samples"].rows[0][0]) == pytest.approx(wanted, abs=0.005)


def test_a_large_node_is_not_compared_while_one_waits(
    view: RunView, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = view.run.value("act", 4, type=EYES)[0].size
    monkeypatch.setattr(table_cards, "_MOST_VALUES", size - 1)
    found = {table.title: table for table in table_cards._tables(view, EYES, 4, "act")}
    assert found["units: act"].rows == ()
    assert "call run.picture('unit_effects', 4, 'act')" in found["units: act"].note
    assert {*found} == {"most confident errors", "foreign samples", "units: act"}


def test_inputs_that_maximise_units_are_drawn_side_by_side(view: RunView) -> None:
    cards = album(view, at(view, step=4, node="act")).cards
    (dream,) = [card for card in cards if card.title == "dream: maximise, conv"]
    values = view.run.picture("dream", 4, "conv").values
    assert dream.high == pytest.approx(np.abs(values).max())
    assert dream.image.startswith("data:image/png")
    assert "units 4, 0, 1" in dream.note


def test_the_pane_shows_the_tables_and_offers_their_samples(view: RunView) -> None:
    pane = PicturesPane(lambda **_: None)
    chosen = at(view, step=4, node="act")
    pane.update(Shown(view, chosen, colour="kind", scale="linear", expanded=None, follow=False))
    assert "<h3>units: act</h3>" in pane.view.html
    first = tables(view, "act")["most confident errors"].samples[0]
    assert f'<th tabindex="0" data-send="sample:{first}">{first}</th>' in pane.view.html
    assert f"sample:{first}" in pane.view.tokens


@pytest.mark.parametrize("name", sorted({*COMPUTED_PICTURES, "dream"} - {"lens_from_records"}))
def test_every_picture_can_be_plotted(view: RunView, name: str) -> None:
    node = None if name in ("likeness", "flow", "confusion", "reliability") else "conv"
    node = "Net" if name in ("confident_errors", "foreign_auroc") else node
    node = "head" if name == "spectrum" else node
    drawn = plotted(view.run).picture(name, step=4, node=node)
    assert len(drawn)


def test_the_input_of_one_unit_is_plotted(view: RunView) -> None:
    plots = plotted(view.run)
    drawn = plots.picture("dream", node="conv", sample=2).dimension_values(2, flat=False)
    wanted = view.run.picture("dream", 4, "conv").values[2].sum(0)
    np.testing.assert_allclose(np.sort(drawn.ravel()), np.sort(wanted.ravel()), rtol=1e-6)
    assert EYES in view.run.types


def test_a_run_without_errors_has_nothing_to_plot(tmp_path: Path) -> None:
    run = trained(tmp_path, foreign=["0", "1", "2", "letter"])
    assert run.picture("confident_errors").values.shape == (0, 4)
    with pytest.raises(UnknownNameError, match="no numbers to draw at step 4"):
        plotted(run).picture("confident_errors")

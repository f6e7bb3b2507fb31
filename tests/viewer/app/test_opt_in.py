"""Opt-in, derived and custom statistics can be selected and shown like all others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import comgra_decl
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.choices import choices, run_choice
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve, slots_of
from comgra_decl.viewer.model.series import curve
from comgra_decl.viewer.model.statistics import statistics_table
from tests.support.shortened import shortened

SPEC = {
    "nodes": {"all": {"select": "**", "capture": ["output", "parameter", "update"]}},
    "schedule": {"first": 9},
    "stats": [
        *("l2", "singular_value"),
        {"name": "mine", "_target_": "tests.viewer.app.test_opt_in.first_value"},
    ],
}


def first_value(x: torch.Tensor) -> torch.Tensor:
    """Returns the first value of each sample."""
    return x.flatten(1)[:, 0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with comgra_decl.trace(SPEC, root=tmp_path):
        for _ in range(3):
            net(torch.ones(6, 2)).sum().backward()
            optimizer.step()
    return tmp_path


@pytest.mark.parametrize("statistic", ["singular_value", "update_ratio", "mine"])
@pytest.mark.parametrize("role", shortened(["weight", "output"], tried=1))
def test_it_is_offered_tabled_and_drawn(folder: Path, statistic: str, role: str) -> None:
    view = RunView(comgra_decl.open_run(folder))
    at = resolve(view, Selection(node="0", role=role, step=1, statistic=statistic), {})
    assert (at.statistic, at.role) == (statistic, role)
    fields = dict(choices(view, at, "statistic", "linear", run_choice((), "")))["Shown"]
    (offered,) = [field for field in fields if field.name == "statistic"]
    assert statistic in [option.value for option in offered.options]
    forward = dict(statistics_table(view, at).rows)[statistic][0]
    applies = role == "weight" or statistic == "mine"
    assert forward.recorded == applies
    if applies:
        truth = view.run.slot("0", role=role).series(statistic)
        assert forward.value == pytest.approx(truth[1])
        drawn = curve(view, slots_of(view, at)[0], at)
        assert drawn.values.tolist() == pytest.approx(truth.tolist())


@pytest.mark.parametrize("role", shortened(["weight", "output"], tried=1))
@pytest.mark.parametrize("statistic", ["singular_value", "update_ratio", "mine"])
def test_the_dashboard_shows_it(folder: Path, statistic: str, role: str) -> None:
    dashboard = Dashboard(Catalogue(folder))
    dashboard.change(node="0", role=role, statistic=statistic)
    assert (dashboard.state.statistic, dashboard.state.role) == (statistic, role)
    assert not dashboard.screen.banner.visible, dashboard.screen.banner.html

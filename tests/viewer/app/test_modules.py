"""The tree of modules counts like torch, and attributes changes to the modules that changed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import comgra_decl
from comgra_decl.viewer.model.modules import Module, ModuleTree, module_tree
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.model.statistics import statistics_table
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.panes.modules import ModulesPane
from comgra_decl.viewer.panes.statistics import StatisticsPane

PARAMETER = ["parameter", "parameter_grad", "update"]
SPEC: dict[str, Any] = {
    "nodes": {"all": {"select": "**", "capture": ["output", *PARAMETER]}},
    "exclude": ["silent"],
    "schedule": {"first": 3},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.second.down.weight = self.first.down.weight
        self.silent = nn.Linear(4, 2)
        self.second.up.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.silent(self.second(self.first(x)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunView, dict[str, float]]:
    """A network with a tied, a frozen and an excluded part; and the changes in its last step."""
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with comgra_decl.trace(SPEC, root=Path(tmp_path_factory.mktemp("runs"))) as session:
        for _ in range(3):
            before = {name: p.detach().clone() for name, p in net.named_parameters()}
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.path is not None
    changed = {
        name: float((p.detach() - before[name]).double().square().sum())
        for name, p in net.named_parameters()
    }
    return RunView(comgra_decl.open_run(session.path)), changed


def test_an_update_stands_beside_value_and_gradient(
    trained: tuple[RunView, dict[str, float]],
) -> None:
    view, changed = trained
    where = resolve(view, Selection(node="first.up", role="weight", statistic="l2"), {})
    table = statistics_table(view, where)
    assert table.columns == ("forward", "gradient", "update")
    value, gradient, update = dict(table.rows)["l2"]
    assert update.value**2 == pytest.approx(changed["first.up.weight"], rel=1e-4)
    assert update.value == pytest.approx(0.1 * gradient.value, rel=1e-4)
    assert value.value > update.value
    pane = StatisticsPane(lambda **_: None)
    pane.refresh(Shown(view, where, "kind", "linear", None, follow=False))
    assert '<th><span class="update">update</span></th>' in pane.view.html
    alone = statistics_table(view, replace(where, gradient="update"))
    assert alone.columns == ("forward", "update")  # not twice
    assert statistics_table(view, resolve(view, Selection(node="first.up"), {})).columns == (
        "forward", "gradient",
    )  # fmt: skip


@pytest.fixture
def tree(trained: tuple[RunView, dict[str, float]]) -> ModuleTree:
    return module_tree(trained[0], resolve(trained[0], Selection(), {}))


def at(tree: ModuleTree, path: str) -> Module:
    return tree.modules[0, path]


def test_modules_are_nested_as_in_the_model(tree: ModuleTree) -> None:
    names = {path: (module.label, module.depth) for (_, path), module in tree.modules.items()}
    assert names == {
        "": ("Net", 0),
        "first": ("first", 1), "first.up": ("up", 2), "first.down": ("down", 2),
        "second": ("second", 1), "second.up": ("up", 2), "second.down": ("down", 2),
        "silent": ("silent", 1),
    }  # fmt: skip


def test_parameters_are_counted_once_however_often_they_are_used(tree: ModuleTree) -> None:
    net = Net()
    assert at(tree, "").count == sum(p.numel() for p in net.parameters())
    assert at(tree, "").trainable == sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert at(tree, "second.down").count == 0
    assert at(tree, "second.down").parameters[0].tied_to == "first.down.weight"


def test_what_is_frozen_is_said(tree: ModuleTree) -> None:
    said = {path: module.frozen for (_, path), module in tree.modules.items() if module.frozen}
    assert said == {"": "partly frozen", "second": "frozen", "second.up": "frozen"}


def test_shares_are_those_of_the_squared_lengths_of_changes(
    trained: tuple[RunView, dict[str, float]], tree: ModuleTree
) -> None:
    changed = {k: v for k, v in trained[1].items() if not k.startswith("silent")}
    total = sum(changed.values())
    assert tree.measure == "update"
    for path in ("first", "first.up", "first.down"):
        inside = sum(v for k, v in changed.items() if k.startswith(path))
        assert at(tree, path).share == pytest.approx(inside / total, rel=1e-4)
    assert at(tree, "").share == pytest.approx(1.0)


def test_where_nothing_was_recorded_nothing_is_claimed(tree: ModuleTree) -> None:
    silent = at(tree, "silent")
    assert (silent.node, silent.share, silent.ratio, silent.output) == (None, None, None, None)
    assert silent.count == 10


def test_only_what_is_unfolded_is_shown(tree: ModuleTree) -> None:
    assert [line.label for line in tree.visible([])] == ["Net"]
    assert [line.label for line in tree.visible([(0, "")])] == ["Net", "first", "second", "silent"]
    assert [line.label for line in tree.visible([(0, "first")])] == ["Net"]
    assert tree.unfolded(60) == {(0, ""), (0, "first"), (0, "second")}
    assert tree.unfolded(5) == {(0, "")}
    assert tree.above("first.up") == {(0, ""), (0, "first")}


def test_lines_select_and_triangles_unfold(trained: tuple[RunView, dict[str, float]]) -> None:
    view = trained[0]
    wanted: list[dict[str, object]] = []
    pane = ModulesPane(lambda **change: wanted.append(change))
    pane.refresh(Shown(view, resolve(view, Selection(), {}), "kind", "linear", None, False))
    assert pane.view.check({"send": "node:first.up"})
    assert not pane.view.check({"send": "node:silent"})
    heads = re.findall(r"<th[^>]*>(.*?)</th>", pane.view.html)
    assert "remarks" in heads[-1]  # takes the room that is left, so that the numbers stay together
    pane._on_message({"send": "node:first.up"})
    assert wanted == [{"node": "first.up"}]
    pane._on_message({"send": "fold:0:first"})
    assert not pane.view.check({"send": "node:first.up"})
    assert pane.view.check({"send": "node:second.up"})

"""The thermometer reads the values that plain torch computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import comgra_decl
from comgra_decl.cli.main import main
from comgra_decl.experiments.thermometer import Reading, reading, readings_of


def test_each_layer_is_read_once_in_order() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.randn(4, 3)
    hidden = net[0](x).detach()
    found: list[Reading] = []
    with reading(found, KeyboardInterrupt):
        net(x).sum().backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert [(r.node, r.module_class) for r in found] == [
        ("0", "Linear"), ("1", "ReLU"), ("2", "Linear")
    ]  # fmt: skip
    assert found[0].in_mean == pytest.approx(float(x.mean()), rel=1e-6)
    assert found[0].in_std == pytest.approx(float(x.std(correction=0)), rel=1e-6)
    assert found[1].out_std == pytest.approx(float(hidden.relu().std(correction=0)), rel=1e-6)
    assert found[2].shape == (4, 1)
    net(x)  # none of our hooks are left behind
    assert len(found) == 3


def test_a_recorded_step_gives_the_same_means(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.randn(4, 3)
    hidden = net[0](x).detach()
    spec = {"nodes": {"all": {"select": "**", "capture": ["input", "output", "parameter"]}}}
    with comgra_decl.trace(spec, root=tmp_path) as session:
        net(x).sum().backward()
        optimizer.step()
    assert session.path is not None
    found = {r.node: r for r in readings_of(comgra_decl.open_run(session.path))}
    assert found["0"].out_mean == pytest.approx(float(hidden.mean()), rel=1e-5)
    assert found["0"].in_mean == pytest.approx(float(x.mean()), rel=1e-5)
    assert found["0"].out_std == pytest.approx(float(hidden.std(correction=0)), rel=1e-5)
    assert found["0"].in_std == pytest.approx(float(x.std(correction=0)), rel=1e-5)
    assert list(found) == ["0", "1", "2", "Sequential"]  # not those with weights first
    assert main_ends(["thermometer", str(session.path), "0"]) == 0
    for odd in (["abc"], ["0", "1"], ["-3"], ["7"]):
        assert main_ends(["thermometer", str(session.path), *odd]) == 2, odd


def main_ends(arguments: list[str]) -> object:
    try:
        main(arguments)
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.parametrize("odd", [["nowhere.py"], ["--", "nowhere.py"], ["-m"], ["--"]])
def test_what_is_no_script_is_said(odd: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main_ends(["thermometer", *odd]) == 2
    assert capsys.readouterr().err.startswith("comgra-decl thermometer: ")


def test_a_run_without_steps_has_no_readings(tmp_path: Path) -> None:
    with comgra_decl.trace("debug", root=tmp_path) as session:
        pass
    assert main_ends(["thermometer", str(session.path)]) == 3

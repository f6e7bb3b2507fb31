"""A contract holds for the run it was made from and names the tensor that leaves it first."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from comgra_decl.cli.main import main
from comgra_decl.errors import ContractError, Exit
from comgra_decl.query import Run, open_run
from comgra_decl.rules.contract import breaches, contract_of, from_yaml, to_yaml
from comgra_decl.sinks.naming import SeriesName, parsed
from tests.support.fake_run import FakeRun


def recorded(path: Path, *, nonfinite_from: int | None = None, layers: int = 1) -> Run:
    fake = FakeRun(path, layers=layers, nonfinite_from=nonfinite_from, values=False)
    fake.write(30)
    fake.close()
    return open_run(path)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return recorded(tmp_path_factory.mktemp("good") / "run")


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run, but one tensor contains NaN from step 20 on."""
    return recorded(tmp_path_factory.mktemp("bad") / "run", nonfinite_from=20)


@pytest.mark.slow
def test_ranges_enclose_the_run_and_survive_the_file(good: Run) -> None:
    contract = from_yaml(to_yaml(contract_of(good, slack=0.5)), where="contract.yaml")
    assert contract.structure == good.structure_hash()
    assert len(contract.ranges) == len(good.slots)
    for tensor, ranges in contract.ranges.items():
        name = parsed(f"{tensor}/std")
        assert isinstance(name, SeriesName)
        key = name.key
        slot = good.slot(key.node, role=key.role, of=key.pass_, iteration=key.iteration)
        series = slot.series("std").dropna().to_numpy(np.float64)
        low, high = ranges["std"]
        more = 0.5 * max(np.ptp(series), 0.1 * np.abs(series).max())
        assert np.isclose(high, series.max() + more, rtol=3e-5)
        assert np.isclose(low, max(0.0, series.min() - more), rtol=1e-3, atol=1e-12)
        assert ranges["nonfinite"] == (0.0, 0.0)
    assert breaches(good, contract) == []
    assert breaches(good, from_yaml(to_yaml(contract_of(good, slack=0.0)), where="c")) == []


@pytest.mark.slow
def test_the_first_tensor_to_leave_is_named_first(good: Run, bad: Run) -> None:
    first = breaches(bad, contract_of(good))[0]
    (node,) = {node for node in bad.nodes if node.endswith("mlp.fc2")}
    assert (first.step, first.statistic) == (20, "nonfinite")
    assert first.tensor == f"{node}/output/forward"
    assert f"nonfinite of {node}/output/forward left its range at step 20" in first.message


def test_a_changed_graph_and_missing_tensors_come_first(good: Run, tmp_path: Path) -> None:
    deeper = recorded(tmp_path / "deeper", layers=2)
    contract = replace(contract_of(deeper), structure="0" * 16)
    graph, *missing = [breach for breach in breaches(good, contract) if breach.step is None]
    assert graph.message.startswith("the graph has changed")
    lost = set(deeper.nodes) - set(good.nodes)
    assert {str(breach.tensor).split("/")[0] for breach in missing} == lost != set()
    assert all("was not recorded" in breach.message for breach in missing)


def test_what_was_not_recorded_breaks_the_contract(good: Run) -> None:
    contract = contract_of(good)
    name = next(iter(contract.ranges))
    ranges = {name: {**contract.ranges[name], "update_ratio": (0.0, 1.0)}, "x/output/grad": {}}
    missing = breaches(good, replace(contract, ranges=ranges))
    assert [(each.tensor, each.statistic, each.step) for each in missing] == [
        (name, "update_ratio", None),
        ("x/output/grad", None, None),
    ]
    assert missing[0].message == f"update_ratio of {name} was not recorded"


def test_a_tensor_that_only_evaluations_recorded_breaks_the_contract(tmp_path: Path) -> None:
    import torch
    from torch import nn

    from tests.support.traced import traced

    def run_of(name: str, *, train: bool) -> Run:
        model = nn.Sequential(nn.Linear(3, 2), nn.Identity())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def training() -> None:
            model.train()
            (model if train else model[0])(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                model(torch.ones(4, 3))

        nodes = {"all": {"select": "**", "capture": ["output"]}}
        return traced(tmp_path / name, nodes, training, schedule={"first": 9, "eval": {"first": 9}})

    contract = replace(contract_of(run_of("good", train=True)), structure=None)
    run = run_of("new", train=False)
    assert "1" in run.nodes
    assert "1/output/forward was not recorded" in [each.message for each in breaches(run, contract)]


@pytest.mark.slow
def test_a_dead_unit_share_and_an_update_ratio_are_checked(tmp_path: Path) -> None:
    import torch
    from torch import nn

    from tests.support.traced import traced

    captures = ["output", "parameter", "update"]
    stats = ["mean", "std", "l2", "zero_fraction"]

    def run_of(name: str, bias: float, rate: float) -> Run:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        nn.init.constant_(model[0].bias, bias)  # type: ignore[arg-type]
        inputs = torch.randn(16, 3)

        def training() -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            for _ in range(4):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()

        nodes = {"all": {"select": "**", "capture": captures}}
        return traced(tmp_path / name, nodes, training, stats=stats)

    contract = contract_of(run_of("good", 0.0, 1e-3))
    assert {"zero_fraction", "mean", "std"} <= contract.ranges["1/output/forward"].keys()
    assert "update_ratio" in contract.ranges["2/weight/update"]
    assert breaches(run_of("same", 0.0, 1e-3), contract) == []
    dead = {(b.tensor, b.statistic) for b in breaches(run_of("dead", -50.0, 1e-3), contract)}
    assert ("1/output/forward", "zero_fraction") in dead
    fast = {(b.tensor, b.statistic) for b in breaches(run_of("fast", 0.0, 0.1), contract)}
    assert ("2/weight/update", "update_ratio") in fast


def test_the_commands_freeze_and_check(
    good: Run, bad: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("contract", good.path) == Exit.DONE
    path = tmp_path / "contract.yaml"
    path.write_text(capsys.readouterr().out)
    assert command("check", good.path, path) == Exit.DONE
    assert "keeps to the contract" in capsys.readouterr().out
    assert command("check", bad.path, path) == Exit.WANTING
    assert "left its range at step 20" in capsys.readouterr().out.splitlines()[0]
    assert command("check", bad.path, path, "--json") == Exit.WANTING
    told = json.loads(capsys.readouterr().out)
    assert (told["kept"], told["first"][0]["step"]) == (False, 20)


def command(*arguments: object) -> int:
    try:
        main([*map(str, arguments)])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("contract: 2", "not a contract of version 1"),
        ("{", "not valid YAML"),
        ("contract: 1\ntensors: 3", "`tensors` must be a mapping"),
        ("contract: 1\ntensors: {a: {std: [0, 1]}}", "must be a tensor such as"),
        ("contract: 1\ntensors: {a/b/c: {std: [0]}}", r"tensors.a/b/c.std: must be one of"),
        ("contract: 1\ntensors: {a/b/c: {sdt: [0, 1]}}", r"tensors.a/b/c.sdt: must be one of"),
        ("contract: 1\ntensors: {a/b/c: {std: [1, 0]}}", r"range \[1, 0\] is empty"),
    ],
)
def test_a_wrong_contract_is_named(change: str, message: str) -> None:
    with pytest.raises(ContractError, match=f"^here: .*{message}|{message}"):
        from_yaml(change, where="here")


def test_a_contract_is_short_enough_to_review(good: Run) -> None:
    text = to_yaml(contract_of(good))
    assert yaml.safe_load(text)["run"] == f"{good.group}/{good.name}"
    assert max(map(len, text.splitlines())) <= 110
    assert not re.search(r"!!", text)

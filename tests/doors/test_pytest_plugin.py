"""The fixture `traced` fails a test whose training is broken, and changes nothing otherwise."""

from __future__ import annotations

from itertools import chain

import pytest

from tests.support.forked import forked

pytest_plugins = ["pytester"]

PROGRAM = """
import torch
from torch import nn


def trained(bias):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    nn.init.constant_(model[0].bias, bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(24):
        inputs = torch.randn(32, 4)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), (inputs[:, 0] > 0).long()).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]
"""

TESTS = """
from pathlib import Path

import pytest
import torch
from comgra_decl.rules.contract import contract_of, to_yaml
from program import trained

CONTRACT = Path(__file__).parent / "contract.yaml"

SPEC = {
    "nodes": {"all": {"select": "**", "capture": ["output", "output_grad", "parameter"]}},
    "schedule": {"first": 1000},
}


def test_healthy(traced):
    with traced(SPEC):
        with_tracing = trained(0.0)
    traced.assert_healthy()
    assert len(traced.run.steps) == 24
    assert all(map(torch.equal, with_tracing, trained(0.0)))
    CONTRACT.write_text(to_yaml(contract_of(traced.run)))
    traced.assert_keeps("contract.yaml")


def test_dead(traced):
    with traced(SPEC):
        trained(-50.0)
    rules = {finding.rule for finding in traced.findings()}
    traced.assert_healthy(ignore=sorted(rules))
    traced.assert_healthy(ignore=iter(rules))
    with pytest.raises(ValueError, match="severity must be one of"):
        traced.assert_healthy(severity="fatal")
    with pytest.raises(KeyError, match="no rule 'dead_unts'; did you mean 'dead_units'"):
        traced.assert_healthy(ignore=["dead_unts"])
    with pytest.raises(KeyError, match="no rule 'dead_unts'"):
        traced.assert_healthy(ignore="dead_unts")
    with pytest.raises(AssertionError, match="0/bias/forward left its range at step 0"):
        traced.assert_keeps("contract.yaml")
    traced.assert_healthy()


def test_an_error_in_the_block(traced):
    with pytest.raises(ZeroDivisionError), traced(SPEC):
        trained(0.0)
        1 / 0
    assert traced.run.state == "failed"
    assert "ZeroDivisionError" in traced.run.ending.headline
    assert len(traced.run.steps) == 24


def test_forgotten(traced):
    traced.assert_healthy()


def test_nothing_recorded(traced):
    with traced({**SPEC, "schedule": {"steps": [1000]}}):
        trained(0.0)
    traced.assert_healthy()


def test_the_second_time_disabled(traced):
    with traced(SPEC):
        trained(0.0)
    with traced({**SPEC, "enabled": False}):
        trained(0.0)
    traced.assert_healthy()
"""


def test_a_dead_network_fails_with_the_rule_and_its_healthy_twin_passes(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(program=PROGRAM, test_training=TESTS)
    plugins = ["no:comgra-decl", "comgra_decl.doors.pytest_plugin", "no:cacheprovider", "no:xdist"]
    options = [*chain(*(("-p", name) for name in plugins))]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # modules imported before
    done = forked(pytester.path, "-m", "pytest", *options)
    lines = done.stdout.splitlines()
    assert pytest.RunResult.parse_summary_nouns(lines) == {"passed": 2, "failed": 4}
    broken = ("dead", "forgotten", "nothing_recorded", "the_second_time_disabled")
    for name in (f"test_{each}" for each in broken):
        assert f"FAILED test_training.py::{name}" in done.stdout
    pytest.LineMatcher(lines).fnmatch_lines(
        [
            "*dead_units at step 0*",
            "*nothing was traced*",
            "*no training step was recorded*",
            "*nothing was traced*",
        ]
    )

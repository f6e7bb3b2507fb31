"""Steps skipped by mixed precision: some are usual, many are not; their gradients do not count."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.records import GRAD_SCALE, SKIPPED_STEP
from comgra_decl.rules import diagnose
from comgra_decl.rules.precision.half import HalfUnderflow
from comgra_decl.rules.precision.nonfinite import Nonfinite
from comgra_decl.rules.precision.scale import GradientScale, ScaleParameters
from tests.rules.tape import Tape


def told(scales: dict[int, float], skipped: list[int]) -> Tape:
    tape = Tape()
    tape.numbers = [(GRAD_SCALE, "train", step, scale) for step, scale in scales.items()]
    tape.numbers += [(SKIPPED_STEP, "train", step, 1.0) for step in skipped]
    return tape


@pytest.mark.parametrize(("smallest", "found"), [(1.0, 0), (0.5, 1)])
def test_a_scale_below_one_is_an_error(smallest: float, found: int) -> None:
    tape = told({0: 4.0, 10: 2.0, 20: smallest, 30: smallest / 2**found}, [10, 20, 30])
    findings = tape.findings(GradientScale())
    assert [(f.severity, f.first_step) for f in findings] == [("error", 20)] * found
    assert [f.evidence["smallest scale"] for f in findings] == [0.25] * found


@pytest.mark.parametrize(
    ("skipped", "first"),
    [
        ([*range(30)], None),  # the scale is finding its value
        ([*range(60, 70)], None),  # ten of two hundred are allowed
        ([*range(60, 71)], 60),
        ([*range(60, 280, 20)], None),  # eleven in 201 steps
        ([*range(60, 270, 19)], 60),
        ([60, 60, *range(61, 70)], None),  # two optimizers in one step
    ],
)
def test_a_twentieth_of_the_steps_may_be_skipped(skipped: list[int], first: int | None) -> None:
    findings = told({0: 8.0}, skipped).findings(GradientScale(), window=3)
    assert [f.first_step for f in findings] == ([] if first is None else [first])


def test_without_a_scaler_there_is_nothing_to_be_said() -> None:
    rule = GradientScale(ScaleParameters())
    assert "GradScaler" in str(rule.missing(Tape().play(rule).scene))


@pytest.mark.parametrize(("skipped", "rules"), [(True, ["gradient_scale"]), (False, ["nonfinite"])])
def test_gradients_of_skipped_steps_are_of_no_concern_to_other_rules(
    skipped: bool, rules: list[str]
) -> None:
    tape = told(dict.fromkeys(range(20), 0.5), [3, 4] if skipped else [])
    out, last = tape.slot("a", (4, 2)), tape.slot("b", (4, 2))
    slopes = [tape.slot(node, (4, 2), pass_="grad") for node in ("a", "b")]
    for step in range(8):
        wild = np.full((4, 2), np.inf if step in (3, 4) else 1.0)
        tape.record({out: np.ones((4, 2)), last: np.ones((4, 2)), slopes[0]: wild, slopes[1]: wild})
    tape.skipped = {3, 4} if skipped else set()
    found = tape.play(Nonfinite(), GradientScale()).findings()
    assert [f.rule for f in found if f.because is None] == rules
    assert found[0].place is not None
    assert found[0].place.node == "b"  # backward reaches it first


class Rooted(nn.Module):
    """The root of a value that is 0 in every step, or in none: its slope is infinite."""

    def __init__(self, *, zero: bool) -> None:
        super().__init__()
        self.layer, self.zero = nn.Linear(4, 4), zero

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * (0.0 if self.zero else 1.0)).square().sqrt().mean() * 1e3


def train(steps: int, *, zero: bool) -> torch.Tensor:
    """Trains with an initial scale that is far too large."""
    torch.manual_seed(0)
    model = Rooted(zero=zero)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 if zero else 2.0**126)
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 4))).backward()
        scaler.step(optimizer)
        scaler.update()
    return model.layer.weight.detach()


@pytest.mark.parametrize(
    ("zero", "expected"), [pytest.param(False, None, marks=pytest.mark.slow), (True, 2)]
)
def test_a_training_says_its_scale_and_what_was_skipped(
    tmp_path: Path, zero: bool, expected: int | None
) -> None:
    overrides = ["schedule.first=12", "rules={gradient_scale: {}, nonfinite: {}}"]
    with comgra.trace("debug", root=tmp_path, overrides=overrides) as session:
        weight = train(30, zero=zero)
    assert torch.equal(weight, train(30, zero=zero))
    run = comgra.open_run(session.path)  # type: ignore[arg-type]
    kpis = run.kpis()
    scales = kpis[kpis["name"] == GRAD_SCALE].set_index("step")["value"]
    skipped = kpis[kpis["name"] == SKIPPED_STEP]["step"].tolist()
    first = 2.0 if zero else 2.0**126
    # every recorded step logs its scale, and so does every skipped one
    assert scales.index.tolist() == sorted({*run.steps.tolist(), *skipped})
    assert scales[skipped].tolist() == [first / 2**k for k in range(len(skipped))]
    assert skipped[:30] == [*range(30)] if zero else skipped[:5] == [*range(5)]
    assert zero or len(skipped) < 15
    found = diagnose(run)
    scale = [f for f in found.findings if f.rule == "gradient_scale"]
    assert [f.first_step for f in scale] == ([] if expected is None else [expected])
    assert [f.rule for f in found.findings if f.rule == "nonfinite"] == []
    live = run.document("findings")["findings"]
    assert live == json.loads(json.dumps([f.to_json() for f in found.findings]))


def test_a_step_that_is_skipped_is_not_kept_for_it(tmp_path: Path) -> None:
    overrides = ["schedule.first=1", "keep={ring: 2, when: [nonfinite]}"]
    with comgra.trace("debug", root=tmp_path, overrides=overrides) as session:
        train(20, zero=False)
    run = comgra.open_run(session.path)  # type: ignore[arg-type]
    assert (run.kpis()["name"] == SKIPPED_STEP).sum() > 3
    assert run.records["kept"].notna().sum() == 0


@pytest.mark.parametrize(("passed", "found"), [(3, 0), (8, 1)])
def test_a_gradient_is_zero_where_a_rectifier_lets_nothing_through(passed: int, found: int) -> None:
    """Three of eight gradients are nonzero: underflow, unless as many values were let through."""
    tape, half = Tape(), np.arange(8) < 3
    layer = tape.slot("layer", (4, 8), dtype="float16")
    act = tape.slot("act", (4, 8), class_="ReLU", dtype="float16")
    slope = tape.slot("layer", (4, 8), pass_="grad", dtype="float16")
    same = tape.slot("norm", (4, 8), class_="Identity", dtype="float16")
    tape.graph([(layer, same), (same, act)])
    for _ in range(6):
        through = np.ones((4, 1)) * (np.arange(8) < passed)
        ones = np.ones((4, 8))
        tape.record({layer: ones, same: ones, act: through, slope: ones * half})
    assert len(tape.findings(HalfUnderflow())) == found

"""The short form of `make neutrality`, and that it detects what it is meant to detect."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from benchmarks.neutrality import zoo
from benchmarks.neutrality.program import Program, usual
from benchmarks.neutrality.trial import Verdict, try_program
from comgra_decl.doors import environment
from tests.support.shortened import shortened

SHORT = """
torch/mlp torch/embedding-sparse torch/lstm-packed torch/encoder-padded torch/lbfgs torch/hooked
torch/intervened torch/pictured-images
""".split()
LONG = """
torch/attention-weights torch/checkpointed torch/vmapped-ensemble torch/adversarial
torch/adamw-fused torch/replayable
torch/instance-norm torch/encoder-frozen torch/mixture-routed torch/gradient-penalty
torch/scripted-part torch/pictured-words examples/tutorial transformers/bert transformers/llama
""".split()

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.mark.parametrize("name", shortened([*SHORT, *LONG], tried=len(SHORT)))
def test_training_is_the_same_to_the_last_bit(name: str, tmp_path: Path) -> None:
    if not zoo.installed(name.partition("/")[0]):
        pytest.skip("the library is not installed")
    verdict = try_program(name, zoo.builder(name), tmp_path)
    assert verdict.error == ""
    assert verdict.differences == []
    assert (verdict.faults, verdict.missing, verdict.wrong) == ([], [], [])
    assert verdict.sound
    assert verdict.compared > 50
    assert verdict.called > 0
    if name == "torch/intervened":
        (run,) = comgra.open_group(tmp_path / "zoo")
        assert run.interventions == ["zero", "swept", "guess", "weights"]
    if name.startswith("torch/pictured"):
        (run,) = comgra.open_group(tmp_path / "zoo")
        assert {*run.spec.pictures} <= {*run.pictures}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def loss(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(torch.randn(5, 3)), torch.randint(2, (5,)))


def tried(disturb: Callable[[Program], Any], folder: Path, *, after: int = 4) -> Verdict:
    """Tests a program that is disturbed in one step, but only in the traced run."""

    def build() -> Program:
        program = usual(net(), loss)
        plain = program.step

        def step(number: int) -> Tensor:
            value = plain(number)
            if number == after and environment.is_recording():
                disturb(program)
            return value

        program.step = step
        return program

    return try_program("disturbed", build, folder)


def test_an_undisturbed_program_is_equal(tmp_path: Path) -> None:
    seen: list[Program] = []
    assert tried(seen.append, tmp_path).sound
    assert len(seen) == 2, "the disturbance would not have come"


def test_time_and_memory_are_measured_in_a_training_of_their_own(tmp_path: Path) -> None:
    assert tried(lambda _: None, tmp_path).sound
    (run,) = comgra.open_group(tmp_path / "around")
    assert [*run.profile(by="step").index] == [4, 5]
    assert [*run.memory(by="step").index] == [6, 7]
    assert run.module_times().attrs["steps"] >= 1
    assert {"time/forward", "memory/host"} <= set(run.kpis(automatic=True)["name"])
    passes = itertools.count()
    verdict = tried(lambda program: _nudge(program) if next(passes) else None, tmp_path / "again")
    assert verdict.status == "different"
    assert verdict.differences[0] == "time and memory: step 4: parameter:0.0.weight"


def _nudge(program: Program) -> None:
    with torch.no_grad():
        weight = program.models[0].get_parameter("0.weight")
        weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(9.0))


def _hook(program: Program) -> None:
    program.models[0].register_forward_hook(lambda *_: None)


def _hook_parameter(program: Program) -> None:
    program.models[0].get_parameter("0.weight").register_hook(lambda g: g)


def _freeze(program: Program) -> None:
    program.models[0].get_parameter("0.bias").requires_grad_(False)


def _mark(program: Program) -> None:
    program.models[0].get_parameter("0.bias").comgra = 1  # type: ignore[attr-defined]


DISTURBANCES: dict[str, tuple[Callable[[Program], Any], str]] = {
    "one bit of a parameter": (_nudge, "step 4: parameter:0.0.weight"),
    "a draw from Python's generator": (lambda _: random.random(), "generator:python"),
    "a draw from torch's generator": (lambda _: torch.rand(1), "generator:torch"),
    "a hook on a module": (_hook, "hooks:0. (module)"),
    "a hook on a parameter": (_hook_parameter, "hooks:0.0.weight"),
    "a frozen parameter": (_freeze, "flags:0.0.bias"),
    "an attribute": (_mark, "attributes:0.0.bias"),
    "a switch to evaluation": (lambda p: p.models[0].eval(), "mode:0."),
    "an optimizer's option": (
        lambda p: p.optimizers[0].param_groups[0].update(lr=1.0),
        "optimizer:0.param_groups[0].lr",
    ),
}


@pytest.mark.parametrize("name", shortened(DISTURBANCES, tried=2))
def test_the_comparison_sees(name: str, tmp_path: Path) -> None:
    disturb, expected = DISTURBANCES[name]
    verdict = tried(disturb, tmp_path, after=9 if name == "a switch to evaluation" else 4)
    assert not verdict.sound
    assert verdict.status == "different"
    assert any(line.startswith(expected) for line in verdict.differences), verdict.differences


def test_a_replaced_function_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(_: Program) -> None:
        monkeypatch.setattr(F, "gelu", lambda *_, **__: None)

    verdict = tried(replace, tmp_path)
    assert "replaced: torch.nn.functional.gelu" in verdict.differences


def test_a_training_that_differs_from_itself_proves_nothing(tmp_path: Path) -> None:
    count = iter(range(1_000_000))

    def build() -> Program:
        return usual(net(), lambda model: loss(model) * (1 + next(count)))

    assert try_program("counting", build, tmp_path).status == "irreproducible"


def test_a_program_that_fails_is_a_verdict(tmp_path: Path) -> None:
    def build() -> Program:
        return usual(net(), lambda model: model(torch.randn(5, 7)).sum())

    verdict = try_program("failing", build, tmp_path)
    assert verdict.status == "broken"
    assert "mat1 and mat2" in verdict.error
    assert comgra.__version__

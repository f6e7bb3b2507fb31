"""The times of modules without a profiler, and that measuring them changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from comgra_decl.cli.main import main
from comgra_decl.errors import UnknownNameError
from comgra_decl.hooks.measuring.measured import Surroundings
from comgra_decl.hooks.measuring.module_times import ModuleTimes
from comgra_decl.hooks.scalars import automatic
from comgra_decl.query.measured import times_table
from tests.record.test_around import HEALTHY, traced
from tests.record.test_profile import program
from tests.support.shortened import shortened
from tests.support.uncompiled import uncompiled as uncompiled  # applies to all tests here

SPARSE = {"schedule": {"first": 1, "every": 5}}


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times the modules in every step that is not recorded."""
    monkeypatch.setattr(automatic, "FIRST_MODULES", 0.0)
    monkeypatch.setattr(automatic, "MODULES_INTERVAL", 0.0)


class Clock:
    """A clock that stands still unless a module works."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Work(nn.Module):
    """Takes some seconds, then calls other modules."""

    def __init__(self, clock: Clock, seconds: float, *inner: nn.Module) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.inner = nn.ModuleList(inner)
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.seconds
        for part in self.inner:
            x = part(x)
        return x * self.weight


def told(clock: Clock, steps: list[Callable[[], Any]]) -> list[Any]:
    """Returns the documents that are passed on if these steps are timed."""
    documents: list[Any] = []
    place = SimpleNamespace(naming=lambda _: None)
    around = Surroundings(
        lambda _, content: documents.append(content), documents.append, lambda: cast(Any, place)
    )

    def fail(error: BaseException) -> None:
        raise error

    times = ModuleTimes(around, on_fault=fail, clock=clock)
    for step in steps:
        times.begin()
        step()
        times.end(keep=True)
    times.finish()
    return documents


def test_times_include_and_exclude_the_modules_within() -> None:
    clock = Clock()
    shared = Work(clock, 2.0)
    model = Work(clock, 1.0, shared, Work(clock, 4.0, shared))
    (content,) = told(clock, [lambda: model(torch.ones(2))])
    table = times_table(content) / 1000
    assert (table["forward_ms"].to_list(), table["forward_self_ms"].to_list()) == (
        [9.0, 6.0, 4.0], [1.0, 4.0, 4.0],
    )  # fmt: skip
    assert (table["calls"] * 1000).to_list() == [1, 1, 2]
    assert (table["share"] * 1000).to_list() == pytest.approx([1, 6 / 9, 4 / 9])


def test_calls_without_gradients_and_repeated_ones_do_not_count() -> None:
    clock = Clock()
    model = Work(clock, 1.0)

    def step() -> None:
        with torch.no_grad():
            model(torch.ones(2))
        x = torch.ones(2, requires_grad=True)
        cast(Tensor, checkpoint(model, x, use_reentrant=False)).sum().backward()

    (content,) = told(clock, [step])
    assert content["rows"][0]["calls"] == 1


def test_a_call_that_fails_leaves_no_trace_in_the_others() -> None:
    clock = Clock()

    class Failing(Work):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise ArithmeticError

    class Careful(Work):
        def forward(self, x: Tensor) -> Tensor:
            with pytest.raises(ArithmeticError):
                self.inner[0](x)
            out: Tensor = self.inner[1](x)
            return out

    model = Careful(clock, 0.0, Failing(clock, 2.0), Work(clock, 3.0))
    (content,) = told(clock, [lambda: model(torch.ones(2))])
    assert [row["self"] for row in content["rows"]] == [2.0, 3.0, 0.0]
    assert [row["time"] for row in content["rows"]] == [2.0, 3.0, 5.0]


def test_documents_become_rarer() -> None:
    clock = Clock()
    model = Work(clock, 1.0)
    documents = told(clock, [lambda: model(torch.ones(2))] * 11)
    assert [document["steps"] for document in documents] == [1, 2, 4, 8, 11]


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(
    "program", shortened(HEALTHY, tried=4), ids=lambda program: program.__name__
)
def test_timed_programs_train_bit_equal(program: Callable[[], list[float]], tmp_path: Path) -> None:
    plain, state = program(), torch.get_rng_state()
    losses: list[float] = []
    run = traced(tmp_path, lambda: losses.extend(program()), **SPARSE)
    assert losses == plain
    assert torch.equal(torch.get_rng_state(), state)
    table = run.module_times()
    assert (table["forward_ms"] >= table["forward_self_ms"]).all()
    assert table["share"].iloc[0] == pytest.approx(1.0)


@pytest.mark.usefixtures("often")
def test_every_module_is_timed_outside_the_recorded_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, bool]] = []
    run = traced(tmp_path, lambda: program(seen=seen), **SPARSE)
    table = run.module_times()
    assert set(table.index) == {"Net", "first", "block", "block.twice", "block.kept", "head"}
    assert table.loc["block.twice", "calls"] == 2
    assert table.attrs["steps"] == 10 - len(run.steps)
    hooks = [len(nn.modules.module._global_forward_hooks), *(number for number, _ in seen)]
    assert hooks[0] == min(hooks), "nothing is left in the program"
    with pytest.raises(SystemExit):
        main(["profile", str(run.path), "--json"])
    rows = json.loads(capsys.readouterr().out)["modules"]
    assert {row["node"]: row["forward_ms"] for row in rows} == pytest.approx(
        table["forward_ms"].to_dict(), rel=1e-3
    )
    with pytest.raises(SystemExit):
        main(["profile", str(run.path)])
    assert "without a profiler" in capsys.readouterr().out


def test_one_key_switches_it_off(tmp_path: Path) -> None:
    run = traced(tmp_path, program, **SPARSE, kpis={"automatic": False})
    with pytest.raises(UnknownNameError, match="no times of modules"):
        run.module_times()

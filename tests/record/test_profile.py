"""The profiled steps of a program: what is measured, for whom, and at what cost for training."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from comgra_decl.cli.main import main
from comgra_decl.errors import SpecError, UnknownNameError
from comgra_decl.hooks.measuring import profiling
from comgra_decl.hooks.measuring.measured import Measured, Measurement, Surroundings
from comgra_decl.query import Run
from comgra_decl.records import PROGRAM
from comgra_decl.spec import load_spec
from comgra_decl.torch_private import profiler_enabled
from tests.record.test_around import AROUND, HEALTHY, traced
from tests.support.shortened import shortened
from tests.support.uncompiled import uncompiled as uncompiled  # applies to all tests here

FIRST, LAST = 4, 6
PROFILE = {"profile": {"steps": [FIRST, LAST]}, "schedule": {"first": 100}}
BATCH, WIDTH = 32, 64


class Block(nn.Module):
    """Calls one layer twice and another one through a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.kept = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(torch.relu(self.twice(x)))
        out: Tensor = checkpoint(self.kept, x, use_reentrant=False)
        return out


class Net(nn.Module):
    """A model with a nested block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.first(x)))
        return out


def program(steps: int = 10, seen: list[tuple[int, bool]] | None = None) -> list[float]:
    torch.manual_seed(0)
    model, losses = Net(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        if seen is not None:
            hooks = len(nn.modules.module._global_forward_hooks)
            seen.append((hooks, profiler_enabled()))
        optimizer.zero_grad()
        loss = model(torch.randn(BATCH, 16)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


SEEN: list[tuple[int, bool]] = []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    SEEN.clear()
    return traced(tmp_path_factory.mktemp("profile"), lambda: program(seen=SEEN), **PROFILE)


@pytest.mark.slow
def test_only_the_profiled_steps_are_attached_to_and_none_of_them_is_recorded(run: Run) -> None:
    assert [profiled for _, profiled in SEEN] == [FIRST <= step <= LAST for step in range(10)]
    assert [*run.steps] == [0, 1, 2, 3, 7, 8, 9]
    assert [*run.profile(by="step").index] == [4, 5, 6]


def test_calls_operations_and_bytes_are_those_of_the_program(run: Run) -> None:
    table = run.profile()
    assert table.index.names == ["node", "pass"]
    forward = table.xs("forward", level="pass")
    assert forward["calls"].to_dict() == {
        "Net": 1.0, "first": 1.0, "block": 1.0, "block.twice": 2.0, "block.kept": 1.0, "head": 1.0,
        PROGRAM: 0.0,
    }  # fmt: skip
    hidden = BATCH * WIDTH * 4
    assert [*forward.loc["first", ["operations", "bytes"]]] == [1, hidden]
    assert [*forward.loc["block.twice", ["operations", "bytes"]]] == [2, 2 * hidden]
    assert forward.loc["head", "bytes"] == BATCH * 4
    assert table.loc[(PROGRAM, "forward"), "operations"] == 2  # square and mean
    assert table.loc[("block.kept", "backward"), "calls"] == 1.0  # the recomputation
    assert set(table.xs("backward", level="pass").index) == {*forward.index}
    assert (table.drop(columns="share")["device_ms"] == 0).all()


def test_times_without_children_and_phases_add_up_to_the_whole_step(run: Run) -> None:
    table, steps = run.profile(), run.profile(by="step")
    assert table["host_self_ms"].sum() == pytest.approx(steps["total"].mean(), rel=1e-6)
    phases = steps[["data", "forward", "backward", "optimizer", "other"]]
    assert phases.sum(axis=1).to_numpy() == pytest.approx(steps["total"].to_numpy(), rel=1e-6)
    assert (phases > 0).all(axis=None)
    for pass_ in ("forward", "backward"):
        part = table.xs(pass_, level="pass")
        inner = part.loc[["block.twice", "block.kept"], "host_ms"].sum()
        block = part.loc["block"]
        assert block["host_ms"] == pytest.approx(block["host_self_ms"] + inner, rel=1e-6)
        whole = steps[pass_].mean()
        assert part["host_self_ms"].sum() == pytest.approx(whole, rel=1e-6)
    assert table["share"].is_monotonic_decreasing
    assert table["share"].max() <= 1


def test_the_time_line_names_nodes_and_lies_within_the_steps(run: Run) -> None:
    line = run.document("timeline")
    assert {*line["nodes"]} == {"Net", "first", "block", "block.twice", "block.kept", "head"}
    assert "aten::addmm" in line["names"]
    start, duration = np.array(line["start"]), np.array(line["duration"])
    content = run.document("profile")["steps"]
    assert start.min() >= 0
    ends = 1e6 * (content[-1]["time"] - line["began"]) + content[-1]["total"]
    assert (start + duration).max() <= ends + 1000  # two clocks
    assert line["dropped"] == 0
    assert run.damage == []


def test_numbers_read_on_the_cpu_are_no_waits_for_a_device(run: Run) -> None:
    assert "aten::_local_scalar_dense" in run.document("timeline")["names"]  # loss.item()
    assert run.document("profile")["waits"] == []


def test_ranges_of_the_program_are_neither_operations_nor_events(tmp_path: Path) -> None:
    def ranged() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            with torch.profiler.record_function("mine::forward"):
                loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step()

    run = traced(tmp_path, ranged, **PROFILE)
    assert "mine::forward" not in run.document("timeline")["names"]
    assert run.profile().loc[("Linear", "forward"), "operations"] == 1
    assert run.profile().loc[(PROGRAM, "forward"), "operations"] == 2  # square and mean


def test_an_unknown_kind_of_table_is_refused(run: Run) -> None:
    expected = r"^by must be 'node' or 'step', got 'steps'; did you mean 'step'\?$"
    with pytest.raises(UnknownNameError, match=expected):
        run.profile(by="steps")
    with pytest.raises(UnknownNameError, match=r"^by must be 'node' or 'step', got \['step'\]$"):
        run.profile(by=["step"])  # type: ignore[arg-type]


def test_a_profile_that_cannot_be_read_ends_only_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no such event")

    monkeypatch.setattr(profiling, "attribute", fail)
    plain, losses = program(), []
    run = traced(tmp_path, lambda: losses.extend(program()), **PROFILE, memory={"steps": [5, 8]})
    assert losses == plain
    assert run.document("profile") is None
    assert run.document("memory")["steps"] == [5, 6, 7, 8]
    assert [*run.steps] == [0, 1, 2, 3, 9]
    assert not profiler_enabled()
    (warning,) = run.report["warnings"]
    assert warning == (
        "profile: steps 4 to 6 are not measured, because of an error in comgra_decl itself "
        "(ValueError: no such event)"
    )


def test_the_command_prints_both_tables(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["profile", str(run.path), *arguments])
        assert ended.value.code == 0
        return capsys.readouterr().out

    text = printed()
    assert "block.twice" in text
    assert "optimizer" in text
    assert "more rows; print them with --rows" in printed("--rows", "3")
    content = json.loads(printed("--json"))
    assert {row["pass"] for row in content["nodes"]} >= {"forward", "backward", "optimizer"}
    assert [row["step"] for row in content["steps"]] == [4, 5, 6]


def test_a_run_without_a_profile_says_how_to_create_one(tmp_path: Path) -> None:
    run = traced(tmp_path, lambda: program(2))
    with pytest.raises(UnknownNameError, match=r"profile: \{steps: \[10, 13\]\}"):
        run.profile()


@pytest.mark.parametrize(
    "program", shortened(HEALTHY, tried=4), ids=lambda program: program.__name__
)
def test_profiled_programs_train_bit_equal_and_get_no_finding_about_time(
    program: Callable[[], list[float]], tmp_path: Path
) -> None:
    plain, state = program(), torch.get_rng_state()
    losses: list[float] = []
    run = traced(tmp_path, lambda: losses.extend(program()), **PROFILE)
    assert losses == plain
    assert torch.equal(torch.get_rng_state(), state)
    assert AROUND.isdisjoint(run.findings()["rule"])
    table, steps = run.profile(), run.profile(by="step")
    assert len(steps) == LAST - FIRST + 1
    assert table["host_self_ms"].sum() == pytest.approx(steps["total"].mean(), rel=1e-6)
    assert {"forward", "backward", "optimizer"} <= {*table.index.get_level_values("pass")}


def test_a_program_that_profiles_itself_is_left_alone(tmp_path: Path) -> None:
    counts = []

    def profiled() -> None:
        with torch.profiler.profile() as profiler:
            program()
        counts.append(len(profiler.key_averages()))

    run = traced(tmp_path, profiled, **PROFILE)
    assert counts[0] > 10
    assert any("the program runs a profiler itself" in each for each in run.report["warnings"])
    assert run.document("profile") is None
    assert len(run.steps) == 9  # only the step at which that was noticed is missing


def test_a_profiler_that_the_program_starts_later_replaces_ours(tmp_path: Path) -> None:
    events: list[str] = []

    def profiled() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        profiler = torch.profiler.profile()
        for step in range(8):
            with profiler if step == FIRST + 1 else nullcontext():
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
        events.extend(event.key for event in profiler.key_averages())

    run = traced(tmp_path, profiled, **PROFILE)
    assert "aten::linear" in events
    assert not any(name.startswith("comgra:") for name in events)
    assert any(
        "the program started a profiler in step 5" in each for each in run.report["warnings"]
    )
    assert run.document("profile") is None


def test_a_program_that_ends_early_is_profiled_up_to_its_last_whole_step(tmp_path: Path) -> None:
    run = traced(tmp_path, lambda: program(FIRST + 2), **PROFILE)
    assert [*run.profile(by="step").index] == [FIRST, FIRST + 1]
    assert not profiler_enabled()


@pytest.mark.parametrize("steps", [[3], [5, 4], [0, 64], [-1, 2], "x", True])
def test_steps_must_be_a_pair(steps: Any) -> None:
    with pytest.raises(SpecError, match=r"profile\.steps"):
        load_spec({"profile": {"steps": steps}})


def test_one_step_may_be_named_by_its_number() -> None:
    spec = load_spec({"profile": {"steps": 7}})
    assert spec.profile is not None
    assert spec.profile.steps == [7, 7]


def test_the_evaluation_of_a_measurement_is_not_taken_for_a_stalled_step() -> None:
    around = Surroundings(lambda *_: None, lambda _: None, lambda: cast(Any, None))

    class Slow(Measurement):
        running = False

        def begin(self, step: int) -> None:
            self.running = True

        def end(self, step: int) -> None:
            self.finish()

        def finish(self) -> None:
            self._stop()
            seen.append(measured.working)  # while it evaluates

        def _stop(self) -> None:
            self.running = False

    seen: list[bool] = []
    measured = Measured([Slow((1, 1), around)])
    measured.begin(1)
    seen.append(measured.working)
    measured.end(1)
    assert [*seen, measured.working] == [True, True, False]

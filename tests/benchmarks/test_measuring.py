"""The benchmark's bookkeeping: what is counted, paired and compared. No times are asserted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import against, around
from benchmarks.machine import machine_facts
from benchmarks.nets import SCENARIOS, Training, build_mlp
from benchmarks.results import ScenarioResult, recording_cost, summarise
from benchmarks.run import measure, selected
from benchmarks.sizes import Size, probe
from benchmarks.targets import verdicts
from benchmarks.timing import Block, Meter, Plan, interleave, plan_for
from benchmarks.tools import Step, Tool
from benchmarks.tools.nothing import Nothing
from docs import cost

PLAIN = Nothing("nothing", "nothing attached")


class Diary(Tool):
    """Writes 100 bytes when attached and 10 per step.

    `bend` changes the training run; `lazy` skips half of the steps.
    """

    name, label, most_records = "diary", "a diary", 6

    def __init__(self, *, bend: bool = False, lazy: bool = False) -> None:
        self.bend, self.lazy = bend, lazy
        self.steps: list[int] = []
        self.folders: list[Path] = []

    @contextmanager
    def attach(self, training: Training, folder: Path) -> Iterator[Step]:
        self.folders.append(folder)
        self.steps.append(0)

        def step():  # type: ignore[no-untyped-def]
            self.steps[-1] += 1
            if self.bend:
                next(training.model.parameters()).data.mul_(1.001)
            return training.step()

        yield step
        (folder / "diary").write_bytes(b"x" * (100 + 10 * self.steps[-1]))

    def records(self, folder: Path) -> int:
        return ((folder / "diary").stat().st_size - 100) // (20 if self.lazy else 10)


@pytest.fixture
def meter(tmp_path: Path) -> Meter:
    return Meter(build_mlp(), tmp_path)


def block(step: float, *, stored: float | None = None, losses: tuple[float, ...] = (1.0,)) -> Block:
    kept = step if stored is None else stored
    seen = np.array(losses, dtype=np.float32)
    return Block(step, kept, step, 0.0, 0.0, step, 0.0, seen)


def test_a_reset_training_repeats_itself_bit_for_bit() -> None:
    for scenario in SCENARIOS[:2]:
        training = scenario.build()
        first = [training.step().item() for _ in range(5)]
        training.reset()
        assert [training.step().item() for _ in range(5)] == first
        assert len(set(first)) == 5


def test_a_block_runs_warmup_and_measured_steps_and_removes_its_folder(meter: Meter) -> None:
    diary = Diary()
    result = meter.block(diary, Plan(warmup=3, steps=4))
    assert diary.steps == [7]
    assert len(result.losses) == 7
    assert not diary.folders[0].exists()
    assert 0 < result.step <= result.stored


def test_a_tool_that_did_not_record_what_it_should_is_no_measurement(meter: Meter) -> None:
    for measured in (lambda t: meter.block(t, Plan(2, 2)), lambda t: probe(t, meter, records=4)):
        with pytest.raises(RuntimeError, match=r"a diary: expected . records, got ."):
            measured(Diary(lazy=True))


def test_every_tool_has_one_block_per_round_in_changing_order(meter: Meter) -> None:
    tools = [PLAIN, *(Nothing(f"n{i}", "") for i in range(3))]
    plans = {tool.name: Plan(1, 1) for tool in tools}
    order: list[str] = []
    run = meter.block
    meter.block = lambda tool, plan: (order.append(tool.name), run(tool, plan))[1]  # type: ignore[method-assign, func-returns-value]
    blocks = interleave(meter, plans, tools=tools, rounds=4)
    rounds = [tuple(order[i : i + 4]) for i in range(0, 16, 4)]
    assert all(set(names) == plans.keys() for names in rounds)
    assert len(set(rounds)) > 1
    assert {name: len(found) for name, found in blocks.items()} == dict.fromkeys(plans, 4)


def test_bytes_per_step_leave_the_fixed_part_out(meter: Meter) -> None:
    size = probe(Diary(), meter, records=4)
    assert (size.per_step, size.fixed) == (10.0, 100.0)


def test_a_tool_that_changes_the_training_is_found_out(meter: Meter) -> None:
    plan = Plan(1, 3)
    plain = meter.block(PLAIN, plan)
    for bend in (False, True):
        bent = meter.block(Diary(bend=bend), plan)
        summary = summarise("", [bent], [plain], size=Size(0.0))
        assert summary.same_losses is not bend


def test_a_ratio_is_the_median_of_the_rounds_with_their_quartiles() -> None:
    tool, plain = [2.0, 9.0, 4.0, 6.0, 5.0], [1.0, 3.0, 4.0, 2.0, 2.5]
    summary = summarise("", [block(t) for t in tool], [block(p) for p in plain], size=Size(0.0))
    ratio = summary.ratios["step"]
    by_round = sorted(t / p for t, p in zip(tool, plain, strict=True))
    assert (ratio.low, ratio.value, ratio.high) == tuple(by_round[1:4])


def test_blocks_are_planned_by_time_within_limits() -> None:
    assert plan_for(PLAIN, step_seconds=0.01, block_seconds=1.0) == Plan(warmup=10, steps=100)
    assert plan_for(PLAIN, step_seconds=9.0, block_seconds=1.0).steps == 2
    assert plan_for(PLAIN, step_seconds=1e-9, block_seconds=1.0).steps == 5000


def result_of(**stored: float) -> ScenarioResult:
    plain = [block(1.0)]
    tools = {
        name: summarise(name, [block(1.0, stored=s)], plain, size=Size(0.0, per_step=s))
        for name, s in {"nothing": 1.0, **stored}.items()
    }
    return ScenarioResult("mlp", "", 1, 1, tools, {})


@pytest.mark.parametrize(("ours", "met"), [(1.4, True), (1.6, False)])
def test_the_cost_of_recording_is_compared_without_the_training_itself(
    ours: float, met: bool
) -> None:
    result = result_of(like=ours, comgra=11.0)
    assert recording_cost(result.tools, "like") == pytest.approx(ours - 1.0)
    (verdict,) = [v for v in verdicts({"mlp": result}) if "costs 20 times less" in v.target]
    assert verdict.met is met


def test_a_cost_below_the_noise_is_not_called_a_success() -> None:
    result = result_of(like=0.99, comgra=11.0)
    (verdict,) = [v for v in verdicts({"mlp": result}) if "costs 20 times less" in v.target]
    assert verdict.met is None


def test_a_target_without_its_tools_is_not_run_rather_than_met() -> None:
    assert {v.met for v in verdicts({"mlp": result_of()})} == {None}


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match="'mpl' is none of: tutorial, mlp"):
        selected(["mpl"], None)


def test_a_scenario_is_measured_from_probe_to_summary(tmp_path: Path) -> None:
    scenario = replace(SCENARIOS[1], block_seconds=0.02, records=3)
    result = measure(scenario, [PLAIN, Diary()], root=tmp_path, rounds=2)
    assert result.tools["diary"].size.per_step == 10.0
    assert all(summary.same_losses for summary in result.tools.values())
    assert list(tmp_path.iterdir()) == []


def test_ratios_to_an_older_checkout_are_those_of_adjacent_blocks() -> None:
    pairs = [(1.0, 2.0), (10.0, 10.0), (1.0, 3.0)]  # a machine that was slower for a while
    blocks = [({"step": a, "cpu": 2 * a}, {"step": b, "cpu": 2 * b}) for a, b in pairs]
    found = against.compared("mlp", "debug", blocks)
    assert found.steps == (1.0, 3.0)
    assert (found.step.value, found.step.low, found.step.high) == (2.0, 1.5, 2.5)
    assert found.cpu == found.step
    lines = against.to_markdown([found], rounds=3).splitlines()
    assert lines[-1].split("|")[1:6] == [
        " mlp ",
        " debug ",
        " 1000.000 ",
        " 3000.000 ",
        " 2.000 (1.500 to 2.500) ",
    ]


def test_a_comparison_is_stored_for_the_page_on_cost(tmp_path: Path) -> None:
    found = against.compared("mlp", "debug", [({"step": 1.0, "cpu": 1.0}, {"step": 2.0, "cpu": 3})])
    facts = machine_facts()
    path = against.save(tmp_path, [found], rounds=1, older=tmp_path, machine=facts)
    assert against.to_markdown([found], rounds=1) in path.read_text()
    document = json.loads(path.with_suffix(".json").read_text())
    (one,) = document["comparisons"]
    assert (one["tool"], one["steps"], one["cpu"]["value"]) == ("debug", [1.0, 2.0], 3.0)
    assert (document["rounds"], document["machine"]["cores"]) == (1, facts["cores"])
    assert document["older"] == ""  # not a git checkout


@pytest.mark.slow
def test_a_checkout_is_compared_with_another_in_processes_of_their_own(tmp_path: Path) -> None:
    scenarios, tools = selected(["mlp"], ["record"])
    short = [replace(scenario, block_seconds=0.01) for scenario in scenarios]
    (tmp_path / "comgra_decl").symlink_to(against.ROOT / "comgra_decl")
    found = against.compare(tmp_path, short, tools, rounds=2)
    assert [comparison.tool for comparison in found] == ["nothing", "record"]
    assert all(seconds > 0 for comparison in found for seconds in comparison.steps)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is not a checkout"):
        against.Checkout(tmp_path, tmp_path)


@pytest.mark.slow
def test_the_price_of_what_is_around_the_network_is_stored_for_the_page(tmp_path: Path) -> None:
    options = ["--nets", "mlp", "--rounds", "2", "--seconds", "0.02", "--save", str(tmp_path)]
    assert around.main(options) == 0
    (file,) = tmp_path.glob("around-*.json")
    found = json.loads(file.read_text())
    assert [price["tool"] for price in found["prices"]] == [
        "again", "bare", "automatic", "memory", "profile",
    ]  # fmt: skip
    assert {*found["post_mortem"]} == {"mlp"}
    section = cost.page(cost.newest(), cost.newest_comparison(), {}, {}, found)
    assert "| a step that is profiled | mlp |" in section

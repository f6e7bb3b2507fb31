"""`python -m benchmarks --device cuda`, run on the CPU: all of its code except CUDA itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.device import checks, kernels, recording, run, timing
from benchmarks.device.checks import Peaks
from benchmarks.device.nets import TINY, gpt, mlp
from benchmarks.device.places import Cuda, Processor
from benchmarks.device.recording import DEBUG, IDLE, RECORD, Declared, recorded, reduced
from benchmarks.device.timing import (
    Deadline,
    OutOfTimeError,
    Times,
    interleaved,
    within_one,
)
from benchmarks.nets import Training
from benchmarks.targets import Verdict
from comgra_decl.records import Raw, RawStep
from tests.support.forked import forked

PLACE = Processor()
MIB = 1 << 20


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "BACKEND", "aot_eager")
    monkeypatch.setattr(timing, "_MOST_ROUNDS", 1)
    monkeypatch.setattr(timing, "_LEAST_ROUNDS", 1)


def verdicts_of(folder: Path) -> dict[str, dict[str, Any]]:
    (file,) = folder.glob("device-*.json")
    return {line["target"]: line for line in json.loads(file.read_text())["targets"]}


@pytest.mark.slow
@pytest.mark.parametrize("store", [True, False], ids=["into a store", "without a store"])
def test_every_line_of_the_table_is_measured(
    store: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without = [] if store else ["--without-store"]
    main(["--device", "cpu", "--smoke", "--save", str(tmp_path), *without])
    verdicts = verdicts_of(tmp_path)
    assert not [line for line in verdicts.values() if line["measured"] is None]
    assert not [line for line in verdicts.values() if line["measured"].startswith("failed")]
    assert {name: line["met"] for name, line in verdicts.items() if ":" in name[:8]} == {
        "neutral: training bit for bit the same, float32": True,
        "neutral: training bit for bit the same, mixed precision": True,
        "true: raw sums equal those of float64": True,
        "memory: GPT-2 124M, record: +2% or 64 MB": None,
        "memory: GPT-2 124M, light: +2% or 64 MB": None,
        "memory: GPT-2 124M, debug: +2% or 64 MB": None,
        "memory: 1e9 elements, 16 million samples: +2% or 64 MB": None,
    }
    printed = capsys.readouterr().out
    assert all(f"| {name} " in printed for name in verdicts)
    assert ("drops them" in printed) is not store
    (page,) = tmp_path.glob("device-*.md")
    assert page.read_text() in printed


def test_the_lines_of_the_parts_that_run_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--device", "cpu", "--smoke", "--save", str(tmp_path), "--parts", "true", "mlp"])
    verdicts = verdicts_of(tmp_path)
    assert verdicts["true: raw sums equal those of float64"]["met"]
    measured = [line["measured"] for line in verdicts.values() if line["measured"] is not None]
    assert len(measured) > 1
    assert not [said for said in measured if said.startswith("failed")]
    printed = capsys.readouterr().out
    assert all(f"| {name} " in printed for name in verdicts)
    assert "drops them" not in printed
    (page,) = tmp_path.glob("device-*.md")
    assert page.read_text() in printed


def test_without_a_device_it_says_what_to_do() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as ended:
        main(["--device", "cuda"])
    assert "finds no CUDA device here" in str(ended.value)
    assert "--device cpu --smoke" in str(ended.value)


def test_packages_that_cannot_be_imported_are_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert recording.has_store()
    (tmp_path / "tensorstore.py").write_text("raise ImportError('built for another machine')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorstore")
    assert not recording.has_store()


ABSENT = """
import sys
for name in ("panel", "bokeh", "holoviews", "param", "tensorstore", "pandas", "ml_dtypes",
             "llvmlite", "xarray", "typer", "hydra"):
    sys.modules[name] = None
from benchmarks.__main__ import main
sys.exit(main(["--device", "cpu", "--smoke", "--no-save", "--parts", *sys.argv[1:]]) and 0)
"""


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(["true"], marks=pytest.mark.slow, id="one"),
        pytest.param(["true", "waits", "mlp", "gpt2", "memory"], marks=pytest.mark.slow, id="all"),
    ],
)
def test_neither_the_viewer_nor_the_store_is_needed(parts: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ABSENT, *parts], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stdout
    assert "are not installed here" in done.stdout
    assert "| true: raw sums equal those of float64" in done.stdout


@pytest.mark.slow
def test_it_ends_when_the_time_is_over() -> None:
    code = (
        "import time; from benchmarks.device import run;"
        "run.Bench._neutral = lambda *_, **__: time.sleep(600);"
        "run._LAST_SECONDS = 39; run._MARGIN = 0;"
        "run.main('cpu', smoke=True, save=None, minutes=40 / 60)"
    )
    done = forked(Path(__file__).parents[2], "-c", code)
    assert done.returncode == 1, done.stderr
    assert "Ended at the time limit, before all parts had run." in done.stdout
    assert "| true: raw sums equal those of float64" in done.stdout


def test_parts_that_would_not_fit_are_left_out(tmp_path: Path) -> None:
    assert run.main("cpu", smoke=True, save=tmp_path, minutes=0.26, only=["gpt2"]) == 0
    assert {line["measured"] for line in verdicts_of(tmp_path).values()} == {None}
    (page,) = tmp_path.glob("*.md")
    assert "Left out for lack of time: gpt2." in page.read_text()


def test_a_part_that_fails_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(kernels, "launched", fail)
    assert run.main("cpu", smoke=True, save=tmp_path, only=["kernels", "waits"]) == 1
    measured = {name: line["measured"] for name, line in verdicts_of(tmp_path).items()}
    said = "failed: RuntimeError: CUDA error: out of memory"
    assert measured["kernels beyond a plain step, 4 layers <= 150"] == said
    assert measured["no operation waits: record"] == "none"


def planned() -> run.Bench:
    bench = run.Bench(PLACE, TINY, store=False, deadline=Deadline(60), report=run.Report({}, False))
    bench.plan()
    return bench


NAMES = [name for name, *_ in planned()._plan]
PARTS = [pytest.param(part, id=name) for part, name in enumerate(NAMES)]


def test_the_allowances_of_all_parts_fit_into_the_time() -> None:
    allowed = sum(seconds for *_, seconds in planned()._plan)
    assert allowed <= 60 * run.MINUTES - run._MARGIN


def test_what_has_no_target_comes_last() -> None:
    assert NAMES[-1] == "differences"


@pytest.mark.parametrize("part", PARTS)
def test_a_part_whose_time_is_over_trains_nothing(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(_: Training) -> torch.Tensor:
        raise AssertionError("it trains")

    monkeypatch.setattr(Training, "step", step)
    _, targets, measure, _ = planned()._plan[part]
    with pytest.raises(OutOfTimeError):
        measure(*targets, deadline=Deadline(-1))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.slow
def test_a_part_looks_at_its_time_while_it_runs(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the deadline, at most the training runs of one measurement are still carried out."""
    now, late = [0.0], [0]
    step, sizes = Training.step, replace(TINY, many=400)

    def counted(training: Training) -> torch.Tensor:
        now[0] += 1
        late[0] += now[0] > 2
        return step(training)

    monkeypatch.setattr(Training, "step", counted)
    bench = planned()
    bench.sizes = sizes
    _, targets, measure, _ = bench._plan[part]
    with suppress(OutOfTimeError):
        measure(*targets, deadline=Deadline(2, clock=lambda: now[0]))
    assert late[0] <= 60


def test_time_that_a_part_leaves_is_given_to_those_after_it() -> None:
    now, given = [0.0], []

    def part(*_: str, deadline: Deadline) -> None:
        given.append(deadline.left)

    bench = planned()
    bench.deadline = Deadline(100, clock=lambda: now[0])
    bench._plan = [("a", (), part, 40), ("b", (), part, 60)]
    bench.run()
    now[0] = 70
    bench.run(["b"])
    assert [round(seconds) for seconds in given] == [40, 100, 30]


def test_a_part_that_ends_early_leaves_its_lines_open() -> None:
    def part(target: str, other: str, **_: object) -> None:
        bench.report.set(target, "1.0", True)
        Deadline(-1).check()
        bench.report.set(other, "2.0", True)

    bench = planned()
    bench._add("part", 60, part, "one", "two")
    bench.run(["part"])
    assert bench.report.verdicts["one"].met
    assert bench.report.verdicts["two"].measured is None
    assert bench.report.notes == ["Ended for lack of time: part."]


# -- checks that can fail ------------------------------------------------------------------------


def test_a_training_that_tracing_changes_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.difference(PLACE, TINY.shallow, Deadline(60)) is None
    step = Training.step

    def bent(training: Training) -> torch.Tensor:
        loss = step(training)
        if torch.nn.modules.module._global_forward_hooks or len(bending) > 11:
            torch.rand(1)
        bending.append(1)
        return loss

    bending: list[int] = []
    monkeypatch.setattr(Training, "step", bent)
    assert checks.difference(PLACE, TINY.shallow, Deadline(60)) is not None


def test_a_training_that_does_not_repeat_itself_is_no_measure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, count = Training.step, iter(range(1000))

    def moody(training: Training) -> torch.Tensor:
        next(training.model.parameters()).data.add_(next(count))
        return step(training)

    monkeypatch.setattr(Training, "step", moody)
    with pytest.raises(RuntimeError, match="is not reproducible"):
        checks.difference(PLACE, TINY.shallow, Deadline(60))


@pytest.mark.parametrize("column", [column for column in Raw if column is not Raw.PIVOT])
def test_a_wrong_sum_is_found_out(column: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    right = checks._raw_of

    def bent(*arguments: Any) -> RawStep:
        raw = right(*arguments)
        raw.raw = raw.raw.copy()
        with np.errstate(invalid="ignore"):
            raw.raw[:, column] += 1e-3 * np.abs(raw.raw[:, column]) + 1e-3
        return raw

    monkeypatch.setattr(checks, "_raw_of", bent)
    wrong, compared = checks.wrong_sums(PLACE, 4000)
    assert wrong
    assert compared > 1000


def test_a_tensor_that_is_not_recorded_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = checks._Shown.forward

    def forgetful(model: checks._Shown, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        del model.shown["offset"]
        return forward(model, tensors)

    monkeypatch.setattr(
        checks._Shown,
        "forward",
        lambda model, tensors: (
            forgetful(model, tensors) if "offset" in model.shown else forward(model, tensors)
        ),
    )
    wrong, _ = checks.wrong_sums(PLACE, 4000)
    assert "offset is not recorded" in wrong


def test_an_operation_that_waits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    training = mlp(PLACE, TINY.mlp)
    assert checks.waits(PLACE, training, RECORD) is None
    step = training.step

    def waiting() -> torch.Tensor:
        if training.taken > 4:
            raise RuntimeError("called a synchronizing CUDA operation\nhere")
        return step()

    monkeypatch.setattr(training, "step", waiting)
    assert checks.waits(PLACE, training, RECORD) == "called a synchronizing CUDA operation"


def test_memory_may_grow_by_a_share_or_by_64_megabytes() -> None:
    assert Peaks(100 * MIB, 164 * MIB).fine
    assert not Peaks(100 * MIB, 165 * MIB).fine
    assert Peaks(10_000 * MIB, 10_200 * MIB).fine
    assert not Peaks(10_000 * MIB, 10_201 * MIB).fine
    assert Peaks(10_000 * MIB, 10_500 * MIB).within(0.05)
    assert str(Peaks(10_000 * MIB, 10_200 * MIB)) == "10,000 MiB, +200 MiB (+2.0%)"


# -- measuring -----------------------------------------------------------------------------------


def test_what_was_not_recorded_is_no_measurement() -> None:
    half = replace(RECORD, overrides=("schedule.every=2",))
    training = mlp(PLACE, TINY.mlp)
    with pytest.raises(RuntimeError, match="expected 3 records, got"):
        interleaved(PLACE, training, {"a": half}, store=False, block=2, deadline=Deadline(60))


def test_a_fault_of_ours_is_no_measurement() -> None:
    broken = recording.Recording(faults=["ValueError: mine"])
    with pytest.raises(RuntimeError, match="tracing failed: ValueError: mine"):
        broken.check(None)


@pytest.mark.parametrize("what", [RECORD, DEBUG], ids=["record", "debug"])
@pytest.mark.parametrize("store", [True, False])
def test_a_recording_counts_its_records(what: Declared, store: bool) -> None:
    training = gpt(PLACE, TINY.gpt2)
    with recorded(what, store=store) as done:
        for _ in range(4):
            training.step()
    done.check(4)


def test_records_can_be_reduced_afterwards() -> None:
    training = mlp(PLACE, TINY.mlp)
    with reduced(RECORD, later=True) as done:
        for _ in range(3):
            training.step()
        assert done.records == 0
    done.check(3)


def test_idle_blocks_record_the_first_step_alone() -> None:
    times = interleaved(
        PLACE,
        mlp(PLACE, TINY.mlp),
        {"idle": IDLE, "plain": None},
        store=False,
        block=3,
        deadline=Deadline(60),
    )
    assert times.rounds == 1
    assert len(times.seconds["idle"]) == len(times.seconds["plain"]) == 1


def test_blocks_alternate_within_one_training() -> None:
    found = within_one(
        PLACE,
        mlp(PLACE, TINY.mlp),
        RECORD,
        store=False,
        block=2,
        rounds=3,
        deadline=Deadline(60),
    )
    assert {name: len(blocks) for name, blocks in found.times.seconds.items()} == {
        "recorded": 3,
        "idle": 3,
    }
    assert found.first > 0


def test_ratios_are_those_of_medians() -> None:
    times = Times({"plain": [1.0, 2.0, 4.0], "record": [3.0, 3.0, 4.0]}, 3)
    assert times.ratio("record").value == 1.5
    assert (times.ratio("record").low, times.ratio("record").high) == (1.25, 2.25)


def test_sums_are_timed_by_what_runs_for_them() -> None:
    sums = kernels.sums(PLACE, torch.bfloat16, (8, 4000), most_bytes=1 << 20)
    assert sums is not None
    assert sums.ours > 0
    assert sums.torch > 0
    assert sums.ratio == sums.ours / sums.torch


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the verdicts on compiled training runs, given the seconds per step of each kind."""

    def judged(
        *,
        plain: float,
        idle: float,
        recorded: float,
        graphs: int = 2,
        first_plain: float = 1.0,
        first_traced: float = 1.0,
    ) -> dict[str, Verdict]:
        blocks = {"idle": [idle], "recorded": [recorded]}
        traced = timing.Within(Times(blocks, 1), first_traced, graphs, None)
        monkeypatch.setattr(run, "within_one", lambda *_, **__: traced)
        bench = planned()
        monkeypatch.setattr(run.Bench, "_plain_steps", lambda *_: [plain])
        monkeypatch.setattr(Processor, "seconds", lambda *_: first_plain)
        bench.run(["compiled"])
        lines = bench.report.verdicts.items()
        return {name.partition(": ")[2]: v for name, v in lines if name.startswith("compiled GPT")}

    return judged


@pytest.mark.slow
def test_recorded_compiled_steps_are_compared_with_plain_ones_as_well(compiled: Any) -> None:
    line = "record <= 1.35"
    assert compiled(plain=1.0, idle=1.0, recorded=1.3)[line].met
    assert not compiled(plain=1.0, idle=1.04, recorded=1.38)[line].met  # 1.33 times an idle step


@pytest.mark.slow
def test_compiling_may_take_a_tenth_longer_and_not_more(compiled: Any) -> None:
    line = "compiling to record takes <= 1.1 of the plain graph"
    steps = {"plain": 1.0, "idle": 1.0, "recorded": 1.0}
    assert compiled(**steps, first_plain=2.0, first_traced=2.19)[line].met
    assert not compiled(**steps, first_plain=2.0, first_traced=2.21)[line].met


@pytest.mark.slow
def test_older_versions_of_torch_are_no_failure_and_their_idle_steps_are_judged(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "unsupported", lambda: "torch 2.11 cannot")
    lines = compiled(plain=1.0, idle=1.01, recorded=3.0, graphs=0)
    assert lines["idle <= 1.05"].met
    others = {name: line for name, line in lines.items() if not name.startswith("idle")}
    assert {(line.measured, line.met) for line in others.values()} == {("needs torch 2.13", None)}


@pytest.mark.slow
def test_recorded_steps_that_are_not_compiled_are_a_failure(compiled: Any) -> None:
    lines = compiled(plain=1.0, idle=1.0, recorded=1.0, graphs=0)
    assert lines["idle <= 1.05"].met
    assert "no graph was compiled" in lines["record <= 1.35"].measured


@pytest.mark.slow
def test_a_budget_is_not_judged_by_a_training_that_is_bound_by_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdicts = {}
    for share in (0.4, 1.0):
        monkeypatch.setattr(run.Bench, "_host_share", lambda *_, share=share: share)
        bench = planned()
        bench.run(["budget"])
        verdicts[share] = [line for line in bench.report.verdicts.values() if line.measured]
    assert len(verdicts[0.4]) == 2
    assert all(line.met is not None for line in verdicts[0.4])
    assert all(line.met is None for line in verdicts[1.0])


def test_caches_of_the_compiler_are_empty_where_compiling_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "BACKEND", "inductor")
    places = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = [os.environ.get(name) for name in places]
    with run._cold_caches():
        within = [os.environ[name] for name in places]
    assert not set(within) & set(before)
    assert [os.environ.get(name) for name in places] == before


# -- CUDA, as far as it can be tested without a GPU ----------------------------------------------


def event(name: str, device_type: Any, **facts: Any) -> SimpleNamespace:
    span = SimpleNamespace(elapsed_us=lambda: 12.5)
    return SimpleNamespace(name=name, device_type=device_type, time_range=span, **facts)


def test_kernels_are_what_runs_on_the_device() -> None:
    from torch._C._autograd import DeviceType

    cuda = Cuda()
    kernel = event("void at::native::reduce_kernel<512>", DeviceType.CUDA)
    assert cuda.is_kernel(kernel)
    assert cuda.kernel_seconds(kernel) == 12.5e-6
    assert not cuda.is_kernel(event("aten::sum", DeviceType.CPU))
    assert not cuda.is_kernel(event("Memcpy DtoH (Device -> Pinned)", DeviceType.CUDA))
    assert not cuda.is_kernel(event("Memset (Device)", DeviceType.CUDA))
    span = event("Optimizer.step#AdamW.step", DeviceType.CUDA, is_user_annotation=True)
    assert not cuda.is_kernel(span)


def test_waiting_is_allowed_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.raises(RuntimeError), Cuda().forbid_waiting():
        raise RuntimeError
    assert modes == ["error", "default"]


def test_a_verdict_is_said_of_announced_lines_only() -> None:
    report = run.Report({}, store=True)
    report.expect("known")
    report.set("known", "1.0", True)
    assert report.verdicts["known"] == Verdict("known", "1.0", True)
    with pytest.raises(AssertionError):
        report.set("unknown", "1.0", True)

"""Run all checks and measurements, the most important first, within a time limit."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import nn

from benchmarks import machine
from benchmarks.device import checks, kernels
from benchmarks.device.nets import FULL, TINY, GptSize, Sizes, gpt, mlp, pointwise
from benchmarks.device.places import Place, place_of
from benchmarks.device.recording import (
    BUDGETED,
    DEBUG,
    EVERY_OTHER,
    IDLE,
    LIGHT,
    OBSERVED,
    RECORD,
    Declared,
    has_store,
    recorded,
    reduced,
)
from benchmarks.device.timing import Deadline, OutOfTimeError, interleaved, within_one
from benchmarks.nets import Training
from benchmarks.report import table, verdict_row, write
from benchmarks.results import Ratio
from benchmarks.targets import Verdict
from comgra_decl.hooks.compiled.variant import unsupported

MINUTES = 8.0
_MARGIN = 15.0  # seconds reserved for writing the report
_LAST_SECONDS = 3.0  # before the deadline, when the process is ended
_PACKAGES = ("torch", "triton", "numpy", "tensorstore", "comgra-decl")

_SUMS_LIMIT = {torch.float32: 1.3, torch.bfloat16: 1.8}
_IDLE_LIMIT = 1.02
_COMPILED_IDLE_LIMIT = 1.05  # looser: measured one after the other
_ROUNDS_COMPILED = 5
_MOST_HOST = 0.8  # largest share of a step that the host may take if the device limits training
_NEEDS = "needs torch 2.13"

_FEW_ROUNDS = 3  # medians of fewer rounds are marked
_TOOLS = {"record": RECORD, "light": LIGHT, "debug": DEBUG}

BACKEND = "inductor"
"""Backend of `torch.compile`; the tests use a faster one."""

TEXT = """\
# What tracing costs on a device

{machine}

Times are medians over interleaved blocks; the loop never waits for the device. Ratios are relative
to the same step with nothing attached, with the quartiles of the per-round ratios in brackets.
*record*: outputs, output gradients and parameter gradients of every module, at every step;
*light*, *debug*: the presets, at every step; *idle*: attached, no step recorded. {store}
"""
_SMOKE = (
    "**A smoke test with tiny nets under the names of the large ones.** The ratios and verdicts "
    "below are not valid for any device."
)
_WITH_STORE = "Records are written to a store."
_WITHOUT_STORE = (
    "A separate thread reduces records to statistics and drops them, because the store's packages "
    "(tensorstore, pandas, ml_dtypes) are not installed here."
)


@dataclass
class Report:
    """The results so far, in the order in which their lines were planned."""

    facts: dict[str, Any]
    store: bool
    smoke: bool = False
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def expect(self, target: str) -> None:
        """Add a line without a result."""
        self.verdicts[target] = Verdict(target, None, None)

    def set(self, target: str, measured: str, met: bool | None) -> None:
        """Store and print the result of a line."""
        assert target in self.verdicts, target
        self.verdicts[target] = Verdict(target, measured, met)
        print(f"{target}: {measured}", file=sys.stderr, flush=True)

    @property
    def markdown(self) -> str:
        """The report as Markdown."""
        facts, packages = self.facts, self.facts["packages"]
        versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
        described = (
            f"{facts['device']}; {facts['processor']}, {facts['cores']} cores, Python "
            f"{facts['python']}, {versions}; {facts['seconds']:.0f} s."
        )
        store = _WITH_STORE if self.store else _WITHOUT_STORE
        rows = [("target", "measured", "met"), *map(verdict_row, self.verdicts.values())]
        text = TEXT.format(machine=described, store=store)
        parts = [text, *([_SMOKE] if self.smoke else []), table(rows), *self.notes]
        return "\n\n".join(part.strip() for part in parts) + "\n"

    def save(self, folder: Path) -> Path:
        """Write `device-DATE.md` and `.json`; return the path of the former."""
        document = {
            "machine": self.facts,
            "store": self.store,
            "targets": [asdict(verdict) for verdict in self.verdicts.values()],
            "figures": self.figures,
            "notes": self.notes,
        }
        return write(folder, document, self.markdown, prefix="device-")


# -- measurements ----------------------------------------------------------------------------


@dataclass
class Bench:
    """One run of the benchmark.

    Args:
        place: the device.
        sizes: sizes of nets and tensors.
        store: whether records go into a store.
        deadline: the time limit.
        report: receives the results.
    """

    place: Place
    sizes: Sizes
    store: bool
    deadline: Deadline
    report: Report
    _plan: list[tuple[str, tuple[str, ...], Callable[..., None], float]] = field(
        default_factory=list
    )

    def plan(self) -> None:
        """Add all parts, with the time limit of each in seconds."""
        sizes, gpt2 = self.sizes, "GPT-2 124M bf16 B8 T1024"
        medium, compiled = "GPT-2 350M bf16 B8 T1024", "compiled GPT-2 124M"
        shown = [f"{_shape(dtype, shape)}" for dtype, shape in sizes.rows]
        self._add(
            "neutral",
            25,
            self._neutral,
            "neutral: training bit for bit the same, float32",
            "neutral: training bit for bit the same, mixed precision",
        )
        self._add("true", 30, self._true, "true: raw sums equal those of float64")
        self._add(
            "waits", 15, self._waits, "no operation waits: record", "no operation waits: debug"
        )
        self._add("kernels", 15, self._kernels, "kernels beyond a plain step, 4 layers <= 150")
        self._add(
            "sums",
            45,
            self._sums,
            *(
                f"raw sums {text} <= {_SUMS_LIMIT[dtype]:g} x.sum()"
                for text, (dtype, _) in zip(shown, sizes.rows, strict=True)
            ),
        )
        self._net("gpt2", 50, gpt2, sizes.gpt2, record=1.15, light=1.10, debug=1.6)
        self._net("medium", 60, medium, sizes.medium, record=1.15, light=1.10, debug=1.6)
        self._net("narrow", 25, "GPT 12x256 float32 B4 T64", sizes.narrow, record=1.35)
        self._net("mlp", 15, "MLP 6x64", None, record=1.8)
        self._add(
            "memory",
            30,
            self._memory,
            *(f"memory: GPT-2 124M, {name}: +2% or 64 MB" for name in _TOOLS),
            "memory: 1e9 elements, 16 million samples: +2% or 64 MB",
        )
        self._add(
            "compiled",
            100,
            self._compiled,
            f"{compiled}: record <= 1.35",
            f"{compiled}: idle <= {_COMPILED_IDLE_LIMIT:g}",
            f"{compiled}: compiling to record takes <= 1.1 of the plain graph",
            f"{compiled}: memory +5% or 64 MB",
        )
        self._add(
            "budget",
            35,
            self._budget,
            "budget of 3%, the loop never waits: 2 to 4%",
            "budget of 3%, the loop reads its loss: 2 to 4%",
        )
        self._add(
            "differences",
            20,
            self._differences,
            "compiled, every other step recorded eagerly: largest difference",
            "compiled, every other step recorded compiled: largest difference",
        )

    def _net(
        self, name: str, seconds: float, title: str, size: GptSize | None, **limits: float
    ) -> None:
        targets = {"idle": f"{title}: idle <= {_IDLE_LIMIT:g}"}
        targets |= {tool: f"{title}: {tool} <= {limit:g}" for tool, limit in limits.items()}

        def measure(*_: str, deadline: Deadline) -> None:
            deadline.check()
            training = mlp(self.place, self.sizes.mlp) if size is None else gpt(self.place, size)
            self._ratios(name, training, targets, {"idle": _IDLE_LIMIT, **limits}, deadline)

        self._add(name, seconds, measure, *targets.values())

    def _add(self, name: str, seconds: float, measure: Callable[..., None], *targets: str) -> None:
        self._plan.append((name, targets, measure, seconds))
        for target in targets:
            self.report.expect(target)

    def run(self, only: Sequence[str] | None = None) -> None:
        """Measure one part after another.

        If a part fails, the failure is reported and the next part runs. Each part has its own time
        limit, plus the time left over by earlier parts.
        """
        plan = [part for part in self._plan if only is None or part[0] in only]
        later = sum(seconds for *_, seconds in plan)
        for name, targets, measure, seconds in plan:
            later -= seconds
            left = self.deadline.left
            if left < min(seconds / 3, 20.0):
                self.report.notes.append(f"Left out for lack of time: {name}.")
                continue
            began = time.monotonic()
            try:
                measure(*targets, deadline=Deadline(max(min(seconds, left), left - later)))
            except OutOfTimeError:
                self.report.notes.append(f"Ended for lack of time: {name}.")
            except Exception as error:  # noqa: BLE001 - the other parts still count
                self._failed(name, targets, error)
            _clean(self.place)
            self.report.figures.setdefault(name, {})["seconds"] = time.monotonic() - began

    def _failed(self, name: str, targets: Sequence[str], error: Exception) -> None:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        for target in targets:
            if self.report.verdicts[target].measured is None:
                self.report.set(target, f"failed: {text}", None)
        lines = "".join(traceback.format_exception(error)[-6:])
        self.report.notes.append(f"{name} failed:\n\n```\n{lines.rstrip()}\n```")

    # -- the parts -------------------------------------------------------------------------------

    def _neutral(self, *targets: str, deadline: Deadline) -> None:
        for target, half in zip(targets, (False, True), strict=True):
            size = replace(self.sizes.shallow, half=half)
            unlike = checks.difference(self.place, size, deadline)
            result = unlike or "losses, gradients, parameters, states, random numbers"
            self.report.set(target, result, unlike is None)

    def _true(self, target: str, *, deadline: Deadline) -> None:
        deadline.check()
        wrong, compared = checks.wrong_sums(self.place, 20_000 if self._tiny else 1_000_000)
        self.report.figures["true"] = {"wrong": wrong, "compared": compared}
        result = f"{compared:,} sums, {len(wrong)} kinds wrong"
        self.report.set(target, "; ".join([result, *wrong[:3]]), not wrong and compared > 0)

    def _waits(self, record: str, debug: str, *, deadline: Deadline) -> None:
        deadline.check()
        training = gpt(self.place, self.sizes.shallow)
        half_idle = Declared(RECORD.source, ("schedule.first=5", "schedule.every=null"))
        for target, what in ((record, half_idle), (debug, DEBUG)):
            deadline.check()
            waits = checks.waits(self.place, training, what)
            self.report.set(target, waits or "none", waits is None)

    def _kernels(self, target: str, *, deadline: Deadline) -> None:
        deadline.check()
        training = gpt(self.place, self.sizes.shallow)
        plain, traced = kernels.launched(self.place, training, deadline)
        self.report.figures["kernels"] = {"plain": plain, "recorded": traced}
        if not plain:
            self.report.set(target, "the profiler reports no kernel", None)
        else:
            beyond = traced - plain
            self.report.set(target, f"{beyond:,} beyond {plain:,}", beyond <= 150)

    def _sums(self, *targets: str, deadline: Deadline) -> None:
        found: list[dict[str, Any]] = []
        self.report.figures["sums"] = {"shapes": found}
        for target, (dtype, shape) in zip(targets, self.sizes.rows, strict=True):
            deadline.check()
            sums = kernels.sums(self.place, dtype, shape, most_bytes=self.sizes.copies)
            if sums is None:
                self.report.set(target, "the profiler reports no kernel", None)
                continue
            found.append(
                {"dtype": str(dtype), "shape": shape, "ours": sums.ours, "sum": sums.torch}
            )
            result = f"{sums.ratio:.2f} ({1e6 * sums.ours:,.1f} us, sum {1e6 * sums.torch:,.1f} us)"
            self.report.set(target, result, sums.ratio <= _SUMS_LIMIT[dtype])

    def _ratios(
        self,
        name: str,
        training: Training,
        targets: dict[str, str],
        limits: dict[str, float],
        deadline: Deadline,
    ) -> None:
        known = {"idle": IDLE, **_TOOLS}
        attached = {"plain": None, "again": None, **{tool: known[tool] for tool in targets}}
        times = interleaved(
            self.place,
            training,
            attached,
            store=self.store,
            block=self.sizes.block,
            deadline=deadline,
        )
        noise = times.ratio("again")
        plain = times.median("plain")
        self.report.figures[name] = {
            "plain": plain,
            "rounds": times.rounds,
            "noise": asdict(noise),
            "ratios": {tool: asdict(times.ratio(tool)) for tool in targets},
        }
        for tool, target in targets.items():
            ratio = times.ratio(tool)
            result = f"{_text(ratio)} of {1000 * plain:.2f} ms"
            if times.rounds < _FEW_ROUNDS:
                result += f", {times.rounds} rounds"
            met: bool | None = ratio.value <= limits[tool]
            if tool == "idle" and not met:  # within the noise: no cost of tracing
                result += f"; nothing attached against itself {_text(noise)}"
                met = ratio.low <= max(noise.high, _IDLE_LIMIT)
            self.report.set(target, result, met)

    def _memory(self, *targets: str, deadline: Deadline) -> None:
        deadline.check()
        training = gpt(self.place, self.sizes.gpt2)
        *trained, huge = targets
        for target, what in zip(trained, _TOOLS.values(), strict=True):
            self._set_peaks(target, checks.peaks(self.place, training, deadline, what), 0.02)
        del training
        _clean(self.place)
        self._set_peaks(huge, checks.huge_peaks(self.place, self.sizes.huge, deadline), 0.02)

    def _set_peaks(self, target: str, peaks: checks.Peaks | None, share: float) -> None:
        if peaks is None:
            self.report.set(target, "memory is not counted here", None)
        else:
            self.report.set(target, str(peaks), peaks.within(share))

    def _compiled(
        self, record: str, idle: str, compiling: str, memory: str, *, deadline: Deadline
    ) -> None:
        place, block = self.place, self.sizes.block
        deadline.check()
        self._warm_compiler()
        training = _compile(gpt(place, self.sizes.gpt2))
        deadline.check()
        with _cold_caches():
            first = place.seconds(lambda: _steps(training, 1))
        steps = self._plain_steps(training)
        peak = place.peak(lambda: _steps(training, block))
        deadline.check(first)  # the variant takes as long
        traced = within_one(
            place,
            training,
            OBSERVED,
            store=self.store,
            block=block,
            rounds=_ROUNDS_COMPILED,
            deadline=deadline,
            compiling=_cold_caches,
        )
        plain = median([*steps, *self._plain_steps(training)])
        ratio = traced.times.ratio("recorded", "idle")
        recorded_step, idle_step = traced.times.median("recorded"), traced.times.median("idle")
        self.report.figures["compiled"] = {
            "plain": plain,
            "idle": idle_step,
            "recorded": recorded_step,
            "first_plain": first,
            "first_recorded": traced.first,
            "ratio": asdict(ratio),
        }
        share = idle_step / plain
        result = f"{share:.3f} of {1000 * plain:.2f} ms, measured before and after"
        self.report.set(idle, result, share <= _COMPILED_IDLE_LIMIT)
        why = unsupported()
        if why is not None:
            for target in (record, compiling, memory):
                self.report.set(target, _NEEDS, None)
            return
        if not traced.graphs:
            raise RuntimeError("recorded steps were not compiled: no graph was compiled for them")
        to_plain = recorded_step / plain
        result = (
            f"{_text(ratio)} of idle steps, {to_plain:.3f} of plain ones ({1000 * plain:.2f} ms)"
        )
        self.report.set(record, result, max(ratio.value, to_plain) <= 1.35)
        result = f"{traced.first:.1f} s; plain graph {first:.1f} s, both with empty caches"
        self.report.set(compiling, result, traced.first <= 1.1 * first)
        known = peak is not None and traced.peak is not None
        self._set_peaks(memory, checks.Peaks(peak or 0, traced.peak or 0) if known else None, 0.05)

    def _warm_compiler(self) -> None:
        """Compile something small, so that the first compilation does not load the compiler."""
        torch.compiler.reset()
        _steps(_compile(gpt(self.place, TINY.gpt2)), 1)
        torch.compiler.reset()  # forget its sizes, which would make those that follow dynamic

    def _plain_steps(self, training: Training) -> list[float]:
        """Return the seconds per step of blocks with nothing attached."""
        block = self.sizes.block
        _steps(training, 1)
        return [
            self.place.seconds(lambda: _steps(training, block)) / block
            for _ in range(_ROUNDS_COMPILED)
        ]

    def _budget(self, *targets: str, deadline: Deadline) -> None:
        deadline.check()
        steps, figures = self.sizes.many, []
        training = pointwise(self.place, self.sizes.pointwise)
        host = self._host_share(training)
        for target, reads in zip(targets, (False, True), strict=True):
            loop = partial(self._many, training, deadline=deadline, reads=reads)
            before = loop(steps // 3)
            with recorded(BUDGETED, store=self.store) as recording:
                took = loop(steps)
            recording.check(None)
            after = loop(steps // 3)
            share, noise = 2 * took / (before + after) - 1, abs(after / before - 1)
            figures.append({"share": share, "noise": noise, "records": recording.records})
            result = f"{share:.1%} with {recording.records:,} records of {steps:,} steps"
            result += f"; noise {noise:.1%}; the host takes {host:.0%} of a step"
            met = share <= 0.04 and (share >= 0.02 or recording.records >= steps)
            # if the host limits training, its cost says nothing about the device's clock
            self.report.set(target, result, met if host <= _MOST_HOST else None)
        self.report.figures["budget"] = {"loops": figures, "host": host}

    def _host_share(self, training: Training) -> float:
        """Return the share of a plain step that the host needs to launch it."""
        training.reset()
        _steps(training, 2)
        self.place.finish()
        began = time.perf_counter()
        _steps(training, 4)  # few enough for the device's queue
        launched = time.perf_counter()
        self.place.finish()
        return (launched - began) / (time.perf_counter() - began)

    def _many(self, training: Training, steps: int, *, deadline: Deadline, reads: bool) -> float:
        """Return the seconds per step, after an untimed warm-up."""

        def work(number: int) -> None:
            for step in range(number):
                if step % 50 == 0:
                    deadline.check()
                loss = training.step()
                if reads:
                    loss.item()

        training.reset()
        work(steps // 10)
        return self.place.seconds(lambda: work(steps)) / steps

    def _differences(self, *targets: str, deadline: Deadline) -> None:
        deadline.check()
        torch.compiler.reset()
        training = _compile(gpt(self.place, self.sizes.shallow))
        plain = checks.trained(self.place, training)
        for target, how in zip(targets, ("eager", "observed"), strict=True):
            deadline.check()
            if how == "observed" and unsupported() is not None:
                self.report.set(target, _NEEDS, None)
                continue
            assert isinstance(EVERY_OTHER.source, dict)
            with reduced(Declared({**EVERY_OTHER.source, "compile": how})) as recording:
                traced = checks.trained(self.place, training)
            recording.check(None)
            far = checks.farthest(plain, traced)
            self.report.figures.setdefault("differences", {})[how] = far
            result = ", ".join(f"{what} {value:.2g}" for what, value in far.items())
            self.report.set(target, result, None)

    @property
    def _tiny(self) -> bool:
        return self.sizes is TINY


def _cold_caches() -> AbstractContextManager[Any]:
    """Return a context in which inductor and Triton find nothing in their caches on disk."""
    if BACKEND != "inductor":
        return nullcontext()
    from torch._inductor import utils

    fresh = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
    context: AbstractContextManager[Any] = fresh()
    return context


def _compile(training: Training) -> Training:
    # compile after building: compiled models have different parameter names
    return replace(
        training, model=cast("nn.Module", torch.compile(training.model, backend=BACKEND))
    )


def _steps(training: Training, number: int) -> None:
    for _ in range(number):
        training.step()


def _text(ratio: Ratio) -> str:
    return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def _shape(dtype: torch.dtype, shape: tuple[int, int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} [{shape[0]:,}, {shape[1]:,}]"


def _clean(place: Place) -> None:
    """Free the memory that a part has left allocated."""
    gc.collect()
    if place.name == "cuda":
        torch.cuda.empty_cache()


# -- the command ---------------------------------------------------------------------------------


def main(
    device: str,
    *,
    smoke: bool,
    save: Path | None,
    only: Sequence[str] | None = None,
    store: bool | None = None,
    minutes: float = MINUTES,
) -> int:
    """Measure, print and store the table, and return the exit status.

    Args:
        device: "cuda", or "cpu" to test the code.
        smoke: whether to use tiny sizes.
        save: folder of the results; None to store nothing.
        only: names of parts; None for all.
        store: whether records go into a store; None: if its packages are installed.
        minutes: time limit; parts that do not fit are left out.

    Returns:
        0, or 1 if a target is missed or a part fails.
    """
    began = time.monotonic()
    place = place_of(device)
    facts = machine.machine_facts(_PACKAGES)
    facts |= {"device": place.description, "seconds": 0.0}
    stored = has_store() if store is None else store
    report = Report(facts, stored, smoke)
    deadline = Deadline(60 * minutes - _MARGIN)
    bench = Bench(place, TINY if smoke else FULL, stored, deadline, report)
    bench.plan()

    def show() -> None:
        facts["seconds"] = time.monotonic() - began
        print(report.markdown, flush=True)
        if save is not None:
            print(f"written to {report.save(save)}", file=sys.stderr, flush=True)

    with _ended_after(60 * minutes, show, report):
        bench.run(only)
    show()
    wanted = [verdict for verdict in report.verdicts.values() if verdict.measured is not None]
    failed = any(verdict.measured.startswith("failed") for verdict in wanted if verdict.measured)
    return int(failed or any(verdict.met is False for verdict in wanted))


@contextmanager
def _ended_after(seconds: float, show: Callable[[], None], report: Report) -> Iterator[None]:
    """End the process when the time is up, after printing the results so far."""

    def end() -> None:
        report.notes.append("Ended at the time limit, before all parts had run.")
        show()
        os._exit(1)

    timer = threading.Timer(max(seconds - _LAST_SECONDS, 0.0), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

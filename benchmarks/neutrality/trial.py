"""Train one program without and with full tracing, and return the verdict."""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

import comgra_decl as comgra
from benchmarks.neutrality.oracle import Seen, first_step
from benchmarks.neutrality.program import STEPS, Program, seed_everything
from benchmarks.neutrality.state import State, bits, gradients_and_parameters, state_of
from benchmarks.neutrality.surroundings import functions, surroundings
from comgra_decl.hooks.scalars import automatic
from comgra_decl.store.location import Location

EVERYTHING: dict[str, Any] = {
    "nodes": {
        "all": {
            "select": "**",
            "capture": [
                "output",
                "output_grad",
                "input",
                "input_grad",
                "parameter",
                "parameter_grad",
                "parameter_grad_raw",
                "update",
                "buffer",
                "optimizer_state",
            ],
            "values": True,
        }
    },
    "graph": True,
    "schedule": {"first": 1_000_000, "max_iterations": None},
}
"""Full tracing: all captures of every module at every step, with graph and values."""

AROUND: dict[str, Any] = {
    "nodes": {"all": {"select": "**", "capture": ["output"]}},
    "schedule": {"first": 1, "every": 1_000_000},
    "profile": {"steps": [STEPS - 6, STEPS - 5]},
    "memory": {"steps": [STEPS - 4, STEPS - 3]},
}
"""Time and memory: two profiled steps, two whose memory is measured, and all others timed."""

_MOST_LINES = 12
_TOLERANCE = (
    2e-4  # of a mean, relative to the mean absolute value: float32 sums depend on the order
)


@dataclass
class Verdict:
    """The verdict on one program.

    `status` is "equal" (every bit), "close" (equal except for rounding, where the program declares
    that recorded steps run different kernels), "different", "irreproducible" (two untraced runs
    differ), or "broken" (the program does not train here, traced or not). `faults` are errors of
    comgra_decl.
    """

    name: str
    status: str = "broken"
    error: str = ""
    differences: list[str] = field(default_factory=list)
    first_step: int | None = None
    largest: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    parameters: int = 0
    finite: bool = True
    compared: int = 0
    called: int = 0
    missing: list[str] = field(default_factory=list)
    means: int = 0
    wrong: list[str] = field(default_factory=list)
    series: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        """Whether training is unchanged, the record is correct and tracing had no errors."""
        recorded = not (self.missing or self.wrong or self.faults)
        return self.status in ("equal", "close") and recorded and self.finite


@dataclass
class _Training:
    program: Program
    losses: list[torch.Tensor]
    states: list[State]
    seconds: float

    @cached_property
    def final(self) -> State:
        """The final state, taken after tracing has ended."""
        return state_of(self.program)


def try_program(name: str, build: Callable[[], Program], folder: Path) -> Verdict:
    """Train a program from the same seed without and with tracing, and return the verdict.

    Args:
        name: name of the program.
        build: builds the program; called after seeding.
        folder: folder in which the run is recorded.
    """
    verdict = Verdict(name)
    try:
        _try(verdict, build, folder)
    except Exception as error:  # noqa: BLE001 - a failing program is a line of the table
        text = f"{type(error).__name__}: {error}"
        verdict.error = f"{text} ({traceback.extract_tb(error.__traceback__)[-1].name})"[:400]
    return verdict


def to_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict in its stored form."""
    return asdict(verdict) | {"sound": verdict.sound}


def _try(verdict: Verdict, build: Callable[[], Program], folder: Path) -> None:
    build()  # triggers imports, which may draw random numbers
    plain = _train(build)
    verdict.compared = len(plain.final)
    verdict.parameters = sum(p.numel() for m in plain.program.models for p in m.parameters())
    verdict.finite = bool(torch.stack([loss.double() for loss in plain.losses]).isfinite().all())
    verdict.status = "different"  # the default, even if the traced training fails
    before, replaced = surroundings(), functions()
    spec = {**EVERYTHING, **plain.program.spec}
    with _logged() as records, comgra.trace(spec, root=folder, group="zoo") as session:
        traced = _train(build)
    after, now = surroundings(), functions()
    verdict.seconds = {"plain": plain.seconds, "traced": traced.seconds}
    verdict.faults = [r.getMessage()[:200] for r in records if "has stopped" in r.getMessage()]
    verdict.faults += [repr(r.exc_info[1])[:300] for r in records if r.exc_info]
    verdict.warnings = [r.getMessage()[:200] for r in records if r.levelno == logging.WARNING]
    verdict.compared += STEPS * (1 + len(plain.states[0])) + len(before)
    _compare(verdict, plain, traced)
    verdict.differences += _changed(before, after)
    verdict.differences += [f"replaced: {k}" for k in _changed(replaced, now, present=True)]
    verdict.status = "different" if verdict.differences else "equal"
    if traced.program.rounds_differently:
        verdict.status = "close" if verdict.largest else "equal"
    elif verdict.differences:
        _control(verdict, plain, build)
    _look(verdict, session.path, traced, _seen(build))
    _try_around(verdict, plain, build, folder)


def _try_around(
    verdict: Verdict, plain: _Training, build: Callable[[], Program], folder: Path
) -> None:
    """Train once more with only time and memory measured; add what differs to the verdict."""
    if verdict.status != "equal":  # already told, or not to be compared bit by bit
        return
    again, before = Verdict(verdict.name), surroundings()
    traced = comgra.trace(AROUND, root=folder, group="around")
    with _logged() as records, _always_timed(), traced:
        measured = _train(build)
    verdict.seconds["measured"] = measured.seconds
    _compare(again, plain, measured)
    again.differences += _changed(before, surroundings())
    verdict.faults += [r.getMessage()[:200] for r in records if _is_fault(r)]
    if again.differences:
        verdict.status, verdict.first_step = "different", again.first_step
        verdict.differences = [f"time and memory: {line}" for line in again.differences]


def _is_fault(record: logging.LogRecord) -> bool:
    return "has stopped" in record.getMessage() or "error in comgra_decl" in record.getMessage()


@contextmanager
def _always_timed() -> Iterator[None]:
    """Let every step that is not recorded be timed: alternately its phases, and its modules."""
    names = ("INTERVAL", "MODULES_INTERVAL", "MEMORY_INTERVAL", "FIRST_MODULES")
    usual = {name: getattr(automatic, name) for name in names}
    try:
        for name in names:
            setattr(automatic, name, 0.0)
        yield
    finally:
        for name, value in usual.items():
            setattr(automatic, name, value)


def _train(build: Callable[[], Program]) -> _Training:
    gc.collect()
    seed_everything()
    program = build()
    losses, states = [], []
    started = time.perf_counter()
    for number in range(STEPS):
        losses.append(program.step(number).clone())
        states.append(gradients_and_parameters(program))
    return _Training(program, losses, states, round(time.perf_counter() - started, 3))


def _seen(build: Callable[[], Program]) -> Seen:
    seed_everything()
    return first_step(build())


@contextmanager
def _logged() -> Iterator[list[logging.LogRecord]]:
    """Collect the log records of comgra_decl."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign,assignment]
    logger = logging.getLogger("comgra_decl")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


# -- the training --------------------------------------------------------------------------------


def _compare(verdict: Verdict, plain: _Training, traced: _Training) -> None:
    found = []
    for number in range(STEPS):
        one = {"loss": bits(plain.losses[number]), **plain.states[number]}
        other = {"loss": bits(traced.losses[number]), **traced.states[number]}
        parted = _changed(one, other)
        if parted:
            verdict.first_step = number
            found += [f"step {number}: {name}" for name in parted[:_MOST_LINES]]
            break
    found += _changed(plain.final, traced.final)
    verdict.differences = found[: 2 * _MOST_LINES]
    if found:
        verdict.largest = _largest(plain, traced)


def _changed(one: State, other: State, *, present: bool = False) -> list[str]:
    """Return the names for which two states differ; with `present`, only names in `one`."""
    names = one.keys() if present else one.keys() | other.keys()
    absent = object()
    return sorted(n for n in names if one.get(n, absent) != other.get(n, absent))


def _largest(plain: _Training, traced: _Training) -> dict[str, float]:
    """Return the largest absolute differences of losses and of final parameters."""
    losses = max(_distance(a, b) for a, b in zip(plain.losses, traced.losses, strict=True))
    pairs = [
        (a, b)
        for one, other in zip(plain.program.models, traced.program.models, strict=True)
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    ]
    return {"loss": losses, "parameter": max(_distance(a, b) for a, b in pairs)}


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.numel() == 0:
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    return float((a.detach().to(wide) - b.detach().to(wide)).abs().max())


def _control(verdict: Verdict, plain: _Training, build: Callable[[], Program]) -> None:
    """Train without tracing once more, to recognize programs that are not reproducible."""
    again = Verdict(verdict.name)
    _compare(again, plain, _train(build))
    if again.differences:
        verdict.status = "irreproducible"


# -- the record ----------------------------------------------------------------------------------


def _look(verdict: Verdict, path: Location | None, traced: _Training, seen: Seen) -> None:
    """Compare the records with the program's own numbers and with torch hooks."""
    assert path is not None
    run = comgra.open_run(path)
    slots = run.slots
    verdict.series, verdict.called = len(slots), len(seen.called)
    if run.steps.tolist() != list(range(STEPS)):
        verdict.wrong.append(f"recorded steps: {run.steps.tolist()}")
    node_of = _nodes(run, traced.program)
    outputs = slots[slots.role.str.startswith("output") & (slots["pass"] == "forward")]
    recorded, unseen = set(outputs.node), traced.program.unseen
    verdict.missing = sorted(p for p in seen.called if node_of.get(p) not in recorded | unseen)
    if traced.program.plain_loss:
        _check_loss(verdict, run, traced)
    for path_, mean in seen.means.items():
        if node_of.get(path_) in recorded:
            _check_mean(
                verdict, run, node_of[path_], mean, calls_before=traced.program.calls_before
            )


def _nodes(run: Any, program: Program) -> dict[str, str]:
    """Return the node of each module path of the first model.

    The run lists modules model by model, each beginning with the model itself (an empty path).
    """
    model = program.models[0]
    kind = type(getattr(model, "_orig_mod", model)).__name__
    found: dict[str, str] = {}
    mine = False
    for module in run.modules:
        if not module["path"]:
            mine = module["class"] in (kind, type(model).__name__) and not found
        if mine:
            found[module["path"]] = module["node"]
    wrapped = {f"_orig_mod.{path}".removesuffix("."): node for path, node in found.items()}
    return found | wrapped


def _check_loss(verdict: Verdict, run: Any, traced: _Training) -> None:
    recorded = run.series("loss").to_numpy(np.float32)
    actual = np.array([float(loss) for loss in traced.losses], np.float32)
    verdict.means += STEPS
    if not np.array_equal(recorded, actual, equal_nan=True):
        verdict.wrong.append(f"loss: {recorded.tolist()} instead of {actual.tolist()}")


def _check_mean(verdict: Verdict, run: Any, node: str, mean: float, *, calls_before: int) -> None:
    """Compare a mean with the module's first call in the step, after calls while building."""
    slots = run.slots
    mine = slots[(slots.node == node) & (slots["pass"] == "forward")]
    role = next(r for r in mine.role if r.startswith("output"))
    verdict.means += 1
    for iteration in mine.iteration[mine.role == role]:
        slot = run.slot(node, role=role, iteration=int(iteration))
        recorded = float(slot.series("mean").iloc[0])
        size = float(slot.series("abs_mean").iloc[0])
        if abs(recorded - mean) <= _TOLERANCE * max(size, abs(mean)) + 1e-12:
            return
        if iteration >= calls_before:
            break
    verdict.wrong.append(f"{node} {role}: mean {recorded:.6g} instead of {mean:.6g}")

"""This package, attached only through its public API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.nets import Attention, Training
from benchmarks.tools.base import CommitClock, Step, Tool, timed_method

EVERY_STEP: Mapping[str, Any] = {"first": 1, "every": 1, "backoff": 1.0}
FIRST_STEP_ONLY: Mapping[str, Any] = {"steps": [0, 10**9]}


class Ours(Tool):
    """comgra_decl with one spec; `source` and `overrides` are arguments of `comgra_decl.trace`."""

    most_records = 1024  # several column blocks of 256 steps

    def __init__(
        self,
        name: str,
        label: str,
        *,
        source: str | Mapping[str, Any],
        overrides: Sequence[str] = (),
    ) -> None:
        self.name, self.label = name, label
        self._source, self._overrides = source, list(overrides)

    @contextmanager
    def attach(self, training: Training, folder: Path) -> Iterator[Step]:
        """Yield the training's own step; the loop is unaware of tracing."""
        import comgra_decl

        with comgra_decl.trace(self._source, root=folder, overrides=self._overrides):
            yield training.step

    def records(self, folder: Path) -> int:
        """Return the number of recorded steps."""
        from comgra_decl import open_run

        return len(open_run(folder).steps)

    def series(self, folder: Path) -> int | None:
        """Return the number of slots of the newest record."""
        from comgra_decl import open_run

        run = open_run(folder)
        return len(run.row(int(run.steps[-1])))

    def commits(self) -> AbstractContextManager[CommitClock]:
        """Time the store's commits on the writer thread."""
        from comgra_decl.store import RunWriter

        return timed_method(RunWriter, "commit")


class Idle(Ours):
    """Attached with only the very first step recorded, to measure unrecorded steps."""

    most_records = 0

    def expected(self, steps: int) -> int:
        """Return 1, for the first step of the warm-up."""
        del steps
        return 1

    def series(self, folder: Path) -> None:
        """Return None, as no measured step was recorded."""


class OfAttention(Ours):
    """A spec about attention, measured only on nets that have some."""

    def refuses(self, training: Training) -> str | None:
        """Refuse nets without attention."""
        found = any(isinstance(module, Attention) for module in training.model.modules())
        return None if found else "the net has no attention"


class Armed(Ours):
    """Every step is captured and checked but none is kept, to measure `keep` until it fires."""

    most_records = 0

    def expected(self, steps: int) -> int:
        """Return 1, for the first step of the warm-up."""
        del steps
        return 1

    def series(self, folder: Path) -> None:
        """Return None, as no measured step was recorded."""


def spec(capture: Sequence[str], **fields: Any) -> dict[str, Any]:
    """Return a spec that captures `capture` of every module; `fields` are its other fields.

    Rules are off, as other tools have none; the presets are measured with their rules.
    """
    nodes = {"all": {"select": "**", "capture": list(capture)}}
    return {"nodes": nodes, "rules": "off", **fields}


OUTPUTS_AND_GRADIENTS = ("output", "output_grad", "parameter_grad")
NEVER: Mapping[str, Any] = {"ring": 20, "when": ["nonfinite", {"spike": 1e9}]}
COMGRA_STATISTICS = ("mean", "abs_mean", "std", "abs_max")

OURS: tuple[Tool, ...] = (
    Idle(
        "idle",
        "ours, idle",
        source=spec(OUTPUTS_AND_GRADIENTS, schedule=FIRST_STEP_ONLY),
    ),
    Idle(
        "silent",
        "ours, idle, without the loss of every step",
        source=spec(OUTPUTS_AND_GRADIENTS, schedule=FIRST_STEP_ONLY, kpis={"loss": False}),
    ),
    Ours(
        "record",
        "ours, every step",
        source=spec(OUTPUTS_AND_GRADIENTS, schedule=EVERY_STEP, graph=False, histogram=None),
    ),
    Armed(
        "armed",
        "ours, keep armed",
        source=spec(
            OUTPUTS_AND_GRADIENTS,
            schedule=FIRST_STEP_ONLY,
            keep=NEVER,
            graph=False,
            histogram=None,
        ),
    ),
    Ours(
        "like",
        "ours, comgra's content",
        source=spec(
            (*OUTPUTS_AND_GRADIENTS, "parameter"),
            schedule=EVERY_STEP,
            histogram=None,
            stats=list(COMGRA_STATISTICS),
        ),
    ),
    Ours(
        "debug",
        "ours, preset debug, every step",
        source="debug",
        overrides=("schedule.first=1", "schedule.every=1", "schedule.backoff=1.0"),
    ),
    Ours(
        "light",
        "ours, preset light, every step",
        source="light",
        overrides=("schedule.first=1", "schedule.every=1", "schedule.backoff=1.0"),
    ),
    OfAttention(
        "attention",
        "ours, preset attention, every step",
        source="attention",
        overrides=("schedule.first=1", "schedule.every=1", "schedule.backoff=1.0"),
    ),
)

"""One row of facts for each run: state, metrics, findings, settings and origin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.records import SEVERITIES

from .compare import differing, settings_of, unique_names
from .index import Index
from .listing import RunSummary, below
from .run import Run

LOSS = "loss"
"""Name of the metric that contains the loss; further losses in a step are "loss[1]", ..."""

SEEDS = ("seed", "random_seed", "manual_seed", "rng_seed")
"""Last parts of the names of settings that contain a seed."""


@dataclass(frozen=True, slots=True)
class RunRow:
    """What a table of runs shows about one run.

    Attributes:
        group, name: names of the folders that contain the run.
        state: "waiting", "live", "finished", "failed" or "stopped".
        steps: number of training steps: the last recorded or logged step plus one; 0 if none.
        records: number of records of all types.
        started: start in Unix seconds.
        duration: seconds from the start to the last record, including pauses; None without records.
        last: the last value of every metric; metrics of types other than training are named like
            "eval: loss".
        best: the lowest finite value of every loss.
        automatic: the last value of every metric that needs no code in the program, such as "lr".
        findings: number of findings of each severity; None if no rule has checked the run.
        commit, branch: of the work tree that contains the script; "" if unknown.
        dirty: whether tracked files had uncommitted changes; None if unknown.
        versions: versions of Python and of packages.
        seed: the seed in the settings; None if there is none.
        command: the command line.
        settings: all settings by name, see `comgra_decl.query.differences`.
    """

    group: str
    name: str
    state: str
    steps: int
    records: int
    started: float
    duration: float | None
    last: dict[str, float]
    best: dict[str, float]
    automatic: dict[str, float]
    findings: dict[str, int] | None
    commit: str
    branch: str
    dirty: bool | None
    versions: dict[str, str]
    seed: Any
    command: str
    settings: dict[str, Any] = field(repr=False)


class Clock(NamedTuple):
    """The times at which a run's training steps took place.

    Attributes:
        steps: recorded training steps, ascending and unique [k].
        seconds: seconds since the start of the run [k].
        samples: samples seen before each of these steps [k].
    """

    steps: NDArray[np.int64]
    seconds: NDArray[np.float64]
    samples: NDArray[np.float64]


def row_of(run: Run) -> RunRow:
    """Return the facts about one run."""
    facts, git = run.facts, run.facts.get("git") or {}
    both = metrics_of(run, automatic=True)
    own = {*run.kpis()["name"]}
    metrics = {name: both[name] for name in both if name.rpartition(": ")[2] in own}
    settings = settings_of(run)
    lasts = [int(steps[-1]) for name, (steps, _) in metrics.items() if ": " not in name]
    lasts += run.steps[-1:].tolist()
    records = run.records
    return RunRow(
        group=run.group,
        name=run.name,
        state=run.state,
        steps=max(lasts, default=-1) + 1,
        records=len(records),
        started=run.started,
        duration=float(records["time"].max()) - run.started if len(records) else None,
        last={name: float(values[-1]) for name, (_, values) in metrics.items()},
        best={name: _lowest(values) for name, (_, values) in metrics.items() if is_loss(name)},
        automatic={
            name: float(values[-1]) for name, (_, values) in both.items() if name not in metrics
        },
        findings=_findings(run),
        commit=str(git.get("commit") or ""),
        branch=str(git.get("branch") or ""),
        dirty=git.get("dirty"),
        versions={str(k): str(v) for k, v in (facts.get("versions") or {}).items()},
        seed=next((v for k, v in settings.items() if k.rpartition(".")[2] in SEEDS), None),
        command=" ".join(map(str, facts.get("command") or ())),
        settings=settings,
    )


def row_in(index: Index, summary: RunSummary) -> RunRow:
    """Return the facts about a run: from an index if it has ended, and else from the run.

    Args:
        index: the index of a folder that contains the run. The row is added if it is missing.
        summary: of the run.
    """
    name = below(index.place, summary.path)
    known = index.row(name)
    if known is not None:
        return known
    line = index.known(name)
    row = row_of(Run(summary.path))
    if line is not None:
        index.put_row(name, line.identity, row)
    return row


def settings_in(index: Index, summary: RunSummary) -> dict[str, Any]:
    """Return the settings of a run: from an index if its row is there, and else from the run."""
    known = index.row(below(index.place, summary.path))
    return settings_of(Run(summary.path)) if known is None else known.settings


def overview(runs: Iterable[Run]) -> pd.DataFrame:
    """Return a table with one row per run: facts, metrics and the settings that differ.

                     state  steps  last.loss  best.loss  errors  ...  config.optimizer.lr
        run
        lr_1e-3   finished    200     0.3121     0.3067       0  ...                0.001
        lr_1e-2   finished    200     2.3026     0.4113       1  ...                 0.01

    The columns are the fields of `RunRow`: `last.*` and `best.*` for each metric, `errors`,
    `warnings` and `hints` (<NA> if no rule has checked the run), `version.*`, and each setting in
    which the runs differ. Missing values are NaN or <NA>.
    """
    known = list(runs)
    return overview_of(dict(zip(unique_names(known), map(row_of, known), strict=True)))


def overview_of(rows: Mapping[str, RunRow]) -> pd.DataFrame:
    """Return the same table for runs whose rows are known."""
    changed = differing({name: row.settings for name, row in rows.items()})
    lines = [line_of(row, changed, missing=pd.NA) for row in rows.values()]
    table = pd.DataFrame(lines, index=pd.Index(list(rows), name="run"))
    for name in ("errors", "warnings", "hints"):
        if name in table:
            table[name] = table[name].astype("Int64")
    return table


def metrics_of(
    run: Run, *, automatic: bool = False
) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Return steps [k] and values [k] of every metric, losses first.

    Metrics of the training type keep their names; others are named like "eval: loss".

    Args:
        run: the run.
        automatic: whether to add the metrics that need no code in the program; see `Run.kpis`.
    """
    table = run.kpis(automatic=automatic)
    table["type"] = table["type"].fillna("")
    training = {"", *_training_types(run)}
    found: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
    for (name, type_), part in table.groupby(["name", "type"], sort=False):
        label = str(name) if type_ in training else f"{type_}: {name}"
        if label in found:  # several training types, such as one for each part of a GAN
            label = f"{type_}: {name}"
        part = part.sort_values("step", kind="stable")
        found[label] = part["step"].to_numpy(np.int64), part["value"].to_numpy(np.float64)
    return dict(sorted(found.items(), key=lambda item: (not is_loss(item[0]), ": " in item[0])))


def is_loss(metric: str) -> bool:
    """Return whether a metric is a loss, for which lower values are better."""
    return metric.rpartition(": ")[2].partition("[")[0] == LOSS


def clock_of(run: Run) -> Clock:
    """Return the times at which the recorded training steps took place.

    Steps between two records are assumed to have the batch size of the record before them.
    """
    records = run.records
    training = records[records["mode"] == "train"]
    found = (training if len(training) else records).drop_duplicates("step").sort_values("step")
    steps = found["step"].to_numpy(np.int64)
    sizes = found["batch_size"].fillna(0).to_numpy(np.float64)
    seen = np.cumsum(np.concatenate([steps[:1] * sizes[:1], np.diff(steps) * sizes[:-1]]))
    return Clock(steps, found["time"].to_numpy(np.float64) - run.started, seen)


def at_steps(clock: Clock, steps: NDArray[np.int64], axis: str) -> NDArray[np.float64]:
    """Return the position of each step on an axis.

    Times between two records are interpolated linearly. Beyond the last record, the pace of the
    last two records is extrapolated.

    Args:
        clock: the times of the run's training steps.
        steps: any steps [k].
        axis: "step", "time" (seconds since the start of the run) or "samples".
    """
    if axis == "step" or not len(clock.steps):
        return steps.astype(np.float64)
    known = clock.seconds if axis == "time" else clock.samples
    found = np.interp(steps, clock.steps, known)
    if len(clock.steps) > 1:
        last = np.diff(known)[-1] / np.diff(clock.steps)[-1]
        found += np.maximum(steps - clock.steps[-1], 0) * last
    return found


def _training_types(run: Run) -> set[str]:
    records = run.records
    return set(records.loc[records["mode"] == "train", "type"]) or {"train"}


def _findings(run: Run) -> dict[str, int] | None:
    if run.document("findings") is None:
        return None
    return {str(k): int(v) for k, v in run.findings()["severity"].value_counts().items()}


def _lowest(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.min()) if len(finite) else float("nan")


def line_of(row: RunRow, changed: Iterable[str], *, missing: object) -> dict[str, Any]:
    """Return a row as one line of a table.

    Args:
        row: the facts about a run.
        changed: names of the settings to include.
        missing: the value of settings and counts that the run lacks.
    """
    plain = {name: getattr(row, name) for name in RunRow.__dataclass_fields__}
    line: dict[str, Any] = {
        name: plain[name] for name in ("group", "state", "steps", "records", "started", "duration")
    }
    line |= {f"last.{name}": value for name, value in row.last.items()}
    line |= {f"best.{name}": value for name, value in row.best.items()}
    counts: Mapping[str, int] | None = row.findings
    for name in SEVERITIES:
        line[f"{name}s"] = missing if counts is None else counts.get(name, 0)
    line |= {name: plain[name] for name in ("commit", "branch", "dirty", "seed", "command")}
    line |= {f"version.{name}": text for name, text in row.versions.items()}
    return line | {name: row.settings.get(name, missing) for name in changed}

"""Compare runs by one statistic, and find the settings in which they differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from comgra_decl.errors import UnknownNameError

from .listing import RunSummary
from .run import Run


def compare(
    runs: Iterable[Run],
    node: str,
    statistic: str = "mean",
    *,
    role: str = "output",
    of: str = "forward",
    iteration: int = 0,
    over_batch: str = "mean",
    type: str | None = None,
) -> pd.DataFrame:
    """Return a statistic of one tensor across runs: one row per step, one column per run.

        run        lr_1e-3   lr_1e-2
        step
        0         0.581002  0.581002
        10        0.603418  1.190233
        20        0.611920       NaN

    NaN where a run did not record the step or lacks the tensor. If a step has several records, for
    example from several evaluations, the last one is used.

    Args:
        runs: a `Group`, or any runs. Each column has the name of its run. If two runs share a name,
        the group is added.
        node: module path or annotated name, as in `Run.slot`.
        statistic: name of a statistic that the runs have.
        role: which of the node's tensors to compare.
        of: the pass: "forward", "grad", ...
        iteration: which call within the step to compare.
        over_batch: "mean", "std" or "abs_max".
        type: type of execution; None: training.

    Raises:
        UnknownNameError: no run has the tensor or the statistic; the message lists the names in the
            last run.
    """
    known = list(runs)
    tensor = Tensor(node, role, of, iteration, statistic, over_batch, type)
    return compare_each(unique_names(known), known, tensor)


class Tensor(NamedTuple):
    """What is compared: a statistic of a tensor; see `compare`."""

    node: str
    role: str
    of: str
    iteration: int
    statistic: str
    over_batch: str
    type: str | None


def compare_each(names: Sequence[str], runs: Iterable[Run], tensor: Tensor) -> pd.DataFrame:
    """Return a statistic of one tensor across runs, as `compare` does.

    Args:
        names: the names of the columns.
        runs: the runs in the same order; each is used once and then let go.
        tensor: what to compare.
    """
    columns: dict[str, pd.Series[float]] = {}
    missing: UnknownNameError | None = None
    found = False
    for name, run in zip(names, runs, strict=True):
        try:
            slot = run.slot(tensor.node, role=tensor.role, of=tensor.of, iteration=tensor.iteration)
            series = slot.series(tensor.statistic, over_batch=tensor.over_batch, type=tensor.type)
            found = True
        except UnknownNameError as error:
            missing = error
            series = pd.Series(dtype="float32", index=pd.Index([], dtype="int64"))
        columns[name] = series[~series.index.duplicated(keep="last")]
    if missing is not None and not found:
        raise missing
    table = pd.DataFrame(columns).sort_index()
    table.index.name, table.columns.name = "step", "run"
    return table


def differences(runs: Iterable[Run]) -> pd.DataFrame:
    """Return the settings in which runs differ: one row per setting, one column per run.

        run                    lr_1e-3  lr_1e-2
        setting
        spec.schedule.every         10       20
        config.optimizer.lr      0.001     0.01

    `spec.*` are settings of the spec, `config.*` those of the program's own configuration. If the
    program has no configuration that comgra_decl knows, `argument.*` are the options on its command
    line (`--lr 0.1` or `lr=0.1`). <NA> where a run lacks the setting. The location of a run does
    not count as a difference.
    """
    known = list(runs)
    return differences_of(dict(zip(unique_names(known), map(settings_of, known), strict=True)))


def differences_of(settings: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Return the settings in which runs differ, as `differences` does, given all of them."""
    lines = {key: [one.get(key, pd.NA) for one in settings.values()] for key in differing(settings)}
    names = list(settings)
    table = pd.DataFrame.from_dict(lines, orient="index", columns=names, dtype=object)
    table.index.name, table.columns.name = "setting", "run"
    return table


def unique_names(runs: Sequence[Run | RunSummary]) -> list[str]:
    """Return the shortest names by which runs can be told apart."""
    for name_of in (_name, _long_name, _path):
        names = [name_of(run) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [f"{_path(run)} ({number})" for number, run in enumerate(runs)]


def _name(run: Run | RunSummary) -> str:
    return run.name


def _long_name(run: Run | RunSummary) -> str:
    return f"{run.group}/{run.name}"


def _path(run: Run | RunSummary) -> str:
    return str(run.path)


def settings_of(run: Run) -> dict[str, Any]:
    """Return all settings of a run by name; see `differences`."""
    spec = run.spec.model_dump(mode="json")
    spec.pop("run", None)
    settings = dict(_flat("spec", spec))
    if run.config is None:
        return settings | arguments_of(run.facts.get("command") or ())
    return settings | dict(_flat("config", run.config))


def differing(settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names of the settings that are not the same in all runs."""
    keys = dict.fromkeys(key for one in settings.values() for key in one)
    return [
        key for key in keys if len({repr(one.get(key, pd.NA)) for one in settings.values()}) > 1
    ]


def arguments_of(command: Sequence[Any]) -> dict[str, Any]:
    """Return the options that follow the script on a command line, with numbers as numbers."""
    words = [str(word) for word in command]
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), -1)
    words = words[script + 1 :]
    found: dict[str, Any] = {}
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        option = name.lstrip("-+~")
        after = "".join(words[place + 1 : place + 2])
        if not option or not (equals or word.startswith("--")):
            continue
        if not equals:
            value = "true" if not after or after.startswith("--") else after
        found[f"argument.{option}"] = _parsed(value)
    return found


def _parsed(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the settings within a mapping; a list is one setting."""
    if isinstance(value, Mapping) and value:
        for name, part in value.items():
            yield from _flat(f"{key}.{name}", part)
    elif not isinstance(value, Mapping):
        yield key, value

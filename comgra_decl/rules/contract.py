"""Contracts: the ranges of a good run, against which later runs are checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from comgra_decl.errors import ContractError, UnknownNameError
from comgra_decl.query import derived
from comgra_decl.records import SlotKey
from comgra_decl.sinks.naming import TRAIN, SeriesName, of_tensor, parsed
from comgra_decl.spec.globs import matches

if TYPE_CHECKING:
    from comgra_decl.query import Run

VERSION = 1
KINDS = ("mean", "std", "abs_max", "zero_fraction", "nonfinite", derived.UPDATE_RATIO)
"""Statistics in a contract, of those that the run has."""

_DIGITS = 6  # significant digits in the file
_FLOOR = 0.1
_HEAD = """\
# What a good run looked like: the smallest and largest value of each statistic over all training
# records, widened by `slack`. `comgra-decl check RUN THIS_FILE` names the first tensor that leaves
# its range. Edit freely.
"""

Range = tuple[float, float]


@dataclass(frozen=True)
class Contract:
    """What a run must keep to.

    Attributes:
        run: the run that it was made from.
        structure: hash of the dependency graph; None: any graph.
        ranges: range of each statistic, by name of the tensor.
    """

    run: str
    structure: str | None
    ranges: Mapping[str, Mapping[str, Range]]


class Breach(NamedTuple):
    """A departure from a contract.

    `step` is None if it concerns the whole run; so is `statistic` if it concerns a whole tensor,
    and `tensor` if it concerns none.
    """

    message: str
    tensor: str | None = None
    statistic: str | None = None
    step: int | None = None


def contract_of(run: Run, *, nodes: str | None = None, slack: float = 1.0) -> Contract:
    """Return the contract of a good run.

    Args:
        run: the run.
        nodes: glob over nodes; None for all.
        slack: by how much to widen each range at both ends, in units of the range or, if that is
            larger, of a tenth of its largest magnitude.

    Raises:
        UnknownNameError: the run has no training records, or no node matches.
        PatternError: the glob is invalid.
    """
    found: dict[str, dict[str, Range]] = {}
    for statistic, keys, _, values in _columns(run):
        if not len(values):
            continue
        for i, key in enumerate(keys):
            column = values[:, i][~np.isnan(values[:, i])]
            if len(column) and (nodes is None or matches(nodes, key.node)):
                ends = _range_of(statistic, column.astype(np.float64), slack)
                of_key = found.setdefault(of_tensor(key, TRAIN), {})
                of_key[statistic] = ends
    if not found:
        raise UnknownNameError(
            f"{str(run.path)!r} has no training records of "
            f"{'any node' if nodes is None else f'nodes that match {nodes!r}'}."
        )
    structure = run.structure_hash() if nodes is None else None
    return Contract(f"{run.group}/{run.name}", structure, found)


def breaches(run: Run, contract: Contract) -> list[Breach]:
    """Return the departures of a run from a contract, in order of steps, then of execution.

    For each tensor and statistic, only the first departure is returned. A changed graph and what
    has no training records come first.
    """
    found = []
    graph = run.structure_hash()
    if contract.structure is not None and graph != contract.structure:
        what = "the run has no graph" if graph is None else f"its hash is {graph}"
        found.append(Breach(f"the graph has changed: {what}, not {contract.structure}"))
    columns = [*_columns(run)]
    found += _missing(columns, contract)
    left = [each for column in columns for each in _departures(column, contract)]
    left.sort(key=lambda each: (each[0].step, each[1]))
    return found + [each for each, _ in left]


def _missing(columns: Sequence[_Column], contract: Contract) -> Iterator[Breach]:
    """Yield the tensors and statistics that have a range but no number in any training record."""
    tensors: set[str] = set()
    known: set[tuple[str, str]] = set()
    for column in columns:
        there = ~np.isnan(column.values).all(axis=0)
        names = [of_tensor(column.keys[i], TRAIN) for i in np.flatnonzero(there)]
        tensors.update(names)
        known.update((name, column.statistic) for name in names)
    for name, ranges in contract.ranges.items():
        if name not in tensors:
            yield Breach(f"{name} was not recorded", name)
            continue
        for statistic in ranges:
            if (name, statistic) not in known:
                yield Breach(f"{statistic} of {name} was not recorded", name, statistic)


def _departures(column: _Column, contract: Contract) -> Iterator[tuple[Breach, int]]:
    """Yield the first departure of each tensor, with the tensor's position."""
    statistic, keys, steps, values = column
    for position, key in enumerate(keys):
        name = of_tensor(key, TRAIN)
        ends = contract.ranges.get(name, {}).get(statistic)
        if ends is None:
            continue
        low, high = ends
        told = values[:, position]
        with np.errstate(invalid="ignore"):
            outside = (told < low) | (told > high)
        rows = np.flatnonzero(outside)
        if len(rows):
            value, step = float(told[rows[0]]), int(steps[rows[0]])
            text = (
                f"{statistic} of {name} left its range at step {step}: "
                f"{value:.4g} is not between {low:.4g} and {high:.4g}"
            )
            yield Breach(text, name, statistic, step), position


class _Column(NamedTuple):
    """A statistic in all training records: tensors [n], steps [k] and values [k, n]."""

    statistic: str
    keys: list[SlotKey]
    steps: NDArray[np.int64]
    values: NDArray[np.float32]


def _columns(run: Run) -> Iterator[_Column]:
    keys = [slot.key for slot in run.arrays.slots]
    stored = [name for name in run.statistics if name not in derived.NAMES]
    wanted = [name for name in KINDS if name in stored]
    columns = [stored.index(name) for name in wanted]
    parts, steps = [], []
    for chunk in run.chunks(probes=False):
        parts.append(chunk.aggregates[chunk.train][:, :, columns, 0])
        steps.append(chunk.steps[chunk.train])
    if not parts:
        return
    table, at = np.concatenate(parts), np.concatenate(steps)
    for i, name in enumerate(wanted):
        yield _Column(name, keys, at, table[:, :, i])
    if derived.UPDATE_RATIO in run.statistics:
        updates = [i for i, key in enumerate(keys) if key.pass_ == "update"]
        slots = [run.slot(k.node, role=k.role, of=k.pass_, iteration=k.iteration)
                 for k in (keys[i] for i in updates)]  # fmt: skip
        series = [slot.series(derived.UPDATE_RATIO) for slot in slots]
        if series:
            ratios = np.full((len(series[0]), len(keys)), np.nan, np.float32)
            ratios[:, updates] = np.stack([one.to_numpy(np.float32) for one in series], axis=1)
            steps_there = series[0].index.to_numpy(np.int64)
            yield _Column(derived.UPDATE_RATIO, keys, steps_there, ratios)


def _range_of(statistic: str, values: NDArray[np.float64], slack: float) -> Range:
    """Return the range of a good run's values, widened; an infinite value is an infinite end."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return float(values.min()), float(values.max())
    low, high = _widened(statistic, float(finite.min()), float(finite.max()), slack)
    return (
        -math.inf if np.isneginf(values).any() else low,
        math.inf if np.isposinf(values).any() else high,
    )


def _widened(statistic: str, low: float, high: float, slack: float) -> Range:
    if statistic == "nonfinite":  # the lower end is 0, because less is no reason for concern
        return 0.0, high
    more = slack * max(high - low, _FLOOR * max(abs(low), abs(high)))
    if statistic == "zero_fraction":
        return 0.0, _outwards(min(1.0, high + more), 1)
    floor = -math.inf if statistic == "mean" else 0.0  # all others are magnitudes
    return max(floor, _outwards(low - more, -1)), _outwards(high + more, 1)


def _outwards(value: float, sign: int) -> float:
    """Return a value with few digits, moved outwards by more than rounding."""
    return float(f"{value + sign * abs(value) * 10.0 ** (1 - _DIGITS):.{_DIGITS}g}")


# -- the file ---------------------------------------------------------------------------------


def to_yaml(contract: Contract) -> str:
    """Return a contract as YAML."""
    content = {
        "contract": VERSION,
        "run": contract.run,
        "structure": contract.structure,
        "tensors": {
            name: {statistic: list(ends) for statistic, ends in ranges.items()}
            for name, ranges in contract.ranges.items()
        },
    }
    told: str = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=100)
    return _HEAD + told


def read(path: Path) -> Contract:
    """Read a contract from a file.

    Raises:
        ContractError: the file cannot be read, or is not a contract; the message says where.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(f"{path}: cannot be read: {error}") from None
    return from_yaml(text, where=str(path))


def from_yaml(text: str, *, where: str) -> Contract:
    """Read a contract.

    Args:
        text: the YAML.
        where: its path, for messages.

    Raises:
        ContractError: it is not a contract; the message says where.
    """
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ContractError(f"{where}: not valid YAML: {error}") from None
    if not isinstance(content, dict) or content.get("contract") != VERSION:
        raise ContractError(
            f"{where}: not a contract of version {VERSION}; create one with "
            "`comgra-decl contract RUN > contract.yaml`."
        )
    tensors = content.get("tensors")
    if not isinstance(tensors, dict):
        raise ContractError(f"{where}: `tensors` must be a mapping from names to ranges.")
    ranges = {
        str(name): _ranges(str(name), each, f"{where}: tensors.{name}")
        for name, each in tensors.items()
    }
    structure = content.get("structure")
    return Contract(
        str(content.get("run", "")), None if structure is None else str(structure), ranges
    )


def _ranges(name: str, content: Any, where: str) -> dict[str, Range]:
    try:
        valid = isinstance(parsed(f"{name}/x"), SeriesName) and isinstance(content, dict)
    except ValueError:
        valid = False
    if not valid:
        raise ContractError(
            f"{where}: must be a tensor such as conv1/output/forward with a mapping of ranges."
        )
    found = {}
    for statistic, ends in content.items():
        numbers = isinstance(ends, list) and len(ends) == 2
        if statistic not in KINDS or not numbers or not all(map(_is_number, ends)):
            raise ContractError(
                f"{where}.{statistic}: must be one of {', '.join(KINDS)} with a range "
                f"[lowest, highest], got {ends!r}."
            )
        if not ends[0] <= ends[1]:
            raise ContractError(f"{where}.{statistic}: the range {ends} is empty.")
        found[str(statistic)] = float(ends[0]), float(ends[1])
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

"""The table of runs, and drawings of several runs: lines over steps, settings, metrics."""

from __future__ import annotations

import colorsys
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np

from comgra_decl.query import RunRow
from comgra_decl.query.compare import differing
from comgra_decl.records import SEVERITIES
from comgra_decl.viewer.model.library import Floats, Library, Recorded, Wanted, XAxis
from comgra_decl.viewer.model.numbers import MISSING, brief, count, duration, number
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.series import log10, smoothed, thin
from comgra_decl.viewer.palette import LINES
from comgra_decl.visible import visible

SMOOTHINGS = ("0", "0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "0.95", "0.97",
              "0.99", "0.995", "0.999")  # fmt: skip
"""Weights of the moving average from which users can choose."""

X_AXES: dict[XAxis, str] = {"step": "step", "time": "wall time", "samples": "samples seen"}
"""Axes on which lines can be drawn: key and label."""

AT_FIRST = 5
"""Number of runs that are ticked until the user ticks any."""

MOST_SETTINGS = 40
"""Maximum number of columns for settings."""

MOST_AXES = 8
"""Maximum number of parallel axes of settings."""

_COLUMNS = frozenset({
    "run", "state", "steps", "findings", "started", "duration", "commit", "uncommitted", "versions",
    "command",
})  # fmt: skip
"""Columns that every table has; settings of these names are written with their path."""

_POINTS = 600  # of a line
_FEW = 40  # lines that have this many points each; more lines have fewer
_LOGARITHMIC = 50  # ratio of the largest to the smallest setting above which an axis is logarithmic


@dataclass(frozen=True, slots=True)
class Overlaid:
    """What the *Runs* section shows.

    Attributes:
        ticked: Names of the ticked runs; None until the user ticks any.
        smoothing: One of `SMOOTHINGS`.
        x_axis: Key of `X_AXES`.
        metric: Name of the metric; "" for the first one.
        against: The setting on the other axis; "" for parallel coordinates of all settings.
    """

    ticked: tuple[str, ...] | None = None
    smoothing: str = "0"
    x_axis: XAxis = "step"
    metric: str = ""
    against: str = ""


DEFAULT = Overlaid()
"""What the section shows until the user chooses."""


class Cell(NamedTuple):
    """Text of a cell, and the value by which it is sorted and filtered."""

    text: str
    key: float | str | None


@dataclass(frozen=True, slots=True)
class RunsTable:
    """The table: columns `(label, help, whether numbers)`, and the cells of each run by name."""

    columns: tuple[tuple[str, str, bool], ...]
    lines: dict[str, tuple[Cell, ...]]

    def json(self, colours: Mapping[str, str]) -> str:
        """Return the table for the browser; see `components.runs_table`."""
        rows = [
            {
                "name": name,
                "colour": colours[name],
                "text": [cell.text for cell in cells],
                "key": [cell.key for cell in cells],
            }
            for name, cells in self.lines.items()
        ]
        columns = [{"label": label, "help": help_, "number": n} for label, help_, n in self.columns]
        return json.dumps({"columns": columns, "rows": rows})


def table_of(rows: Mapping[str, RunRow], problems: Mapping[str, str]) -> RunsTable:
    """Return the table of all runs that have been read.

    Args:
        rows: The runs by name, newest first.
        problems: Why other runs could not be read, by name.
    """
    metrics = metrics_in(rows)
    settings, losses = settings_in(rows)[:MOST_SETTINGS], _losses(rows)
    short = short_names([*settings, *metrics], taken=_COLUMNS)
    has_seed = "seed" not in short.values()  # else it is among the settings
    columns = [
        ("run", "Path below the viewer's folder; click to open the run", False),
        ("state", "waiting, live, finished, failed, stopped or damaged", False),
        ("steps", "Number of training steps", True),
        *(column for name in metrics for column in _metric_columns(name, losses)),
        ("findings", "What the rules found", True),
        *((short[name], name, _is_number(rows, name)) for name in settings),
        ("started", "Local time", True),
        ("duration", "From the start to the last record", True),
        ("commit", "Commit of the script's work tree, and its branch", False),
        ("uncommitted", "Whether tracked files had uncommitted changes", False),
        *([("seed", "The seed in the settings", True)] if has_seed else []),
        ("versions", "Versions of Python and packages", False),
        ("command", "Command line", False),
    ]
    names = metrics, settings, losses
    lines = {name: _cells(name, row, *names, seed=has_seed) for name, row in rows.items()}
    blank = (Cell(MISSING, None),) * (len(columns) - 3)
    for name, problem in problems.items():
        lines[name] = (Cell(name, name), Cell("damaged", "damaged"), *blank, Cell(problem, problem))
    return RunsTable(tuple(columns), lines)


def metrics_in(rows: Mapping[str, RunRow]) -> list[str]:
    """Return the names of all metrics of the runs, losses first."""
    names = dict.fromkeys(name for row in rows.values() for name in row.last)
    losses = set(_losses(rows))
    return sorted(names, key=lambda name: (name not in losses, ": " in name))


def all_metrics_in(rows: Mapping[str, RunRow]) -> list[str]:
    """Return the same names, followed by those of the metrics that need no code in the program."""
    automatic = {name for row in rows.values() for name in row.automatic}
    own = metrics_in(rows)
    return [*own, *sorted(automatic.difference(own))]


def last_of(row: RunRow, metric: str) -> float:
    """Return the last value of a metric of a run; NaN without one."""
    return row.last.get(metric, row.automatic.get(metric, math.nan))


def settings_in(rows: Mapping[str, RunRow]) -> list[str]:
    """Return the settings that differ between the runs; those of the program first."""
    names = differing({name: row.settings for name, row in rows.items()})
    return sorted(names, key=lambda name: name.startswith("spec."))


def most_varied(rows: Mapping[str, RunRow], settings: Sequence[str]) -> str:
    """Return the setting with the most different values, the first of several; "" for none."""

    def values(setting: str) -> int:
        known = (row.settings.get(setting) for row in rows.values())
        return len({repr(value) for value in known if value is not None})

    return max(settings, key=values, default="")


def short_names(names: Sequence[str], *, taken: Collection[str] = ()) -> dict[str, str]:
    """Return the shortest unique ending of each setting's name that is not `taken`."""
    short: dict[str, str] = {}
    for name in names:
        parts = name.split(".")
        ends = [".".join(parts[-size:]) for size in range(1, len(parts) + 1)]
        others = [other for other in names if other != name]
        short[name] = next(
            (
                end
                for end in ends
                if end not in taken and not any(f".{o}".endswith(f".{end}") for o in others)
            ),
            name,
        )
    return short


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Return the colour of each run. The oldest runs have the most distinct colours.

    Args:
        names: All runs, newest first. New runs do not change the colours of the others.
    """
    return {name: _colour(place) for place, name in enumerate(reversed(names))}


def ticked_of(overlaid: Overlaid, names: Sequence[str], shown: str) -> tuple[str, ...]:
    """Return the runs to draw: those ticked, or else the shown run and the newest in its group."""
    if overlaid.ticked is not None:
        there = set(names)
        return tuple(name for name in overlaid.ticked if name in there)
    group = shown.rpartition("/")[0]
    near = [name for name in names if name.rpartition("/")[0] == group and name != shown]
    own = [shown] if shown in names else []
    return tuple((own + near)[:AT_FIRST])


@dataclass(frozen=True, slots=True)
class OverlaidLine:
    """A line of one run; `raw` are the values without smoothing."""

    run: str
    x: Floats
    y: Floats
    raw: Floats


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of several runs on the same axes.

    Attributes:
        lines: The lines; runs without values are left out.
        loading: Number of runs that are still being read.
        lacking: Number of runs that lack the metric or the tensor.
        left_out: Number of runs for which there was no room in memory.
        unit: Unit of the x axis: "" or "s", "min", "h".
    """

    lines: tuple[OverlaidLine, ...]
    loading: int
    lacking: int
    left_out: int = 0
    unit: str = ""

    def logarithmic(self) -> Lines:
        """Return the lines in powers of ten; non-positive values become gaps."""
        lines = [replace(line, y=log10(line.y), raw=log10(line.raw)) for line in self.lines]
        return replace(self, lines=tuple(lines))


def metric_lines(library: Library, runs: Sequence[str], overlaid: Overlaid, metric: str) -> Lines:
    """Return a metric of several runs."""
    return _lines(library, metrics_wanted(runs, metric), overlaid)


def tensor_lines(
    library: Library, runs: Sequence[str], overlaid: Overlaid, *, at: Selection, pass_: str
) -> Lines:
    """Return the selected statistic of the selected tensor in several runs."""
    return _lines(library, tensors_wanted(runs, at, pass_), overlaid)


def metrics_wanted(runs: Sequence[str], metric: str) -> list[Wanted]:
    """Return what to read for a metric of several runs."""
    return [Wanted(run, metric) for run in runs if metric]


def tensors_wanted(runs: Sequence[str], at: Selection, pass_: str) -> list[Wanted]:
    """Return what to read for the selected tensor in several runs."""
    over = "mean" if at.sample is not None else at.batch
    return [
        Wanted(run, "", at.node, at.role, at.iteration, pass_, at.statistic, over, at.type)
        for run in runs
    ]


def _lines(library: Library, wanted: Sequence[Wanted], overlaid: Overlaid) -> Lines:
    found = [(one.run, library.get(one)) for one in wanted]
    known = [(run, numbers) for run, numbers in found if numbers is not None]
    there = [(run, numbers) for run, numbers in known if len(numbers.steps)]
    scale, unit = _unit(overlaid.x_axis, [numbers for _, numbers in there])
    points = _POINTS if len(there) <= _FEW else _POINTS // 4
    lines = tuple(_line(run, numbers, overlaid, scale, points) for run, numbers in there)
    left_out = sum(numbers.left_out for _, numbers in known)
    lacking = len(known) - len(there) - left_out
    return Lines(lines, len(found) - len(known), lacking, left_out, unit)


def _line(
    run: str, numbers: Recorded, overlaid: Overlaid, scale: float, points: int
) -> OverlaidLine:
    x = numbers.x(overlaid.x_axis) / scale
    y = smoothed(numbers.values, float(overlaid.smoothing))
    keep = thin(numbers.values, points)
    return OverlaidLine(run, x[keep], y[keep], numbers.values[keep])


def _unit(axis: XAxis, found: Sequence[Recorded]) -> tuple[float, str]:
    """Return the seconds in a unit of the x axis, and its name."""
    if axis != "time":
        return 1.0, ""
    longest = max((float(numbers.x("time")[-1]) for numbers in found), default=0.0)
    return (1.0, "s") if longest < 120 else (60.0, "min") if longest < 7200 else (3600.0, "h")


# --- settings against a metric ---------------------------------------------------------------


_LONG = 1e6
"""Whole numbers above this are rounded at an axis."""

_EACH_MARKED, _APART = 6, 0.15
"""Number of different values that are all marked at an axis, and the least distance of marks."""


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis of settings or of a metric.

    Attributes:
        label: Name of the axis.
        places: Position of each run, from 0 to 1 [runs]; NaN where the run has no value.
        ticks: Positions and labels of the values to mark.
        texts: The value of each run as text [runs].
    """

    label: str
    places: Floats
    ticks: tuple[tuple[float, str], ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trials:
    """Runs on axes of settings; the last axis is the metric.

    Attributes:
        runs: Names of the runs.
        scales: The axes: two for a scatter plot, any number for parallel coordinates.
    """

    runs: tuple[str, ...]
    scales: tuple[Scale, ...]

    def ordered(self, order: Sequence[int]) -> Trials:
        """Return the runs in another order."""
        scales = (
            replace(s, places=s.places[[*order]], texts=tuple(s.texts[i] for i in order))
            for s in self.scales
        )
        return Trials(tuple(self.runs[i] for i in order), tuple(scales))


def trials_of(rows: Mapping[str, RunRow], metric: str, against: Sequence[str]) -> Trials:
    """Return all runs that have a metric, on the axes of settings and of its last value."""
    having = {name: row for name, row in rows.items() if math.isfinite(last_of(row, metric))}
    short = short_names(list(against))
    scales = [
        scale_of(short[name], [row.settings.get(name) for row in having.values()])
        for name in against
    ]
    scales.append(scale_of(metric, [last_of(row, metric) for row in having.values()]))
    return Trials(tuple(having), tuple(scales))


def scale_of(label: str, values: Sequence[Any]) -> Scale:
    """Return an axis for numbers (logarithmic if they differ widely), or for other values."""
    texts = tuple(MISSING if value is None else _text(value) for value in values)
    numeric = [v for v in values if v is not None]
    if numeric and all(_numeric(value) for value in numeric):
        return _numbers(
            label, np.array([math.nan if v is None else v for v in values], float), texts
        )
    kinds = sorted(set(texts))
    step = 1 / max(len(kinds) - 1, 1)
    place = {text: step * index if len(kinds) > 1 else 0.5 for index, text in enumerate(kinds)}
    return Scale(
        label,
        np.array([place[text] for text in texts], float),
        tuple((place[text], text) for text in kinds),
        texts,
    )


def _short_number(value: float) -> str:
    whole = value.is_integer() and abs(value) < _LONG
    return str(int(value)) if whole else brief(value, digits=3)


def _numbers(label: str, values: Floats, texts: tuple[str, ...]) -> Scale:
    known = values[np.isfinite(values)]
    if not len(known):
        return Scale(label, np.full(len(values), np.nan), (), texts)
    low, high = float(known.min()), float(known.max())
    if low == high:
        return Scale(
            label, np.where(np.isfinite(values), 0.5, np.nan), ((0.5, _short_number(low)),), texts
        )
    if low > 0 and high / low > _LOGARITHMIC:
        places = np.log(values / low) / math.log(high / low)
        middle = math.sqrt(low * high)
    else:
        places = (values - low) / (high - low)
        middle = (low + high) / 2
    several = {float(value): float(place) for value, place in zip(values, places, strict=True)}
    chosen = {low: 0.0, middle: 0.5, high: 1.0}
    if len(np.unique(known)) <= _EACH_MARKED:
        chosen = {value: several[value] for value in np.unique(known).tolist()}
    apart: list[tuple[float, str]] = []
    for value, place in chosen.items():
        if not apart or place - apart[-1][0] >= _APART or place == 1:
            if apart and place - apart[-1][0] < _APART and len(apart) > 1:
                apart.pop()  # the last value is always marked
            apart.append((place, _short_number(value)))
    ticks = tuple(apart)
    return Scale(label, places, ticks, texts)


# --- cells -----------------------------------------------------------------------------------


def _cells(
    name: str,
    row: RunRow,
    metrics: Sequence[str],
    settings: Sequence[str],
    losses: Sequence[str],
    *,
    seed: bool,
) -> tuple[Cell, ...]:
    numbers: list[Cell] = []
    for metric in metrics:
        numbers.append(_number(row.last.get(metric)))
        if metric in losses:
            numbers.append(_number(row.best.get(metric)))
    dirty = {True: "yes", False: "no", None: MISSING}[row.dirty]
    started = f"{datetime.fromtimestamp(row.started).astimezone():%Y-%m-%d %H:%M}"
    commit = f"{row.commit[:8]} {row.branch}".strip()
    return (
        Cell(name, name),
        Cell(row.state, row.state),
        Cell(count(row.steps), row.steps),
        *numbers,
        _findings(row.findings),
        *(_setting(row.settings.get(setting)) for setting in settings),
        Cell(started, row.started),
        Cell(MISSING, None) if row.duration is None else Cell(duration(row.duration), row.duration),
        Cell(commit or MISSING, commit),
        Cell(dirty, dirty),
        *([_setting(row.seed)] if seed else []),
        _worded(", ".join(f"{package} {text}" for package, text in row.versions.items())),
        _worded(row.command),
    )


def _metric_columns(name: str, losses: Sequence[str]) -> list[tuple[str, str, bool]]:
    shown = visible(name)
    last = (name, f"Last value of {shown}", True)
    return [last, (f"best {name}", f"Lowest value of {shown}", True)] if name in losses else [last]


def _worded(text: str) -> Cell:
    return Cell(text or MISSING, text)


def _number(value: float | None) -> Cell:
    if value is None:
        return Cell(MISSING, None)
    return Cell(number(value), value if math.isfinite(value) else None)


def _setting(value: Any) -> Cell:
    if value is None:
        return Cell(MISSING, None)
    return Cell(_text(value), value if _numeric(value) else _text(value))


def _findings(counts: Mapping[str, int] | None) -> Cell:
    """Return a sort key for the counts: one error outweighs any number of warnings, and so on."""
    if counts is None:
        return Cell("not checked", None)
    parts = [
        f"{counts[name]} {name}{'s' * (counts[name] > 1)}"
        for name in SEVERITIES
        if counts.get(name)
    ]
    weight = sum(
        min(counts.get(name, 0), 999) * 1000**place
        for place, name in enumerate(reversed(SEVERITIES))
    )
    return Cell(", ".join(parts) or "none", weight)


def _text(value: Any) -> str:
    return brief(value) if _numeric(value) and isinstance(value, float) else str(value)


def _numeric(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_number(rows: Mapping[str, RunRow], setting: str) -> bool:
    known = [row.settings[setting] for row in rows.values() if setting in row.settings]
    return all(_numeric(value) for value in known if value is not None)


def _losses(rows: Mapping[str, RunRow]) -> list[str]:
    return list(dict.fromkeys(name for row in rows.values() for name in row.best))


def _colour(place: int) -> str:
    if place < len(LINES):
        return LINES[place]
    turned = place * 0.618034 % 1  # the golden ratio keeps neighbours apart
    red, green, blue = colorsys.hls_to_rgb(turned, 0.46 + 0.1 * (place % 2), 0.55)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"

"""Feeds a sink with a stored run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.errors import UnknownNameError
from comgra_decl.pictures.tiles import tiled
from comgra_decl.query import Run, Slot
from comgra_decl.query.chunks import Chunk
from comgra_decl.records import PICTURE_PREFIX, PROBE_PREFIX, SHOWN, Note, SlotInfo, SlotKey
from comgra_decl.sinks import About, Feed, Graph, Metrics, Moment, Records, Sink, graph_of, naming
from comgra_decl.sinks.making import about_of

from .content import Content

_PICTURES = 20
"""Largest number of tensors whose pictures are sent, and of steps for each, spread over the run."""

_MAPS = {("height", "width"), ("query", "key")}
"""Pairs of axes that make a picture."""


def forward(content: Content, sink: Sink) -> list[SlotKey]:
    """Pass the selected part of a run to a sink; the caller ends it.

    Returns:
        The selected tensors.

    Raises:
        SelectionError: too many series are selected; nothing has been written.
        UnknownNameError: a selected statistic is not stored.
    """
    run = content.run
    feed = Feed(sink, content.selection, statistics=content.statistics, spacing=run.spacing)
    shown = {*content.ids.tolist()}
    slots = [slot for slot in run.arrays.slots if slot.id in shown]
    wanted = [slot for slot in slots if content.selection.includes(slot.key.node, slot.key.pass_)]
    feed.see(slots, _types(run, wanted))
    sink.begin(about(run, content.statistics))
    clock = Clock(run)
    feed.metrics(_metrics(run, clock))
    if feed.chosen:
        ids, times = np.array([*feed.chosen]), run.records["time"]
        for chunk in content.chunks():
            moments = [
                *map(Moment, chunk.steps.tolist(), times.loc[chunk.records.tolist()].tolist())
            ]
            numbers = chunk.aggregates[:, ids]
            found = _histograms(chunk, ids) if content.selection.histograms else (None, None)
            feed.records(Records(moments, chunk.types, ids, numbers, *found))
    graph = graph_in(run)
    if graph is not None:
        sink.graph(Moment(0, run.started), graph)
    if content.selection.pictures:
        for at, name, pixels in _preview_tiles(run, [*feed.chosen.values()], clock):
            sink.image(at, name, pixels)
        for at, key, value in _pictures(content, clock):
            feed.picture(at, key, value)
    feed.notes(_notes(run.notes()))
    document = run.document("findings")
    for finding in (document or {}).get("findings", []):
        feed.findings({"findings": [finding]}, clock.at(int(finding["first_step"])))
    return [*feed.chosen.values()]


def _types(run: Run, slots: list[SlotInfo]) -> dict[int, set[str]]:
    """Return the types of execution in which tensors were recorded; {} if there is only one."""
    if len(run.types) < 2:
        return {}
    found: dict[int, set[str]] = {slot.id: set() for slot in slots}
    ids = np.array([*found], np.int64)
    for type_ in run.types:
        lowest = run.arrays.extremes("nonfinite", ids=ids, type=type_).low
        for number in ids[~np.isnan(lowest).all(0)].tolist():
            found[number].add(type_)
    return found


def about(run: Run, statistics: list[str]) -> About:
    """Return the facts about a run that sinks show."""
    return about_of(run.path, run.config, run.started, statistics)


class Clock:
    """The time of each step, interpolated between records; constant before and after them."""

    def __init__(self, run: Run) -> None:
        records = run.records[["step", "time"]].groupby("step", sort=True)["time"].first()
        self._steps = records.index.to_numpy(np.float64)
        self._times = records.to_numpy(np.float64)
        self._started = run.started

    def at(self, step: int) -> float:
        """Return the time of a step in unix seconds."""
        if not len(self._steps):
            return self._started
        return float(np.interp(step, self._steps, self._times))


def graph_in(run: Run) -> Graph | None:
    """Return the last graph of a run; None if it has none."""
    structure = run.structure()
    return None if structure is None else graph_of(structure, run.arrays.slots)


def _metrics(run: Run, clock: Clock) -> Metrics:
    table = run.kpis(automatic=True).sort_values("step", kind="stable")
    steps = table["step"].tolist()
    times = {step: clock.at(step) for step in set(steps)}
    moments = [Moment(step, times[step]) for step in steps]
    return Metrics(moments, table["type"].tolist(), table["name"].tolist(), table["value"].tolist())


def _histograms(
    chunk: Chunk, slots: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[Any]] | tuple[None, None]:
    """Return counts [k, n, bins] and ranges [k, n, 2] of n slots; None without histograms."""
    pairs = [pair for slot in slots.tolist() if (pair := chunk.histograms(slot)) is not None]
    if not pairs:
        return None, None
    counts, ranges = zip(*pairs, strict=True)
    return np.stack(counts, axis=1), np.stack(ranges, axis=1)


def _notes(table: pd.DataFrame) -> list[Note]:
    columns = (table[name].tolist() for name in ("step", "type", "time", "text"))
    return [Note(*line) for line in zip(*columns, strict=True)]


def _preview_tiles(
    run: Run, chosen: list[SlotKey], clock: Clock
) -> Iterator[tuple[Moment, str, NDArray[np.uint8]]]:
    """Yield the previews of the chosen tensors."""
    drawn = 0
    for key in chosen:
        if drawn == _PICTURES:
            break
        slot = run.slot(key.node, role=key.role, of=key.pass_, iteration=key.iteration)
        found = dict(_previews(slot, run))
        drawn += bool(found)
        # a tag of its own: TensorBoard shows only the first kind of data under each
        name = f"{naming.of_tensor(key, naming.TRAIN)}/preview"
        for step, values in found.items():
            yield Moment(step, clock.at(step)), name, tiled(values)


def _pictures(content: Content, clock: Clock) -> Iterator[tuple[Moment, SlotKey, NDArray[Any]]]:
    """Yield the pictures that probes have recorded, and what the program has shown."""
    run = content.run
    keys = [slot.key for slot in run.arrays.slots if content.selection.pictured(slot.key)]
    for key in [key for key in keys if key.pass_ != SHOWN][:_PICTURES]:
        name = key.pass_.removeprefix(PICTURE_PREFIX)
        for step in _spread(_steps_of(run, name)):
            with suppress(UnknownNameError):
                picture = run.picture(name, step, key.node)
                yield Moment(step, clock.at(step)), key, picture.values
    for name, steps in [*run.shown.groupby("name", sort=False)["step"]][:_PICTURES]:
        for step in _spread(sorted({*steps.tolist()})):
            value = run.shown_value(str(name), step)
            kind = "text" if isinstance(value, str) else "image"
            array = np.frombuffer(value.encode(), np.uint8) if isinstance(value, str) else value
            yield Moment(step, clock.at(step)), SlotKey(str(name), kind, 0, SHOWN), array[None]


def _steps_of(run: Run, picture: str) -> list[int]:
    """Return the steps of the records that can have a picture: those of its probe."""
    declared = run.spec.pictures.get(picture)
    if declared is None or declared.of is None:
        return [int(step) for step in run.steps]
    steps = run.records.query("type == @type", local_dict={"type": f"{PROBE_PREFIX}{declared.of}"})
    return sorted({*steps["step"].tolist()})


def _previews(slot: Slot, run: Run) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Yield the steps and values [..., height, width] of a tensor's previews."""
    for step in _spread(run.steps.tolist()):
        try:
            preview = slot.preview(step)
        except UnknownNameError:
            return
        if preview.axes[-2:] not in _MAPS or np.iscomplexobj(preview.values):
            return
        yield preview.step, preview.values.astype(np.float64)


def _spread(steps: list[int]) -> list[int]:
    """Return at most `_PICTURES` of the steps, with the first and the last."""
    if len(steps) <= _PICTURES:
        return steps
    return [steps[i] for i in np.linspace(0, len(steps) - 1, _PICTURES).round().astype(int)]

"""Produce the arrays of a run in pieces, for any output format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.bins import edges_of
from comgra_decl.records import AGGREGATES

from .content import Content


@dataclass(frozen=True)
class Form:
    """Name, shape, dtype and dim names of an array to write."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    dims: tuple[str, ...]


def forms(content: Content) -> list[Form]:
    """Return the forms of the statistics arrays, with slots in the order of `content.slots`."""
    run, both = content.run, (len(content.records), len(content.slots))
    names, samples = len(content.statistics), run.sample_count
    found = [
        Form(
            "statistics",
            (*both, names, len(AGGREGATES)),
            "float32",
            ("record", "slot", "statistic", "aggregate"),
        )
    ]
    if samples:
        shape = (*both, samples, names)
        found.append(Form("samples", shape, "float32", ("record", "slot", "sample", "statistic")))
    if bins := run.bins:
        found.append(Form("histogram_counts", (*both, bins), "uint32", ("record", "slot", "bin")))
        edges = (*both, bins + 1)
        found.append(Form("histogram_edges", edges, "float32", ("record", "slot", "edge")))
    return found


def pieces(content: Content) -> Iterator[tuple[str, int, NDArray[Any]]]:
    """Yield pieces of all arrays of `forms`: (array name, first row, data [rows, slots, ...])."""
    ids, first = [int(number) for number in content.ids], 0
    for chunk in content.chunks():
        yield "statistics", first, chunk.aggregates[:, ids]
        samples = [chunk.samples(number) for number in ids]
        if ids and samples[0] is not None:
            yield "samples", first, np.stack([s for s in samples if s is not None], axis=1)
        found = [chunk.histograms(number) for number in ids]
        known = [pair for pair in found if pair is not None]
        if known:
            counts = np.stack([pair[0] for pair in known], axis=1).astype(np.uint32)
            yield "histogram_counts", first, counts
            ranges = np.stack([pair[1] for pair in known], axis=1)
            low, high = np.moveaxis(ranges, -1, 0)
            edges = edges_of(low, high, counts.shape[-1], content.run.spacing)
            yield "histogram_edges", first, edges.astype(np.float32)
        first += len(chunk.records)


def record_columns(content: Content) -> dict[str, NDArray[Any]]:
    """Return facts of each record as arrays [records]; a type is its index in `types`."""
    records = content.records
    codes = {name: code for code, name in enumerate(content.run.types)}
    return {
        "record": records.index.to_numpy(np.int64),
        "step": records["step"].to_numpy(np.int64),
        "time": records["time"].to_numpy(np.float64),
        "type": np.array([codes[name] for name in records["type"]], np.int64),
    }

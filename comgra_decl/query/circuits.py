"""The effects of paths as a graph: what is changed, what receives it, and the strongest edges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from comgra_decl.errors import SelectionError, UnknownNameError
from comgra_decl.spec.interventions import INTO, NODE


@dataclass(frozen=True, slots=True)
class Link:
    """An edge of a circuit.

    Attributes:
        source: the place that is changed.
        sink: the receiver.
        effect: the mean effect of the path.
        error: its standard error; NaN for a single sample.
    """

    source: str
    sink: str
    effect: float
    error: float


@dataclass(frozen=True, slots=True)
class Circuit:
    """The strongest paths of an intervention with receivers, at one step.

    Attributes:
        intervention: its name.
        step: the step.
        measure: what the effects are measured by.
        nodes: the module of each place, by the name of the place. The name is the module and, if
            parts are swept, their numbers: "blocks.0.attn.out, head 3".
        links: the paths, the strongest first.
        parts: pairs of a receiver and a place that is changed within it, through which a circuit
            goes on.
        omitted: the number of paths that are too weak, without those that have no effect.
    """

    intervention: str
    step: int
    measure: str
    nodes: Mapping[str, str]
    links: tuple[Link, ...]
    parts: tuple[tuple[str, str], ...]
    omitted: int


def circuit_of(
    name: str,
    step: int,
    table: pd.DataFrame,
    facts: Mapping[str, Any],
    *,
    above: float,
    strongest: int | None,
) -> Circuit:
    """Return the circuit in a table of effects; see `Run.circuit`."""
    if strongest is not None and strongest < 1:
        raise SelectionError(f"strongest must be at least 1, or None for all, got {strongest}")
    axes = [*facts["axes"]]
    if NODE not in axes or INTO not in axes:
        raise UnknownNameError(
            f"intervention {name!r} has no circuit: it needs receivers in `into`, and a sweep over "
            f"{NODE} and {INTO}."
        )
    receiving = [axis for axis in axes if axis.startswith(INTO)]
    sending = [axis for axis in axes if axis not in receiving]
    table = table[table["mean"] != 0.0].dropna(subset="mean")
    order = table["mean"].abs().sort_values(ascending=False, kind="stable")
    kept = order[order > above]
    chosen = table.loc[kept.index[:strongest]]
    columns = chosen.index.to_frame(index=False)
    sources = [_name(row, sending, NODE) for row in columns.to_dict("records")]
    sinks = [_name(row, receiving, INTO) for row in columns.to_dict("records")]
    nodes: dict[str, str] = {}
    for names, modules in ((sources, columns[NODE]), (sinks, columns[INTO])):
        nodes |= dict(zip(names, map(str, modules), strict=True))
    links = tuple(map(Link, sources, sinks, chosen["mean"], chosen["error"]))
    parts = tuple(
        (sink, source)
        for sink in dict.fromkeys(sinks)
        for source in dict.fromkeys(sources)
        if source != sink and _within(nodes[source], nodes[sink])
    )
    return Circuit(name, step, facts["measure"], nodes, links, parts, len(order) - len(chosen))


def _name(row: Mapping[Any, Any], axes: list[str], module: str) -> str:
    parts = [f"{axis.removeprefix(f'{INTO}.')} {row[axis]}" for axis in axes if axis != module]
    return ", ".join([str(row[module]), *parts])


def _within(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith(f"{outer}.")

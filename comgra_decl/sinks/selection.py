"""Which tensors and statistics other tools receive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from comgra_decl.errors import SelectionError, UnknownNameError, did_you_mean, shown
from comgra_decl.records import AGGREGATES, PICTURE_PREFIX, SlotInfo
from comgra_decl.spec.globs import matches

USUAL = ("mean", "std", "abs_max")
"""The statistics that are sent if none are selected and the run has them."""

SERIES = 200
"""The largest number of series that are sent unless more are requested."""


@dataclass(frozen=True)
class Selection:
    """A selection of series: a statistic of a tensor each.

    Attributes:
        nodes: a glob over nodes, as in a spec; None: all nodes, "" for metrics only.
        passes: "forward", "grad", ...; empty for all.
        statistics: names such as "std" or, for another aggregate over the batch, "l2.abs_max";
            empty for the usual ones.
        series: the largest number of series.
        histograms: whether to send the histograms of the selected tensors.
        pictures: whether to send pictures and previews.
    """

    nodes: str | None = None
    passes: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    series: int = SERIES
    histograms: bool = True
    pictures: bool = True

    def columns(self, stored: Sequence[str]) -> list[tuple[int, int]]:
        """Return the selected statistics as (index of the statistic, index of the aggregate).

        Raises:
            UnknownNameError: a statistic is not among the stored ones.
        """
        wanted = self.statistics or [name for name in USUAL if name in stored] or stored
        return [_column(name, stored) for name in wanted]

    def chosen(self, slots: Sequence[SlotInfo], stored: Sequence[str]) -> list[SlotInfo]:
        """Return the selected tensors.

        Raises:
            SelectionError: they have more series than `series`; the message proposes a selection.
        """
        if self.nodes == "":
            return []
        found = [slot for slot in slots if self._has(slot)]
        count = len(found) * len(self.columns(stored))
        if count > self.series:
            raise SelectionError(
                f"{len(found):,} tensors with {len(self.columns(stored))} statistics each are "
                f"{count:,} series, but at most {self.series:,} are sent. Select some, such as "
                f"{self._proposal(slots, stored)}; use {_option('nodes', '')} for metrics and "
                f"findings only; or raise the limit with {_option('series', str(count))}."
            )
        return found

    def _has(self, slot: SlotInfo) -> bool:
        key = slot.key
        if key.pass_.startswith(PICTURE_PREFIX):  # sent as a picture, if at all
            return False
        return (not self.passes or key.pass_ in self.passes) and (
            self.nodes is None or matches(self.nodes, key.node)
        )

    def _proposal(self, slots: Sequence[SlotInfo], stored: Sequence[str]) -> str:
        """Return the options of the largest simple selection within the limit."""
        sizes = {each: self._size(each, slots, stored) for each in self._simpler(slots, stored)}
        fitting = {each: size for each, size in sizes.items() if 0 < size <= self.series}
        if not fitting:
            return _option("nodes", "")
        best = max(fitting, key=fitting.__getitem__)
        options = [_option("nodes", best.nodes)] if best.nodes is not None else []
        options += [_option("pass", each) for each in best.passes]
        options += [_option("statistic", each) for each in best.statistics]
        return f"{' '.join(options)} ({fitting[best]:,} series)"

    def _size(self, other: Selection, slots: Sequence[SlotInfo], stored: Sequence[str]) -> int:
        return sum(map(other._has, slots)) * len(other.columns(stored))

    def _simpler(self, slots: Sequence[SlotInfo], stored: Sequence[str]) -> Iterator[Selection]:
        one = next((name for name in ("std", "l2") if name in stored), stored[0])
        statistics = self.statistics[:1] or (one,)
        found = [slot.key.node for slot in slots if self._has(slot)]
        nodes = [self.nodes]
        if self.nodes is None:
            heads = dict.fromkeys(node.partition(".")[0] for node in found)
            nodes += ["*", *(f"{head}.*" for head in heads), *(f"{head}.**" for head in heads)]
        nodes += dict.fromkeys(found)
        for glob in nodes[:50]:
            for passes in (self.passes, ("forward",)):
                yield replace(self, nodes=glob, passes=passes, statistics=statistics)


def _option(name: str, value: str | None) -> str:
    return f"--{name} '{value}'" if value is None or not value.isalnum() else f"--{name} {value}"


def _column(name: str, stored: Sequence[str]) -> tuple[int, int]:
    statistic, _, how = name.partition(".")
    if name in stored:
        return stored.index(name), 0
    if statistic in stored and how in AGGREGATES:
        return stored.index(statistic), AGGREGATES.index(how)
    raise UnknownNameError(
        f"there is no statistic {shown(name)}{did_you_mean(name, stored) or '.'} "
        f"This run has {', '.join(stored)}, each also with .std or .abs_max."
    )

"""Which tensors and statistics other tools receive."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from comgra_decl.errors import SelectionError, UnknownNameError, did_you_mean, shown
from comgra_decl.records import (
    AGGREGATES,
    EFFECT_PREFIX,
    LENS_RANKS,
    LENS_TOKENS,
    NO_SERIES,
    PICTURE_PREFIX,
    SHOWN,
    SlotInfo,
    SlotKey,
)
from comgra_decl.spec.globs import escaped, is_glob, matches
from comgra_decl.spec.sinks import SERIES

USUAL = ("mean", "std", "abs_max")
"""The statistics that are sent if none are selected and the run has them."""


@dataclass(frozen=True)
class Selection:
    """A selection of series: a statistic of a tensor each.

    Attributes:
        nodes: a glob over nodes, as in a spec; None: all nodes, "" for metrics only.
        passes: "forward", "grad", ...; empty for all.
        statistics: names such as "std" or, for another aggregate over the batch, "l2.abs_max";
            empty for the usual ones.
        series: the largest number of series. A statistic has a series for each type of execution.
        histograms: whether to send the histograms of the selected tensors.
        pictures: whether to send pictures, previews and what the program shows.
        in_spec: whether it is part of a spec, so that messages propose YAML instead of options of
            `comgra-decl export`.
    """

    nodes: str | None = None
    passes: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    series: int = SERIES
    histograms: bool = True
    pictures: bool = True
    in_spec: bool = False

    def columns(self, stored: Sequence[str]) -> list[tuple[int, int]]:
        """Return the selected statistics as (index of the statistic, index of the aggregate).

        Raises:
            UnknownNameError: a statistic is not among the stored ones.
        """
        wanted = self.statistics or [name for name in USUAL if name in stored] or stored
        return [_column(name, stored) for name in wanted]

    def chosen(
        self,
        slots: Sequence[SlotInfo],
        stored: Sequence[str],
        types: Mapping[int, Collection[str]] | None = None,
    ) -> list[SlotInfo]:
        """Return the selected tensors.

        Args:
            slots: all tensors.
            stored: the statistics of the run.
            types: the types of execution in which each tensor occurs, by id; a tensor has series of
                its own in each. One if they are unknown.

        Raises:
            SelectionError: they have more series than `series`; the message proposes a selection.
        """
        if self.nodes == "":
            return []
        found = [slot for slot in slots if self._has(slot)]
        statistics = len(self.columns(stored))
        numbers = {slot.id: max(1, len((types or {}).get(slot.id, ()))) for slot in found}
        count = sum(numbers.values()) * statistics
        if count > self.series:
            proposal = self._proposal(found, stored, numbers)
            several = {name for slot in found for name in (types or {}).get(slot.id, ())}
            within = f", in {' and '.join(sorted(several))}," if len(several) > 1 else ""
            some = "" if proposal is None else f"Select some, such as {proposal}; "
            metrics, more = self._written(nodes=""), self._written(series=count)
            use = "use" if some else "Use"
            raise SelectionError(
                f"{len(found):,} tensors with {statistics} statistics each{within} are {count:,} "
                "series, "
                f"but at most {self.series:,} are sent. {some}{use} {metrics} for metrics and "
                f"findings only; or raise the limit with {more}."
            )
        return found

    def _has(self, slot: SlotInfo) -> bool:
        return self.includes(slot.key.node, slot.key.pass_)

    def includes(self, node: str, pass_: str) -> bool:
        """Return whether the tensors of a node in a pass are selected."""
        pictured = pass_.startswith((PICTURE_PREFIX, EFFECT_PREFIX))
        if pictured or pass_ in NO_SERIES:  # sent as pictures, if at all
            return False
        return (not self.passes or pass_ in self.passes) and (
            self.nodes is None or matches(self.nodes, node)
        )

    def pictured(self, key: SlotKey) -> bool:
        """Return whether a slot is a picture that is sent.

        Like notes, what the program shows does not depend on `nodes`.
        """
        if not self.pictures or key.pass_ == SHOWN:
            return self.pictures
        beside = key.role.endswith((LENS_TOKENS, LENS_RANKS))
        if not key.pass_.startswith(PICTURE_PREFIX) or beside:
            return False
        return self.nodes is None or (self.nodes != "" and matches(self.nodes, key.node))

    def _proposal(
        self, found: Sequence[SlotInfo], stored: Sequence[str], numbers: Mapping[int, int]
    ) -> str | None:
        """Return the largest simple selection of these tensors within the limit, with its size."""
        tensors: Counter[tuple[str, str]] = Counter()
        for slot in found:
            tensors[slot.key.node, slot.key.pass_] += numbers[slot.id]
        best, most = None, 0
        for each in self._simpler(list(dict.fromkeys(node for node, _ in tensors)), stored):
            here = sum(count for key, count in tensors.items() if each.includes(*key))
            size = here * len(each.columns(stored))
            if most < size <= self.series:
                best, most = each, size
        if best is None:
            return None
        chosen: dict[str, Any] = {} if best.nodes is None else {"nodes": best.nodes}
        chosen |= {"passes": [*best.passes]} if best.passes else {}
        written = self._written(**chosen, statistics=[*best.statistics])
        return f"{written} ({most:,} series)"

    def _simpler(self, nodes: Sequence[str], stored: Sequence[str]) -> Iterator[Selection]:
        """Yield parts of this selection, of which `nodes` are the nodes."""
        one = next((name for name in ("std", "l2") if name in stored), stored[0])
        statistics = self.statistics[:1] or (one,)
        exact = [each for each in map(escaped, nodes) if each and is_glob(each)]
        globs: list[str | None] = [self.nodes]
        if self.nodes is None:
            heads = dict.fromkeys(glob.partition(".")[0] for glob in exact if "." in glob)
            globs += ["*", *(f"{head}.*" for head in heads), *(f"{head}.**" for head in heads)]
        for glob in [*globs, *exact][:_MOST_GLOBS]:
            for passes in (self.passes, self.passes[:1] or ("forward",)):
                yield replace(self, nodes=glob, passes=passes, statistics=statistics)

    def _written(self, **chosen: Any) -> str:
        """Return a selection as the user would write it."""
        if self.in_spec:
            return yaml.safe_dump(chosen, default_flow_style=True, width=math.inf).strip()
        options = [
            (f"--{_OPTIONS.get(name, name)}", str(value))
            for name, values in chosen.items()
            for value in (values if isinstance(values, list) else [values])
        ]
        return shlex.join(part for option in options for part in option)


_MOST_GLOBS = 50  # that a proposal tries

_OPTIONS = {"passes": "pass", "statistics": "statistic"}
"""Names of the options of `comgra-decl export`, where they differ."""


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

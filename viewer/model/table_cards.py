"""Tables beside the pictures of a probe: what is computed from the records of one step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from comgra_decl.errors import ComgraError
from comgra_decl.query import Picture
from comgra_decl.viewer.model.numbers import MISSING, count, number
from comgra_decl.viewer.model.record_pictures import size_of
from comgra_decl.viewer.model.runview import RunView

_MOST_ROWS = 12
_MOST_SAMPLES = 2000
"""Most samples of which all pairs are compared while one waits."""

_MOST_VALUES = 4_000_000
"""Most values of a node that are compared while one waits."""


@dataclass(frozen=True, slots=True)
class TableCard:
    """A table about the probe's samples or the selected node.

    Attributes:
        title: what it shows.
        columns: the names of the columns.
        rows: the text of each cell.
        note: how it was computed.
        samples: the sample that each row leads to; () if rows lead nowhere.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str
    samples: tuple[int, ...] = ()


def table_cards(view: RunView, type_: str, step: int, node: str) -> tuple[TableCard, ...]:
    """Return the tables for which there are data, those about the selected node last."""

    def compute() -> tuple[TableCard, ...]:
        return tuple(_tables(view, type_, step, node))

    return view.ever(("tables", type_, step, node), compute)


def _tables(view: RunView, type_: str, step: int, node: str) -> Iterator[TableCard]:
    if len(view.run.samples(step, type=type_)) > _MOST_SAMPLES:
        return
    if (found := _picture(view, "confident_errors", type_, step)) is not None:
        yield _errors(found)
    if (found := _picture(view, "foreign_auroc", type_, step)) is not None:
        known, foreign = count(found.facts["familiar"]), count(found.facts["foreign"])
        yield TableCard(
            "foreign samples",
            ("AUROC of the confidence",),
            ((_number(float(found.values[0])),),),
            f"{known} familiar and {foreign} foreign samples; 1: every familiar one has a higher "
            "confidence than every foreign one, 0.5: chance",
        )
    size = size_of(view, node)
    if size > _MOST_VALUES:
        yield TableCard(
            f"units: {node}",
            (),
            (),
            f"{count(size)} values are too many to compare here; call "
            f"run.picture('unit_effects', {step}, {node!r})",
        )
        return
    if (found := _picture(view, "separability", type_, step, node)) is not None:
        values = found.values[0].tolist()
        rows = zip(found.labels["quantity"], values, strict=True)
        yield TableCard(
            f"separability: {node}",
            ("measure", "value"),
            tuple((name, _number(value)) for name, value in rows),
            f"{count(found.facts['samples'][0])} samples of {count(found.facts['categories'][0])} "
            "categories; variability collapse: variation within the categories relative to that "
            "between their means",
        )
    if (found := _picture(view, "unit_effects", type_, step, node)) is not None:
        yield _effects(view, found, type_)
    if (found := _picture(view, "concept_derivatives", type_, step, node)) is not None:
        shares = found.facts["lowers_loss"]
        concepts = zip(found.labels["category"], found.values.mean(1).tolist(), shares, strict=True)
        yield TableCard(
            f"concepts: {node}",
            ("category", "mean derivative", "lowers the loss"),
            tuple((c, _number(d), _number(s)) for c, d, s in concepts),
            "derivative of the loss along the direction of each category, at the samples of the "
            "training step, and the share of samples at which it is negative; accuracy of the "
            f"directions on held-out samples: {_number(found.facts['accuracy'])}",
        )


def _picture(
    view: RunView, name: str, type_: str, step: int, node: str | None = None
) -> Picture | None:
    """Return a picture; None if it needs data that the run lacks."""
    try:
        return view.run.picture(name, step, node, type=type_)
    except ComgraError:
        return None


def _number(value: float) -> str:
    return MISSING if value != value else number(value, digits=3)


def _errors(found: Picture) -> TableCard:
    rows = found.values[:_MOST_ROWS].tolist()
    more = f", of which the first {len(rows)} are shown" if len(rows) < len(found.values) else ""
    return TableCard(
        "most confident errors",
        ("sample", "class", "predicted", "confidence"),
        tuple(
            (f"{sample:.0f}", f"{cls:.0f}", f"{predicted:.0f}", _number(sure))
            for sample, cls, predicted, sure in rows
        ),
        f"{count(len(found.values))} of {count(found.facts['samples'])} samples are predicted as "
        f"another class{more}",
        tuple(int(row[0]) for row in rows),
    )


def _effects(view: RunView, found: Picture, type_: str) -> TableCard:
    names = found.labels["category"]
    top = _picture(view, "top_samples", type_, found.step or 0, found.node)
    rows, samples = [], []
    for unit, category, effect, again in found.values[:_MOST_ROWS].tolist():
        best = [] if top is None else top.values[int(unit), :3, 0].astype(int).tolist()
        samples.append(best[0] if best else 0)
        rows.append(
            (
                f"{unit:.0f}",
                MISSING if effect != effect else names[int(category)],
                _number(effect),
                _number(again),
                ", ".join(map(str, best)),
            )
        )
    return TableCard(
        f"units: {found.node}",
        ("unit", "category", "effect", "held-out effect", "top samples"),
        tuple(rows),
        f"the units that tell one category from all others best (Cohen's d in "
        f"{count(found.facts['fitted'])} samples, and in {count(found.facts['tested'])} others), "
        "and the samples with their largest values; a row leads to the first of them",
        tuple(samples),
    )

"""Tables of what parts of a model do: effects of interventions, and induction scores of heads."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.errors import UnknownNameError, did_you_mean, shown
from comgra_decl.pictures.units import induction
from comgra_decl.records import EFFECT_PREFIX, INTERVENTION, INTERVENTION_PREFIX, SlotInfo
from comgra_decl.spec.interventions import INTO, NODE
from comgra_decl.store.layout import RecordColumn

from .preview import axis_names

if TYPE_CHECKING:
    from .snapshot import Snapshot

MEAN, ERROR = "mean", "error"


class Effects:
    """The interventions of one run."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    @property
    def names(self) -> list[str]:
        """The interventions that have records."""
        view = self._snapshot.view
        types = [*dict.fromkeys(view.names("type"))]
        return [
            name.removeprefix(INTERVENTION_PREFIX)
            for name in types
            if name.startswith(INTERVENTION_PREFIX)
        ]

    def facts(self, name: str, step: int | None) -> dict[str, Any]:
        """Return the facts about an intervention at a step; see `Run.intervention_facts`."""
        records = self._records(name)
        at = max(records) if step is None else step
        if at not in records:
            known = ", ".join(map(str, sorted(records)))
            raise UnknownNameError(
                f"intervention {name!r} has no record of step {at}; it has {known}."
            )
        return dict(self._snapshot.view.extra(records[at])[INTERVENTION])

    def last(self, name: str) -> int:
        """Return the last step at which an intervention has a record."""
        return max(self._records(name))

    def table(self, name: str, step: int | None, *, share: bool) -> pd.DataFrame:
        """Return the effects; see `Run.effects`."""
        records = self._records(name)
        slot = next(
            (s for s in self._snapshot.view.slots if s.key.pass_ == EFFECT_PREFIX + name), None
        )
        steps = sorted(records) if step is None else [step]
        parts = []
        for at in steps:
            facts = self.facts(name, at)
            if slot is None or "unmeasured" in facts:
                why = facts.get("unmeasured", "they were not stored")
                raise UnknownNameError(f"intervention {name!r} has no effects: {why}.")
            if share and not (facts["axes"] and len(facts["changes"]) > 1):
                raise UnknownNameError(
                    f"intervention {name!r} has no shares: share=True needs a sweep with changes "
                    "in `first`, whose effect is what a place can restore."
                )
            values = self._snapshot.view.value(records[at], slot.id)
            assert values is not None  # stored with the facts
            parts.append(_table(at, facts, np.asarray(values, np.float64), share=share))
        return pd.concat(parts)

    def _records(self, name: str) -> dict[int, int]:
        """Return the record of each step."""
        known = self.names
        if name not in known:
            there = ", ".join(map(repr, known)) or "none"
            raise UnknownNameError(
                f"there is no intervention {shown(name)}{did_you_mean(name, known) or '.'} This "
                f"run has {there}."
            )
        records = self._snapshot.records(INTERVENTION_PREFIX + name)
        return dict(zip(self._snapshot.steps[records].tolist(), records.tolist(), strict=True))


def _table(
    step: int, facts: Mapping[str, Any], values: NDArray[np.float64], *, share: bool
) -> pd.DataFrame:
    axes = [*facts["axes"]]
    values = values.reshape(len(values), -1).T + 0.0  # [places, samples], and no -0.0
    clean, baseline = (np.array(facts[key], np.float64) for key in ("clean", "baseline"))
    measured = ~np.isnan(clean)  # the others have no measure, such as a loss without a label
    count, known = int(measured.sum()), values[:, measured]
    spread = known.std(1, ddof=1) if count > 1 else np.full(len(values), np.nan)
    mean = known.mean(1) if count else np.full(len(values), np.nan)
    error = spread / np.sqrt(max(count, 1))
    if share:
        whole = np.where(clean == baseline, np.nan, clean - baseline)  # nothing to restore: NaN
        total = (clean - baseline)[measured].mean() if count else 0.0
        total = total if total else np.nan
        values, mean, error = values / whole, mean / total, error / abs(total)
    index = _places(facts, axes)
    index.insert(0, "step", step)
    columns: dict[str | int, NDArray[np.float64]] = {MEAN: mean, ERROR: error}
    columns |= {i: values[:, i] for i in range(values.shape[1])}
    found = pd.DataFrame(columns)
    return found.set_index(
        pd.MultiIndex.from_frame(index) if axes else pd.Index([step], name="step")
    )


def _places(facts: Mapping[str, Any], axes: list[str]) -> pd.DataFrame:
    """Return one row for each place, with a column for each axis."""
    if not axes:
        return pd.DataFrame(index=[0])
    receiving = [axis for axis in axes if axis == INTO or axis.startswith(f"{INTO}.")]
    senders = _columns(facts["places"], [a for a in axes if a not in receiving], NODE)
    receivers = _columns(facts.get("into", [[None]]), receiving, INTO)
    return senders.merge(receivers, how="cross")[axes]


def _columns(places: list[list[Any]], axes: list[str], module: str) -> pd.DataFrame:
    """Return one row for each combination of a module and the parts of its tensor."""
    others = [axis for axis in axes if axis != module]
    rows = [(path, *each) for path, *parts in places for each in product(*parts)]
    return pd.DataFrame(rows, columns=[module, *others])


def induction_table(snapshot: Snapshot, step: int | None, type_: str | None) -> pd.DataFrame:
    """Return the induction score of each attention head; see `Run.induction`."""
    slots = snapshot.view.slots
    patterns = [slot for slot in slots if _is_attention(snapshot, slot)]
    rows = []
    for record in snapshot.records(type_).tolist() if patterns else ():
        at = int(snapshot.steps[record])
        if step is not None and at != step:
            continue
        read = tokens_of(snapshot, record)
        for slot in patterns:
            weights = snapshot.view.value(record, slot.id)
            if weights is None or weights.shape[-1] != weights.shape[-2]:
                continue
            if slot.batch_dim is None:
                weights = _by_sample(weights[0], snapshot, record)
            by_head = weights.reshape(len(weights), -1, *weights.shape[-2:])
            tokens = read.get(weights.shape[-1])
            if tokens is None or not len(weights) or len(tokens) < len(weights):
                continue
            scores, queries = induction(by_head, tokens[: len(weights)])
            key = (at, slot.key.node, slot.key.iteration)
            rows += [(*key, head, score, queries) for head, score in enumerate(scores.tolist())]
    if not rows:
        raise UnknownNameError(
            "no record contains values of attention weights together with those of the tokens that "
            "the model received. The `attention` preset records both; see also "
            "`values.max_elements`."
        )
    names = ["step", "node", "iteration", "head", "score", "queries"]
    return pd.DataFrame(rows, columns=names).set_index(names[:4])


def _by_sample(weights: NDArray[Any], snapshot: Snapshot, record: int) -> NDArray[Any]:
    """Return attention weights of the recorded samples, [samples, heads, queries, keys].

    Args:
        weights: those of the whole batch, [samples * heads, queries, keys], as
            `nn.MultiheadAttention` computes them.
        snapshot: the run.
        record: number of the record.
    """
    size = snapshot.view.records[record, RecordColumn.BATCH_SIZE]
    samples = [i for i in snapshot.view.samples(record) if i >= 0]
    if not size >= 1 or len(weights) % int(size):
        return weights[:0, None]
    return weights.reshape(int(size), -1, *weights.shape[-2:])[samples]


def _is_attention(snapshot: Snapshot, slot: SlotInfo) -> bool:
    if slot.key.pass_ != "forward" or slot.kind != "computed":
        return False
    if slot.batch_dim != 0 and (slot.batch_dim is not None or len(slot.shape) != 3):
        return False
    names = axis_names(snapshot, slot, slot.shape[1:], whole_numbers=False)
    return names[-2:] == ("query", "key")


def tokens_of(snapshot: Snapshot, record: int) -> dict[int, NDArray[Any]]:
    """Return the recorded token inputs, [samples, positions], by their number of positions."""
    found: dict[int, NDArray[Any]] = {}
    for slot in snapshot.view.slots:
        if slot.kind != "input" or slot.key.pass_ != "forward" or "int" not in slot.dtype:
            continue
        value = snapshot.view.value(record, slot.id)
        if value is not None and value.ndim == 2:
            found.setdefault(value.shape[1], value)
    return found

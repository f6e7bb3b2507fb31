"""The recorded values behind the answers to the checklist.

Readings are collected for every run, whatever its rules. They are shown next to the answer and can
prevent a tick, because an answer is never green if the values contradict it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from math import log, prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules import kind_readings
from comgra_decl.rules.base import Scene
from comgra_decl.rules.calls import BINARY_LOGITS, CLASSIFICATION, LossCall
from comgra_decl.rules.curve import Curve
from comgra_decl.rules.graph import classes_of, predictions, sources_of
from comgra_decl.rules.kind_readings import Attention, between
from comgra_decl.rules.loss_readings import LossReadings
from comgra_decl.rules.memory import Slots, grown
from comgra_decl.rules.table import SlotTable, elements_of, samples_of
from comgra_decl.rules.window import VARYING, Numbers, Window

Verdict = Literal["fine", "unknown", "absent", "poor", "bad"]
"""The effect of the values on the answer:

- fine: the values do not contradict a tick.
- unknown: the values do not allow a tick.
- absent: the question does not apply, because the run has no tensors of this kind.
- poor, bad: the values answer the question "no", regardless of the rules.
"""


_SAME = 1e-6  # relative variation of predictions below which samples are not distinguished


@dataclass(frozen=True, slots=True)
class Reading:
    """The values of a run for one question.

    Attributes:
        text: the values, such as "loss 2.27 → 3.60".
        verdict: see `Verdict`.
        deciding: rules that must have checked this run before the question is ticked, in addition
            to those of the question.
    """

    text: str
    verdict: Verdict = "fine"
    deciding: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the reading as JSON-compatible data."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Reading:
        """Restore a reading from the result of `to_json`, ignoring unknown keys."""
        known = {name: content[name] for name in cls.__dataclass_fields__ if name in content}
        return cls(**{**known, "deciding": tuple(known.get("deciding", ()))})


class _Means:
    """Mean of each slot's values over all records."""

    def __init__(self) -> None:
        self._sums = np.zeros(0)
        self._counts = np.zeros(0)

    def look(self, at: Slots, values: NDArray[Any]) -> None:
        """Process values [records, slots]; ignores non-finite ones."""
        there = np.isfinite(values)
        size = int(at.max(initial=-1)) + 1
        self._sums, self._counts = (grown(x, size, 0.0) for x in (self._sums, self._counts))
        self._sums[at] += np.where(there, values, 0).sum(axis=0, dtype=np.float64)
        self._counts[at] += there.sum(axis=0)

    @property
    def largest(self) -> float:
        """Largest mean of any slot; 0 if there is none."""
        at = np.flatnonzero(self._counts)
        return float((self._sums[at] / self._counts[at]).max(initial=0.0))

    @property
    def smallest(self) -> float:
        """Smallest mean of any slot; infinity if there is none."""
        at = np.flatnonzero(self._counts)
        return float((self._sums[at] / self._counts[at]).min(initial=np.inf))

    def range(self, table: SlotTable) -> str:
        """Return the smallest and largest means with their tensors; "" if there are none."""
        at = np.flatnonzero(self._counts)
        return between(table, at, self._sums[at] / self._counts[at])


class Readings:
    """Collects the readings of a run; the results do not depend on the division into windows.

    Args:
        curves: see `Scene.curves`.
    """

    def __init__(self, curves: Mapping[str, Curve]) -> None:
        self.losses = LossReadings(curves)
        self._attention = Attention()
        self._seen = np.zeros(0, np.bool_)
        self._wild: dict[str, tuple[int, int]] = {}  # number of records, and the first step
        self._first: NDArray[np.float32] = np.zeros((0, 0, 0), np.float32)
        self._last = self._first
        self._gradients = _Means()
        self._updates = _Means()
        self._largest: dict[str, float] = {}

    def look(self, window: Window) -> None:
        """Process the next training records."""
        if not len(window):
            return
        with np.errstate(all="ignore"):
            self._see_finite(window)
            if not len(self._first):
                self._first = np.array(window.aggregates[0])
            self._last = np.array(window.aggregates[-1])
            self._attention.look(window)
            table = window.table
            if window.has("abs_mean"):
                at = np.flatnonzero(table.layer_gradients)
                self._gradients.look(at, window.read("abs_mean", at))
            if window.has("l2"):
                at, updates = table.remembered(Readings, _updated)
                self._updates.look(at, window.read("l2", updates) / window.read("l2", at))
            if window.has("abs_max"):
                for name, wanted in _EXTREMES.items():
                    at = table.remembered((Readings, name), wanted)
                    values = window.read("abs_max", at, "abs_max")
                    top = float(np.nanmax(np.where(np.isfinite(values), values, 0), initial=0))
                    self._largest[name] = max(top, self._largest.get(name, 0.0))

    def _see_finite(self, window: Window) -> None:
        """Count tensors, and records with non-finite tensors; ignore masks."""
        at = np.flatnonzero(window.table.floating)
        self._seen = grown(self._seen, len(window.table), False)
        self._seen[at] |= window.present[:, at].any(axis=0)
        wild = window.read("nonfinite", at, "abs_max") > 0
        if wild.any() and window.has("min", "max"):
            high = window.read("max", at)
            inside = np.isfinite(high) | np.isneginf(high)
            wild &= ~(np.isneginf(window.read("min", at)) & inside)
        backward = window.table.backward[at]
        for kind, columns in (("any", wild), ("backward", wild[:, backward])):
            rows = np.flatnonzero(columns.any(axis=1))
            count, first = self._wild.get(kind, (0, -1))
            if len(rows):
                first = int(window.steps[rows[0]]) if first < 0 else first
                self._wild[kind] = count + len(rows), first

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Process the next values of one metric for one type of execution."""
        self.losses.look(numbers)

    def readings(self, scene: Scene) -> dict[str, Reading]:
        """Return the readings so far, by the names used in the questions."""
        made: dict[str, Callable[[Scene], Reading | None]] = {
            "finite": self._finite,
            "shapes": _shapes,
            "trained": _trained,
            "cleared": self._cleared,
            "half": self._half,
            "inputs": self._inputs,
            "labels": _labels,
            "predictable": self._predictable,
            "dependent": self._dependent,
            "evaluation": self._evaluation,
            "first_loss": self._first_loss,
            "scales": self._scales,
            "falling": self._falling,
            "steady": self._steady,
            "gradients": self._gradient_scale,
            "updates": self._update_size,
            "alive": self._alive,
            "unsaturated": self._unsaturated,
            "spread": self._spread,
            "last_layer": _last_layer,
            "branches": lambda scene: _reading(kind_readings.branches(scene, self._last)),
            "attention": lambda scene: _reading(self._attention.reading(scene)),
        }
        found = {name: make(scene) for name, make in made.items()}
        return {name: reading for name, reading in found.items() if reading is not None}

    # -- code

    def _finite(self, scene: Scene) -> Reading | None:
        if not scene.records:
            return None
        tensors = f"{int(self._seen.sum())} tensors of {scene.records} records"
        if not self._wild:
            return Reading(f"no NaN or infinity in {tensors}")
        count, first = self._wild["any"]
        since = f"from step {first} on"
        return Reading(f"NaN or infinity in {count} of {scene.records} records {since}", "bad")

    def _cleared(self, scene: Scene) -> Reading | None:
        first, last = (_norm(scene, record) for record in (self._first, self._last))
        if first is None or last is None:
            wild = "backward" in self._wild
            return Reading("no finite gradient in the last record", "unknown") if wild else None
        text = f"norm of all gradients {first:.3g} \u2192 {last:.3g}"
        if scene.are_cleared:
            text = "no gradients are left from the previous step when a backward pass begins"
        return Reading(text, "fine" if np.isfinite((first, last)).all() else "unknown")

    def _half(self, scene: Scene) -> Reading | None:
        return _reading(kind_readings.half(scene, self._largest.get("half")))

    # -- data

    def _inputs(self, scene: Scene) -> Reading | None:
        at = _inputs(scene.table)
        mean = self._of(scene, "mean", self._last, at)
        if mean is None or not np.isfinite(mean).any():
            return None
        top = f"largest magnitude {self._largest.get('inputs', 0):.3g}"
        return Reading(f"{top}; mean in the last record {between(scene.table, at, mean)}")

    def _predictable(self, scene: Scene) -> Reading | None:
        classes, ends = classes_of(scene), self.losses.ends()
        if classes < 2 or ends is None:
            return None
        text = f"loss {ends.last:.3g}, guessing ln({classes}) = {log(classes):.3g}"
        broken = self.losses.broken
        return Reading(f"{text}; {broken}", "unknown") if broken else Reading(text)

    def _dependent(self, scene: Scene) -> Reading | None:
        chosen = predictions(scene)
        if not chosen:
            return None
        at = _batched(scene.table, chosen)
        at = at if len(at) else _batched(scene.table, _unflattened(scene, chosen))
        at = at[at < len(self._last)]
        if not len(at):
            return Reading("no prediction with a batch dimension is recorded", "unknown")
        most = np.full(len(at), np.nan)
        for name in (name for name in VARYING if name in scene.statistics):
            values = self._last[at, scene.statistics.index(name)]
            with np.errstate(all="ignore"):
                varied = np.where(values[:, 2] > 0, values[:, 1] / values[:, 2], np.nan)
            most = np.fmax(most, varied)
        known = most[np.isfinite(most)]
        if not len(known):
            return Reading("no finite prediction in the last record", "unknown")
        text = f"within a batch, predictions vary by {known.min():.2g} times the largest value"
        # the statistics of samples can be equal although their elements differ
        return Reading(text, "fine" if known.min() > _SAME else "unknown")

    def _evaluation(self, scene: Scene) -> Reading | None:
        return _reading(self.losses.validation())

    # -- initialization

    def _first_loss(self, scene: Scene) -> Reading | None:
        ends = self.losses.ends()
        if ends is None:
            return None
        classes = classes_of(scene)
        if classes < 2:
            text = f"first loss {ends.first:.3g}; without classes, the cost of guessing is unknown"
            return Reading(text, "unknown")
        text = f"first loss {ends.first:.3g}, ln({classes}) = {log(classes):.3g}"
        return Reading(text, "fine" if ends.first > 0 else "unknown")

    def _scales(self, scene: Scene) -> Reading | None:
        at = _spreading(scene.table)
        std = self._of(scene, "std", self._first, at)
        text = "" if std is None else between(scene.table, at[: len(std)], std)
        return Reading(f"std in the first record: {text}") if text else None

    # -- dynamics

    def _falling(self, scene: Scene) -> Reading | None:
        return _reading(self.losses.falling())

    def _steady(self, scene: Scene) -> Reading | None:
        return _reading(self.losses.steady())

    def _gradient_scale(self, scene: Scene) -> Reading | None:
        text = self._gradients.range(scene.table)
        if not text:
            return None
        still = not self._gradients.smallest
        return self._unless_wild(f"mean magnitude {text}", "poor" if still else "fine")

    def _unless_wild(self, text: str, verdict: Verdict = "fine") -> Reading:
        """Return a reading about gradients or updates; poor if any are not finite."""
        if "backward" not in self._wild:
            return Reading(text, verdict)
        return Reading(f"{text}; not finite from step {self._wild['backward'][1]} on", "poor")

    def _update_size(self, scene: Scene) -> Reading | None:
        text = self._updates.range(scene.table)
        if text:
            still = not self._updates.largest
            text = f"update divided by weight: {text}"
            return self._unless_wild(text, "poor" if still else "fine")
        at = _trainable(scene)
        before, after = (self._of(scene, "l2", r, at) for r in (self._first, self._last))
        if before is None or after is None or not len(before):
            return None
        with np.errstate(all="ignore"):
            moved = np.abs(after[: len(before)] - before) / before
        text = between(scene.table, at[: len(before)], moved)
        if not text:
            return self._unless_wild("no update size is known", "unknown")
        still = scene.records > 1 and not np.nanmax(moved, initial=0)
        text = f"norms changed by {text} of their initial value over the run"
        return self._unless_wild(text, "poor" if still else "fine")

    # -- activations

    def _alive(self, scene: Scene) -> Reading | None:
        return _reading(kind_readings.alive(scene, self._last))

    def _unsaturated(self, scene: Scene) -> Reading | None:
        return _reading(kind_readings.unsaturated(scene, self._last))

    def _spread(self, scene: Scene) -> Reading | None:
        at = _spreading(scene.table)
        first, last = (self._of(scene, "std", r, at) for r in (self._first, self._last))
        if first is None or last is None:
            return None
        with np.errstate(all="ignore"):
            ratio = last[: len(first)] / first
        text = between(scene.table, at[: len(first)], ratio)
        return Reading(f"std, last record / first: {text}") if text else None

    def _of(
        self, scene: Scene, statistic: str, record: NDArray[np.float32], at: Slots
    ) -> NDArray[np.float32] | None:
        """Return a statistic of the slots known to a record; None if it is not recorded."""
        if statistic not in scene.statistics or not len(record):
            return None
        known = at[at < len(record)]
        found: NDArray[np.float32] = record[known, scene.statistics.index(statistic), 0]
        return found


def _reading(judged: tuple[str, Verdict] | None) -> Reading | None:
    return None if judged is None else Reading(*judged)


def _shapes(scene: Scene) -> Reading | None:
    if not scene.calls:
        return None
    some = [
        f"{call.function} of {list(call.prediction.shape)} and {list(call.target.shape)}"
        for call in islice(scene.calls, 2)
    ]
    more = f" and {len(scene.calls) - 2} more" if len(scene.calls) > 2 else ""
    return Reading(", ".join(some) + more)


def _trained(scene: Scene) -> Reading | None:
    facts = scene.parameters.values()
    trainable = [f for f in facts if f.get("trainable") and not f.get("tied_to")]
    if not trainable:
        return None
    known = [f for f in trainable if "optimized" in f]
    if not known:
        return Reading(f"{len(trainable)} parameters are trainable")
    held = sum(bool(f["optimized"]) for f in known)
    return Reading(f"an optimizer contains {held} of {len(known)} trainable parameters")


def _labels(scene: Scene) -> Reading | None:
    """Return a reading about the targets; a tick requires the counts of class targets."""
    if not scene.calls:
        return None
    call = _last(scene.calls)
    target = f"targets {call.target.dtype} {list(call.target.shape)}"
    classes = call.function in CLASSIFICATION and call.target.is_integer
    if not classes:
        return Reading(target)
    return Reading(f"{target}, {call.classes} classes", "fine", ("class_imbalance", "single_class"))


def _last_layer(scene: Scene) -> Reading | None:
    """Return a reading about the inputs of the loss; a tick requires the rules for that loss."""
    if not scene.calls:
        return None
    call = _last(scene.calls)
    made = f" computed by {call.prediction.made_by}" if call.prediction.made_by else ""
    deciding: tuple[str, ...] = ()
    if call.function in CLASSIFICATION and call.target.is_integer:
        deciding = ("probabilities_as_logits",)
    elif call.function in BINARY_LOGITS:
        deciding = ("sigmoid_twice",)
    many = sum(seen.records for seen in scene.calls.values())
    return Reading(f"{call.function}{made}, {many} calls recorded", "fine", deciding)


def _last(calls: Mapping[LossCall, Any]) -> LossCall:
    """Return the latest type of call, because auxiliary losses come first."""
    return next(reversed(list(calls)))


def _inputs(table: SlotTable) -> Slots:
    return np.flatnonzero(table.floating & table.where(lambda info: info.kind == "input"))


def _trainable(scene: Scene) -> Slots:
    """Return the weights that are not known to be frozen."""
    facts = scene.parameters
    weights = np.flatnonzero(scene.table.weights)
    keys = [scene.table.infos[slot].key for slot in weights.tolist()]
    kept = [facts.get((key.node, key.role), {}).get("trainable", True) for key in keys]
    return weights[np.array(kept, np.bool_)]


def _halves(table: SlotTable) -> Slots:
    return np.flatnonzero(table.where(lambda info: info.dtype in ("float16", "bfloat16")))


_EXTREMES = {"inputs": _inputs, "half": _halves}


def _batched(table: SlotTable, slots: Iterable[int]) -> Slots:
    """Return the slots that contain several samples."""
    return np.array([i for i in sorted(slots) if samples_of(table.infos[i]) > 1], np.int64)


def _unflattened(scene: Scene, slots: Iterable[int]) -> set[int]:
    """Return the tensors that are reshaped to predictions [batch * positions, ...]."""
    infos, sources = scene.table.infos, sources_of(scene)
    return {
        source
        for slot in slots
        for source in sources.get(slot, [])
        if infos[source].kind == "computed" and prod(infos[source].shape) == prod(infos[slot].shape)
    }


def _spreading(table: SlotTable) -> Slots:
    """Return the outputs with several values per sample, for which a spread is defined."""
    return np.flatnonzero(table.outputs & table.where(lambda info: elements_of(info) > 1))


def _updated(table: SlotTable) -> tuple[Slots, Slots]:
    """Return the slots of weights with recorded updates, and the slots of the updates."""
    pairs = [
        (slot, table.by_key[key])
        for slot in np.flatnonzero(table.weights).tolist()
        if (key := table.infos[slot].key._replace(pass_="update")) in table.by_key
    ]
    at = np.array(pairs, np.int64).reshape(-1, 2)
    return at[:, 0], at[:, 1]


def _norm(scene: Scene, record: NDArray[np.float32]) -> float | None:
    """Return the l2 norm of all parameter gradients in a record."""
    at = np.flatnonzero(scene.table.parameter_gradients)
    at = at[at < len(record)]
    if "l2" not in scene.statistics or not len(at):
        return None
    sizes = record[at, scene.statistics.index("l2"), 0].astype(np.float64)
    return float(np.sqrt(np.nansum(sizes**2))) if np.isfinite(sizes).any() else None

"""Triggers, which decide whether to keep a step. Each trigger checks many steps in one call."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from importlib import import_module
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from comgra_decl.keep.step_numbers import Measure, StepNumbers, StepView
from comgra_decl.records import SKIPPED_STEP

if TYPE_CHECKING:
    from comgra_decl.spec.keep import QuantileTrigger, SpikeTrigger

_log = logging.getLogger("comgra_decl")
_ROUNDING = 1e-6  # relative to the mean; float32 rounding makes a constant loss vary by less

Reasons = dict[int, str]
"""Reasons for the steps at which the trigger fired, by position among the checked steps."""


class Trigger(Protocol):
    """Checks each step once, in order."""

    @property
    def name(self) -> str:
        """Name of the trigger in the run."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the required statistics; "*" for all."""

    @property
    def trouble(self) -> str | None:
        """Why the trigger cannot work, if that is known."""

    def look(self, look: StepNumbers) -> Reasons:
        """Return the steps at which the trigger fires."""


class Nonfinite:
    """Fires if a slot contains NaN or infinity and was finite in its previous record.

    Ignores the gradients in steps that mixed precision skipped.
    """

    name = "nonfinite"
    statistics = ("nonfinite",)
    trouble = None

    def __init__(self) -> None:
        self._wild = np.zeros(0, np.bool_)  # by slot id: whether it was non-finite when last seen

    def look(self, look: StepNumbers) -> Reasons:
        """Return the steps at which the trigger fires."""
        slots, at = look.batch.slots, np.flatnonzero(look.watched)
        if not len(slots) or not len(at):
            return {}
        missing = int(slots.max()) + 1 - len(self._wild)
        if missing > 0:
            self._wild = np.pad(self._wild, (0, missing))
        # abs-max over the batch rather than mean, which could underflow
        wild = look.statistic("nonfinite", "abs_max")[at] > 0
        skipped = [SKIPPED_STEP in look.batch.steps[i].extra for i in at.tolist()]
        if any(skipped):  # mixed precision discarded these gradients
            gradients = look.names.columns(self, slots, lambda key: key.pass_.startswith("grad"))
            wild[np.ix_(np.flatnonzero(skipped), gradients)] = False
        if not wild.any():
            self._wild[slots] = False
            return {}
        turned = wild & ~np.concatenate((self._wild[slots][None], wild[:-1]))
        self._wild[slots] = wild[-1]
        return {int(at[i]): self._reason(look, turned[i]) for i in np.flatnonzero(turned.any(1))}

    def _reason(self, look: StepNumbers, turned: NDArray[np.bool_]) -> str:
        """Return the reason, naming the first slot in execution order."""
        key = look.names.keys[int(look.batch.slots[np.argmax(turned)])]
        return f"{self.name}: {key.node} {key.role}, {key.pass_}"


class Spike:
    """Fires if a value exceeds recent values by many standard deviations or is not finite."""

    def __init__(self, spec: SpikeTrigger, *, name: str | None = None) -> None:
        self._sigmas, self._window = spec.spike, spec.window
        self._warm_up = max(20, spec.window // 2)
        self._measure = Measure(spec.of)
        self._latest: dict[str, NDArray[np.float64]] = {}  # recent finite numbers, by type
        self._finite: dict[str, bool] = {}  # whether the last number was finite
        self.name = name or f"spike of {self._measure}"
        self.statistics = self._measure.statistics

    @property
    def trouble(self) -> str | None:
        """Why the trigger cannot work."""
        return _not_found(self._measure)

    def look(self, look: StepNumbers) -> Reasons:
        """Return the steps at which the trigger fires."""
        values, there = self._measure.read(look)
        reasons: Reasons = {}
        for type_, steps in look.by_type().items():
            at = steps[there[steps]]
            fires = self._fires(type_, values[at])
            reasons.update(dict.fromkeys(at[fires].tolist(), self.name))
        return reasons

    def _fires(self, type_: str, values: NDArray[np.float64]) -> NDArray[np.bool_]:
        finite = np.isfinite(values)
        fires = ~finite & np.concatenate(([self._finite.get(type_, True)], finite))[:-1]
        if len(values):
            self._finite[type_] = bool(finite[-1])
        latest = self._latest.get(type_, np.empty(0))
        known = np.concatenate((latest, values[finite]))
        fires[finite] = self._rises(known, len(latest))
        self._latest[type_] = known[-self._window :].copy()
        return fires

    def _rises(self, known: NDArray[np.float64], start: int) -> NDArray[np.bool_]:
        """Return a mask of the values from `start` on that exceed the limit of earlier values."""
        rises = np.zeros(len(known) - start, np.bool_)
        whole = max(start, self._window)
        for i in range(max(start, self._warm_up), min(whole, len(known))):
            rises[i - start] = self._exceeds(known[i], known[None, :i])[0]
        if whole < len(known):
            before = np.lib.stride_tricks.sliding_window_view(known[:-1], self._window)
            before = before[whole - self._window :]
            rises[whole - start :] = self._exceeds(known[whole:], before)
        return rises

    def _exceeds(
        self, values: NDArray[np.float64], before: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        with np.errstate(over="ignore", invalid="ignore"):
            mean, std = before.mean(1), before.std(1, ddof=1)
            return np.asarray(values - mean > self._sigmas * std + _ROUNDING * np.abs(mean))


class Quantile:
    """Fires if a value is beyond a quantile of recent values."""

    def __init__(self, spec: QuantileTrigger) -> None:
        self._quantile, self._window, self._warm_up = spec.quantile, spec.window, spec.warm_up
        self._below = spec.quantile < 0.5
        self._measure = Measure(spec.of, lowest=self._below)
        self._latest: dict[str, tuple[deque[float], list[float]]] = {}  # by arrival; sorted
        self.name = f"quantile {spec.quantile:g} of {self._measure}"
        self.statistics = self._measure.statistics

    @property
    def trouble(self) -> str | None:
        """Why the trigger cannot work."""
        return _not_found(self._measure)

    def look(self, look: StepNumbers) -> Reasons:
        """Return the steps at which the trigger fires."""
        values, there = self._measure.read(look)
        reasons: Reasons = {}
        for type_, steps in look.by_type().items():
            latest = self._latest.setdefault(type_, (deque(), []))
            for i in steps[there[steps]].tolist():
                if self._fires(float(values[i]), *latest):
                    reasons[i] = self.name
        return reasons

    def _fires(self, value: float, latest: deque[float], ordered: list[float]) -> bool:
        fires = False
        if len(ordered) >= self._warm_up:
            bound = ordered[max(0, ceil(self._quantile * len(ordered) - 1e-9) - 1)]
            fires = value < bound if self._below else value > bound
        if np.isfinite(value):
            latest.append(value)
            insort(ordered, value)
            if len(latest) > self._window:
                del ordered[bisect_left(ordered, latest.popleft())]
        return fires


class Function:
    """Fires if a custom function returns a reason."""

    statistics = ("*",)

    def __init__(self, path: str, arguments: dict[str, Any]) -> None:
        """Import the function; if this fails, report the error and disable only this trigger."""
        self.name, self._arguments = path, arguments
        self.trouble: str | None = None
        self._function: Callable[..., Any] = bool
        try:
            module, _, name = path.rpartition(".")
            self._function = getattr(import_module(module), name)
        except Exception as error:  # noqa: BLE001 - the user's own code
            self.trouble = f"import failed: {type(error).__name__}: {error}"
            _log.error("comgra.keep.when: %s is disabled: %s", path, self.trouble)

    def look(self, look: StepNumbers) -> Reasons:
        """Return the steps at which it fires. If the function failed, it is not called again."""
        reasons: Reasons = {}
        for i in np.flatnonzero(look.watched).tolist():
            if self.trouble is not None:
                break
            reason = self._ask(look, i)
            if reason is not None:
                reasons[i] = reason
        return reasons

    def _ask(self, look: StepNumbers, i: int) -> str | None:
        view = StepView(look, i, dict(look.kpis[i]))
        try:
            answer = self._function(view, **self._arguments)
            if isinstance(answer, str):
                return f"{self.name}: {answer}" if answer else None
            return self.name if bool(answer) else None
        except Exception as error:  # noqa: BLE001 - the user's own code
            self.trouble = f"{type(error).__name__}: {error}"
            _log.exception(
                "comgra.keep: %s failed at step %d and is not called again; other triggers "
                "continue",
                self.name,
                view.step,
            )
            return None


def _not_found(measure: Measure) -> str | None:
    return None if measure.found else f"{measure} was not recorded"

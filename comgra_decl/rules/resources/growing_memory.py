"""Memory that grows from step to step."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from comgra_decl.rules.api import (
    AUTOMATIC,
    GROWING,
    GROWING_BYTES,
    Curve,
    Field,
    Finding,
    Int,
    Number,
    Numbers,
    Positive,
    Rule,
    RuleParameters,
    Scene,
    per_run,
)

_PARTS = 8
_MEMORY = f"{AUTOMATIC}memory/"
_GROWING = AUTOMATIC + GROWING
_GROWING_BYTES = AUTOMATIC + GROWING_BYTES
_MOST_NAMED = 3
_WHOSE = {f"{_MEMORY}host": "of the process", f"{_MEMORY}device": "on the device"}


class GrowingMemoryParameters(RuleParameters):
    """Options of `growing_memory`."""

    growth: Positive = 0.05
    """Largest allowed growth, relative to the memory after the first quarter of the readings."""

    least_mb: Positive = 64.0
    """Largest allowed growth in mebibytes."""

    least_named_mb: Positive = 16.0
    """The same if tensors of known modules, optimizers or variables explain at least half of it."""

    steadiness: Annotated[Number, Field(gt=0, le=1)] = 0.25
    """Smallest growth in any part of the run, relative to the median growth of the parts."""

    least: Annotated[Int, Field(ge=16)] = 24
    """Number of readings required."""


class GrowingMemory(Rule):
    """Memory that grows steadily, as if data from each step were kept."""

    name = "growing_memory"
    severity = "warning"
    certainty = 0.8
    definition = (
        "The first quarter of all readings of `memory/host` or `memory/device` is left out, and "
        f"the others are divided into {_PARTS} parts. From each part to the next, the mean grows "
        "by at least `steadiness` times the median growth. In total, it grows by more than "
        "`growth` times the memory after the first quarter, and by more than `least_mb`. If what "
        "grows is known and its tensors explain at least half of the growth, it only needs to be "
        "more than `least_named_mb`."
    )
    source = (
        "PyTorch's FAQ on memory names losses that are accumulated with their graphs as the usual "
        "cause. The thresholds were chosen using programs that leak memory and programs that do "
        "not."
    )
    advice = (
        "Data from each step is kept. Store numbers instead of tensors in lists, sums and logs: "
        "`loss.item()`, or `losses[step] = loss.detach()` in one tensor for all steps. A list of "
        "`loss.detach()` keeps no graphs, but on a CPU each small tensor can keep the freed memory "
        "around it from being reused. Detach hidden states that are carried to the next step. "
        "Limit caches and buffers."
    )
    Parameters = GrowingMemoryParameters

    _curves: dict[str, Curve] = per_run(dict)
    _counts: dict[str, float] = per_run(dict)
    _sizes: dict[str, float] = per_run(dict)

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Add memory readings, and what was found to grow."""
        if numbers.name in _WHOSE:
            curve = self._curves.setdefault(numbers.name, Curve())
            curve.add(numbers.steps, numbers.values)
        elif numbers.name.startswith(_GROWING):
            self._counts[numbers.name.removeprefix(_GROWING)] = float(numbers.values[-1])
        elif numbers.name.startswith(_GROWING_BYTES):
            self._sizes[numbers.name.removeprefix(_GROWING_BYTES)] = float(numbers.values[-1])

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the memory that grows the most."""
        found = [self._judge(scene, name, curve) for name, curve in self._curves.items()]
        kept = [finding for finding in found if finding is not None]
        kept.sort(key=lambda finding: -float(finding.evidence["mib_per_step"]))
        return kept[:1]

    def _judge(self, scene: Scene, name: str, curve: Curve) -> Finding | None:
        limits, means, steps = self.parameters, curve.means, np.array(curve.steps)
        if curve.count < limits.least or len(means) < 2 * _PARTS:
            return None
        start = len(means) // 4
        parts = [part.mean() for part in np.array_split(means[start:], _PARTS)]
        gains = np.diff(parts)
        if gains.min() <= 0 or gains.min() < limits.steadiness * np.median(gains):
            return None
        gain = parts[-1] - parts[0]
        slope = float(np.polyfit(steps[start:], means[start:], 1)[0])
        least = max(limits.growth * means[start], limits.least_mb * 2**20)
        if max(self._sizes.values(), default=0.0) >= slope / 2:
            least = min(least, limits.least_named_mb * 2**20)
        if gain < least:
            return None
        evidence: dict[str, float | str] = {
            "mib_per_step": slope / 2**20,
            "from_mib": float(means[start]) / 2**20,
            "to_mib": float(means[-1]) / 2**20,
        }
        text = (
            f"The memory {_WHOSE[name]} grows steadily, by {_size(slope)} per step: from "
            f"{_size(float(means[start]))} to {_size(float(means[-1]))}."
        )
        growing = self._growing()
        if growing:
            named = [f"`{holder}` ({gain} more per step)" for holder, gain in growing.items()]
            text += f" What grows is {', '.join(named)}."
            evidence["grows"] = next(iter(growing))
        return self.finding(scene, first_step=int(steps[start]), message=text, evidence=evidence)

    def _growing(self) -> dict[str, str]:
        """Return what grows, and by how much per step: tensors by size first, then by number."""
        sizes = sorted(self._sizes, key=lambda name: -self._sizes[name])
        known = {name: _size(self._sizes[name]) for name in sizes}
        known |= {name: f"{gain:.3g}" for name, gain in self._counts.items() if name not in known}
        return dict([*known.items()][:_MOST_NAMED])

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the memory could not be checked, or None."""
        count = max((curve.count for curve in self._curves.values()), default=0)
        if not count:
            return "no memory is recorded; set `kpis: {automatic: true}`"
        least = self.parameters.least
        return None if count >= least else f"it needs {least} memory readings; there are {count}"


def _size(size: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(size) >= factor:
            return f"{_digits(size / factor)} {unit}"
    return f"{_digits(size / 2**10)} KiB"


def _digits(number: float) -> str:
    """Return a number with three digits, without an exponent."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"

"""Which steps are kept because of what happened in them, decided after the step."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from comgra_decl.errors import did_you_mean
from comgra_decl.spec.base import Bool, Int, Number, SpecModel
from comgra_decl.spec.nodes import Glob

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def _listed(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]


def checked_target(path: str) -> str:
    """Returns `path` if it can name a function: `package.module.function`.

    Raises:
        ValueError: it cannot.
    """
    if not _TARGET.fullmatch(path):
        raise ValueError(f"{path!r} does not name a function; write 'package.module.function'")
    return path


class MeasureSpec(SpecModel):
    """One number per step: a KPI, or a statistic of the recorded tensors."""

    kpi: Annotated[str, Field(min_length=1)] | None = None
    """Name of a KPI: what `comgra.kpi` says of the step, or `loss`, what `backward()` was called on
    (first, if several times)."""

    node: Glob | None = None
    """Glob over nodes; of several slots that match, the one with the largest value counts."""

    statistic: Annotated[str, Field(min_length=1)] = "abs_max"
    """One of the spec's `stats`."""

    over_batch: Literal["mean", "std", "abs_max"] = "mean"
    """How the statistic is aggregated over the batch."""

    role: str = "*"
    """The tensor within its node, such as `output` or `weight`; a glob."""

    pass_: str = Field("forward", alias="pass")
    """`forward`, `grad`, `update` or another pass that is recorded; a glob."""

    @model_validator(mode="after")
    def _names_one_thing(self) -> MeasureSpec:
        if (self.kpi is None) == (self.node is None):
            raise ValueError(
                "must name either a KPI, {kpi: loss}, or tensors, "
                "{node: 'blocks.*', statistic: abs_max, pass: grad}"
            )
        return self


_LOSS = MeasureSpec.model_validate({"kpi": "loss"})


class QuantileTrigger(SpecModel):
    """Fires when a number is unusual among those of the latest steps of the same type.

    It fires above the quantile, or below it if the quantile is less than 0.5, from the moment at
    which so many numbers have been seen that one of them lies beyond it: 100 for 0.99 and for 0.01.
    The quantile is that of the last `window` finite numbers before the step, exactly
    (numpy's method `inverted_cdf`).
    """

    quantile: Annotated[Number, Field(gt=0, lt=1)]
    """A quantile: 0.99 fires at about one step of a hundred."""

    of: MeasureSpec = _LOSS
    """The number that is looked at."""

    window: Annotated[Int, Field(ge=10, le=1_000_000)] = 1000
    """Latest numbers that are compared with; at least the 1 / (1 - quantile) that it takes."""

    @model_validator(mode="after")
    def _window_is_long_enough(self) -> QuantileTrigger:
        if self.window < self.warm_up:
            raise ValueError(
                f"a window of {self.window} is too short for the quantile {self.quantile}; "
                f"it takes at least {self.warm_up}"
            )
        return self

    @property
    def warm_up(self) -> int:
        """Numbers that must have been seen before it can fire."""
        share = min(self.quantile, 1 - self.quantile)
        return max(10, math.ceil(1 / share - 1e-6))


class SpikeTrigger(SpecModel):
    """Fires when a number rises by many standard deviations, or is not finite.

    That is, when it exceeds the mean of the last `window` finite numbers of the same type by more
    than `spike` times their standard deviation (ddof 1), and by a millionth of the mean, which is
    rounding; and from the moment at which half of the window, at least 20, has been seen. The rule
    and its defaults are those by which OLMo-core leaves out optimizer steps (`SkipStepOptimizer`:
    6 standard deviations over 128 steps), except that a fall of the loss is no spike.
    """

    spike: Annotated[Number, Field(gt=0)] = 6.0
    """So many standard deviations."""

    of: MeasureSpec = _LOSS
    """The number that is looked at."""

    window: Annotated[Int, Field(ge=20, le=100_000)] = 128
    """Latest numbers that are compared with."""


class FunctionTrigger(SpecModel):
    """Fires when a function of yours says so; other keys are passed to it by name.

    The function is called with a `comgra_decl.keep.StepView` after every step and returns whether
    to keep it, or the reason as text. It runs on the writer thread. When it raises, that is
    reported once and the trigger is switched off.
    """

    model_config = ConfigDict(extra="allow")

    target: Annotated[str, AfterValidator(checked_target)] = Field(alias="_target_")
    """The function: `package.module.function`."""


def _kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "literal[trigger]"
    if isinstance(value, SpecModel):
        return type(value).__name__
    if isinstance(value, Mapping):
        for key, kind in _KINDS.items():
            if key in value:
                return kind
    return None


_KINDS = {
    "_target_": "FunctionTrigger",
    "quantile": "QuantileTrigger",
    "spike": "SpikeTrigger",
}

Trigger = Annotated[
    Annotated[Literal["nonfinite", "loss_spike"], Tag("literal[trigger]")]
    | Annotated[QuantileTrigger, Tag("QuantileTrigger")]
    | Annotated[SpikeTrigger, Tag("SpikeTrigger")]
    | Annotated[FunctionTrigger, Tag("FunctionTrigger")],
    Discriminator(
        _kind,
        custom_error_type="trigger",
        custom_error_message=(
            "no such trigger; there is nonfinite, loss_spike, {quantile: 0.99, of: {kpi: loss}}, "
            "{spike: 6.0, of: {kpi: loss}} and {_target_: package.module.function}"
        ),
    ),
]


def _measure(trigger: Any) -> MeasureSpec | None:
    return trigger.of if isinstance(trigger, (QuantileTrigger, SpikeTrigger)) else None


class KeepSpec(SpecModel):
    """Keeps steps because of what happened in them, beside those that the schedule records.

    Every training step is captured, which costs what recording it does except for the storing.
    After each step its numbers are looked at. When a trigger fires, the step, those just before it
    and those just after it are stored; all others are forgotten. What the schedule records is
    stored in any case, though up to `ring` steps later than without `keep`. A `schedule.budget`
    limits only what the schedule records.
    """

    ring: Annotated[Int, Field(ge=0, le=100_000)] = 20
    """So many steps before the one at which a trigger fires are kept with it."""

    after: Annotated[Int, Field(ge=0)] = 0
    """So many steps after it are kept, too."""

    when: Annotated[list[Trigger], BeforeValidator(_listed)] = ["nonfinite", "loss_spike"]
    """What makes a step worth keeping; empty where `on_finding.keep` alone decides.

    `nonfinite`: a recorded tensor, the loss for one, holds NaN or infinity and did not when it was
    last recorded (a mask that is always -inf fires once). `loss_spike`: short for `{spike: 6.0}`.
    """

    values: Bool = False
    """Whether kept steps hold the recorded samples of all tensors as they are, as far as
    `values.max_elements` allows; they are then copied at every step."""

    at_most: Annotated[Int, Field(ge=1)] | None = 200
    """So many records are stored because of triggers, then no more; null for no limit."""

    memory_mb: Annotated[Int, Field(ge=1)] = 256
    """Mebibytes that steps may take while it is open whether they are kept; where the ring needs
    more, it is shorter, and that is said."""

    def unknown_statistics(self, known: Sequence[str]) -> list[str]:
        """Returns a sentence for each statistic that a trigger looks at but nobody records."""
        measures = [(i, _measure(trigger)) for i, trigger in enumerate(self.when)]
        return [
            f"keep.when[{i}].of.statistic: {of.statistic!r} is not one of the spec's stats, "
            f"{', '.join(known)}{did_you_mean(of.statistic, known)}"
            for i, of in measures
            if of is not None and of.kpi is None and of.statistic not in known
        ]

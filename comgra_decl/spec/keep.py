"""Which steps to keep, decided after each step based on its results."""

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
    """Return `path` if it is a dotted function name of the form `package.module.function`.

    Raises: ValueError: it is not.
    """
    if not _TARGET.fullmatch(path):
        raise ValueError(f"{path!r} does not name a function; write 'package.module.function'")
    return path


class MeasureSpec(SpecModel):
    """One value per step: a KPI, or a statistic of the recorded tensors."""

    kpi: Annotated[str, Field(min_length=1)] | None = None
    """Name of a KPI logged with `comgra.kpi`, or `loss` for the first tensor in each step on which
    `backward()` is called."""

    node: Glob | None = None
    """Glob over nodes; if several slots match, the largest value is used."""

    statistic: Annotated[str, Field(min_length=1)] = "abs_max"
    """A statistic listed in the spec's `stats`."""

    over_batch: Literal["mean", "std", "abs_max"] = "mean"
    """How to aggregate the statistic over the batch."""

    role: str = "*"
    """The role of the tensor, such as `output` or `weight`; a glob."""

    pass_: str = Field("forward", alias="pass")
    """`forward`, `grad`, `update` or another recorded pass; a glob."""

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
    """Fires when a value is unusual compared with the values in recent steps of the same type.

    It fires if the value is above the quantile, or below it if the quantile is less than 0.5. It
    cannot fire until there are enough values for one of them to lie beyond the quantile: 100
    values, for example, for 0.99 or 0.01. The quantile is computed exactly from the last `window`
    finite values before the step, with NumPy's method `inverted_cdf`.
    """

    quantile: Annotated[Number, Field(gt=0, lt=1)]
    """A quantile: 0.99 fires at about one step in a hundred."""

    of: MeasureSpec = _LOSS
    """The value to check."""

    window: Annotated[Int, Field(ge=10, le=1_000_000)] = 1000
    """Number of recent values to compare with; at least 1 / (1 - quantile)."""

    @model_validator(mode="after")
    def _window_is_long_enough(self) -> QuantileTrigger:
        if self.window < self.warm_up:
            raise ValueError(
                f"a window of {self.window} is too short for the quantile {self.quantile}; "
                f"it must be at least {self.warm_up}"
            )
        return self

    @property
    def warm_up(self) -> int:
        """Number of values needed before the trigger can fire."""
        share = min(self.quantile, 1 - self.quantile)
        return max(10, math.ceil(1 / share - 1e-6))


class SpikeTrigger(SpecModel):
    """Fires when a value rises by many standard deviations or is not finite.

    It compares the value with the mean of the last `window` finite values from steps of the same
    type. It fires if the value exceeds this mean by more than `spike` times the standard deviation
    (ddof 1) and, to ignore rounding, by more than a millionth of the mean. At least 20 values, and
    at least half a window, must be available. The criterion and its defaults are those of
    OLMo-core's `SkipStepOptimizer`, which skips optimizer steps: 6 standard deviations over 128
    steps. Unlike in OLMo-core, a falling loss is not a spike.
    """

    spike: Annotated[Number, Field(gt=0)] = 6.0
    """Number of standard deviations."""

    of: MeasureSpec = _LOSS
    """The value to check."""

    window: Annotated[Int, Field(ge=20, le=100_000)] = 128
    """Number of recent values to compare with."""


class FunctionTrigger(SpecModel):
    """Fires when a custom function requests it; other keys are passed to it as keyword arguments.

    The function is called with a `comgra_decl.keep.StepView` after every step. It returns whether
    to keep the step, or a string with the reason for keeping it. It runs on the writer thread. If
    it raises an exception, the error is reported once, and the trigger is disabled.
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
            "unknown trigger; choose nonfinite, loss_spike, {quantile: 0.99, of: {kpi: loss}}, "
            "{spike: 6.0, of: {kpi: loss}} or {_target_: package.module.function}"
        ),
    ),
]


def _measure(trigger: Any) -> MeasureSpec | None:
    return trigger.of if isinstance(trigger, (QuantileTrigger, SpikeTrigger)) else None


class KeepSpec(SpecModel):
    """Keeps steps based on their results, in addition to those that the schedule records.

    Every training step is captured, which costs as much as recording it, except for the cost of
    storing it. When a trigger fires after a step, that step is stored together with the steps
    before and after it; all other steps are dropped. Scheduled steps are always stored, but up to
    `ring` steps later than without `keep`. A `schedule.budget` limits only scheduled records.
    """

    ring: Annotated[Int, Field(ge=0, le=100_000)] = 20
    """Number of steps to keep before the step at which a trigger fires."""

    after: Annotated[Int, Field(ge=0)] = 0
    """Number of steps to keep after the step at which a trigger fires."""

    when: Annotated[list[Trigger], BeforeValidator(_listed)] = ["nonfinite", "loss_spike"]
    """Conditions for keeping a step; empty if `on_finding.keep` alone decides.

    `nonfinite`: a recorded tensor, such as the loss, contains NaN or infinity but did not in its
    previous record. A mask that is always -inf therefore fires the trigger only once. `loss_spike`:
    short for `{spike: 6.0}`.
    """

    values: Bool = False
    """Whether the values of all tensors for the recorded samples, up to `values.max_elements`, are
    kept as well. If so, these values are copied at every step."""

    at_most: Annotated[Int, Field(ge=1)] | None = 200
    """Maximum number of records that triggers may store; null for no limit."""

    memory_mb: Annotated[Int, Field(ge=1)] = 256
    """Maximum memory, in mebibytes, for steps that have been neither kept nor dropped yet. If they
    need more, the ring is shortened, and this is reported."""

    def unknown_statistics(self, known: Sequence[str]) -> list[str]:
        """Return a sentence for each statistic that a trigger uses but that is not recorded."""
        measures = [(i, _measure(trigger)) for i, trigger in enumerate(self.when)]
        return [
            f"keep.when[{i}].of.statistic: {of.statistic!r} is not one of the spec's stats, "
            f"{', '.join(known)}{did_you_mean(of.statistic, known)}"
            for i, of in measures
            if of is not None and of.kpi is None and of.statistic not in known
        ]

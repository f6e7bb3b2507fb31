"""Which statistics are recorded: the usual ones, opt-in ones, and functions of the user's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
)

from comgra_decl.errors import did_you_mean
from comgra_decl.records import STATISTICS
from comgra_decl.spec.base import Number, SpecModel
from comgra_decl.spec.keep import checked_target
from comgra_decl.spec.nodes import CaptureName, Glob

StatisticName = Literal[
    "mean", "abs_mean", "std", "min", "max", "abs_max", "l2", "zero_fraction", "nonfinite"
]
"""Every statistic that is recorded by default; `records.STATISTICS` as a type."""

FormulaName = Literal["rms", "snr"]
"""Opt-in statistics that follow from what is read in any case: they cost the training nothing."""

OptionalName = Literal[
    "negative_fraction",
    "kurtosis",
    "q01",
    "q05",
    "q25",
    "q50",
    "q75",
    "q95",
    "q99",
    "singular_value",
    "stable_rank",
    "effective_rank",
]
"""Opt-in statistics that look at the tensor once more; `stats.measures` says what they are."""

KnownName = Literal[StatisticName, FormulaName, OptionalName]
"""Everything that can be asked for by its name alone."""

MATRIX = ("singular_value", "stable_rank", "effective_rank")
"""Those of matrices: by default only of parameters."""

DEFAULT: list[Any] = list(get_args(StatisticName))
"""What is recorded where nothing is said."""

_CORE: tuple[str, ...] = get_args(StatisticName)
_FORMULAS: tuple[str, ...] = get_args(FormulaName)
_OPTIONAL: tuple[str, ...] = get_args(OptionalName)
assert _CORE == STATISTICS, "the spec and the records name other statistics"

_NAME = re.compile(r"[^\W\d]\w*")
DERIVED = ("update_ratio",)
"""Names of statistics that reading a run makes of those that are stored."""


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _own_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name; write letters, digits and '_', as in 'my_stat'")
    if name in (*_CORE, *_FORMULAS, *_OPTIONAL, *DERIVED):
        raise ValueError(f"{name!r} is the name of a statistic that is already there")
    return name


OwnName = Annotated[str, AfterValidator(_own_name)]
Scope = Annotated[list[CaptureName], BeforeValidator(_listed)]


class OptionalStatistic(SpecModel):
    """An opt-in statistic, and where it is computed.

    Where it is not computed, or means nothing, it is missing (NaN), never 0. A tensor that is
    recorded under two names (what a block and its last layer return) has it under both.
    """

    name: OptionalName
    """One of the opt-in statistics.

    `negative_fraction`: share of values below 0. `kurtosis`: fourth moment over the squared
    variance, 3 for normal numbers. `q01` to `q99`: quantiles, exact up to 4096 values per sample,
    of 4096 evenly spaced ones beyond. Of matrices (a sample's first value dim against all others):
    `singular_value`, the largest, by the Lanczos method, to a relative 5e-4 at worst;
    `stable_rank`, the squared Frobenius norm over its square; `effective_rank`, the exponential of
    the entropy of all singular values, up to a smaller side of 1024.

    Price on one core per recorded step, for the 48 matrices of 12 transformer layers of width 256
    (9.4 million weights; their other statistics take 2 ms, training on 512 tokens 600 ms):
    `singular_value` and `stable_rank` together 35 ms where few singular values are large, 160 ms
    where none is (at initialisation); `effective_rank` 250 ms. Of an activation of
    [8, 128, 256], quantiles take 0.5 ms, `kurtosis` 0.8 ms, `negative_fraction` 0.4 ms.
    """

    on: Scope | None = None
    """What it is computed of, as in `capture`. Null means parameters for `singular_value`,
    `stable_rank` and `effective_rank`, and everything that is recorded for all others."""

    nodes: Annotated[list[Glob], BeforeValidator(_listed)] = Field(["**"], min_length=1)
    """Globs over nodes: only there."""

    @field_validator("name", mode="before")
    @classmethod
    def _is_opt_in(cls, name: Any) -> Any:
        if name in (*_CORE, *_FORMULAS):
            raise ValueError(f"{name!r} is computed everywhere or nowhere; write it as text")
        if name in _OPTIONAL:
            return name
        near = did_you_mean(str(name), _OPTIONAL)
        raise ValueError(
            f"{name!r} is not one of {', '.join(_OPTIONAL)}{near}; a statistic of your own has "
            "a '_target_', or a 'quantile'"
        )


class QuantileStatistic(SpecModel):
    """A quantile of the values, under a name of your choice: `{name: q999, quantile: 0.999}`."""

    name: OwnName
    """What it is called in the run."""

    quantile: Annotated[Number, Field(ge=0, le=1)]
    """Between 0 (the minimum) and 1 (the maximum). Of each sample's values, of 4096 evenly spaced
    ones where there are more; between two of them it is interpolated, as in `numpy.quantile`."""

    on: Scope | None = None
    """What it is computed of, as in `capture`; null means everything that is recorded."""

    nodes: Annotated[list[Glob], BeforeValidator(_listed)] = Field(["**"], min_length=1)
    """Globs over nodes: only there."""


class FunctionStatistic(SpecModel):
    """A function of your own; keys that are not named here are passed to it by name.

    It is called with a copy of the tensor, without gradient, batch dimension first: shape
    [samples, ...], on the tensor's device and in its dtype. A tensor without batch dimension is one
    sample, and samples that are single numbers make [samples, 1]. It returns one number per sample:
    a tensor of shape [samples], or a plain number where there is one sample (see also `per`). The
    training never notices it: what it does to its argument and to the random number generators
    stays without consequence. When it raises, that is reported once, and the statistic is missing
    (NaN) where it did. It must not use autograd or `torch.func`.
    """

    model_config = ConfigDict(extra="allow")

    name: OwnName
    """What it is called in the run."""

    target: Annotated[str, AfterValidator(checked_target)] = Field(alias="_target_")
    """The function: `package.module.function`."""

    per: Literal["sample", "batch"] = "sample"
    """`batch`: it reduces the whole batch and returns a single number, such as the share of units
    that are 0 for all samples. That number stands for every sample: it is the mean over the batch,
    from which none deviates."""

    on: Scope | None = None
    """What it is computed of, as in `capture`; null means everything that is recorded."""

    nodes: Annotated[list[Glob], BeforeValidator(_listed)] = Field(["**"], min_length=1)
    """Globs over nodes: only there."""


OptIn = OptionalStatistic | QuantileStatistic | FunctionStatistic
"""A statistic that is computed of a tensor in addition to its raw sums."""


def _kind(value: Any) -> str:
    if isinstance(value, SpecModel):
        return type(value).__name__
    if isinstance(value, Mapping):
        if "_target_" in value or "target" in value:
            return "FunctionStatistic"
        return "QuantileStatistic" if "quantile" in value else "OptionalStatistic"
    return "literal[statistic]"


Statistic = Annotated[
    Annotated[KnownName, Tag("literal[statistic]")]
    | Annotated[OptionalStatistic, Tag("OptionalStatistic")]
    | Annotated[QuantileStatistic, Tag("QuantileStatistic")]
    | Annotated[FunctionStatistic, Tag("FunctionStatistic")],
    Discriminator(_kind),
]


def name_of(entry: str | OptIn) -> str:
    """Returns the name of a statistic as it is stored."""
    return entry if isinstance(entry, str) else entry.name


def in_stored_order(entries: list[Any]) -> list[Any]:
    """Returns the entries of `stats` as they are stored: those with a formula, then the rest.

    Raises:
        ValueError: two are called the same.
    """
    names = [name_of(entry) for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is named twice")
    mappings = [entry for entry in entries if not isinstance(entry, str)]
    wanted = {entry for entry in entries if isinstance(entry, str)} | {"nonfinite"}
    first = [name for name in (*_CORE, *_FORMULAS, *_OPTIONAL) if name in wanted]
    return [*first, *mappings]


def opt_in(entries: list[Any]) -> list[OptIn]:
    """Returns what is computed of tensors in addition to their raw sums, in stored order."""
    by_name = [{"name": entry} if entry in _OPTIONAL else entry for entry in entries]
    full = [OptionalStatistic.model_validate(e) if isinstance(e, dict) else e for e in by_name]
    return [entry for entry in full if not isinstance(entry, str)]

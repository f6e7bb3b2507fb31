"""Display names and tooltips of statistics and aggregates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comgra_decl.rules import Place

if TYPE_CHECKING:
    from comgra_decl.viewer.model.selection import Selection

STATISTIC_HELP = {
    "mean": "mean of the values",
    "abs_mean": "mean of the absolute values",
    "std": "standard deviation of the values (population)",
    "min": "smallest value",
    "max": "largest value",
    "abs_max": "largest absolute value",
    "l2": "Euclidean norm of the values",
    "zero_fraction": "fraction of the values that are exactly 0",
    "nonfinite": "number of values that are NaN or infinite",
    "rms": "square root of the mean of the squared values",
    "snr": "absolute value of the mean divided by the standard deviation",
    "negative_fraction": "fraction of the values that are below 0",
    "kurtosis": "fourth central moment / squared variance (3 for a normal distribution)",
    **{f"q{q}": f"{q}% quantile of the values" for q in ("01", "05", "25", "50", "75", "95", "99")},
    "singular_value": "largest singular value",
    "stable_rank": "squared Frobenius norm divided by the squared largest singular value",
    "effective_rank": "exponential of the entropy of the normalized singular values",
    "update_ratio": "norm of the update divided by the norm of the parameter",
}

BATCH_HELP = {
    "mean": "mean over the batch",
    "std": "standard deviation over the batch",
    "abs_max": "largest absolute value over the batch",
}

BATCH_LABELS = {"mean": "Mean", "std": "Std", "abs_max": "Abs-max"}


def order_of_operations(statistic: str, batch: str) -> str:
    """Return how a value was computed: per sample, then over the batch."""
    first = STATISTIC_HELP.get(statistic, statistic)
    if batch.isdecimal():
        return f"{first} of sample {batch}"
    return f"{first} of each sample, then {BATCH_HELP.get(batch, batch)}"


def named(at: Selection) -> str:
    """Return the selected tensor's name for tooltips: "out, iteration 4", "head weight"."""
    return str(Place(at.node, at.role, at.iteration))


def pass_label(pass_: str) -> str:
    """Return a pass's display name: `forward`, `gradient`, `gradient 2`."""
    if pass_ == "grad" or pass_.startswith("grad:"):
        return f"gradient {pass_[5:]}".strip()
    return pass_

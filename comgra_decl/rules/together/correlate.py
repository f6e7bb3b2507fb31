"""Looks for what goes together in a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comgra_decl.rules.diagnosis import Diagnosis, concluded, diagnose
from comgra_decl.rules.together.correlation import Correlation
from comgra_decl.rules.together.grouping import grouped
from comgra_decl.rules.together.happening import happening
from comgra_decl.rules.together.moving import moving
from comgra_decl.rules.together.sampling import sampling
from comgra_decl.rules.together.series import Series, series_of

if TYPE_CHECKING:
    from comgra_decl.query import Run
    from comgra_decl.spec.rules import Rules

MOST = 10
"""More than that nobody reads."""


def correlate(
    run: Run, rules: Rules | None = None, *, trust: bool = False, most: int = MOST
) -> list[Correlation]:
    """Returns what goes together in a stored run, strongest first.

    Losses and the program's other numbers, the records at which rules fire, types of execution and
    tags, and statistics of tensors are compared by record; where single samples are recorded, their
    statistics are compared with their losses and categories. Of each comparison all lags count as
    tried; at most 5 % of all that is returned is expected to be chance.

    Args:
        run: as of its last `refresh`.
        rules: whose events are looked at; None for those of the run's spec, or the default.
        trust: see `diagnose`.
        most: how many to return at most.
    """
    return among(series_of(run, rules, trust=trust)[0], most=most, run=run)


def diagnose_and_correlate(
    run: Run, rules: Rules | None = None, *, trust: bool = False, most: int = MOST
) -> tuple[Diagnosis, list[Correlation]]:
    """Returns what `diagnose` and `correlate` do, in one look at all records.

    Of a distributed training it takes two: correlations are those of all ranks joined.
    """
    if len(run.ranks) > 1:
        together = correlate(run, rules, trust=trust, most=most)
        return diagnose(run, rules, trust=trust), together
    series, engine = series_of(run, rules, trust=trust)
    return concluded(engine, run), among(series, most=most, run=run)


def among(series: Series, *, most: int = MOST, run: Run | None = None) -> list[Correlation]:
    """Returns what goes together in series; see `correlate`."""
    found = [*moving(series), *happening(series)]
    if run is not None:
        found += sampling(run)
    return grouped(found, most)

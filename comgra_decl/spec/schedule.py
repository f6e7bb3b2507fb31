"""Which steps are recorded."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from comgra_decl.spec.base import Int, Number, SpecModel


def _ascending(steps: list[int]) -> list[int]:
    return sorted(set(steps))


class EvalSpec(SpecModel):
    """Which evaluation passes are recorded."""

    every: Annotated[Int, Field(ge=1)] = 1
    """Record the first and then every so many-th evaluation phase."""


class ScheduleSpec(SpecModel):
    """Which training steps are recorded; steps count from 0.

    The first `first` steps are recorded, then the multiples of `every`. With a `backoff` above 1
    the k-th gap between them is `every * backoff**k`, rounded down.
    """

    first: Annotated[Int, Field(ge=0)] = 10
    """So many steps from the start are all recorded."""

    every: Annotated[Int, Field(ge=1)] = 1
    """After those, every so many-th step is recorded."""

    backoff: Annotated[Number, Field(ge=1)] = 1.0
    """Each gap is so many times longer than the one before; 1 keeps them equal."""

    steps: (
        Annotated[
            list[Annotated[Int, Field(ge=0)]], Field(min_length=1), AfterValidator(_ascending)
        ]
        | None
    ) = None
    """Exactly these steps and no others; `first`, `every` and `backoff` are then not used."""

    eval: EvalSpec | None = EvalSpec()
    """Evaluation passes to record; null for none."""

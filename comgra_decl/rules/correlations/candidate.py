"""A correlation on its way to the report, with what decides which of several are named."""

from __future__ import annotations

from dataclasses import dataclass

from comgra_decl.rules.correlations.correlation import Correlation
from comgra_decl.rules.correlations.origin import Origin
from comgra_decl.rules.window import Floats


@dataclass(frozen=True)
class Candidate:
    """A correlation that chance does not explain.

    Attributes:
        correlation: what it would report.
        course: the course of its first side, aligned so that candidates compare.
        origin: where its first side stands in a step.
    """

    correlation: Correlation
    course: Floats
    origin: Origin

"""A candidate for the report, with the data for the choice between equivalent candidates."""

from __future__ import annotations

from dataclasses import dataclass

from comgra_decl.rules.correlations.correlation import Correlation
from comgra_decl.rules.correlations.origin import Origin
from comgra_decl.rules.window import Floats


@dataclass(frozen=True)
class Candidate:
    """A statistically significant correlation.

    Attributes:
        correlation: the correlation to report.
        course: the course of its first side, aligned so that candidates are comparable.
        origin: the origin of its first side in a step.
    """

    correlation: Correlation
    course: Floats
    origin: Origin

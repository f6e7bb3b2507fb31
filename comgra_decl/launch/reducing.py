"""From raw sums to what is stored, as a spec wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comgra_decl.records import RawStep, StepBatch
    from comgra_decl.spec import Spec


class Reduction:
    """Turns raw sums into statistics, on the writer thread."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._extra = tuple(statistic.name for statistic in spec.opt_in)

    def __call__(self, steps: list[RawStep]) -> list[StepBatch]:
        """Returns everything that is stored of these steps."""
        from comgra_decl.stats import finalise

        spec = self._spec
        return finalise(
            steps,
            statistics=spec.statistics,
            extra=self._extra,
            sample_count=spec.samples.count,
            bins=None if spec.histogram is None else spec.histogram.bins,
        )

    def look(self, steps: list[RawStep], statistics: tuple[str, ...]) -> list[StepBatch]:
        """Returns a few statistics only, without samples and histograms."""
        from comgra_decl.stats import finalise

        return finalise(steps, statistics=statistics, extra=self._extra, sample_count=0, bins=None)

"""Compare the figures with their targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.results import ScenarioResult, recording_cost

Results = Mapping[str, ScenarioResult]


@dataclass(frozen=True)
class Verdict:
    """A target, the measured value, and whether it meets the target.

    `measured` is None if nothing was measured, `met` is None if unknown.
    """

    target: str
    measured: str | None
    met: bool | None


def verdicts(results: Results) -> list[Verdict]:
    """Compare the results with every target."""
    return [
        _at_most(results, "mlp", "idle", limit=1.02, column="step"),
        _at_most(results, "mlp", "silent", limit=1.02, column="step"),
        _not_measurable(results, "transformer", "idle"),
        _at_most(results, "mlp", "record", limit=4.0, column="stored"),
        _at_most(results, "transformer", "record", limit=1.15, column="stored"),
        *(_cheaper(results, net, limit=20) for net in results),
        *(_smaller(results, net, limit=10) for net in results),
    ]


def sweep_verdict(ratio: float) -> Verdict:
    """Compare the time of a sweep with its target.

    Args:
        ratio: the time of a sweep, in that of equally many forward passes at the same batch sizes.
    """
    target = f"a sweep takes at most {_SWEEP:g} times its forward passes"
    return Verdict(target, f"{ratio:.3f}", ratio <= _SWEEP)


_SWEEP = 1.3


def _at_most(results: Results, net: str, tool: str, *, limit: float, column: str) -> Verdict:
    span = ", store included" if column == "stored" else ""
    text = f"{net}: {tool} <= {limit:g}{span}"

    def measure(result: ScenarioResult) -> tuple[str, bool]:
        ratio = result.tools[tool].ratios[column]
        return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})", ratio.value <= limit

    return _verdict(text, results, net=net, needs=(tool,), measure=measure)


def _not_measurable(results: Results, net: str, tool: str) -> Verdict:
    def measure(result: ScenarioResult) -> tuple[str, bool]:
        ratio, noise = (result.tools[name].ratios["step"] for name in (tool, "again"))
        spread = f"{noise.low:.3f} to {noise.high:.3f}"
        text = f"{ratio.value:.3f}; nothing attached against itself {spread}"
        return text, ratio.low <= max(noise.high, 1.0)

    text = f"{net}: {tool} within the noise of nothing attached against itself"
    return _verdict(text, results, net=net, needs=(tool, "again"), measure=measure)


def _cheaper(results: Results, net: str, *, limit: float) -> Verdict:
    def measure(result: ScenarioResult) -> tuple[str, bool | None]:
        theirs, ours = (recording_cost(result.tools, name) for name in ("comgra", "like"))
        if ours <= 0:
            return "ours is within the noise", None
        return f"{theirs / ours:.0f} times", theirs >= limit * ours

    text = f"{net}: recording costs {limit:g} times less than comgra's, same content"
    return _verdict(text, results, net=net, needs=("like", "comgra"), measure=measure)


def _smaller(results: Results, net: str, *, limit: float) -> Verdict:
    def measure(result: ScenarioResult) -> tuple[str, bool]:
        theirs, ours = (result.tools[name].size.per_step or 0 for name in ("comgra", "like"))
        return f"{theirs / ours:.1f} times", theirs >= limit * ours

    text = f"{net}: a recorded step is {limit:g} times smaller than comgra's, same content"
    return _verdict(text, results, net=net, needs=("like", "comgra"), measure=measure)


def _verdict(
    text: str,
    results: Results,
    *,
    net: str,
    needs: tuple[str, ...],
    measure: Callable[[ScenarioResult], tuple[str, bool | None]],
) -> Verdict:
    """Return the verdict, which has no measurement if a required tool was not run."""
    if net not in results or not {"nothing", *needs} <= results[net].tools.keys():
        return Verdict(text, None, None)
    measured, met = measure(results[net])
    return Verdict(text, measured, met)

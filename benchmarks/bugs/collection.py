"""All training runs of the benchmark."""

from __future__ import annotations

from benchmarks.bugs.case import BUGS, HEALTHY, Bug, Healthy


def cases() -> list[Bug | Healthy]:
    """Return all bugs and all healthy training runs, in the order of their declaration."""
    from benchmarks.bugs.cases import healthy, initial, losses, numbers, rates, samples

    assert all((healthy, initial, losses, numbers, rates, samples))
    return [*BUGS.values(), *HEALTHY.values()]

"""A training with known properties: which bug it contains, and which findings are expected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from benchmarks.bugs.recipes import Half, kind
from benchmarks.bugs.setup import Setup

Change = Callable[[Setup], Sequence[str] | None]
"""Adds a bug to a training run; returns the nodes (globs) that show it, None for the whole run."""

BUGS: dict[str, Bug] = {}
HEALTHY: dict[str, Healthy] = {}


@dataclass(frozen=True)
class Bug:
    """A bug and its labels.

    Attributes:
        name: name of the bug.
        family: kind of bug.
        kinds: kind of training that it is added to, by half.
        change: adds the bug.
        rules: accepted rules.
        steps: range of the first step of a correct finding, both ends included.
        records: overrides that record more than the `debug` preset.
    """

    name: str
    family: str
    kinds: dict[Half, str]
    change: Change
    rules: tuple[str, ...]
    steps: tuple[int, int]
    records: tuple[str, ...] = ()


@dataclass(frozen=True)
class Healthy:
    """A training without a bug."""

    name: str
    kinds: dict[Half, str]
    change: Callable[[Setup], None] | None = None


def bug(
    family: str,
    *rules: str,
    on: tuple[str, str],
    steps: tuple[int, int] = (0, 15),
    records: tuple[str, ...] = (),
) -> Callable[[Change], Change]:
    """Register the function as a bug; `on` are the kinds of training of the two tuning halves.

    The third form uses the first kind if the name has an even number of letters, otherwise the
    second.
    """

    def register(change: Change) -> Change:
        name = change.__name__
        assert name not in BUGS, name
        kinds: dict[Half, str] = {"tune": on[0], "second": on[1], "report": _third(name, on)}
        BUGS[name] = Bug(name, family, kinds, change, rules, steps, records)
        return change

    return register


def healthy(*on: str) -> Callable[[Callable[[Setup], None]], Callable[[Setup], None]]:
    """Register the function as a harmless change; `on` is the same as for `bug`."""

    def register(change: Callable[[Setup], None]) -> Callable[[Setup], None]:
        name = change.__name__
        kinds: dict[Half, str] = {"tune": on[0], "second": on[-1], "report": _third(name, on)}
        HEALTHY[name] = Healthy(name, kinds, change)
        return change

    return register


def _third(name: str, on: Sequence[str]) -> str:
    return on[0] if len(name) % 2 == 0 else on[-1]


def built(case: Bug | Healthy, half: Half) -> tuple[Setup, Sequence[str] | None]:
    """Return the training run of a half, and the nodes that show its bug (None: all)."""
    setup = kind(case.kinds[half], half)
    if case.change is None:
        return setup, None
    return setup, case.change(setup)


def weighted(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return names and modules of all linear and convolution layers, the output layer last."""
    kinds = (nn.Linear, nn.Conv2d)
    return [(name, m) for name, m in model.named_modules() if isinstance(m, kinds)]

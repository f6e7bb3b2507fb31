"""A training with known properties: which bug it contains, and which findings are expected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from benchmarks.bugs.recipes import Half, kind
from benchmarks.bugs.setup import Setup

Change = Callable[[Setup], Sequence[str] | None]
"""Puts a bug into a training; returns the nodes (globs) that show it, None for the whole run."""

BUGS: dict[str, Bug] = {}
HEALTHY: dict[str, Healthy] = {}


@dataclass(frozen=True)
class Bug:
    """A bug and its labels.

    Attributes:
        name: what it is called.
        family: which kind of bug it is.
        kinds: the training it is put into, by half.
        change: puts it there.
        rules: any of these is the right finding.
        steps: the first step that a finding should name lies between these, both included.
        records: what is recorded beside the preset `debug`, as overrides.
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
    """A training in which nothing is wrong."""

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
    """Registers the function as a bug; `on` are the kinds of training of both tuning halves.

    The third form takes the first kind where the name has an even number of letters, else the
    other one.
    """

    def register(change: Change) -> Change:
        name = change.__name__
        assert name not in BUGS, name
        kinds: dict[Half, str] = {"tune": on[0], "second": on[1], "report": _third(name, on)}
        BUGS[name] = Bug(name, family, kinds, change, rules, steps, records)
        return change

    return register


def healthy(*on: str) -> Callable[[Callable[[Setup], None]], Callable[[Setup], None]]:
    """Registers the function as a change that does no harm; the kinds are as with `bug`."""

    def register(change: Callable[[Setup], None]) -> Callable[[Setup], None]:
        name = change.__name__
        kinds: dict[Half, str] = {"tune": on[0], "second": on[-1], "report": _third(name, on)}
        HEALTHY[name] = Healthy(name, kinds, change)
        return change

    return register


def _third(name: str, on: Sequence[str]) -> str:
    return on[0] if len(name) % 2 == 0 else on[-1]


def built(case: Bug | Healthy, half: Half) -> tuple[Setup, Sequence[str] | None]:
    """Returns the training of a half, and the nodes that show its bug."""
    setup = kind(case.kinds[half], half)
    if case.change is None:
        return setup, None
    return setup, case.change(setup)


def weighted(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the names and modules of all layers with a matrix or kernels, the answer's last."""
    kinds = (nn.Linear, nn.Conv2d)
    return [(name, m) for name, m in model.named_modules() if isinstance(m, kinds)]

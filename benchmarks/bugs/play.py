# ruff: noqa: ARG005  (callbacks take the arguments of their callers)
"""Run one training run of the benchmark with tracing and evaluate its diagnosis."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import comgra_decl as comgra
from benchmarks.bugs.case import Bug, Healthy, built
from benchmarks.bugs.recipes import Half
from benchmarks.bugs.setup import train
from comgra_decl.rules import Finding, diagnose

FIRST = 3
"""The correct finding must be among the first ones, up to this number."""

SEEDS: dict[Half, int] = {"tune": 1, "second": 2, "report": 3}


@dataclass(frozen=True)
class Reported:
    """The relevant fields of a finding."""

    rule: str
    severity: str
    node: str | None
    step: int
    message: str


@dataclass(frozen=True)
class Outcome:
    """The outcome of one training run.

    Attributes:
        name: name of the bug or of the healthy training run.
        half: "tune", "second" (both for tuning rules) or "report".
        kind: kind of training, before adding the bug.
        family: kind of bug; None if healthy.
        rank: rank from 1 of the correct finding (rule, tensor and step) among the primary ones.
        rank_of_rule: rank of the first finding of an accepted rule.
        found: the finding with rank `rank`, or else `rank_of_rule`.
        said: the primary findings, best first.
        losses: the first and the last loss.
        seconds: duration of the traced training.
    """

    name: str
    half: Half
    kind: str
    family: str | None
    rank: int | None
    rank_of_rule: int | None
    found: Reported | None
    said: list[Reported] = field(default_factory=list)
    losses: tuple[float, float] = (0.0, 0.0)
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether a finding with the correct rule, tensor and step is among the first three."""
        return self.rank is not None and self.rank <= FIRST

    @property
    def right_rule(self) -> bool:
        """Whether a finding of an accepted rule is among the first three."""
        return self.rank_of_rule is not None and self.rank_of_rule <= FIRST

    @property
    def alarms(self) -> int:
        """Number of errors and warnings."""
        return sum(finding.severity != "hint" for finding in self.said)

    @property
    def hints(self) -> int:
        """Number of hints."""
        return sum(finding.severity == "hint" for finding in self.said)

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as JSON-compatible data."""
        return {**asdict(self), "right": self.right, "right_rule": self.right_rule}


def play(case: Bug | Healthy, half: Half) -> Outcome:
    """Train a case with the `debug` preset and evaluate the diagnosis of its run."""
    torch.manual_seed(SEEDS[half])
    setup, nodes = built(case, half)
    records = case.records if isinstance(case, Bug) else ()
    logging.getLogger("comgra_decl").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="bugs-") as root, _quiet():
        start = perf_counter()
        with comgra.trace("debug", root=root, overrides=records) as session:
            losses = train(setup, comgra.kpi)
        seconds = perf_counter() - start
        findings = diagnose(comgra.open_run(str(session.path))).findings
    primary = [finding for finding in findings if finding.because is None]
    return _outcome(case, half, primary, nodes, losses=losses, seconds=seconds)


def plain(case: Bug | Healthy, half: Half) -> list[float]:
    """Train a case without tracing and rules, and return the losses."""
    torch.manual_seed(SEEDS[half])
    setup, _ = built(case, half)
    return train(setup, lambda name, value: None)


def _outcome(
    case: Bug | Healthy,
    half: Half,
    findings: list[Finding],
    nodes: Sequence[str] | None,
    *,
    losses: list[float],
    seconds: float,
) -> Outcome:
    rank = rank_of_rule = found = None
    if isinstance(case, Bug):
        fits = [f.rule in case.rules for f in findings]
        right = [fit and is_right(f, case, nodes) for fit, f in zip(fits, findings, strict=True)]
        rank_of_rule = fits.index(True) + 1 if any(fits) else None
        rank = right.index(True) + 1 if any(right) else None
        at = rank or rank_of_rule
        found = None if at is None else _reported(findings[at - 1])
    return Outcome(
        case.name,
        half,
        case.kinds[half],
        case.family if isinstance(case, Bug) else None,
        rank,
        rank_of_rule,
        found,
        [_reported(finding) for finding in findings],
        (losses[0], losses[-1]),
        seconds,
    )


def is_right(finding: Finding, bug: Bug, nodes: Sequence[str] | None) -> bool:
    """Whether a finding of an accepted rule has a correct tensor and a plausible first step."""
    first, last = bug.steps
    if not first <= finding.first_step <= last:
        return False
    if nodes is None:
        return True
    node = "" if finding.place is None else finding.place.node
    return any(fnmatchcase(node, pattern) for pattern in nodes)


def _reported(finding: Finding) -> Reported:
    node = None if finding.place is None else str(finding.place)
    return Reported(finding.rule, finding.severity, node, finding.first_step, finding.message)


class _quiet:  # noqa: N801  (used like a function)
    """Hides the output and warnings of training runs and tracing."""

    def __enter__(self) -> None:
        self._nowhere = Path(os.devnull).open("w")
        self._streams = redirect_stderr(self._nowhere)
        self._warnings = warnings.catch_warnings()
        self._streams.__enter__()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *exception: object) -> None:
        self._warnings.__exit__(None, None, None)
        self._streams.__exit__(None, None, None)
        self._nowhere.close()

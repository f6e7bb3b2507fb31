"""Codes and rows in an order that shows that they belong to other data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from comgra_decl.rules.api import (
    CODES,
    Count,
    Finding,
    Fraction,
    Place,
    Rule,
    RuleParameters,
    Scene,
    Window,
    per_run,
)

_RELATED = 0.25  # rank correlation, below which lengths are unrelated
_LEAST_LENGTHS = 30


class OwnCodes(Rule):
    """Categories of evaluation data that are numbered anew."""

    name = "own_codes"
    severity = "hint"
    certainty = 0.65
    definition = (
        "In all of the first evaluations, the codes in a column of an integer input, or in the "
        "whole input read row by row, are in the order of their first appearance: each new code is "
        "the largest one so far plus 1. There are at least six codes, of which some repeat before "
        "the last one appears. A training batch does not have this property, so it is not in the "
        "nature of the data. Codes that were assigned to other data are in this order by chance "
        "only, with a probability of 1 / k! for k codes."
    )
    source = (
        "scikit-learn's documentation, Common pitfalls, inconsistent preprocessing: encoders are "
        "fitted to the training data only. Our own definition."
    )
    advice = (
        "Number the categories once, from the training data, and look them up for all other data; "
        "give categories that are missing there a code of their own."
    )

    _otherwise: set[str] = per_run(set)  # inputs with training batches in another order
    _in_order: dict[str, tuple[int, int, int]] = per_run(dict)  # step, codes and rows
    _not_in_order: set[str] = per_run(set)
    _evaluations = 0

    def look(self, window: Window) -> None:
        """Store which inputs are not in order in training."""
        for _, fact in _facts(window):
            if not fact["codes"]:
                self._otherwise.add(fact["input"])

    def look_at_evaluation(self, window: Window) -> None:
        """Store which inputs are in order in evaluations."""
        for step, fact in _facts(window):
            self._evaluations += 1
            if fact["codes"]:
                found = step, max(fact["codes"]), fact["rows"]
                self._in_order.setdefault(fact["input"], found)
            else:
                self._not_in_order.add(fact["input"])

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first input."""
        for role, (step, codes, rows) in self._in_order.items():
            if role in self._not_in_order or role not in self._otherwise:
                continue
            return [
                self.finding(
                    scene,
                    place=Place("input", role),
                    first_step=step,
                    message=f"The {codes} codes in the {rows} rows of {role} in an evaluation are "
                    "in the order of their first appearance: they were numbered for these data, so "
                    "the same code means something else in training, unless these are the data for "
                    "which all codes were numbered.",
                    evidence={"codes": codes, "rows": rows},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return None if self._evaluations else "no evaluation with integer inputs"


class RowParameters(RuleParameters):
    """Options of `mispaired_rows`."""

    share: Fraction = 0.2
    """Smallest share of rows whose target continues beyond the end of the input."""

    records: Count = 2
    """Number of records required."""


class MispairedRows(Rule):
    """Targets whose rows are in another order than those of the inputs."""

    name = "mispaired_rows"
    certainty = 0.8
    definition = (
        "The input and the target, or the only two integer inputs, have the same shape "
        "[batch, positions] and end with padding. In each of the first records, and at least "
        "`records` of them, targets continue beyond the end of their inputs, in at least `share` "
        "of all rows, but none would in another order of the rows: the lengths are the same, or "
        "the inputs are sorted by length. For CTC losses: the inputs are sorted by length, and the "
        f"rank correlation of their lengths with those of the targets is at most {_RELATED:g} over "
        f"at least {_LEAST_LENGTHS} rows."
    )
    source = (
        "Batches are sorted by length for torch.nn.utils.rnn.pack_padded_sequence; targets must be "
        "sorted with them. Our own definition."
    )
    advice = (
        "Apply the same permutation to inputs, lengths, masks and targets, or leave the order to "
        "pack_padded_sequence(enforce_sorted=False)."
    )
    Parameters = RowParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding if rows are not paired."""
        ends = scene.told("row ends")
        rows = sum(fact["rows"] for fact in ends)
        beyond = sum(fact["beyond"] for fact in ends)
        fit = len(ends) >= self.parameters.records and all(fact["fits"] for fact in ends)
        if fit and beyond >= self.parameters.share * rows and beyond > len(ends):
            return [
                self.finding(
                    scene,
                    place=Place("target", "target"),
                    first_step=0,
                    message=f"{beyond} of {rows} targets continue beyond the end of their input, "
                    "but none would if the rows were in another order: inputs and targets are not "
                    "in the same order, probably because only one of them was sorted by length.",
                    evidence={"rows": rows, "beyond": beyond},
                )
            ]
        return self._of_chosen(scene) or self._of_lengths(scene)

    def _of_chosen(self, scene: Scene) -> list[Finding]:
        """Judge predictions whose rows were chosen by an index."""
        facts = scene.told("other rows")
        if not facts:
            return []
        rows, wrong = facts[0]["rows"], facts[0]["wrong"]
        return [
            self.finding(
                scene,
                place=Place("target", "target"),
                first_step=0,
                message=f"The prediction consists of {rows} rows chosen by an index, but the "
                f"target is a slice of the labels: {wrong} predictions are compared with the "
                "labels of other rows.",
                advice="Choose both by the same index: loss(logits[train], labels[train]).",
                evidence={"rows": rows, "wrong": wrong},
            )
        ]

    def _of_lengths(self, scene: Scene) -> list[Finding]:
        """Judge the lengths that a CTC loss receives."""
        facts = scene.told("ctc lengths")
        rows = sum(fact["rows"] for fact in facts)
        if rows < _LEAST_LENGTHS or any(len({*fact["target"]}) < 3 for fact in facts):
            return []
        # within batches, as a batch may hold sequences of similar lengths
        inputs, targets = (np.concatenate([_ranks(f[k]) for f in facts]) for k in _SIDES)
        related = float(np.corrcoef(inputs, targets)[0, 1])
        if related > _RELATED:
            return []
        where = str(facts[0]["where"])
        return [
            self.finding(
                scene,
                place=Place(where),
                first_step=0,
                message=f"In {where}, the inputs are sorted by length, but their lengths are not "
                f"related to those of the targets (rank correlation {related:.2f} over {rows} "
                "rows): probably only the inputs were sorted.",
                evidence={"rows": rows, "correlation": related},
                severity="hint",
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        known = scene.told("row ends") or scene.told("ctc lengths")
        return None if known else "no padded input has a target of its shape, and there is no CTC"


_SIDES = ("input", "target")


def _ranks(lengths: list[int]) -> np.ndarray[Any, Any]:
    """Return the mean ranks of lengths, from -0.5 to 0.5."""
    given = np.asarray(lengths, np.float64)
    below = (given[:, None] > given[None]).mean(1)
    return np.asarray(below + 0.5 * (given[:, None] == given[None]).mean(1) - 0.5)


def _facts(window: Window) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the facts about codes in the records of a window, with their steps."""
    steps = window.steps.tolist()
    return [
        (step, fact)
        for step, facts in zip(steps, window.facts, strict=False)
        for fact in facts.get(CODES) or ()
    ]

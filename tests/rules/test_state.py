"""A rule's state in a run is declared once, and `reset` resets all of it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from comgra_decl.rules.api import Early, Finding, Numbers, Rule, Scene, per_run
from comgra_decl.rules.catalogue import build, known
from tests.rules.tape import Tape

OWN: Any = {"an_expression": {"when": "abs_max > 5 * early(abs_max)"},
       "about_a_number": {"when": "value > 2 * early(value)", "kpi": "loss"}}  # fmt: skip


class Counting(Rule):
    """Counts numbers, using every way to keep a count."""

    name = "counting"
    parts: list[int] = per_run(list)
    early = per_run(Early, 2)
    count = 0
    never_used: Any = per_run(dict)

    def look_at_numbers(self, numbers: Numbers) -> None:
        self.parts.append(len(numbers.steps))
        self.count += len(numbers.steps)
        self.early.look(np.array([0]), numbers.values[:, None])

    def findings(self, scene: Scene) -> list[Finding]:
        return []

    def missing(self, scene: Scene) -> str | None:
        return None


class CountingFromTen(Counting):
    never_used: Any = None
    count = 10


def wild(seed: int = 0) -> Tape:
    """A network that explodes, dies and skips steps; nearly every rule stores some of it."""
    tape, random = Tape(), np.random.default_rng(seed)
    nodes = ("first", "second", "third", "last")
    weights = [tape.slot(node, (6, 6), role="weight", kind="parameter") for node in nodes]
    weights += [tape.slot(n, (6, 6), role="weight", kind="parameter", pass_="grad") for n in nodes]
    outputs = [tape.slot(node, (8, 6), class_="ReLU" if node == "third" else "Linear")
               for node in nodes]  # fmt: skip
    outputs += [tape.slot(node, (8, 6), pass_="grad") for node in nodes]
    target = tape.slot("target", (8,), kind="target", dtype="int64")
    data = tape.slot("input", (8, 6), role="x", kind="input")
    chain = [data, *outputs[:4]]
    tape.graph([*pairwise(chain), (outputs[3], target)])
    for step in range(40):
        size = 1.4**step
        arrays = {slot: size * random.normal(size=tape.slots[slot].shape)
                  for slot in (data, *weights, *outputs)}  # fmt: skip
        arrays[outputs[2]] *= 0
        mode = "eval" if step == 30 else "train"
        tape.record(arrays | {target: random.integers(0, 3, 8)}, mode=mode)
    tape.losses([1.0] * 150 + [1.5**n for n in range(50)])
    tape.losses([1.0, 3.0, 4.0, 5.0], name="val_loss", type_="eval")
    tape.losses([2.0**-n for n in range(20)], name="gradient scale")
    tape.skipped = {20, 21}
    return tape


def state(thing: Any) -> Any:
    """Returns everything that an object holds, as plain data."""
    if isinstance(thing, np.ndarray):
        return thing.shape, thing.dtype, thing.tolist() if thing.dtype.kind != "f" else str(thing)
    if isinstance(thing, dict):
        return {key: state(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [state(value) for value in thing]
    ours = type(thing).__module__.startswith("comgra_decl.rules.") and not callable(thing)
    if ours or isinstance(thing, Rule):
        return type(thing).__name__, state({k: v for k, v in vars(thing).items() if k != "scene"})
    return str(thing) if not callable(thing) else None


def test_a_rule_that_is_reset_is_as_new() -> None:
    rules, new = build(OWN), build(OWN)
    tape = wild()
    first = tape.play(*rules).findings()
    changed = sum(state(rule) != state(fresh) for rule, fresh in zip(rules, new, strict=True))
    assert len(first) > 8
    assert changed > 60  # the others read facts of the scene and keep nothing
    for rule, fresh in zip(rules, new, strict=True):
        rule.reset()
        assert state(rule) == state(fresh), rule.name
    assert tape.play(*rules).findings() == first


def test_rules_of_one_class_share_nothing() -> None:
    one, other = Counting(), Counting()
    one.look_at_numbers(Numbers("loss", "train", np.arange(3), np.ones(3)))
    assert (one.parts, one.count, other.parts, other.count) == ([3], 3, [], 0)
    assert one.early is not other.early


def test_what_a_subclass_declares_counts() -> None:
    rule = CountingFromTen()
    rule.look_at_numbers(Numbers("loss", "train", np.arange(3), np.ones(3)))
    assert (rule.count, rule.never_used) == (13, None)
    rule.reset()
    assert rule.count == 10


def test_what_no_class_declares_is_kept() -> None:
    """A custom constructor may set up what is not state."""

    class Theirs(Counting):
        def __init__(self, parameters: Any = None) -> None:
            self.before = "before"
            super().__init__(parameters)
            self.after = "after"

    rule = Theirs()
    rule.reset()
    assert (rule.before, rule.after) == ("before", "after")


@pytest.mark.parametrize("kind", known().values(), ids=lambda kind: str(kind.name))
def test_no_rule_has_a_constructor(kind: type[Rule]) -> None:
    assert kind.__init__ is Rule.__init__

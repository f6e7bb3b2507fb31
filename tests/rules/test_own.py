"""Custom rules: expressions and classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from comgra_decl.errors import SpecError
from comgra_decl.rules import Rule
from comgra_decl.rules.catalogue import FAMILIES, build, known
from comgra_decl.rules.expression import ExpressionError, parse
from comgra_decl.rules.gradients.vanishing import VanishingGradient
from comgra_decl.rules.own import OwnParameters
from comgra_decl.spec.described import descriptions
from tests.rules.tape import Tape
from tests.support.shortened import shortened

ONES = np.ones((4, 6))


def own(entry: Any) -> Rule:
    (rule,) = [r for r in build({"mine": entry}, trust=True) if r.name == "mine"]
    return rule


def growing() -> Tape:
    tape = Tape()
    slots = [tape.slot(name, (4, 6)) for name in ("blocks.0", "blocks.1", "head")]
    for step in range(30):
        sizes = (1.0, 1.0 + (step > 19) * 9, 100.0)
        tape.record({slot: size * ONES for slot, size in zip(slots, sizes, strict=True)})
    return tape


@pytest.mark.parametrize(
    ("when", "first"),
    shortened(
        [
            ("abs_max > 5", 20),
            ("abs_max > 5 * early(abs_max)", 20),
            ("abs_max.abs_max / previous(abs_max) >= 9.5 and step > 3", 20),
            ("not (l2 / sqrt(elements) < 2) or mean < 0", 20),
            ("3 < mean < 11", 20),
            ("max(mean, 3) > 3", 20),
            ("largest(mean) > 5 and smallest(mean) < 2", 20),
            ("mean > 1 + 1e9", None),
            ("isnan(mean)", None),
        ],
        tried=1,
        several=True,
    ),
)
@pytest.mark.parametrize("window", [1, 8])
def test_an_expression_holds_from_the_step_at_which_it_does(
    when: str, first: int | None, window: int
) -> None:
    found = growing().findings(own({"when": when, "node": "blocks.*"}), window=window)
    assert [f.first_step for f in found] == ([] if first is None else [first])
    assert all(f.place is not None and f.place.node == "blocks.1" for f in found)


def test_an_expression_may_be_about_a_number() -> None:
    tape = Tape()
    tape.losses([1.0] * 15 + [4.0] * 3, name="lr")
    rule = own({"when": "value > 3 * early(value)", "kpi": "lr", "patience": 2, "message": "up"})
    (found,) = tape.findings(rule)
    assert (found.first_step, found.last_step, found.message) == (15, 17, "lr: up.")


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "().__class__",
        "std.__class__",
        "[x for x in (1,)]",
        "lambda: 1",
        "std if mean else 1",
        "mean = 3",
        "open('x')",
        "'a' * 9",
        "abs(1, 2)",
        "mean[0]",
        "(" * 60 + "1" + ")" * 60 + " + " + "-" * 60 + "1",
        "x" * 2000,
        "",
    ],
)
def test_what_is_no_expression_is_refused_and_never_run(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse(text)


def test_the_name_of_a_function_is_hinted_at() -> None:
    with pytest.raises(ExpressionError, match="did you mean 'early'"):
        parse("erly(std) > 1")


class Mine(VanishingGradient):
    """A rule from another package."""


def test_a_class_of_the_users_is_a_rule_like_any_other() -> None:
    rule = own({"_target_": f"{__name__}.Mine", "ratio": 0.5})
    assert isinstance(rule, Mine)
    assert (rule.name, rule.parameters.ratio) == ("mine", 0.5)
    with pytest.raises(SpecError, match=r"not a subclass of comgra_decl\.rules\.Rule"):
        build({"mine": {"_target_": "pathlib.Path"}}, trust=True)


def test_single_rules_can_be_switched_off_and_changed() -> None:
    built = {rule.name: rule for rule in build({"nonfinite": "off", "dead_units": {"share": 0.9}})}
    assert "nonfinite" not in built
    assert built["dead_units"].parameters.share == 0.9
    assert len(built) == len(known()) - 1
    assert build("off") == []


def test_a_severity_may_be_the_users() -> None:
    (found,) = growing().findings(own({"when": "mean > 50", "severity": "hint"}))
    assert found.severity == "hint"


@pytest.mark.parametrize("kind", known().values(), ids=lambda kind: str(kind.name))
def test_every_rule_says_what_it_is(kind: type[Rule]) -> None:
    assert kind.__doc__
    for text in (kind.definition, kind.source, kind.advice):
        assert len(text) > 20
        assert text.strip().endswith((".", ")", "?")), text
    assert set(kind.explained_by) <= set(known()), kind.explained_by
    assert kind.__module__.split(".")[2] in FAMILIES
    for model in (kind.Parameters, OwnParameters):
        assert set(model.model_fields) <= set(descriptions(model))

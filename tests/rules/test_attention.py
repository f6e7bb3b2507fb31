"""Rules about attention, on probabilities written by hand."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from comgra_decl.rules import Rule
from comgra_decl.rules.attention.patterns import (
    AttentionCollapse,
    AttentionDiagonal,
    AttentionSink,
    PatternParameters,
)
from tests.rules.tape import Tape

TOKENS = 5
EVEN = np.full((2, 3, TOKENS, TOKENS), 1 / TOKENS)  # samples, heads, queries, tokens
SINK = np.broadcast_to(np.eye(TOKENS)[0], EVEN.shape)
DIAGONAL = np.broadcast_to(np.eye(TOKENS), EVEN.shape)
BEFORE = np.broadcast_to(np.eye(TOKENS)[[0, 0, 1, 2, 3]], EVEN.shape)  # each at the one before it


def mixed(pattern: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Attention of which this share has the pattern, in addition to that of uniform attention."""
    part = (share - 1 / TOKENS) / (1 - 1 / TOKENS)
    return part * pattern + (1 - part) * EVEN


def played(attention: NDArray[np.float64], records: int = 30, changed: int = 0) -> Tape:
    tape = Tape()
    slot = tape.slot("attn", attention.shape, class_="Softmax")
    for step in range(records):
        tape.record({slot: EVEN if step < changed else attention})
    return tape


def test_attention_on_one_token_has_collapsed() -> None:
    (found,) = played(SINK, 9, changed=3).findings(AttentionCollapse())
    assert found.first_step == 3
    assert found.evidence["tokens"] == pytest.approx(1.0)
    assert not played(EVEN).findings(AttentionCollapse())


@pytest.mark.parametrize(("p", "found"), [(0.96, 1), (0.94, 0)])
def test_collapse_is_a_spread_over_less_than_one_and_a_tenth_of_a_token(
    p: float, found: int
) -> None:
    """The sum of squares is p^2 + (1 - p)^2 / 4: 1 / 0.922 or 1 / 0.884 tokens."""
    one_most = np.broadcast_to(p * np.eye(TOKENS) + (1 - p) / 4 * (1 - np.eye(TOKENS)), EVEN.shape)
    findings = played(one_most).findings(AttentionCollapse())
    spread = 1 / (p**2 + (1 - p) ** 2 / 4)
    assert [f.evidence["tokens"] for f in findings] == pytest.approx([spread] * found, rel=1e-5)


@pytest.mark.parametrize("window", [1, 7, 100])
@pytest.mark.parametrize(
    ("rule", "pattern", "other"),
    [(AttentionSink, SINK, DIAGONAL), (AttentionDiagonal, DIAGONAL, SINK)],
)
def test_a_pattern_is_found_by_its_own_rule(
    rule: type[Rule], pattern: NDArray[np.float64], other: NDArray[np.float64], window: int
) -> None:
    (found,) = played(mixed(pattern, 0.95), 60, changed=15).findings(rule(), window=window)
    assert (found.severity, found.first_step) == ("hint", 20)  # every tenth is checked
    assert found.evidence["share of attention"] == pytest.approx(0.95)
    for harmless in (EVEN, other, BEFORE, mixed(pattern, 0.85)):
        assert not played(harmless).findings(rule())
    assert not played(pattern, 20).findings(rule())  # it takes three checks


def test_a_sink_may_be_any_token_but_must_be_the_same_for_all() -> None:
    third = np.broadcast_to(np.eye(TOKENS)[2], EVEN.shape)
    assert played(third).findings(AttentionSink())
    heads = np.stack([np.broadcast_to(np.eye(TOKENS)[h], EVEN.shape[2:]) for h in range(3)])
    each_head_its_own = np.broadcast_to(heads, EVEN.shape)
    assert not played(each_head_its_own).findings(AttentionSink())


def test_attention_to_others_has_no_diagonal() -> None:
    crossing = np.broadcast_to(np.eye(TOKENS)[:3], (2, 3, 3, TOKENS))
    assert not played(crossing).findings(AttentionDiagonal())


@pytest.mark.parametrize("rule", [AttentionCollapse, AttentionSink, AttentionDiagonal])
def test_where_there_is_no_attention_nobody_has_looked(rule: type[Rule]) -> None:
    image = np.random.default_rng(0).random(EVEN.shape)
    (unchecked,) = played(image).play(rule()).unchecked()
    assert "no attention is recorded" in unchecked.reason
    assert not played(EVEN).play(rule()).unchecked()


def test_every_record_can_be_looked_at() -> None:
    rule = AttentionSink(PatternParameters(every=1, patience=2))
    (found,) = played(SINK, 9, changed=3).findings(rule)
    assert found.first_step == 3

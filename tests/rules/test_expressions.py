"""Any text used as an expression is either rejected as a problem of the spec or has a value."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.errors import SpecError
from comgra_decl.rules.catalogue import build
from comgra_decl.rules.expression import parse

SLOTS = np.arange(3)


def value_of(text: str) -> np.ndarray | None:
    """Evaluates an expression as a rule does; None if the spec rejects it."""
    try:
        build({"mine": {"when": text}})
    except SpecError:
        return None

    def read(name: str, _: str) -> np.ndarray:
        rng = np.random.default_rng(len(name))
        return np.where(rng.random((2, 3)) < 0.2, np.nan, rng.normal(size=(2, 3)))

    with np.errstate(all="ignore"):
        return np.asarray(parse(text).term(read, SLOTS))


ATOMS = st.one_of(
    st.sampled_from(["mean", "std", "mean.std", "value", "step", "True", "None", "''", "1e999"]),
    st.integers(-(10**420), 10**420).map(str),
    st.floats(allow_nan=False).map(repr),
)
BINARY = "+ - * / ** // % @ << >> & | ^ < <= > >= == != and or in is".split()
CALLED = "abs sqrt log10 exp isnan min max early previous largest smallest print".split()


def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, st.sampled_from(BINARY), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(st.sampled_from(["-", "+", "~", "not "]), inner).map("".join),
        st.tuples(st.sampled_from(CALLED), inner).map(lambda t: f"{t[0]}({t[1]})"),
        st.tuples(st.sampled_from(CALLED), inner, inner).map(lambda t: f"{t[0]}({t[1]}, {t[2]})"),
        st.tuples(inner, inner).map(lambda t: f"{t[0]}[{t[1]}]"),
    )


@given(st.recursive(ATOMS, grown, max_leaves=12))
def test_an_expression_is_refused_as_a_problem_of_the_spec_or_has_a_value(text: str) -> None:
    value_of(text)


@given(
    st.text(st.sampled_from("mean.std()[]{}<>=!+-*/ 0123456789e'\"\\\n:,#lambdaif"), max_size=60)
)
def test_any_text_is_refused_as_a_problem_of_the_spec_or_has_a_value(text: str) -> None:
    value_of(text)


@pytest.mark.parametrize(
    "text",
    [
        "1" * 400 + " > mean",
        "10" + "0" * 320 + " > mean",
        "[" * 150 + "]" * 150,
        "-" * 900 + "1",
        "(" * 300 + "1" + ")" * 300,
        "mean + " + "x" * 500 + "(1)",
        "\ud800 > 1",
        "mean > 1\0",
    ],
)
def test_what_is_too_large_too_deep_or_no_text_is_refused(text: str) -> None:
    assert value_of(text) is None


@pytest.mark.parametrize(
    "text", ["9**9**9**9 > mean", "-(mean > 0) < 0", "(mean>0) - (std>0) == 0"]
)
def test_huge_powers_and_sums_of_truths_have_a_value(text: str) -> None:
    value = value_of(text)
    assert value is not None
    assert value.dtype == np.bool_

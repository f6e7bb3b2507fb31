"""Names of series have an inverse, whatever they are made of."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.records import AGGREGATES, SlotKey
from comgra_decl.sinks.naming import SeriesName, decoded, encoded, of_metric, parsed

TEXT = st.text(max_size=12) | st.text("ab/.()[]%-x5B |:", max_size=12)
KEYS = st.builds(SlotKey, TEXT, TEXT, st.integers(0, 20), TEXT)
NARROW = re.compile(r"[A-Za-z0-9_\-. /]")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            SeriesName(SlotKey("blocks.0.attn", "output", 0, "forward"), "std"),
            "blocks.0.attn/output/forward/std",
        ),
        (
            SeriesName(SlotKey("cell", "hidden[3]", 2, "grad"), "l2", "abs_max", "eval"),
            "cell (eval)/hidden%5B3%5D[2]/grad/l2.abs_max",
        ),
        (
            SeriesName(SlotKey("metrics", "output", 0, "forward"), "mean"),
            "%6Detrics/output/forward/mean",
        ),
        (
            SeriesName(SlotKey("shown", "output", 0, "forward"), "mean"),
            "%73hown/output/forward/mean",
        ),
    ],
)
def test_names_read_like_paths(name: SeriesName, text: str) -> None:
    assert str(name) == text
    assert parsed(text) == name


@given(KEYS, TEXT, st.sampled_from(AGGREGATES), TEXT)
def test_a_series_is_found_from_its_name(
    key: SlotKey, statistic: str, over_batch: str, type_: str
) -> None:
    name = SeriesName(key, statistic, over_batch, type_)
    assert parsed(str(name)) == name


@given(TEXT, TEXT)
def test_a_metric_is_found_from_its_name(name: str, type_: str) -> None:
    assert parsed(of_metric(name, type_)) == (name, type_)


@given(TEXT)
def test_an_encoded_name_has_only_allowed_characters_and_an_inverse(name: str) -> None:
    text = encoded(name, NARROW)
    assert all(NARROW.fullmatch(char) for char in text)
    assert decoded(text) == name
    parts = text.split("/")
    assert "" not in parts[1:]
    assert not {".", ".."} & set(parts)


@given(st.from_regex(re.compile(r"\w+([./ ]\w+){0,3}", re.ASCII), fullmatch=True))
def test_usual_names_stay_as_they_are(name: str) -> None:
    assert encoded(name, NARROW) == name

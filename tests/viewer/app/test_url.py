from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

import comgra_decl
from comgra_decl.viewer.state import SECTIONS, ViewState
from comgra_decl.viewer.url import format_query, parse

texts = st.text(min_size=1, max_size=40)


@given(
    run=texts,
    node=texts,
    role=texts,
    step=st.integers(0, 10**12),
    iteration=st.integers(0, 1000),
    section=st.sampled_from(["overview", "inspect", "kpis", "run"]),
    expanded=st.none() | st.frozensets(texts),
)
def test_what_is_written_is_read_back(**fields: object) -> None:
    state = ViewState(**fields)
    read = parse(format_query(state))
    defaults = {name: state.param[name].default for name in fields}
    assert {**defaults, **read} == fields


@pytest.mark.parametrize(("key", "label"), SECTIONS.items())
def test_a_link_may_have_a_section_as_it_is_written_on_its_tab(key: str, label: str) -> None:
    assert parse(f"?section={label}") == parse(f"?section={key}") == {"section": key}


def test_the_documentation_lists_all_sections() -> None:
    page = Path(comgra_decl.__file__).parents[1] / "docs" / "viewer.md"
    (line,) = [line for line in page.read_text().splitlines() if line.startswith("- `section`:")]
    assert re.findall(r"`(\w+)`", line.partition(":")[2].partition("The default")[0]) == [*SECTIONS]


@pytest.mark.parametrize("name", ["123", "true", "None", "a&b=c", "ä ö/../ü", "<script>"])
def test_names_stay_text(name: str) -> None:
    assert parse(f"?node={quote(name, safe='')}") == {"node": name, "section": "inspect"}


@pytest.mark.parametrize(
    "query",
    ["?step=abc", "?step=-3", "?step=1e9", "?step=" + "9" * 400, "?section=evil", "?iteration=²",
     "?scale=cubic", "?node=" + "x" * 5000, "?unknown=1", "?", "", "?&&=&"],
)  # fmt: skip
def test_a_bad_field_is_dropped(query: str) -> None:
    assert parse(query) == {}


@given(st.text(max_size=300))
def test_any_text_can_be_parsed(query: str) -> None:
    assert set(parse(query)) <= set(ViewState.param)


def test_a_bad_field_does_not_take_others_with_it() -> None:
    assert parse("?step=x&role=a&section=nope&batch=3") == {"role": "a", "batch": "3"}


def test_a_link_to_a_node_shows_it_and_any_other_the_overview() -> None:
    assert parse("?node=a")["section"] == "inspect"
    assert parse("?node=a&section=kpis")["section"] == "kpis"
    assert "section" not in parse("?run=a")
    assert ViewState().section == "overview"
    assert "section" not in format_query(ViewState(node="a", section="inspect"))
    assert "section=overview" in format_query(ViewState(node="a", section="overview"))


def test_a_page_that_follows_names_no_step() -> None:
    assert "step" not in format_query(ViewState(step=7, node="a", follow=True))
    assert "step=7" in format_query(ViewState(step=7, node="a"))

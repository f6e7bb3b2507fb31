"""An invalid spec: all problems are reported at once, with the keys that the user wrote."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import comgra_decl as comgra
from comgra_decl.doors.trace import trace
from comgra_decl.errors import SpecError
from comgra_decl.spec import Spec, load_spec
from comgra_decl.spec.problems import explain
from tests.support.shortened import examples


def problems(content: dict[str, Any]) -> list[str]:
    with pytest.raises(SpecError) as raised:
        load_spec(content)
    return raised.value.problems


def only_problem(content: dict[str, Any]) -> str:
    (problem,) = problems(content)
    return problem


def entry(**keys: Any) -> dict[str, Any]:
    return {"nodes": {"attn": {"select": "**", **keys}}}


def test_a_wrong_choice_names_the_right_ones_and_the_nearest() -> None:
    assert only_problem(entry(capture=["grads"])) == (
        "comgra.nodes.attn.capture[0]: 'grads' is not one of output, output_grad, input, "
        "input_grad, parameter, parameter_grad, parameter_grad_raw, update, buffer, "
        "optimizer_state; did you mean 'output_grad' or 'input_grad' or 'parameter_grad'?"
    )


def test_an_unknown_key_is_blamed_on_its_mapping() -> None:
    assert only_problem({"schedule": {"evry": 3}}) == (
        "comgra.schedule: unknown key 'evry'; valid keys: first, every, backoff, steps, windows, "
        "seconds, sudden, types, eval, budget, step, max_iterations; did you mean 'every'?"
    )
    assert only_problem({"samplse": 1}).startswith(
        "comgra: unknown key 'samplse'; valid keys: run, "
    )


@pytest.mark.parametrize(
    ("written", "place"),
    [
        ("a..b", "comgra.nodes.attn.select"),
        (["ok", "a..b"], "comgra.nodes.attn.select[1]"),
        ({"path": "a..b"}, "comgra.nodes.attn.select.path"),
        ({"path": ["ok", "a..b"]}, "comgra.nodes.attn.select.path[1]"),
        ([{"path": "ok"}, {"path": ["a..b"]}], "comgra.nodes.attn.select[1].path[0]"),
        ({"class": "a.b"}, "comgra.nodes.attn.select.class"),
    ],
)
def test_the_key_path_is_the_one_that_was_written(written: Any, place: str) -> None:
    assert only_problem(entry(select=written)).partition(": ")[0] == place


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"schedule": {"every": "often"}}, "comgra.schedule.every: 'often' is not an integer"),
        ({"schedule": {"every": True}}, "comgra.schedule.every: True is not an integer"),
        ({"schedule": {"every": 0}}, "comgra.schedule.every: 0 must be at least 1"),
        ({"schedule": {"backoff": "x"}}, "comgra.schedule.backoff: 'x' is not a number"),
        (
            {"schedule": {"backoff": float("nan")}},
            "comgra.schedule.backoff: nan is not a finite number",
        ),
        ({"schedule": {"steps": []}}, "comgra.schedule.steps: [] must not be empty"),
        ({"schedule": {"steps": [1, -2]}}, "comgra.schedule.steps[1]: -2 must be at least 0"),
        ({"graph": "yes"}, "comgra.graph: 'yes' is not true or false"),
        ({"store": 3}, "comgra.store: 3 is not a mapping of keys to values"),
        ({"nodes": ["**"]}, "comgra.nodes: ['**'] is not a mapping of names to entries"),
        ({"histogram": {"bins": 1}}, "comgra.histogram.bins: 1 must be at least 2"),
        ({"nodes": {3: {"select": "**"}}}, "comgra.nodes.3: 3 is not text"),
        ({"run": {"root": ""}}, "comgra.run.root: '' must not be empty"),
        (
            {"run": {"root": "ftp://host/runs"}},
            (
                "comgra.run.root: 'ftp://host/runs' must be a folder, s3://BUCKET/PREFIX or "
                "gs://BUCKET/PREFIX"
            ),
        ),
        (
            entry(batch_dim="first"),
            (
                "comgra.nodes.attn.batch_dim: 'first' must be 'auto', a dimension such as 0, or "
                "null (no batch dim)"
            ),
        ),
        (
            entry(select={}),
            (
                "comgra.nodes.attn.select: needs a path, regex, class or annotation; "
                "write '**' for every module"
            ),
        ),
    ],
)
def test_each_kind_of_mistake_has_its_sentence(content: dict[str, Any], problem: str) -> None:
    assert only_problem(content) == problem


@pytest.mark.parametrize("name", ["a/b", "a\\b", "..", ".hidden", "", " ", "a\n", " a", "x" * 300])
@pytest.mark.parametrize("key", ["group", "name"])
def test_a_name_that_cannot_be_a_folder_is_refused(key: str, name: str) -> None:
    assert only_problem({"run": {key: name}}).startswith(f"comgra.run.{key}: ")


def test_a_missing_key_is_explained_by_its_documentation() -> None:
    assert only_problem({"nodes": {"attn": {}}}).startswith(
        "comgra.nodes.attn.select: is required. A glob over module paths"
    )


def test_everything_that_is_wrong_is_said_at_once() -> None:
    found = problems(
        {
            "nodes": {"a": {"select": "x**", "capture": ["outpt"]}, "b": 5},
            "stats": ["maen"],
            "schedule": {"every": 0, "frist": 2},
            "run": {"name": "${nowhere}"},
        }
    )
    assert [line.partition(": ")[0] for line in found] == [
        "comgra.run.name",
        "comgra.nodes.a.select",
        "comgra.nodes.a.capture[0]",
        "comgra.nodes.b",
        "comgra.stats[0]",
        "comgra.schedule.every",
        "comgra.schedule",
    ]


def test_an_error_shows_all_its_problems() -> None:
    with pytest.raises(SpecError) as raised:
        load_spec({"graph": 1, "enabled": 2})
    assert str(raised.value).splitlines() == raised.value.problems
    assert len(raised.value.problems) == 2


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Every(Strict):
    kind: Literal["every"]
    steps: int


class Budget(Strict):
    kind: Literal["budget"]
    share: float


class Model(Strict):
    tagged: list[Annotated[Every | Budget, Field(discriminator="kind")]] = []
    plain: int | bool | None = None
    limit: Annotated[int, Field(lt=9, gt=1)] = 5


def explained(content: dict[str, Any]) -> list[str]:
    with pytest.raises(ValidationError) as raised:
        Model.model_validate(content, strict=True)
    return explain(raised.value, Model, content)


def test_the_tag_of_a_union_is_no_part_of_the_key_path() -> None:
    assert explained(
        {"tagged": [{"kind": "every", "stps": 1}, {"kind": "budget", "share": "all"}]}
    ) == [
        "comgra.tagged[0].steps: is required.",
        "comgra.tagged[0]: unknown key 'stps'; valid keys: kind, steps; did you mean 'steps'?",
        "comgra.tagged[1].share: 'all' is not a number",
    ]


def test_the_members_of_a_union_make_one_line() -> None:
    assert explained({"plain": "x", "limit": 9}) == [
        "comgra.plain: 'x' is not an integer; or 'x' is not true or false",
        "comgra.limit: 9 must be less than 9",
    ]


def test_no_sentence_of_pydantic_is_left_over_for_any_field() -> None:
    """Whatever is put in the wrong place, the message is ours and names the place."""
    for name in Spec.model_fields:
        for value in ("nonsense", -1, 1.5, ["?"], {"?": 1}):
            try:
                load_spec({name: value})
            except SpecError as error:
                for line in error.problems:
                    assert line.startswith((f"comgra.{name}", "comgra:"))
                    assert "Input should" not in line
                    assert "validation error" not in line


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            {"schedule": {"windows": [[1]]}},
            "comgra.schedule.windows[0]: [1] must be a pair of numbers, [first, last]",
        ),
        (
            {"schedule": {"windows": [[1, 2], [3, 4, 5]]}},
            "comgra.schedule.windows[1]: [3, 4, 5] must be a pair of numbers, [first, last]",
        ),
        ({"stats": ["mean", "std", "mean"]}, "comgra.stats: 'mean' is listed twice"),
        (
            entry(select=""),
            (
                "comgra.nodes.attn.select: '' matches no module; write '**' for all, or "
                "{class: ...} for the outermost"
            ),
        ),
        (
            entry(select={"regex": ""}),
            (
                "comgra.nodes.attn.select.regex: a regular expression must not be empty; '.*' "
                "matches every module"
            ),
        ),
    ],
)
def test_what_would_do_nothing_or_nothing_more_is_refused(
    content: dict[str, Any], problem: str
) -> None:
    assert only_problem(content) == problem


@pytest.mark.parametrize("source", [None, 5, b"debug", ["debug"], {"debug"}, object, 1.5])
def test_what_is_no_spec_is_said_with_what_would_be_one(source: Any) -> None:
    with pytest.raises(SpecError, match="is not a spec; pass the name of a preset") as raised:
        load_spec(source)
    with pytest.raises(SpecError) as traced, trace(source):
        raise AssertionError("it must not begin")
    assert traced.value.problems == raised.value.problems


@pytest.mark.parametrize("overrides", [None, 5, "schedule.every=3", [3], {"schedule.every": 3}])
def test_what_is_no_list_of_changes_is_said(overrides: Any) -> None:
    with pytest.raises(SpecError, match=r"overrides must be a list of strings such as \['sched"):
        load_spec("debug", overrides)


def test_what_yaml_cannot_hold_is_said_with_its_place_and_with_all_else() -> None:
    holds_itself: list[Any] = []
    holds_itself.append(holds_itself)
    found = problems(
        {
            "schedule": {"every": object, "frist": 2},
            "stats": ["mean", object()],
            "nodes": {"attn": {"select": ["**", b"x"], "capture": holds_itself}, (1, 2): "**"},
            "run": {"name": "${"},
        }
    )
    assert [line.partition(": ")[0] for line in found] == [
        "comgra.schedule.every",
        "comgra.stats[1]",
        "comgra.nodes.attn.select[1]",
        "comgra.nodes.attn.capture[0]",
        "comgra.nodes",
        "comgra.run.name",
        "comgra.schedule",
    ]


KEYS = [*Spec.model_fields, "select", "every", "windows", "by", "_target_", "when", "defaults"]
KEYS += ["steps", "kpi", "node", "quantile", "name", "on", "class", "path", "spike", "budget"]
LEAVES = st.one_of(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    st.complex_numbers() | st.dates() | st.builds(object) | st.frozensets(st.integers()),
    st.sampled_from([int, 10**400, np.float64(2), np.int64(3), np.array([1]), Path("x")]),
    st.sampled_from(["**", "${a}", "${", "${nodes}", "???", "mean", "off", "a < b", "nope.nope"]),
)
WORDS = st.sampled_from(KEYS)
NAMES = WORDS | st.text(max_size=3) | st.integers() | st.none() | st.floats() | st.binary()
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner), st.dictionaries(NAMES, inner, max_size=4)
    ),
    max_leaves=10,
)
CHANGES = st.lists(st.text(max_size=8) | st.from_regex(r"~?[a-z.\[~+${]{1,9}=?.{0,5}"), max_size=2)


@pytest.mark.parametrize("load", [load_spec, comgra.load_spec])
@settings(max_examples=examples(300), deadline=None)
@given(
    source=VALUES | st.dictionaries(st.sampled_from([*Spec.model_fields]), VALUES, min_size=1),
    overrides=st.just(()) | CHANGES | VALUES,
)
@example(source={1: {"": "${0}"}}, overrides=())
def test_whatever_is_given_as_a_spec_only_ever_is_a_wrong_spec(
    load: Callable[..., Spec], source: Any, overrides: Any
) -> None:
    found = ["comgra: nothing"]
    try:
        load(source, overrides)
    except SpecError as error:
        found = error.problems
    assert found
    assert all(re.match(r"comgra[.:\[]", line) for line in found)

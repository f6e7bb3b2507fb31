"""Which calls and which named tensors a spec selects."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.errors import SpecError
from comgra_decl.spec import ModuleFacts, load_spec
from comgra_decl.spec.calls import call_rules, calls_inside, calls_outside, named_tensor

LEVEL = st.sampled_from(["a", "b", "ab"])
PATHS = st.lists(LEVEL, max_size=3).map(".".join)
GLOBS = st.lists(st.sampled_from(["a", "b", "*", "**", "a*"]), min_size=1, max_size=3).map(".".join)


def by_hand(glob: str, path: str) -> bool:
    """Whether a glob matches a path, level by level."""

    def fits(levels: list[str], names: list[str]) -> bool:
        if not levels:
            return not names
        if levels[0] == "**":
            return any(fits(levels[1:], names[n:]) for n in range(len(names) + 1))
        return bool(names) and fnmatchcase(names[0], levels[0]) and fits(levels[1:], names[1:])

    return fits(glob.split("."), path.split(".") if path else [])


@given(
    entries=st.lists(
        st.tuples(st.lists(GLOBS, max_size=2), st.lists(GLOBS, max_size=1)), min_size=1, max_size=3
    ),
    path=PATHS,
)
def test_calls_are_meant_inside_modules_that_fit_and_are_not_left_out(
    entries: list[tuple[list[str], list[str]]], path: str
) -> None:
    nodes = {
        f"e{i}": {"select": {"function": "torch.relu", "within": within}, "exclude": exclude}
        for i, (within, exclude) in enumerate(entries)
    }
    spec = load_spec({"nodes": nodes})
    found = calls_inside(spec, call_rules(spec), ModuleFacts(path, ("Module",)))
    expected = tuple(
        f"e{i}"
        for i, (within, exclude) in enumerate(entries)
        if (not within or any(by_hand(glob, path) for glob in within))
        and not any(by_hand(glob, path) for glob in exclude)
    )
    assert (found["torch.relu"].entries if found else ()) == expected
    outside = calls_outside(spec, call_rules(spec))
    anywhere = tuple(f"e{i}" for i, (within, _) in enumerate(entries) if not within)
    assert (outside["torch.relu"].entries if outside else ()) == anywhere


@given(
    pattern=st.sampled_from(["attn", "attn*", "*", "a b*", "[ab]*"]),
    name=st.sampled_from(["attn", "attn 2", "a b.c", "b", "other", "Attn"]),
    on=st.booleans(),
)
def test_named_tensors_are_chosen_by_globs_over_names(pattern: str, name: str, on: bool) -> None:
    entry = {"select": {"annotation": pattern}, "capture": "output"}
    capture = named_tensor(load_spec({"nodes": {"e": entry}, "annotations": on}), name)
    if fnmatchcase(name, pattern):
        assert capture is not None
        assert (capture.output, capture.output_grad, capture.entries) == (True, False, ("e",))
    elif on:
        assert capture is not None
        assert (capture.output, capture.output_grad, capture.entries) == (True, True, ())
    else:
        assert capture is None


def test_entries_that_mean_modules_mean_no_tensor() -> None:
    nodes = {"e": {"select": {"annotation": "x", "path": "**"}}, "all": {"select": "**"}}
    assert named_tensor(load_spec({"nodes": nodes, "annotations": False}), "x") is None


def test_what_is_excluded_everywhere_is_not_recorded_under_that_name_either() -> None:
    spec = load_spec({"nodes": {"all": {"select": "**"}}, "exclude": [{"annotation": "secret*"}]})
    assert named_tensor(spec, "secret 1") is None
    assert named_tensor(spec, "open") is not None


@pytest.mark.parametrize(
    ("written", "full"),
    [
        ("F.softmax", "torch.nn.functional.softmax"),
        ("nn.functional.relu", "torch.nn.functional.relu"),
        ("Tensor.softmax", "torch.Tensor.softmax"),
        ("my.layers.attend", "my.layers.attend"),
    ],
)
def test_short_names_of_functions_are_completed(written: str, full: str) -> None:
    spec = load_spec({"nodes": {"e": {"select": {"function": written}}}})
    assert [rule.function for rule in call_rules(spec)] == [full]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"select": {"function": "softmax"}}, r"e\.select\.function: 'softmax' is not the dotted"),
        ({"select": {"function": "torch.soft max"}}, r"is not the dotted name of a function"),
        ({"select": {"within": "a"}}, r"e\.select: 'within' requires 'function'"),
        (
            {"select": {"function": "torch.relu", "path": "a"}},
            r"e\.select: 'function' cannot be combined with 'path'",
        ),
        (
            {"select": {"function": "torch.relu"}, "capture": ["output", "parameter"]},
            r"a function call has no 'parameter'; it has output, output_grad, input",
        ),
        ({"select": "a", "split": {"name": "head"}}, r"e\.split\.dim: is required"),
        ({"select": "a", "split": {"dim": 0, "groups": 0}}, r"e\.split\.groups: 0 must be"),
        ({"select": "a", "split": {"dim": 0, "nam": "x"}}, r"unknown key 'nam'.*did you mean"),
        ({"select": "a", "split": {"dim": 0, "name": " x"}}, r"e\.split\.name: ' x' must not"),
        ({"select": "a", "attention": {"recompte": True}}, r"did you mean 'recompute'"),
    ],
)
def test_what_is_wrong_is_said_at_its_key(entry: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec({"nodes": {"e": entry}})
    (said,) = caught.value.problems
    assert said.startswith("comgra.nodes.e")
    assert re.search(problem, said), said

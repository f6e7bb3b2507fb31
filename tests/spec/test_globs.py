"""Globs over module paths, compared with a matcher that tries every possibility."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.spec.globs import compile_glob, compile_name, matches

NAMES = st.text("ab1_", min_size=1, max_size=4)
PATHS = st.lists(NAMES, max_size=5).map(".".join)
LEVELS = st.one_of(
    st.just("**"),
    st.text("ab1_*?", min_size=1, max_size=4).filter(lambda level: "**" not in level),
    st.sampled_from(["[ab]", "[!a]*", "[a-b]?", "a[]1]", "[!]]", "[!-a]1", "[a^]"]),
)
GLOBS = st.lists(LEVELS, max_size=5).map(".".join)


def tried(levels: list[str], names: list[str]) -> bool:
    """Whether the levels of a glob match the names of a path in any way."""
    if not levels:
        return not names
    if levels[0] == "**":
        return any(tried(levels[1:], names[n:]) for n in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], levels[0]) and tried(levels[1:], names[1:])


@given(GLOBS, PATHS)
def test_a_glob_matches_what_trying_everything_finds(glob: str, path: str) -> None:
    levels = glob.split(".") if glob else []
    names = path.split(".") if path else []
    assert matches(glob, path) == tried(levels, names)


@given(PATHS)
def test_a_path_without_wildcards_matches_itself_alone(path: str) -> None:
    assert matches(path, path)
    assert not matches(path, f"{path}.x" if path else "x")


@pytest.mark.parametrize(
    ("glob", "path", "expected"),
    [
        ("**", "", True),
        ("**", "a.b.c", True),
        ("*", "", False),
        ("*", "a", True),
        ("*", "a.b", False),
        ("blocks.*.attn", "blocks.0.attn", True),
        ("blocks.*.attn", "blocks.0.x.attn", False),
        ("blocks.**", "blocks", True),
        ("**.dropout*", "dropout1", True),
        ("**.dropout*", "a.b.dropout", True),
        ("**.dropout*", "a.dropout.b", False),
        ("a.**.b", "a.b", True),
        ("a.**.**.b", "a.x.y.b", True),
        ("layer?", "layer1", True),
        ("layer?", "layer12", False),
        ("", "", True),
        ("", "a", False),
        ("a+b", "a+b", True),
        ("a+b", "aab", False),
    ],
)
def test_examples(glob: str, path: str, expected: bool) -> None:
    assert matches(glob, path) is expected


def test_many_double_stars_stay_quick() -> None:
    path = ".".join(["a"] * 60)
    assert not matches(".".join(["**"] * 30 + ["b"]), path)
    assert not matches(".".join(["**", "a"] * 25 + ["b"]), path)


@pytest.mark.parametrize(
    ("glob", "complaint"),
    [
        ("a..b", "empty name"),
        (".a", "empty name"),
        ("a.", "empty name"),
        ("blocks**", "must stand alone"),
        ("a.[b", "no matching ']'"),
        ("a[]", "no matching ']'"),
        ("a[!]", "no matching ']'"),
        ("a[b-a]", "not a set of characters"),
    ],
)
def test_what_is_no_glob_is_explained(glob: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as raised:
        compile_glob(glob)
    assert repr(glob) in str(raised.value)


def test_a_class_name_may_be_a_glob_but_not_a_path() -> None:
    assert compile_name("*Attention").fullmatch("MultiheadAttention")
    assert not compile_name("Linear").fullmatch("LazyLinear")
    with pytest.raises(ValueError, match="without its module"):
        compile_name("torch.nn.Linear")

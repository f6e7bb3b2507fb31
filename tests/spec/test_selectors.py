"""Which modules a spec selects, and what it reports about patterns that select none."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.spec import Capture, ModuleFacts, Selection, load_spec, select
from tests.spec.test_globs import tried

MODULES = [
    ModuleFacts("", ("Transformer", "Module")),
    ModuleFacts("embed", ("Embedding", "Module")),
    *(
        module
        for n in range(3)
        for module in (
            ModuleFacts(f"blocks.{n}", ("Block", "Module")),
            ModuleFacts(f"blocks.{n}.attn", ("CausalAttention", "MultiheadAttention", "Module")),
            ModuleFacts(f"blocks.{n}.attn.out", ("NonDynamicLinear", "Linear", "Module")),
            ModuleFacts(f"blocks.{n}.dropout", ("Dropout", "_DropoutNd", "Module")),
        )
    ),
    ModuleFacts("head", ("Linear", "Module")),
]
PATHS = [module.path for module in MODULES]


def selection(nodes: dict[str, Any], **spec: Any) -> Selection:
    return select(load_spec({"nodes": nodes, **spec}), MODULES)


def chosen(selector: Any, **entry: Any) -> list[str]:
    return selection({"it": {"select": selector, **entry}}).matched["it"]


def test_everything_includes_the_root() -> None:
    assert chosen("**") == PATHS


def test_the_order_is_that_of_the_modules() -> None:
    picked = selection({"b": {"select": "head"}, "a": {"select": ["embed", "blocks.2"]}})
    assert list(picked.captures) == ["embed", "blocks.2", "head"]


def test_a_class_is_found_by_the_names_it_derives_from() -> None:
    assert chosen({"class": "Linear"}) == [
        "blocks.0.attn.out",
        "blocks.1.attn.out",
        "blocks.2.attn.out",
        "head",
    ]
    assert chosen({"class": "*Attention"}) == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]


def test_path_and_class_must_both_fit() -> None:
    assert chosen({"path": "blocks.[01].**", "class": ["Linear", "Dropout"]}) == [
        "blocks.0.attn.out",
        "blocks.0.dropout",
        "blocks.1.attn.out",
        "blocks.1.dropout",
    ]


def test_of_several_selectors_any_may_fit() -> None:
    assert chosen(["embed", {"class": "Block"}, {"path": ["head", "nothing"]}]) == [
        "embed",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "head",
    ]


def test_what_is_excluded_is_left_out() -> None:
    assert chosen("blocks.*", exclude="blocks.1") == ["blocks.0", "blocks.2"]
    picked = selection({"all": {"select": "**"}}, exclude=["**.dropout", "**.attn.**"])
    assert picked.matched["all"] == ["", "embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert list(picked.captures) == picked.matched["all"]


def test_later_entries_add_to_earlier_ones() -> None:
    picked = selection(
        {
            "all": {"select": "**", "capture": "output", "batch_dim": 1},
            "attn": {"select": "**.attn", "capture": ["output_grad"], "values": True},
            "weights": {"select": {"class": "Linear"}, "capture": ["parameter", "parameter_grad"]},
            "head": {"select": "head", "capture": "output", "batch_dim": None},
        }
    )
    assert picked.captures["embed"] == Capture(output=True, batch_dim=1, entries=("all",))
    assert picked.captures["blocks.0.attn"] == Capture(
        output=True, output_grad=True, values=True, batch_dim=1, entries=("all", "attn")
    )
    assert picked.captures["head"] == Capture(
        output=True,
        parameter=True,
        parameter_grad=True,
        batch_dim=None,
        entries=("all", "weights", "head"),
    )


def test_a_selection_survives_saving_the_spec() -> None:
    spec = load_spec("debug", ["nodes.attn={select: {class: '*Attention'}, batch_dim: 1}"])
    saved = load_spec(spec.model_dump(mode="json"))
    assert saved == spec
    assert select(saved, MODULES) == select(spec, MODULES)


@given(
    st.lists(
        st.lists(st.sampled_from(["**", "*", "blocks", "?", "attn", "d*"]), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    )
)
def test_matched_and_unmatched_tell_the_whole_truth(patterns: list[list[str]]) -> None:
    globs = [".".join(levels) for levels in patterns]
    picked = selection({"it": {"select": globs}})
    by_hand = {
        glob: [p for p in PATHS if tried(glob.split("."), p.split(".") if p else [])]
        for glob in globs
    }
    assert set(picked.matched["it"]) == {path for paths in by_hand.values() for path in paths}
    for glob, paths in by_hand.items():
        assert any(f"'{glob}' matches no module" in s for s in picked.unmatched) == (not paths)


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        (
            {"a": {"select": "blocks.*.atn"}},
            (
                "comgra.nodes.a.select: 'blocks.*.atn' matches no module; modules below "
                "'blocks.*': attn, dropout; did you mean 'attn'?"
            ),
        ),
        (
            {"a": {"select": "model.head"}},
            (
                "comgra.nodes.a.select: 'model.head' matches no module; modules at the top: "
                "embed, head"
            ),
        ),
        (
            {"a": {"select": {"regex": r"blocks\.0"}, "exclude": {"regex": "attn"}}},
            (
                "comgra.nodes.a.exclude: the regex 'attn' matches only a part of 'blocks.0.attn', "
                "but must match a whole module path; add '.*' to allow more text"
            ),
        ),
        (
            {"a": {"select": {"regex": "heed"}}},
            (
                "comgra.nodes.a.select: the regex 'heed' matches no module path; paths: embed, "
                "blocks.0, blocks.0.attn, blocks.0.attn.out, blocks.0.dropout, blocks.1, "
                "blocks.1.attn, blocks.1.attn.out, ... (14 names); did you mean 'head' or 'embed'?"
            ),
        ),
        (
            {"a": {"select": {"path": "blocks.*", "class": "Blok"}}},
            (
                "comgra.nodes.a.select: no module at 'blocks.*' is a 'Blok'; classes: Block; "
                "did you mean 'Block'?"
            ),
        ),
        (
            {"a": {"select": "head", "exclude": "**"}},
            "comgra.nodes.a: selects 1 modules, but 'exclude' excludes all of them",
        ),
        (
            {"a": {"select": "head", "exclude": "heads"}},
            (
                "comgra.nodes.a.exclude: 'heads' matches no module; modules at the top: embed, "
                "head; did you mean 'head'?"
            ),
        ),
    ],
)
def test_a_pattern_that_means_nothing_is_explained(nodes: dict[str, Any], sentence: str) -> None:
    assert selection(nodes).unmatched == [sentence]


MARKED = [
    ModuleFacts("", ("Model", "Module")),
    ModuleFacts("enc.attn", ("Attention", "Module"), "self-attn"),
    ModuleFacts("dec.attn", ("Attention", "Module"), "cross-attn"),
    ModuleFacts("dec.mlp", ("Linear", "Module"), "mlp"),
]


def test_a_regex_fits_whole_paths() -> None:
    assert chosen({"regex": r"blocks\.[02]\.attn"}) == ["blocks.0.attn", "blocks.2.attn"]
    assert chosen({"regex": ["head", r".*\.out"], "class": "Linear"}) == [
        "blocks.0.attn.out",
        "blocks.1.attn.out",
        "blocks.2.attn.out",
        "head",
    ]
    assert chosen({"regex": "lock"}) == []


@given(
    st.lists(
        st.sampled_from(["blocks", r"\.", "[01]", ".*", "attn", "(out|dropout)", "d?", r"\d", ""]),
        min_size=1,
        max_size=5,
    )
    .map("".join)
    .filter(bool),
    st.sampled_from(["**", "blocks.**", "*", "**.attn"]),
    st.sampled_from([r".*1.*", r"head", r"blocks\.\d"]),
)
def test_path_and_regex_and_exclude_are_set_operations(regex: str, glob: str, out: str) -> None:
    expected = [
        p
        for p in PATHS
        if re.fullmatch(regex, p)
        and tried(glob.split("."), p.split(".") if p else [])
        and not re.fullmatch(out, p)
    ]
    assert chosen({"path": glob, "regex": regex}, exclude={"regex": out}) == expected


# "???" is how OmegaConf marks a missing value
@given(st.text("*?acemfl-tnsr.", min_size=1, max_size=8).filter(lambda text: text != "???"))
def test_annotations_are_found_by_globs(pattern: str) -> None:
    picked = select(load_spec({"nodes": {"it": {"select": {"annotation": pattern}}}}), MARKED)
    marks = {"enc.attn": "self-attn", "dec.attn": "cross-attn", "dec.mlp": "mlp"}
    expected = [path for path, mark in marks.items() if fnmatchcase(mark, pattern)]
    assert picked.matched["it"] == expected
    assert list(picked.unmarked) == ([] if expected else [pattern])
    assert picked.unmatched == []


def test_classes_and_annotations_can_be_excluded() -> None:
    spec: dict[str, Any] = {"nodes": {"it": {"select": "**", "exclude": {"annotation": "*-attn"}}}}
    assert select(load_spec(spec), MARKED).matched["it"] == ["", "dec.mlp"]
    spec = {"nodes": {"it": {"select": "**"}}, "exclude": [{"class": "Attention"}, "dec.mlp"]}
    assert select(load_spec(spec), MARKED).matched["it"] == [""]


def test_an_annotation_that_nothing_carries_names_those_there_are() -> None:
    picked = select(load_spec({"nodes": {"a": {"select": {"annotation": "mlpp"}}}}), MARKED)
    assert picked.unmarked == {
        "mlpp": "comgra.nodes.a.select: nothing is annotated 'mlpp'; annotations: self-attn, "
        "cross-attn, mlp; did you mean 'mlp'?"
    }


def test_an_empty_declaration_is_said() -> None:
    assert "is empty" in selection({}).unmatched[0]


def test_nothing_is_said_of_patterns_that_fit() -> None:
    assert select(load_spec("debug"), MODULES).unmatched == []

"""What is too much is refused with a selection that works, as the user would write it."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

import pytest
import yaml

from comgra_decl.errors import SelectionError
from comgra_decl.records import SlotInfo, SlotKey
from comgra_decl.sinks import Selection
from comgra_decl.spec import load_spec

STORED = ("mean", "std", "abs_max", "nonfinite")


def slots_of(*nodes: str, passes: tuple[str, ...] = ("forward", "grad")) -> list[SlotInfo]:
    keys = [SlotKey(node, "output", 0, pass_) for node in nodes for pass_ in passes]
    return [SlotInfo(i, key, "computed", "float32", (2,), 0, "") for i, key in enumerate(keys)]


def refusal(selection: Selection, slots: list[SlotInfo]) -> str:
    with pytest.raises(SelectionError) as caught:
        selection.chosen(slots, STORED)
    return str(caught.value)


def proposed(message: str) -> str:
    return message.partition("such as ")[2].partition(" (")[0]


def from_options(text: str, **others: Any) -> Selection:
    """Return the selection that a shell and a command make of options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes")
    parser.add_argument("--pass", dest="passes", action="append", default=[])
    parser.add_argument("--statistic", dest="statistics", action="append", default=[])
    found = vars(parser.parse_args(shlex.split(text)))
    return Selection(found["nodes"], (*found["passes"],), (*found["statistics"],), **others)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["a b", "a b.c"], 2),
        (["it's", "it's.x"], 2),
        (["block[0]", "block[1]"], 2),
        (["what?", "what*", "**"], 2),
        (["", ".a", "b..c", "d"], 2),
        ([f"blocks.{i}" for i in range(9)], 2),
    ],
)
def test_the_options_it_proposes_fit(nodes: list[str], expected: int) -> None:
    slots = slots_of(*nodes)
    text = proposed(refusal(Selection(series=2), slots))
    selection = from_options(text, series=2)
    assert 0 < len(selection.chosen(slots, STORED)) * len(selection.statistics) <= expected


def test_in_a_spec_it_proposes_yaml() -> None:
    slots = slots_of("a: b", "c")
    message = refusal(Selection(series=1, in_spec=True), slots)
    content = yaml.safe_load(proposed(message))
    assert content == {"nodes": "a: b", "passes": ["forward"], "statistics": ["std"]}
    assert "use {nodes: ''} for metrics" in message
    assert message.endswith("raise the limit with {series: 12}.")
    load_spec({"nodes": {}, "sinks": [{"wandb": content}]})


def test_it_proposes_a_part_of_what_was_asked_for() -> None:
    slots = slots_of("a.x", "a.y", "b")
    asked = Selection("a.*", ("grad", "forward"), ("mean", "std"), series=2)
    assert proposed(refusal(asked, slots)) == "--nodes 'a.*' --pass grad --statistic mean"


def test_if_nothing_fits_it_proposes_metrics() -> None:
    message = refusal(Selection(series=1), slots_of("a..b", passes=("forward", "forward")))
    assert "such as" not in message
    assert "Use --nodes '' for metrics and findings only" in message


def test_pictures_and_checkpoints_are_no_series() -> None:
    slots = slots_of("a", passes=("forward", "picture:cam", "checkpoint", "shown"))
    assert [slot.key.pass_ for slot in Selection().chosen(slots, STORED)] == ["forward"]

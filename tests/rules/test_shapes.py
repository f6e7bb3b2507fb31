"""Rules use the shape in each record, not that of the first record for all."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import comgra_decl as comgra
from comgra_decl.records import STATISTICS, SlotInfo, SlotKey
from comgra_decl.rules import Window, diagnose
from comgra_decl.rules.attention.patterns import AttentionCollapse
from comgra_decl.rules.data.targets import SingleClass, Unshuffled
from comgra_decl.rules.graph import same_shape_edges
from comgra_decl.rules.structure.probabilities import ProbabilitiesAsLogits, SigmoidTwice
from comgra_decl.rules.structure.small_batch import SmallBatchNorm
from comgra_decl.rules.table import SlotTable
from comgra_decl.rules.values.independent import InputIndependence
from tests.rules.tape import Tape

RNG = np.random.default_rng(8)


def volume(info: SlotInfo) -> float:
    return math.prod(info.shape)


@given(st.data())
def test_what_a_shape_decides_is_worked_out_for_each_record(data: st.DataObject) -> None:
    dims = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    own = data.draw(st.lists(dims, min_size=1, max_size=4))
    others = data.draw(st.lists(dims, min_size=1, max_size=3, unique=True))
    k, n = data.draw(st.integers(1, 4)), len(own)
    code = st.one_of(st.integers(0, len(others)).map(float), st.just(math.nan))
    rows = data.draw(st.lists(st.lists(code, min_size=n, max_size=n), min_size=k, max_size=k))
    infos = [
        SlotInfo(i, SlotKey(f"n{i}", "output", 0, "forward"), "computed", "float32", s, 0, "")
        for i, s in enumerate(own)
    ]
    window = Window(
        table=SlotTable(infos),
        statistics=STATISTICS,
        first=0,
        steps=np.arange(k),
        types=["train"] * k,
        train=np.ones(k, bool),
        aggregates=np.zeros((k, n, len(STATISTICS), 3), np.float32),
        details=Any,  # type: ignore[arg-type]
        shape_codes=np.array(rows, np.float32),
        shapes=others,
    )
    at = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5)))
    expected = [
        [volume(infos[s]) if not line[s] > 0 else math.prod(others[int(line[s]) - 1]) for s in at]
        for line in rows
    ]
    assert window.of_shape(volume, at).tolist() == expected
    part = window.only(np.arange(k)[::-1].copy(), 0)
    assert part.of_shape(volume, at).tolist() == expected[::-1]
    bare = replace(window, shape_codes=None)
    assert bare.of_shape(volume, at).tolist() == [[volume(infos[s]) for s in at]] * k


@pytest.mark.parametrize("window", [1, 4, 100])
@pytest.mark.parametrize(("sizes", "found"), [([16, 2, 2, 2], [8.0]), ([2, 16, 16, 16], [])])
def test_batch_norm_is_judged_by_each_batch(
    sizes: list[int], found: list[float], window: int
) -> None:
    tape = Tape()
    slot = tape.slot("norm", (sizes[0], 3, 2, 2), class_="BatchNorm2d")
    for size in sizes * 2 if not found else sizes:
        tape.record({slot: RNG.normal(size=(size, 3, 2, 2))})
    rule = SmallBatchNorm(SmallBatchNorm.Parameters(values=9))
    findings = tape.findings(rule, window=window)
    assert [finding.evidence["values per channel"] for finding in findings] == found
    assert all("over only 8 values" in finding.message for finding in findings)


@pytest.mark.parametrize("sizes", [[8] * 6, [8, 3, 8, 3, 8, 3], [64, 8, 8, 8, 8, 8]])
@pytest.mark.parametrize("twice", [True, False])
def test_a_sigmoid_taken_twice_is_told_whatever_the_batches_are(
    sizes: list[int], twice: bool
) -> None:
    """For predictions whose origin is unknown."""
    tape = Tape()
    answer = tape.slot("net", (sizes[0], 2))
    goal = tape.slot("target", (sizes[0], 2), kind="target", role="target")
    loss = tape.slot("loss", (), kind="loss")
    tape.graph([(answer, loss)], cut=[(goal, loss)])
    tape.loss_call("binary_cross_entropy_with_logits", answer, goal)
    for size in sizes:
        p = np.tile([0.02, 0.98], (size, 1))
        y = np.tile([0.0, 1.0], (size, 1))
        tape.record({answer: p if twice else np.log(p / (1 - p)), goal: y})
    assert len(tape.findings(SigmoidTwice())) == twice


def test_classes_that_come_later_are_classes() -> None:
    """A network that gains a softmax and loses two outputs after the first step."""
    tape = Tape()
    answer = tape.slot("net", (8, 5))
    goal = tape.slot("target", (8,), kind="target", role="target", dtype="int64")
    loss = tape.slot("loss", (), kind="loss")
    tape.graph([(answer, loss)], cut=[(goal, loss)])
    for classes, made_by in [(5, "Addmm")] + [(3, "Softmax")] * 8:
        tape.calls.clear()
        tape.loss_call("cross_entropy", answer, goal, made_by=made_by)
        raw = np.exp(RNG.normal(size=(8, classes)))
        tape.record({answer: raw / raw.sum(1, keepdims=True), goal: np.arange(8) % 3})
    (found,) = tape.findings(ProbabilitiesAsLogits())
    assert (found.first_step, found.last_step, found.evidence["classes"]) == (1, 8, 3)


@pytest.mark.parametrize("first", [1, 8])
def test_a_first_batch_of_one_sample_does_not_hide_that_all_are_the_same(first: int) -> None:
    tape = Tape()
    inside, answer = tape.slot("input", (first, 4), kind="input"), tape.slot("net", (first, 4))
    loss = tape.slot("loss", (), kind="loss")
    tape.graph([(inside, answer), (answer, loss)])
    for size in [first] + [8, 1] * 20:
        x = RNG.normal(size=(size, 4))
        tape.record({inside: x, answer: np.tile(RNG.normal(size=4), (size, 1)), loss: 1.0})
    (found,) = tape.findings(InputIndependence())
    assert found.place is not None
    assert found.place.node == "net"


def test_a_batch_of_one_sample_is_no_evidence_that_all_are_the_same() -> None:
    tape = Tape()
    answer, loss = tape.slot("net", (8, 4)), tape.slot("loss", (), kind="loss")
    tape.graph([(answer, loss)])
    for size in [8] + [1] * 40:
        tape.record({answer: RNG.normal(size=(size, 4)), loss: 1.0})
    assert not tape.findings(InputIndependence())


def test_small_batches_in_between_do_not_end_a_streak_of_one_class() -> None:
    tape = Tape()
    goal = tape.slot("target", (2,), kind="target", role="target", dtype="int64")
    for step in range(40):
        tape.record({goal: np.arange(2) if step % 3 == 0 else np.full(32, step % 2)})
    (found,) = tape.findings(SingleClass())
    assert found.first_step == 1
    tape.record({goal: np.arange(32) % 2})
    tape.rows = tape.rows[-1:] * 41
    assert not tape.findings(SingleClass())


def test_the_order_of_batches_is_judged_by_the_size_of_each() -> None:
    """Sorted labels, the first batch of which is too small to provide evidence."""
    tape = Tape()
    goal = tape.slot("target", (4,), kind="target", role="target", dtype="int64")
    labels = np.sort(RNG.integers(0, 10, 4 + 64 * 12))
    for part in np.split(labels, [4, *range(4 + 64, len(labels), 64)]):
        tape.record({goal: part})
    (found,) = tape.findings(Unshuffled())
    assert found.evidence["batches"] == 12
    tape.rows = [{goal: RNG.permutation(labels)[: len(row[goal])]} for row in tape.rows]
    assert not tape.findings(Unshuffled())


@pytest.mark.parametrize("first", [2, 9])
def test_attention_collapses_at_any_length(first: int) -> None:
    tape = Tape()
    slot = tape.slot("attn", (2, 3, first, first), class_="Softmax")
    for tokens in [first, *RNG.integers(4, 12, 12).tolist()]:
        tape.record({slot: np.broadcast_to(np.eye(tokens)[0], (2, 3, tokens, tokens))})
    (found,) = tape.findings(AttentionCollapse())
    assert found.evidence["tokens"] == pytest.approx(1.0)
    tape.rows = [{slot: np.full(row[slot].shape, 1 / row[slot].shape[-1])} for row in tape.rows]
    assert not tape.findings(AttentionCollapse())


def test_tensors_are_of_one_shape_that_are_so_in_one_record() -> None:
    """Two slots whose first records come from batches of different sizes."""
    tape = Tape()
    source, sink = tape.slot("a", (7, 4)), tape.slot("b", (3, 4))
    tape.graph([(source, sink)])
    tape.record({source: RNG.normal(size=(5, 4)), sink: RNG.normal(size=(5, 4))})
    scene = tape.play(SmallBatchNorm()).scene
    assert list(same_shape_edges(scene)) == [(source, sink)]


def test_what_is_found_live_is_found_in_the_stored_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    spec = {
        "nodes": {"all": {"select": "**", "capture": ["output", "output_grad"]}},
        "schedule": {"first": 1000},
    }
    with comgra.trace(spec, root=tmp_path, group="g") as session:
        for step in range(60):
            x = torch.randn(32 if step < 50 else 5, 4)
            optimizer.zero_grad()
            y = (x[:, :1] > 0).float()
            nn.functional.binary_cross_entropy_with_logits(model(x).sigmoid(), y).backward()
            optimizer.step()
    assert session.path is not None
    run = comgra.open_run(session.path)
    live = run.findings()
    (small,) = live[live["rule"] == "small_batch_norm"].itertuples()
    assert (small.first_step, small.node) == (50, "1")
    stored = [(f.rule, f.first_step, f.last_step, f.message) for f in diagnose(run).findings]
    columns = ["rule", "first_step", "last_step", "message"]
    assert stored == list(live[columns].itertuples(index=False, name=None))

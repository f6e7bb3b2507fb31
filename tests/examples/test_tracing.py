"""Tracing the examples changes nothing about them and records what they compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import comgra_decl as comgra
from comgra_decl.export import export_run
from comgra_decl.rules import diagnose
from tests.examples.conftest import SHORT, Outcome, Train
from tests.support.shortened import shortened

USED = ("tutorial", "digits", "characters")
"""Other tests of the normal suite use the records of these examples."""
RECORDED = shortened([*USED, *(name for name in SHORT if name not in USED)], tried=len(USED))
TRACED = ("+comgra=debug", "+comgra.schedule.backoff=1.0", "+comgra.schedule.every=3")


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, leaf) for every tensor and number in a checkpoint."""
    if isinstance(value, Mapping):
        for key in value:
            yield from flat(value[key], f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from flat(item, f"{path}[{index}]")
    else:
        yield path, value


def bits(leaf: Any) -> Any:
    """Returns a value that is equal only if every bit is."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, tuple(leaf.shape), leaf.numpy().tobytes()
    return leaf


def differing(one: Outcome, other: Outcome) -> list[str]:
    """Returns the paths of everything in two checkpoints that differs in any bit."""
    left, right = dict(flat(one.checkpoint)), dict(flat(other.checkpoint))
    assert left.keys() == right.keys()
    return [path for path in left if bits(left[path]) != bits(right[path])]


@pytest.mark.parametrize("example", shortened(sorted(SHORT, key="tutorial".__ne__), tried=1))
def test_a_traced_training_is_bit_for_bit_the_untraced_one(example: str, train: Train) -> None:
    plain, traced = train(example), train(example, *TRACED)
    assert len(dict(flat(plain.checkpoint["model"]))) >= 8
    assert len(dict(flat(plain.checkpoint["optimizer"]))) > 8
    assert differing(plain, traced) == []
    ours = "[comgra_decl]"
    said = [line for line in traced.printed.splitlines() if ours not in line]
    assert said == plain.printed.splitlines()


@pytest.mark.slow
def test_the_comparison_would_see_a_difference(train: Train) -> None:
    paths = differing(train("tutorial"), train("tutorial", "lr=0.00200001"))
    assert {path.split(".")[1] for path in paths} == {"model", "optimizer", "losses"}


@pytest.mark.parametrize("example", RECORDED)
def test_the_run_can_be_opened_and_is_finished(example: str, train: Train) -> None:
    outcome = train(example, *TRACED)
    run = comgra.open_run(outcome.folder / "runs")
    steps = range(len(outcome.losses))
    assert run.state == "finished"
    assert run.steps.tolist() == [step for step in steps if step < 10 or step % 3 == 0]
    assert run.config is not None
    assert run.config["save"] == "checkpoint.pt"
    assert run.report["unmatched"] == []
    assert run.report["warnings"] == []
    evaluates = any(option.startswith("eval_every") for option in SHORT[example])
    assert set(run.types) == {"train", *(["eval"] if evaluates else [])}


@pytest.mark.parametrize("example", RECORDED)
def test_onnx_accepts_the_graph_with_every_edge(example: str, train: Train, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    run = comgra.open_run(train(example, *TRACED).folder / "runs")
    path = export_run(run, tmp_path / "graph.onnx", "onnx")
    onnx.checker.check_model(str(path))
    there = {node.name: node for node in onnx.load(str(path)).graph.node}
    cyclic = {
        (source.decode(), node.name)
        for node in there.values()
        for attribute in node.attribute
        if attribute.name == "cycle_from"
        for source in onnx.helper.get_attribute_value(attribute)
    }
    edges = {(source, name) for name, node in there.items() for source in node.input}
    assert edges | cyclic >= {*run.edges()}


@pytest.mark.parametrize("example", RECORDED)
def test_the_recorded_loss_is_the_loss(example: str, train: Train) -> None:
    outcome = train(example, *TRACED)
    series = comgra.open_run(outcome.folder / "runs").series("loss")
    expected = outcome.losses.numpy()[series.index]
    np.testing.assert_array_equal(series.to_numpy(np.float32), expected)


def test_the_graph_of_the_tutorial_leads_from_the_input_to_the_loss(train: Train) -> None:
    run = comgra.open_run(train("tutorial", *TRACED).folder / "runs")
    edges = set(run.edges())
    way = [("input", "pre.first"), ("pre.first", "pre.last"), ("pre.last", "pre")]
    way += [("pre", "memory.first"), ("memory.last", "memory"), ("memory", "out.first")]
    way += [("out.last", "out"), ("out", "answer"), ("answer", "RunningSum")]
    way += [("RunningSum", "BCELoss"), ("target", "BCELoss"), ("BCELoss", "loss")]
    assert set(way) <= edges
    assert ("input", "partial_sums") in edges
    assert not {sink for source, sink in edges if source == "partial_sums"} - {"partial_sums"}


def test_the_tutorials_bug_shows_in_the_recorded_statistics(train: Train) -> None:
    run = comgra.open_run(train("tutorial", *TRACED).folder / "runs")
    step, iteration = int(run.steps[-1]), 4
    before, after = (
        run.slot(node, iteration=iteration).value(step) for node in ("out.last", "out")
    )
    assert (before < 0).any()
    np.testing.assert_allclose(after, np.where(before < 0, before / 100, before), rtol=1e-5)


def test_the_partial_sums_of_the_tutorial_are_recorded_per_sample(train: Train) -> None:
    run = comgra.open_run(train("tutorial", *TRACED).folder / "runs")
    step = int(run.steps[-1])
    inputs = run.slot("input", role="input").value(step)
    for iteration in range(inputs.shape[1]):
        sums = run.slot("partial_sums", iteration=iteration).value(step)
        np.testing.assert_allclose(sums, inputs[:, : iteration + 1].sum(axis=1), atol=1e-5)


def test_tied_weights_are_recorded_once_under_both_names(train: Train) -> None:
    slots = comgra.open_run(train("characters", *TRACED).folder / "runs").slots
    tied = slots[slots["names"].map(lambda names: "head.weight" in names)]
    assert set(tied["node"]) == {"symbol"}
    assert set(tied["role"]) == {"weight"}
    assert not ((slots["node"] == "head") & (slots["role"] == "weight")).any()


def test_attention_weights_are_recorded_and_sum_to_one(train: Train) -> None:
    run = comgra.open_run(train("characters", *TRACED).folder / "runs")
    for block in range(4):
        mean = run.series(f"blocks.{block}.attention.weights", "mean")
        np.testing.assert_allclose(mean, 1 / 64, rtol=1e-5)  # each row of 64 sums to 1


def test_batch_norm_and_dropout_of_the_digits_know_training_from_evaluation(train: Train) -> None:
    run = comgra.open_run(train("digits", *TRACED).folder / "runs")
    normed = run.series("block1.norm", "abs_mean", type="train")
    assert normed.notna().all()
    training = run.series("dropout", "zero_fraction", type="train")
    feeding = run.series("block2", "zero_fraction", type="train")
    assert (training > feeding).all()
    evaluation = run.series("dropout", "zero_fraction", type="eval")
    fed = run.series("block2", "zero_fraction", type="eval")
    np.testing.assert_array_equal(evaluation, fed)


def test_the_tutorials_bug_is_found_without_being_told_where(train: Train) -> None:
    found = diagnose(comgra.open_run(train("tutorial", *TRACED).folder / "runs")).findings
    (bug,) = [finding for finding in found if finding.severity == "error"]
    assert found[0] == bug
    others = {finding.severity for finding in found if not finding.because} - {"error"}
    assert others <= {"hint"}  # nothing else is wrong with it
    assert (bug.rule, str(bug.place), bug.first_step) == ("rectified_answer", "out", 0)
    left = bug.evidence["share of negative values that remains"]
    assert left == pytest.approx(0.01, rel=1e-4)
    assert "Between out.last and out, an activation function keeps 1%" in bug.message


@pytest.mark.slow
@pytest.mark.parametrize("example", ["digits", "characters"])
def test_the_other_examples_have_no_such_bug(example: str, train: Train) -> None:
    found = diagnose(comgra.open_run(train(example, *TRACED).folder / "runs")).findings
    assert [finding for finding in found if finding.severity == "error"] == []

"""Training in two processes is unchanged, and the joined records match a single process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import comgra_decl as comgra
from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Run
from comgra_decl.rules import diagnose, diagnose_and_correlate
from tests.ranks import worker
from tests.ranks.launching import run_ranks

WAYS = ["ddp", "no_sync", "unused", "drifting", "fsdp", "fsdp_whole"]
FOUND = [*WAYS, "broken"]
PARALLEL = ["ddp", "no_sync", "unused", "fsdp", "fsdp_whole"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what two ranks trained, in all ways."""
    out = tmp_path_factory.mktemp("ranks")
    for code, text in run_ranks("-m", "tests.ranks.worker", out, *FOUND):
        assert code == 0, text
    return out


def run_of(trained: Path, way: str) -> Run:
    return comgra.open_run(trained / way / "run")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The same training runs in one process, on the global batches."""
    root = tmp_path_factory.mktemp("alone")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {way: _alone(root, way) for way in ("ddp", "unused")}
    finally:
        torch.set_num_threads(threads)


def _alone(root: Path, way: str) -> Run:
    with comgra.trace(worker.SPEC, root=root, group=way, name="run") as session:
        worker.train(worker.net(skip=way == "unused"), worker.batch)
    assert session.path is not None
    return comgra.open_run(session.path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_traced_rank_trains_bit_for_bit_as_an_untraced_one(
    trained: Path, way: str, rank: int
) -> None:
    result = torch.load(trained / f"{way}.{rank}.pt")
    assert result["plain"].keys() == result["traced"].keys()
    for name, plain in result["plain"].items():
        assert torch.equal(plain, result["traced"][name]), name


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_record_into_one_run(trained: Path, way: str) -> None:
    paths = {torch.load(trained / f"{way}.{rank}.pt")["path"] for rank in (0, 1)}
    run = run_of(trained, way)
    assert paths == {str(run.path)}
    assert run.ranks == [0, 1]
    assert run.missing_ranks == []
    assert run.state == "finished"
    assert list(run.steps) == list(range(worker.STEPS))
    assert [len(run.rank(number).steps) for number in (0, 1)] == [worker.STEPS] * 2
    assert [other.name for other in comgra.open_group(trained / way)] == ["run"]
    with pytest.raises(UnknownNameError, match="rank 2 was not recorded; this run has 0, 1"):
        run.rank(2)


@pytest.mark.parametrize("way", ["ddp", "fsdp", "fsdp_whole"])
def test_nodes_and_graph_are_those_of_one_process(
    trained: Path, alone: dict[str, Run], way: str
) -> None:
    run, single = run_of(trained, way), alone["ddp"]
    assert sorted(run.nodes) == sorted(single.nodes)
    assert sorted(run.edges()) == sorted(single.edges())
    classes = [{*zip(r.slots.node, r.slots.module_class, strict=True)} for r in (run, single)]
    assert classes[0] == classes[1]


@pytest.mark.parametrize(
    ("way", "single"),
    [("ddp", "ddp"), ("fsdp", "ddp"), ("fsdp_whole", "ddp"), ("unused", "unused")],
)
@pytest.mark.parametrize("how", ["mean", "std", "abs_max"])
def test_joined_statistics_are_those_of_one_process(
    trained: Path, alone: dict[str, Run], way: str, single: str, how: str
) -> None:
    """At the first step, all differ only by rounding; later, training itself diverges."""
    for step in range(worker.STEPS):
        joined = _named(run_of(trained, way), step, how)
        whole = _named(alone[single], step, how)
        losses = {key for key in whole if key[0] == "loss"}  # a mean of means, see below
        assert joined.keys() == whole.keys()
        for key in joined.keys() - losses:
            if key[3] == "grad" and key[1] == "output":
                continue  # each rank's loss is a mean over its own batch
            tolerance = 2e-6 if step == 0 and key[3] == "forward" else 2e-3
            np.testing.assert_allclose(
                joined[key], whole[key], rtol=tolerance, atol=tolerance, err_msg=str((step, *key))
            )


def _named(run: Run, step: int, how: str) -> dict[tuple[str, ...], np.ndarray]:
    """Returns a record's statistics by slot name, without what Adam makes of rounding errors."""
    rows = run.row(step, over_batch=how).drop(columns="update_ratio")
    return dict(zip(rows.index, rows.to_numpy(), strict=True))


def test_gradients_of_outputs_are_those_of_the_ranks_own_losses(
    trained: Path, alone: dict[str, Run]
) -> None:
    """With mean losses over half the batch, they are twice those of the global mean."""
    name = "blocks.0.0"
    joined = run_of(trained, "ddp").slot(name, of="grad").series("l2").iloc[0]
    whole = alone["ddp"].slot(name, of="grad").series("l2").iloc[0]
    assert joined == pytest.approx(2 * whole, rel=1e-5)


def test_the_loss_is_the_mean_of_the_ranks(trained: Path, alone: dict[str, Run]) -> None:
    joined, whole = run_of(trained, "ddp").kpis(), alone["ddp"].kpis()
    assert list(joined.step) == list(whole.step)
    np.testing.assert_allclose(joined.value, whole.value, rtol=1e-4)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_values_are_those_of_the_global_batch(
    trained: Path, alone: dict[str, Run], way: str
) -> None:
    run, single = run_of(trained, way), alone["ddp"]
    joined = run.value("blocks.0.0", 0)
    assert joined.shape == (8, 5)
    np.testing.assert_allclose(joined[:4], single.value("blocks.0.0", 0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(run.value("blocks.0.0", 0, sample=5), joined[5])
    weight = run.slot("blocks.0.0", role="weight").value(0)
    np.testing.assert_array_equal(weight, single.slot("blocks.0.0", role="weight").value(0))
    assert list(run.samples(0).place) == list(range(8))
    np.testing.assert_allclose(
        run.slot("blocks.0.0").row(0)["mean"], joined.mean(1), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        run.slot("blocks.0.0").samples("mean")[6].iloc[0], joined[6].mean(), rtol=1e-5
    )


@pytest.mark.parametrize("way", PARALLEL)
def test_series_rows_and_heat_say_the_same(trained: Path, way: str) -> None:
    run = run_of(trained, way)
    heat = run.heat("std", over_batch="std")
    for step in run.steps:
        row = run.row(int(step), over_batch="std")["std"]
        known = heat.loc[step].dropna()
        np.testing.assert_array_equal(known, row[known.index])
    columns: list[Any] = heat.columns.tolist()
    for column in (columns[0], columns[-2]):
        node, role, iteration, _ = column
        series = run.slot(node, role=role, iteration=iteration).series("std", over_batch="std")
        np.testing.assert_array_equal(series, heat[column])


def test_histograms_count_the_elements_of_all_ranks(trained: Path) -> None:
    run = run_of(trained, "ddp")
    counts, edges = run.slot("blocks.0.0").histogram(0)
    values = run.value("blocks.0.0", 0)
    assert counts.sum() == values.size
    assert (edges[0], edges[-1]) == (values.min(), values.max())
    steps, all_counts, all_edges = run.slot("blocks.0.0").histograms()
    np.testing.assert_array_equal(all_counts[0], counts)
    np.testing.assert_array_equal(all_edges[0], edges)
    assert list(steps) == list(run.steps)


@pytest.mark.parametrize("way", PARALLEL)
def test_data_parallel_parameters_are_the_same_on_all_ranks(trained: Path, way: str) -> None:
    run = run_of(trained, way)
    assert run.rank_differences().empty
    assert not [w for w in run.report["warnings"] if "all ranks" in w]


def test_parameters_that_drift_apart_are_said(trained: Path) -> None:
    run = run_of(trained, "drifting")
    differences = run.rank_differences()
    gradients = differences[(differences["pass"] == "grad") & (differences.role == "weight")]
    assert set(gradients.first_step) == {0}
    weights = differences[(differences["pass"] == "forward") & (differences.role == "weight")]
    assert set(weights.first_step) == {1}
    assert any("should be identical on all ranks" in w for w in run.report["warnings"])


def test_shards_are_parts_of_what_they_name(trained: Path) -> None:
    run = run_of(trained, "fsdp")
    lengths = [
        run.rank(number).slot("blocks.0.0", role="weight").series("l2").iloc[0] for number in (0, 1)
    ]
    whole = run.slot("blocks.0.0", role="weight").series("l2").iloc[0]
    assert max(lengths) < whole
    assert np.linalg.norm(lengths) == pytest.approx(whole, rel=1e-6)
    shapes = run.slots[(run.slots.node == "blocks.0.0") & (run.slots.role == "weight")]["shape"]
    assert set(shapes) == {(5, 6)}


@pytest.mark.parametrize("way", FOUND)
def test_a_diagnosis_finds_what_the_ranks_have_found(trained: Path, way: str) -> None:
    run = run_of(trained, way)
    live, found = run.document("findings"), diagnose(run)
    assert live["findings"] == json.loads(json.dumps([f.to_json() for f in found.findings]))
    assert live["unchecked"] == {entry.rule: entry.reason for entry in found.unchecked}
    assert found == diagnose_and_correlate(run)[0]


def test_what_one_rank_alone_finds_carries_its_number(trained: Path) -> None:
    run = run_of(trained, "broken")
    found = {
        f.message.partition(":")[0]: f for f in diagnose(run).findings if f.rule == "nonfinite"
    }
    bad = found["Rank 1"]
    assert (str(bad.place), bad.first_step, bad.sample) == ("input input", 3, 2)
    assert len(found) == 2  # and where rank 0 gets it from: the summed gradients
    (unused,) = [f for f in diagnose(run).findings if f.rule == "untrained_parameter"]
    assert str(unused.place) == "spare weight"
    assert diagnose(run.rank(1)).findings[0].sample == 2

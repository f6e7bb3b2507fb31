"""Ranks of a device mesh are joined by their coordinates, and chosen by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import comgra_decl as comgra
from comgra_decl.errors import SpecError
from comgra_decl.query import Run
from comgra_decl.query.ranks.batches import same_batch, shares_batch
from comgra_decl.record.mesh import Mesh, coordinates_of, recorded_ranks
from comgra_decl.record.ranks import Rank
from comgra_decl.spec import load_spec
from comgra_decl.spec.run import RunSpec
from tests.ranks import meshes
from tests.ranks.launching import run_ranks


def launched(out: Path, way: str, *options: str) -> list[dict[str, Any]]:
    """Train on a mesh; return what each rank has saved."""
    ranks = int(np.prod(list(meshes.SIZES[way].values())))
    for code, text in run_ranks("-m", "tests.ranks.meshes", out, way, *options, world_size=ranks):
        assert code == 0, text
    return [torch.load(out / f"{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Training with FSDP2 and tensor parallelism, two by two."""
    out = tmp_path_factory.mktemp("mesh")
    return out, launched(out, "fsdp tp")


@pytest.fixture(scope="module")
def run(saved: tuple[Path, list[dict[str, Any]]]) -> Run:
    return comgra.open_run(saved[0] / "mesh" / "run")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same training in one process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return comgra.open_run(meshes.alone(tmp_path_factory.mktemp("alone")))
    finally:
        torch.set_num_threads(threads)


def rows(run: Run, *, over_batch: str = "mean", **key: str) -> pd.DataFrame:
    """The statistics of the first step, of the slots with some role and pass."""
    found = run.row(0, over_batch=over_batch)
    for level, wanted in key.items():
        found = found[found.index.get_level_values(level.removesuffix("_")) == wanted]
    return found


def assert_unchanged(saved: list[dict[str, Any]]) -> None:
    for rank in saved:
        assert rank["plain"].keys() == rank["traced"].keys()
        for name, plain in rank["plain"].items():
            assert torch.equal(plain, rank["traced"][name]), name


@pytest.mark.slow
def test_training_on_a_mesh_is_unchanged_bit_for_bit(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    assert_unchanged(saved[1])


@pytest.mark.slow
def test_each_rank_says_where_it_is(run: Run) -> None:
    assert run.coordinates.to_dict("list") == {"dp": [0, 0, 1, 1], "tp": [0, 1, 0, 1]}
    assert run.rank(2).coordinates.to_dict("index") == {2: {"dp": 1, "tp": 0}}
    assert run.slot("blocks.first.up").coordinates == {"dp": [0, 1], "tp": [0, 1]}
    assert run.rank(3).slot("blocks.first.up").coordinates == {"dp": [1], "tp": [1]}


@pytest.mark.slow
@pytest.mark.parametrize("role", ["weight", "bias"])
@pytest.mark.parametrize("pass_", ["forward", "grad"])
def test_sharded_parameters_have_the_statistics_of_the_whole(
    run: Run, whole: Run, role: str, pass_: str
) -> None:
    joined, alone = (rows(each, role=role, pass_=pass_) for each in (run, whole))
    names = joined.columns.drop(["update_ratio", "snr"], errors="ignore")
    assert len(alone) == 6
    np.testing.assert_allclose(joined[names], alone.loc[joined.index, names], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("over_batch", ["mean", "std", "abs_max"])
def test_copies_of_activations_count_once(run: Run, whole: Run, over_batch: str) -> None:
    joined, alone = (
        rows(each, over_batch=over_batch, role="output", pass_="forward") for each in (run, whole)
    )
    copied = [key for key in joined.index if key[0].rpartition(".")[2] not in ("up", "act")]
    copied = [key for key in copied if key[0] != "loss"]
    assert len(copied) == 7
    np.testing.assert_allclose(joined.loc[copied], alone.loc[copied], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_parts_of_activations_are_joined_where_that_is_exact(run: Run, whole: Run) -> None:
    for node in ("blocks.first.up", "blocks.second.up"):
        for over_batch, exact in {
            "mean": ["mean", "abs_mean", "zero_fraction", "nonfinite"],
            "abs_max": ["abs_max", "nonfinite"],
        }.items():
            joined, alone = (each.row(0, over_batch=over_batch) for each in (run, whole))
            key = (node, "output", 0, "forward")
            np.testing.assert_allclose(
                joined.loc[key, exact], alone.loc[key, exact], rtol=1e-4, atol=1e-6
            )
            numbers = joined.xs(key)
            assert np.isnan([numbers["l2"], numbers["std"]]).all()


@pytest.mark.slow
def test_what_is_neither_a_copy_nor_a_known_part_is_missing(run: Run) -> None:
    """The activation between the two layers is a plain tensor on each rank."""
    key = ("blocks.first.act", "output", 0, "forward")
    numbers = run.row(0).xs(key)
    assert np.isnan([numbers["mean"], numbers["l2"]]).all()
    each = [run.rank(rank).slot("blocks.first.act").series("mean").iloc[0] for rank in run.ranks]
    assert np.isfinite(each).all()


@pytest.mark.slow
def test_samples_and_values_are_those_of_the_global_batch(run: Run, whole: Run) -> None:
    places = [0, 1, 4, 5]  # two of each half
    assert list(run.samples(0).place) == places
    for node in ("blocks.first.norm", "blocks.first.up", "blocks.second"):
        values = run.value(node, 0)
        np.testing.assert_allclose(values, whole.value(node, 0)[places], rtol=1e-4, atol=1e-6)
        lengths = run.slot(node).row(0)["l2"]
        np.testing.assert_allclose(lengths, np.linalg.norm(values, axis=1), rtol=1e-5)


@pytest.mark.slow
def test_histograms_count_each_element_once(run: Run) -> None:
    for node, features in {
        "blocks.first.norm": meshes.FEATURES,
        "blocks.first.up": meshes.HIDDEN,
    }.items():
        counts, _ = run.slot(node).histogram(0)
        assert counts.sum() == meshes.GLOBAL * features
    counts, _ = run.slot("blocks.first.up", role="weight").histogram(0)
    assert counts.sum() == meshes.HIDDEN * meshes.FEATURES


@pytest.mark.slow
def test_stages_of_a_pipeline_are_one_run(tmp_path: Path, whole: Run) -> None:
    """FSDP2, tensor and pipeline parallelism together, in eight processes."""
    assert_unchanged(launched(tmp_path, "fsdp tp pp"))
    run = comgra.open_run(tmp_path / "mesh" / "run")
    assert run.coordinates["pp"].tolist() == [0] * 4 + [1] * 4
    assert run.slot("blocks.first.up").coordinates["pp"] == [0]
    assert run.slot("blocks.second.up").coordinates["pp"] == [1]
    for node in ("blocks.first", "blocks.second", "blocks.second.norm"):
        joined, alone = (each.slot(node).series("l2").iloc[0] for each in (run, whole))
        assert joined == pytest.approx(alone, rel=1e-5)
    for name, statistic in {"up": "l2", "down": "std", "norm": "mean"}.items():
        for block in ("first", "second"):
            slots = [each.slot(f"blocks.{block}.{name}", role="weight") for each in (run, whole)]
            joined, alone = (float(s.series(statistic).iloc[0]) for s in slots)
            assert joined == pytest.approx(alone, rel=1e-4)


@pytest.mark.slow
def test_one_rank_of_each_group_of_the_programs_mesh_is_recorded(tmp_path: Path) -> None:
    saved = launched(tmp_path, "tp", "run.ranks={one_per: tp}")
    assert_unchanged(saved)
    assert [rank["path"] is not None for rank in saved] == [True, False]
    (found,) = comgra.open_group(tmp_path / "mesh")
    assert found.ranks == [0]
    assert list(found.steps) == list(range(meshes.STEPS))
    assert found.coordinates.to_dict("list") == {"tp": [0]}


# -- choosing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ("all", [*range(8)]),
        ("first", [0]),
        (5, [5]),
        ([3, 0, 9], [0, 3]),
        ({"one_per": "tp"}, [0, 4]),
        ({"one_per": "dp"}, [0, 1, 2, 3]),
        ({"one_per": ["dp", "tp"]}, [0]),
    ],
)
def test_ranks_are_chosen_by_number_or_by_a_declared_mesh(ranks: object, found: list[int]) -> None:
    run = RunSpec.model_validate({"ranks": ranks, "mesh": {"dp": 2, "tp": 4}})
    assert recorded_ranks(run, 8) == found


def test_a_declared_mesh_is_that_of_init_device_mesh() -> None:
    run = RunSpec.model_validate({"mesh": {"pp": 2, "dp": 2, "tp": 2}})
    assert coordinates_of(run, Rank(6, 8)) == {"pp": 1, "dp": 1, "tp": 0}
    ranks = np.arange(8).reshape(2, 2, 2)
    assert Mesh(("pp", "dp", "tp"), ranks).one_per(["dp", "tp"]) == [0, 4]


def test_without_a_mesh_all_ranks_are_recorded() -> None:
    run = RunSpec.model_validate({"ranks": {"one_per": "tp"}})
    assert recorded_ranks(run, 4) == [0, 1, 2, 3]
    assert coordinates_of(run, Rank(1, 4)) is None


def test_a_mesh_of_another_size_is_refused() -> None:
    run = RunSpec.model_validate({"mesh": {"dp": 2, "tp": 4}})
    for ask in (lambda: coordinates_of(run, Rank(0, 4)), lambda: recorded_ranks(run, 4)):
        with pytest.raises(SpecError, match="dp 2 x tp 4 are 8 processes, but the job has 4"):
            ask()


def test_a_dimension_that_the_declared_mesh_lacks_is_refused() -> None:
    content = {"run": {"ranks": {"one_per": "tpp"}, "mesh": {"dp": 2, "tp": 4}}}
    with pytest.raises(
        SpecError, match=r"the mesh \(dp, tp\) has no dimension 'tpp'; did you mean"
    ):
        load_spec(content)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({"one_per": ["tp", "tp"]}, "names 'tp' twice"),
        ({"one-per": "tp"}, "the key 'one_per' alone, got 'one-per'; did you mean 'one_per'"),
        ({}, "a mapping must have the key 'one_per' alone"),
    ],
)
def test_a_group_that_is_written_wrongly_is_refused(ranks: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_spec({"run": {"ranks": ranks, "mesh": {"dp": 2, "tp": 4}}})


def test_the_mesh_must_be_declared_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    overrides = ["run.ranks={one_per: tp}", "run.resume=true", f"run.root={tmp_path}"]
    with comgra.trace("light", overrides=overrides) as session:
        pass
    assert session.path is None
    assert "to resume a run, the recorded ranks must be known when tracing begins" in caplog.text


@pytest.mark.parametrize("name", ["tp", "tensor_parallel", "pp", "CP", "context"])
def test_model_parallel_ranks_share_a_batch(name: str) -> None:
    assert shares_batch(name)
    coordinates = {rank: {"dp": rank // 2, name: rank % 2} for rank in range(4)}
    assert same_batch(range(4), coordinates) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("name", ["dp", "dp_shard", "fsdp", "ep", "mine"])
def test_other_ranks_have_a_batch_of_their_own(name: str) -> None:
    assert not shares_batch(name)
    assert same_batch([0, 1], {0: {name: 0}, 1: {name: 1}}) == [[0], [1]]
    assert same_batch([0, 1], {0: {"tp": 0}}) == [[0], [1]]

"""What a run contains about its tensors equals what numpy computes from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import comgra_decl as comgra
from comgra_decl.query import Run, open_run
from comgra_decl.records import STATISTICS, SlotInfo
from tests.query.conftest import NODES, STEPS
from tests.support.fake_model import BATCH
from tests.support.fake_run import FakeRun
from tests.support.fake_statistics import reduce, sample_indices, statistics

AGGREGATE = {"mean": 0, "std": 1, "abs_max": 2}


def expected(fake: FakeRun, slot: SlotInfo, step: int, kind: str = "train") -> Any:
    """Returns (aggregates, samples, counts, range) of a tensor, computed independently."""
    tensor = fake.tensor(slot, step, kind)
    return reduce(tensor, slot, count=fake.meta.sample_count, bins=fake.meta.bins or 0)


def where(slot: SlotInfo) -> dict[str, Any]:
    key = slot.key
    return {"role": key.role, "of": key.pass_, "iteration": key.iteration}


def equal(a: Any, b: Any) -> bool:
    return bool(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True))


def test_steps_types_nodes_and_statistics(run: Run) -> None:
    assert run.steps.tolist() == list(range(STEPS))
    assert run.steps.dtype == np.int64
    assert run.types == ["train", "eval"]
    assert set(run.nodes) == {"input", "loss", *NODES}
    assert run.statistics == list(STATISTICS)
    assert run.sample_count == 4


def test_the_table_of_records(run: Run, fake: FakeRun) -> None:
    records = run.records
    assert records.index.name == "record"
    assert list(records.columns)[:8] == [
        "step", "type", "mode", "time", "structure", "batch_size", "cost", "kept"
    ]  # fmt: skip
    evals = records[records["type"] == "eval"]
    assert evals["step"].tolist() == [10, 20]
    assert (evals["mode"] == "eval").all()
    assert (records["batch_size"] == BATCH).all()
    assert records["structure"].iloc[0] == fake.structures[0].hash
    assert records["structure"].iloc[-1] == fake.structures[1].hash
    assert records["time"].is_monotonic_increasing
    assert records["kept"].isna().all()


def test_the_table_of_slots(run: Run, fake: FakeRun) -> None:
    slots = run.slots
    assert slots.index.tolist() == [slot.id for slot in fake.slots]
    for slot in fake.slots:
        line = slots.loc[slot.id]
        assert (line["node"], line["role"], line["iteration"], line["pass"]) == tuple(slot.key)
        assert (line["kind"], line["dtype"]) == (slot.kind, slot.dtype)
        assert (line["shape"], line["names"]) == (slot.shape, slot.names)
        assert line["module_class"] == slot.module_class
        assert slots["batch_dim"].isna()[slot.id] == (slot.batch_dim is None)
        assert slots["batch_dim"].fillna(0)[slot.id] == (slot.batch_dim or 0)


@pytest.mark.parametrize("over_batch", AGGREGATE)
def test_series_of_every_slot_and_statistic(run: Run, fake: FakeRun, over_batch: str) -> None:
    for slot in fake.slots:
        truth = np.stack([expected(fake, slot, step)[0] for step in range(STEPS)])
        if slot.key.node == "aux":
            truth[:5] = np.nan  # it begins at the sixth step
        for rank, statistic in enumerate(STATISTICS):
            handle = run.slot(slot.key.node, **where(slot))
            series = handle.series(statistic, over_batch=over_batch)
            assert series.index.tolist() == list(range(STEPS))
            assert series.index.name == "step"
            assert equal(series, truth[:, rank, AGGREGATE[over_batch]]), (slot.key, statistic)


def test_series_of_another_type(run: Run, fake: FakeRun) -> None:
    head = slot_of(fake, "head")
    series = run.series("head", "std", type="eval")
    truth = [expected(fake, head, step, "eval")[0][STATISTICS.index("std"), 0] for step in (10, 20)]
    assert series.index.tolist() == [10, 20]
    assert equal(series, np.array(truth))
    assert run.slot("head", of="grad").series(type="eval").isna().all()


def test_a_nan_in_a_tensor_is_counted_and_not_missing(run: Run) -> None:
    found = run.series("blocks.0.mlp.fc2", "nonfinite", over_batch="abs_max")
    assert (found[:20] == 0).all()
    assert (found[20:] == 1).all()
    missing = run.series("aux", "nonfinite")
    assert missing[:5].isna().all()
    assert (missing[5:] == 0).all()


def test_series_of_samples(run: Run, fake: FakeRun) -> None:
    slot = slot_of(fake, "head")
    truth = np.stack([expected(fake, slot, step)[1] for step in range(STEPS)])
    for sample in range(4):
        for rank, statistic in enumerate(STATISTICS):
            series = run.slot("head").samples(statistic)[sample]
            assert equal(series, truth[:, sample, rank])


def test_samples_come_before_the_aggregate(run: Run, fake: FakeRun) -> None:
    """The per-sample statistics agree with the statistics of each sample's own values."""
    slot = slot_of(fake, "head")
    tensor = fake.tensor(slot, 7)
    each = statistics(tensor.reshape(BATCH, -1)).astype(np.float32)
    assert equal(run.slot("head").row(7), each[sample_indices(BATCH, 4)])


def test_a_row_holds_the_slots_present_in_a_record(run: Run, fake: FakeRun) -> None:
    for step, kind in ((2, "train"), (12, "train"), (10, "eval")):
        for over_batch, rank in AGGREGATE.items():
            row = run.row(step, type=None if kind == "train" else kind, over_batch=over_batch)
            present = fake.present(step, kind)
            assert row.index.tolist() == [tuple(slot.key) for slot in present]
            assert row.index.names == ["node", "role", "iteration", "pass"]
            assert list(row.columns) == list(STATISTICS)
            truth = [expected(fake, slot, step, kind)[0][:, rank] for slot in present]
            assert equal(row, np.array(truth))


def test_a_row_of_samples(run: Run, fake: FakeRun) -> None:
    row = run.slot("embed", of="grad").row(3)
    assert row.index.tolist() == [0, 1, 2, 3]
    assert row.attrs["batch_index"] == sample_indices(BATCH, 4)
    assert equal(row, expected(fake, slot_of(fake, "embed", pass_="grad"), 3)[1])
    weight = run.slot("head", role="weight").row(3)
    assert (weight.index.tolist(), weight.attrs["batch_index"]) == ([0], [])
    assert len(run.slot("aux").row(3)) == 0


def test_heat_maps_of_both_passes(run: Run, fake: FakeRun) -> None:
    for pass_ in ("forward", "grad"):
        heat = run.heat("l2", of=pass_, over_batch="abs_max")
        slots = [slot for slot in fake.slots if slot.key.pass_ == pass_]
        names: Any = heat.columns.tolist()
        assert names == [tuple(slot.key) for slot in slots]
        assert heat.columns.names == ["node", "role", "iteration", "pass"]
        assert equal(heat.index, np.arange(STEPS))
        for slot in slots:
            truth = run.slot(slot.key.node, **where(slot)).series("l2", over_batch="abs_max")
            assert equal(heat[tuple(slot.key)], truth)


def test_a_heat_map_of_a_pass_that_never_was_is_empty(run: Run) -> None:
    assert run.heat("mean", of="grad:other").shape == (STEPS, 0)


def test_values_are_the_tensors_themselves(run: Run, fake: FakeRun) -> None:
    picked = sample_indices(BATCH, 4)
    for node, kind in (("head", "train"), ("blocks.0.mlp.act", "train"), ("embed", "eval")):
        tensor = fake.tensor(slot_of(fake, node), 10, kind)
        found = run.value(node, 10, type=kind)
        assert found.dtype == np.float32
        assert equal(found, tensor[picked])
        assert equal(run.value(node, 10, sample=2, type=kind), tensor[picked[2]])
    third = slot_of(fake, "cell", iteration=2)
    assert equal(run.slot("cell", iteration=2).value(4), fake.tensor(third, 4)[picked])


def test_histograms(run: Run, fake: FakeRun) -> None:
    slot = slot_of(fake, "aux")
    steps, counts, borders_of_all = run.slot("aux").histograms()
    assert steps.tolist() == list(range(5, STEPS)), "only where it was recorded"
    for i, step in enumerate(steps):
        tensor: NDArray[Any] = fake.tensor(slot, int(step))
        truth, edges = np.histogram(tensor, bins=32)
        assert equal(counts[i], truth)
        assert equal(borders_of_all[i, [0, -1]], edges[[0, -1]].astype(np.float32))
        one, borders = run.slot("aux").histogram(int(step))
        assert equal(one, truth)
        assert borders.shape == (33,)
        assert equal(borders, borders_of_all[i])
        assert one.sum() == tensor.size


def test_kpis(run: Run, fake: FakeRun) -> None:
    kpis = run.kpis()
    assert list(kpis.columns) == ["step", "type", "name", "value"]
    loss = kpis[(kpis["name"] == "loss") & (kpis["type"] == "train")]
    slot = slot_of(fake, "loss")
    assert loss["step"].tolist() == list(range(STEPS))
    assert loss["value"].tolist() == [float(fake.tensor(slot, step)) for step in range(STEPS)]
    assert len(kpis) == 2 * len(run.records)


def test_the_graph_valid_at_a_step(run: Run, fake: FakeRun) -> None:
    assert run.structure(0) == fake.structures[0]
    assert run.structure(4) == fake.structures[0]
    assert run.structure(5) == fake.structures[1]
    assert run.structure() == fake.structures[1]
    assert run.structure(10, type="eval") == fake.structures[1]
    keys = fake.structures[1].keys
    pairs = {(keys[a].node, keys[b].node) for a, b, _ in fake.structures[1].edges}
    edges = run.edges()
    assert len(set(edges)) == len(edges)
    assert set(edges) == {(a, b) for a, b in pairs if a != b}
    assert not any("aux" in pair for pair in run.edges(0))


def test_documents_spec_config_and_facts(run: Run) -> None:
    assert {module["node"] for module in run.modules} == set(NODES)
    assert run.report["entries"]["all"]["matched"] == len(NODES)
    assert run.spec.samples.count == 4
    assert run.config is not None
    assert run.config["optimizer"]["lr"] == 3e-4
    assert run.facts["command"] == ["train.py", "+comgra=debug"]


def test_notes_and_findings_have_their_columns(run: Run) -> None:
    assert {"step", "text"} <= set(run.notes().columns)
    assert {"rule", "severity", "node", "role", "pass", "first_step", "message"} <= set(
        run.findings().columns
    )


def test_what_is_handed_out_can_be_changed_without_harm(run: Run) -> None:
    for table in (run.records, run.slots, run.kpis()):
        for column in table.columns:
            table[column] = None
    run.steps[:] = -1
    assert run.steps.tolist() == list(range(STEPS))
    assert run.records["step"].max() == STEPS - 1
    assert run.slots["node"].iloc[0] == "input"


def test_it_shows_itself(run: Run) -> None:
    assert repr(run).endswith(": finished, 26 records>")
    html = run._repr_html_()
    assert "group/fake" in html
    assert "0 to 23" in html


def slot_of(
    fake: FakeRun, node: str, *, role: str = "output", pass_: str = "forward", iteration: int = 0
) -> SlotInfo:
    return next(slot for slot in fake.slots if slot.key == (node, role, iteration, pass_))


def test_the_tables_of_a_run_without_records_have_their_columns_in_form(tmp_path: Path) -> None:
    """A program that ended before its first step: filtering by name returns no rows."""
    with comgra.trace({"nodes": {"all": {"select": "**"}}}, root=tmp_path, group="g", name="r"):
        comgra.note("nothing came of it")
    (path,) = (tmp_path / "g").iterdir()
    run = open_run(path)
    tables = {"slots": run.slots, "records": run.records, "kpis": run.kpis(), "notes": run.notes()}
    tables["findings"] = run.findings()
    for name, columns in {
        "slots": ["node", "role", "pass", "kind", "dtype", "module_class"],
        "records": ["type", "mode", "structure"],
        "kpis": ["type", "name"],
        "notes": ["type", "text"],
        "findings": ["rule", "severity", "node", "role", "pass", "message"],
    }.items():
        for column in columns:
            assert not tables[name][column].str.startswith("x").any(), (name, column)

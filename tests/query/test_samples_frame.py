"""The table of all samples contains the statistics that each tensor has of its samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Run


@pytest.mark.parametrize("type_", [None, "eval"])
def test_each_number_is_that_of_its_tensor(run: Run, type_: str | None) -> None:
    frame = run.samples_frame("std", "l2", type=type_)
    records = run.records
    steps = sorted({*records[records["type"] == (type_ or "train")]["step"]})
    assert frame.index.get_level_values("step").unique().tolist() == steps
    checked = 0
    for node, role, iteration, of in run.slots[["node", "role", "iteration", "pass"]].to_numpy():
        slot = run.slot(node, role=role, iteration=iteration, of=of)
        calls = f"[{iteration}]" * (iteration > 0)
        for statistic in ("std", "l2"):
            name = f"{node}/{role}{calls}/{of}/{statistic}"
            features = slot.batch_dim is not None and slot.kind not in ("target", "loss")
            assert (name in frame) == features
            if features:
                truth = slot.samples(statistic, type=type_).stack(future_stack=True)
                there = frame[name]
                np.testing.assert_array_equal(there, truth.loc[there.index])
                checked += int(there.notna().any())
    assert checked > 10


def test_places_and_labels_are_those_of_the_record(run: Run) -> None:
    frame = run.samples_frame("mean", nodes="head")
    for step in run.steps[[0, -1]].tolist():
        samples = run.samples(step)
        there = frame.loc[step]
        assert there["place"].tolist() == samples["place"].tolist()
        assert there["label"].tolist() == samples["label"].tolist()


def test_nodes_passes_and_statistics_are_selected(run: Run) -> None:
    frame = run.samples_frame(nodes=["blocks.**", "head"], of="grad")
    names = [name.split("/") for name in frame.columns[2:]]
    assert {name[0] for name in names} <= {"blocks.0.mlp.fc2", "blocks.0.mlp.act", "head"}
    assert {name[2] for name in names} == {"grad"}
    assert {name[3] for name in names} <= {*run.statistics}
    with pytest.raises(UnknownNameError, match="no node matches 'haed'; did you mean 'head'"):
        run.samples_frame(nodes="haed")
    with pytest.raises(UnknownNameError, match="stdd"):
        run.samples_frame("stdd")


def test_a_name_given_twice_makes_one_column(run: Run) -> None:
    frame = run.samples_frame("mean", "std", "mean")
    assert frame.columns.is_unique
    pd.testing.assert_frame_equal(frame, run.samples_frame("mean", "std"))


def test_runs_without_samples_have_empty_tables(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spec = {"nodes": {"all": {"select": "**"}}, "samples": {"count": 0}}
    with comgra.trace(spec, root=tmp_path) as session:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    assert session.path is not None
    run = comgra.open_run(session.path)
    frame = run.samples_frame("mean")
    assert len(frame) == 0
    assert {"place", "label", "Linear/output/forward/mean"} <= {*frame.columns}
    assert len(run.samples_frame()) == 0
    assert len(run.samples(0)) == 0
    assert run.slot("Linear").samples("mean").dropna(axis=1, how="all").empty
    assert run.unusual(1, "mean").dropna(axis=1, how="all").empty


@pytest.mark.parametrize("nodes", ["**", "head"])
def test_types_without_a_record_have_empty_tables(run: Run, nodes: str) -> None:
    with pytest.raises(UnknownNameError, match="test"):
        run.samples_frame("mean", nodes=nodes, type="test")

"""TensorBoard's own reader finds in a log folder exactly what the run contains."""

from __future__ import annotations

import copy
import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import comgra_decl as comgra
from comgra_decl.errors import MissingPackageError, SelectionError
from comgra_decl.export import export_run
from comgra_decl.query import Run, open_run
from comgra_decl.sinks import Selection
from comgra_decl.sinks.naming import SeriesName, of_tensor, parsed
from tests.query.conftest import NODES
from tests.support.fake_run import FakeRun
from tests.support.traced import traced, train

accumulating = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

SELECTED = Selection(statistics=("mean", "l2.abs_max", "nonfinite"), series=100_000)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """24 training and 2 evaluation records; from step 20 on, one tensor contains NaN."""
    fake = FakeRun(tmp_path_factory.mktemp("tensorboard") / "run", nodes=NODES, nonfinite_from=20)
    fake.write(24, commit=5)
    fake.close()
    return open_run(fake.path)


@pytest.fixture(scope="module")
def logs(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("logs") / "run"
    return read(export_run(run, folder, "tensorboard", selection=SELECTED))


def read(folder: Path) -> Any:
    everything = ("scalars", "histograms", "images", "tensors", "compressedHistograms")
    found = accumulating.EventAccumulator(str(folder), size_guidance=dict.fromkeys(everything, 0))
    found.Reload()
    return found


def test_every_statistic_is_equal_to_the_bit_with_its_step_and_time(run: Run, logs: Any) -> None:
    found = check_statistics(run, logs)
    passes = [(of, type_) for of in set(run.slots["pass"]) for type_ in run.types]
    there = [run.heat("nonfinite", of=of, type=type_).notna().any().sum() for of, type_ in passes]
    assert found == sum(there) * len(SELECTED.statistics)


def test_series_of_evaluations_count_too(run: Run, tmp_path: Path) -> None:
    every = Selection(statistics=("mean",), series=100_000)
    tags = read(export_run(run, tmp_path / "all", "tensorboard", selection=every)).Tags()["scalars"]
    number = sum(not tag.startswith("metrics") for tag in tags)
    assert any(" (eval)/" in tag for tag in tags)
    just = replace(every, series=number)
    export_run(run, tmp_path / "just", "tensorboard", selection=just)
    with pytest.raises(SelectionError, match=f"in eval and train, are {number} series, but at"):
        export_run(
            run, tmp_path / "less", "tensorboard", selection=replace(just, series=number - 1)
        )
    assert not (tmp_path / "less").exists()


def check_statistics(run: Run, logs: Any) -> int:
    """Compare all series with the run; return their number."""
    tags = [tag for tag in logs.Tags()["scalars"] if not tag.startswith("metrics")]
    records = run.records
    for tag in tags:
        name = parsed(tag)
        assert isinstance(name, SeriesName)
        key = name.key
        slot = run.slot(key.node, role=key.role, of=key.pass_, iteration=key.iteration)
        truth = slot.series(name.statistic, over_batch=name.over_batch, type=name.type)
        truth = truth[slot.series("nonfinite", type=name.type).notna()]
        told = logs.Scalars(tag)
        assert [event.step for event in told] == truth.index.tolist()
        values = np.array([event.value for event in told], np.float32)
        assert values.tobytes() == truth.to_numpy(np.float32).tobytes() or np.array_equal(
            values, truth, equal_nan=True
        )
        times = records[records["type"] == name.type].set_index("step")["time"]
        assert [event.wall_time for event in told] == times[truth.index].tolist()
    return len(tags)


def test_every_metric_is_there(run: Run, logs: Any) -> None:
    for (name, type_), truth in run.kpis().groupby(["name", "type"]):
        told = logs.Scalars(f"metrics{'' if type_ == 'train' else f' ({type_})'}/{name}")
        assert [event.step for event in told] == truth["step"].tolist()
        assert np.array_equal([e.value for e in told], truth["value"].astype(np.float32))


def test_histograms_keep_their_counts_and_edges(run: Run, logs: Any) -> None:
    for _, row in run.slots.iterrows():
        slot = run.slot(row["node"], role=row["role"], of=row["pass"], iteration=row["iteration"])
        steps, counts, edges_of_all = slot.histograms()
        told = logs.Histograms(of_tensor(slot.key, "train"))
        assert [event.step for event in told] == steps[counts.any(axis=1)].tolist()
        for event, bins, own in zip(told, counts, edges_of_all, strict=True):
            histogram = event.histogram_value
            assert histogram.bucket == bins.tolist()
            assert (histogram.num, histogram.min, histogram.max) == (bins.sum(), own[0], own[-1])
            edges = [histogram.min, *histogram.bucket_limit]
            assert np.array_equal(edges, own)


def test_the_graph_has_the_runs_nodes_edges_and_classes(run: Run, logs: Any) -> None:
    nodes = {node.name.replace("/", "."): node for node in logs.Graph().node}
    edges = {(source.replace("/", "."), name) for name, n in nodes.items() for source in n.input}
    assert edges == set(run.edges())
    classes = dict(zip(run.slots["node"], run.slots["module_class"], strict=True))
    for name, node in nodes.items():
        if classes.get(name):
            assert node.op == classes[name]
    shape = nodes["head"].attr["_output_shapes"].list.shape[0]
    assert (
        tuple(dim.size for dim in shape.dim) == run.slots.query("node == 'head'")["shape"].iloc[0]
    )


def test_nodes_whose_names_tensorboard_would_write_alike_stay_apart(tmp_path: Path) -> None:
    inner = nn.ModuleDict({"a b": nn.Linear(2, 2), "a_b": nn.Linear(2, 2), "a:b": nn.Tanh()})
    other = nn.ModuleDict({"a_b": nn.Linear(2, 2)})
    model = nn.ModuleDict({"x y": inner, "x_y": other})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comgra.trace("debug", root=tmp_path, group="g", name="n"):
        hidden = torch.ones(3, 2)
        for part in (*inner.values(), *other.values()):
            hidden = part(hidden)
        hidden.sum().backward()
        optimizer.step()
    run = comgra.open_run(tmp_path / "g" / "n")
    logs = read(export_run(run, tmp_path / "logs", "tensorboard"))
    nodes = {node.name: {*node.input} for node in logs.Graph().node}
    names = {
        "x y.a b": "x_y_2/a_b_2", "x y.a_b": "x_y_2/a_b", "x y.a:b": "x_y_2/a_b_3",
        "x_y.a_b": "x_y/a_b",
    }  # fmt: skip
    assert set(names.values()) <= nodes.keys()
    assert len(nodes) == len({name for edge in run.edges() for name in edge})
    for source, sink in run.edges():
        assert names.get(source, source) in nodes[names.get(sink, sink)]


def test_tensorboard_lists_the_settings_of_one_run(run: Run, logs: Any) -> None:
    """Asked as its server asks: the HParams page shows what `session_groups` contains."""
    processing, hparams = "tensorboard.backend.event_processing", "tensorboard.plugins.hparams"
    api_pb2 = pytest.importorskip(f"{hparams}.api_pb2")
    runs = pytest.importorskip(f"{processing}.plugin_event_multiplexer").EventMultiplexer()
    runs.AddRunsFromDirectory(str(Path(logs.path).parent))
    runs.Reload()
    assert [*runs.Runs()] == [Path(logs.path).name]
    provider = pytest.importorskip(f"{processing}.data_provider").MultiplexerDataProvider(runs, "")
    board = pytest.importorskip("tensorboard.plugins.base_plugin").TBContext(data_provider=provider)
    context = pytest.importorskip(f"{hparams}.backend_context").Context(board)
    asked = pytest.importorskip("tensorboard.context").RequestContext()
    every = api_pb2.ListSessionGroupsRequest(
        slice_size=10, allowed_statuses=api_pb2.Status.values()
    )
    handler = pytest.importorskip(f"{hparams}.list_session_groups").Handler
    told = handler(asked, context, "", every).run()
    (group,) = told.session_groups
    assert group.hparams["model.layers"].number_value == 2
    assert group.hparams["optimizer.lr"].number_value == run.config["optimizer"]["lr"]  # type: ignore[index]
    (session,) = group.sessions
    assert session.status == api_pb2.STATUS_SUCCESS
    assert session.start_time_secs == pytest.approx(run.started)


def test_too_many_series_are_refused_with_a_selection_that_works(run: Run, tmp_path: Path) -> None:
    tensors = f"{len(run.slots)} tensors with 3 statistics each, in eval and train, are "
    with pytest.raises(SelectionError, match=rf"{tensors}\d+ series, but at most 20") as caught:
        export_run(run, tmp_path / "out", "tensorboard", selection=Selection(series=20))
    assert list(tmp_path.iterdir()) == []
    options = str(caught.value).partition("such as ")[2].partition(" (")[0].split()
    pairs = dict(zip(options[::2], (value.strip("'") for value in options[1::2]), strict=True))
    proposed = Selection(
        pairs.get("--nodes"),
        (pairs["--pass"],) if "--pass" in pairs else (),
        (pairs["--statistic"],) if "--statistic" in pairs else (),
        series=20,
    )
    found = read(export_run(run, tmp_path / "out", "tensorboard", selection=proposed)).Tags()
    series = {tag for tag in found["scalars"] if not tag.startswith("metrics")}
    assert 0 < len(series) <= 20
    metrics = replace(proposed, nodes="")
    alone = read(export_run(run, tmp_path / "alone", "tensorboard", selection=metrics)).Tags()
    assert {tag.partition("/")[0] for tag in alone["scalars"]} == {"metrics", "metrics (eval)"}


def test_a_run_without_a_record_and_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRun(tmp_path / "run", nodes=NODES)
    run = open_run(fake.path)
    assert read(export_run(run, tmp_path / "out", "tensorboard")).Tags()["scalars"] == []
    fake.close()
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'comgra-decl\[tensorboard\]'"):
        export_run(run, tmp_path / "missing", "tensorboard")


def test_a_program_sends_the_same_numbers_while_it_trains(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
    nodes = {"all": {"select": "**", "capture": ["output", "output_grad", "parameter"]}}
    run = traced(
        tmp_path,
        nodes,
        lambda: train(model, torch.randn(4, 3), steps=3),
        sinks=["tensorboard"],
        preview=False,
    )
    folder = Path(run.document("links")["tensorboard"]["where"])
    assert folder == Path(str(run.path)) / "tensorboard"
    live, stored = read(folder), read(export_run(run, tmp_path / "out", "tensorboard"))
    for each in (live, stored):
        (link,) = each.Tensors("run")
        assert str(run.path.absolute()).encode() in link.tensor_proto.string_val[0]
    assert live.Tags()["histograms"] == stored.Tags()["histograms"] != []
    assert {*live.Tags()["scalars"]} == {*stored.Tags()["scalars"]}
    for tag in stored.Tags()["scalars"]:
        same = [[(e.step, e.value) for e in each.Scalars(tag)] for each in (live, stored)]
        assert same[0] == same[1]
        if not tag.startswith("metrics"):  # which have the time of their commit while it trains
            times = [[e.wall_time for e in each.Scalars(tag)] for each in (live, stored)]
            assert times[0] == times[1] == run.records["time"].tolist()
    for tag in stored.Tags()["histograms"]:
        assert live.Histograms(tag) == stored.Histograms(tag)
    assert live.Graph() == stored.Graph()


def test_pictures_and_what_the_program_shows_arrive_live_as_in_an_export(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 2))
    spec = {
        "nodes": {"all": {"select": "2"}},
        "schedule": {"first": 100},
        "preview": False,
        "probes": {"eyes": {"samples": {"count": 2}, "schedule": {"first": 3}}},
        "pictures": {"cam": {"method": "occlusion", "of": "eyes", "target": 0, "window": [2, 2]}},
        "sinks": ["tensorboard"],
    }
    photo = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    with comgra.trace(spec, root=tmp_path, group="g") as session:
        for step in range(3):
            train(model, torch.randn(4, 1, 4, 4))
            comgra.image(photo + step, "photo")
            comgra.text(f"größe {step}", "words")
    assert session.path is not None
    run = open_run(session.path)
    live = read(Path(str(run.path)) / "tensorboard")
    stored = read(export_run(run, tmp_path / "out", "tensorboard"))
    assert "shown/photo" in live.Tags()["images"]
    assert any("picture:cam" in tag for tag in live.Tags()["images"])
    assert {*live.Tags()["images"]} == {*stored.Tags()["images"]}
    for tag in live.Tags()["images"]:
        told = [[(e.step, e.encoded_image_string) for e in x.Images(tag)] for x in (live, stored)]
        assert told[0] == told[1]
        assert [step for step, _ in told[0]] == [0, 1, 2]
    for step, event in enumerate(live.Images("shown/photo")):
        pixels = np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))
        assert np.array_equal(pixels, photo + step)
    for each in (live, stored):
        words = [e.tensor_proto.string_val[0].decode() for e in each.Tensors("shown/words")]
        assert words == ["größe 0", "größe 1", "größe 2"]


def test_pictures_of_a_probe_that_runs_seldom_are_all_sent(tmp_path: Path) -> None:
    """Of 60 training steps, every tenth has a picture."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    spec = {
        "nodes": {"all": {"select": "2"}},
        "preview": False,
        "probes": {"eyes": {"samples": {"count": 2}, "schedule": {"first": 1, "every": 10}}},
        "pictures": {"cam": {"method": "occlusion", "of": "eyes", "target": 0, "window": [2, 2]}},
    }
    with comgra.trace(spec, root=tmp_path, overrides=["schedule.every=1"]) as session:
        train(model, torch.randn(4, 1, 4, 4), steps=60)
    assert session.path is not None
    logs = read(export_run(open_run(session.path), tmp_path / "logs", "tensorboard"))
    (tag,) = logs.Tags()["images"]
    assert [event.step for event in logs.Images(tag)] == [0, 10, 20, 30, 40, 50]


def test_a_resumed_run_keeps_the_times_of_its_records(tmp_path: Path) -> None:
    """Records that the second session replaced have numbers, but are left out."""

    def train(steps: int, state: Any = None) -> Any:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        if state is not None:
            optimizer.load_state_dict(state)
        states = []
        for _ in range(steps):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            states.append(copy.deepcopy(optimizer.state_dict()))
        return states[1]

    nodes = {"all": {"select": "**", "capture": ["output"]}}
    spec = {"nodes": nodes, "schedule": {"first": 100}}
    where = {"root": str(tmp_path), "group": "g", "name": "r"}
    with comgra.trace({**spec, "run": where}):
        state = train(4)
    with comgra.trace({**spec, "run": {**where, "resume": True}}):
        train(3, state)
    resumed = open_run(tmp_path / "g" / "r")
    assert resumed.records.index.tolist() == [0, 1, 4, 5, 6]
    assert check_statistics(resumed, read(export_run(resumed, tmp_path / "out", "tensorboard"))) > 0


def test_histograms_that_are_not_selected_are_not_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from comgra_decl.query.chunks import Chunk

    def read_them(_: Chunk, slot: int) -> None:
        asked.append(slot)

    asked: list[int] = []
    monkeypatch.setattr(Chunk, "histograms", read_them)
    for number, selection in enumerate(
        [Selection(nodes="head"), Selection(nodes="head", histograms=False), Selection(nodes="")]
    ):
        export_run(run, tmp_path / str(number), "tensorboard", selection=selection)
        head = run.slots.query("node == 'head'").index.tolist()
        assert {*asked} == {*(head if number == 0 else [])}
        asked.clear()


@pytest.mark.parametrize("way", ["export", "live"])
def test_values_of_one_step_are_all_there_in_the_order_of_steps(way: str, tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    logged: list[tuple[int, float]] = []
    declared = {"schedule": {"steps": [0, 4, 9]}, "nodes": {"a": {"select": "**"}}}
    with comgra.trace({**declared, "sinks": ["tensorboard"]}, root=tmp_path) as session:
        for step in range(12):
            optimizer.zero_grad()
            net(torch.ones(3, 2)).square().mean().backward()
            for part in (0.25, 0.5):
                comgra.kpi("twice", step + part)
                logged.append((step, step + part))
            optimizer.step()
    assert isinstance(session.path, Path)
    folder = session.path / "tensorboard"
    if way == "export":
        folder = export_run(open_run(session.path), tmp_path / "logs", "tensorboard")
    found = read(folder)
    assert [(e.step, e.value) for e in found.Scalars("metrics/twice")] == logged
    for tag in found.Tags()["scalars"]:
        events = found.Scalars(tag)
        assert [e.step for e in events] == sorted(e.step for e in events)
        assert [e.wall_time for e in events] == sorted(e.wall_time for e in events)

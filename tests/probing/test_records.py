"""What the records of probes contain, and when there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import ProbeError, SpecError
from comgra_decl.export import export_run
from comgra_decl.hooks.probing.copying import CleanCopy
from comgra_decl.query import Run
from comgra_decl.records import PROBE_MODE
from comgra_decl.rules import diagnose
from comgra_decl.spec import load_spec
from tests.support.recording import EVERYTHING, Recording, recording
from tests.support.tables import read_csv

EYES = "probe:eyes"


class Net(nn.Module):
    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.bn(self.conv(x)))).mean((2, 3)))


Batches = list[tuple[Tensor, Tensor]]


def batches(steps: int, size: int = 10) -> Batches:
    torch.manual_seed(1)
    return [(torch.randn(size, 1, 6, 6), torch.randint(3, (size,))) for _ in range(steps)]


def train(model: nn.Module, data: Batches) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


SPEC: dict[str, Any] = {
    "nodes": {
        "all": {"select": "**", "capture": ["output", "output_grad", "parameter", "buffer"]},
        "values": {"select": "**", "capture": ["parameter", "buffer"], "values": True},
    },
    "schedule": {"first": 100},
    "probes": {
        "eyes": {"samples": {"count": 6, "by": "target"}, "schedule": {"first": 2, "every": 3}},
        "trained": {"samples": {"count": 3}, "mode": "train", "schedule": {"every": 4}},
    },
    "pictures": {
        "cam": {"method": "grad_cam", "of": "eyes", "select": "conv", "target": "label"},
        "maps": {"method": "integrated_gradients", "of": "eyes", "target": "top", "points": 4},
        "guided": {"method": "occlusion", "of": "trained", "window": [9, 9, 9, 9]},
    },
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.manual_seed(0)
    with comgra.trace(SPEC, root=tmp_path_factory.mktemp("runs")) as session:
        train(Net(), batches(7))
    assert session.path is not None
    return comgra.open_run(session.path)


def test_a_probe_runs_at_the_recorded_steps_that_its_schedule_names(run: Run) -> None:
    records = run.records
    assert records["step"][records["type"] == EYES].tolist() == [0, 1, 3, 6]
    assert records["step"][records["type"] == "probe:trained"].tolist() == [0, 4]
    assert set(records["mode"][records["type"] == EYES]) == {PROBE_MODE}
    assert run.steps.tolist() == [*range(7)]  # those of training alone


def test_the_samples_are_those_of_the_first_batch_by_category_at_every_record(run: Run) -> None:
    x, y = batches(1)[0]
    for step in (0, 3, 6):
        samples = run.samples(step, type=EYES)
        places = samples["place"].tolist()
        assert samples["label"].tolist() == [str(int(y[place])) for place in places]
        assert sorted(samples["label"]) == ["0", "0", "1", "1", "2", "2"]
        given = run.slot("input", role="input").value(step, type=EYES)
        assert (given == x[places].numpy()).all()


@pytest.mark.parametrize("step", [0, 3, 6])
def test_a_probe_has_the_parameters_and_buffers_with_which_its_step_began(
    run: Run, step: int
) -> None:
    model = Net().eval()
    for name, tensor in model.state_dict().items():
        node, _, role = name.rpartition(".")
        stored = run.slot(node, role=role).value(step)[0]
        tensor.copy_(torch.from_numpy(np.array(stored)))
    x = torch.from_numpy(run.slot("input", role="input").value(step, type=EYES))
    wanted = model(x).detach().numpy()
    np.testing.assert_allclose(run.slot("Net").value(step, type=EYES), wanted, rtol=1e-6)


def test_statistics_and_values_are_read_as_those_of_any_other_type(run: Run) -> None:
    series = run.series("conv", "mean", type=EYES)
    assert series.index.tolist() == [0, 1, 3, 6]
    for step, mean in zip(series.index.tolist(), series, strict=True):
        assert mean == pytest.approx(run.value("conv", step, type=EYES).mean(), rel=1e-5)
    difference = run.slot("conv").series(type=EYES) - run.slot("conv").series()
    assert difference.notna().tolist() == [s in (0, 1, 3, 6) for s in range(7)]


def test_an_export_contains_the_records_of_a_probe(run: Run, tmp_path: Path) -> None:
    export_run(run, tmp_path / "csv", "csv")
    table = read_csv(tmp_path / "csv" / "statistics.csv")
    chosen = (table["type"] == EYES) & (table["node"] == "head") & (table["role"] == "output")
    told = table[chosen & (table["pass"] == "forward")].set_index("step")["mean"]
    wanted = [run.value("head", s, type=EYES).mean() for s in (0, 1, 3, 6)]
    assert told.index.tolist() == [0, 1, 3, 6]
    assert told.to_numpy() == pytest.approx(wanted, rel=1e-5)
    assert {EYES, "probe:trained"} <= {*table["type"]}


def test_pictures_are_read_by_name_with_axes_and_facts(run: Run) -> None:
    cam = run.picture("cam", 3)
    assert cam.axes == ("sample", "height", "width")
    assert (cam.values.shape, cam.step, cam.node) == ((6, 4, 4), 3, "conv")
    assert cam.facts["target"] == [int(label) for label in cam.labels["sample"]]
    assert np.asarray(cam, np.float32).dtype == np.float32
    assert repr(cam) == "<Picture 'cam' of 'conv' at step 3: sample 6, height 4, width 4>"
    maps = run.picture("maps")
    assert (maps.step, maps.values.shape, maps.node) == (6, (6, 1, 6, 6), "input")
    assert len(maps.facts["gap"]) == 6
    same_class = run.value("Net", 6, type=EYES).argmax(1).tolist()
    assert maps.facts["target"] == same_class


def test_a_picture_that_cannot_be_made_is_reported_with_the_reason(run: Run) -> None:
    facts = run.picture_facts(4, type="probe:trained")
    assert "needs a floating-point input" in facts["guided"]["refused"]
    (warning,) = run.document("report")["warnings"]
    assert warning.startswith("probe 'trained': there is no picture 'guided': occlusion")


def test_rules_do_not_see_probes(run: Run, tmp_path: Path) -> None:
    torch.manual_seed(0)
    bare = {**SPEC, "probes": {}, "pictures": {}}
    with comgra.trace(bare, root=tmp_path) as session:
        train(Net(), batches(7))
    assert session.path is not None
    other = comgra.open_run(session.path)
    assert run.findings().equals(other.findings())
    assert stored(run) == stored(other)
    assert run.kpis().equals(other.kpis())


def stored(run: Run) -> list[str]:
    return [finding.message for finding in diagnose(run).findings]


# -- agreement with the record of the step -----------------------------------------------------


def test_in_the_mode_of_training_the_whole_batch_gives_what_the_step_computed() -> None:
    spec = {"samples": {"count": 10}, "mode": "as_is", "schedule": {"first": 1}}
    with recording({**EVERYTHING, "probes": {"eyes": spec}}, samples={"count": 10}) as found:
        train(Net(dropout=0.0), batches(1))
    step, probe = found.steps
    names = {info.id: key for key, info in found.slots.items()}
    shared = {names[i]: (step.values[i], v) for i, v in probe.values.items() if i in step.values}
    assert {key.node for key in shared} == {"Net", "conv", "bn", "drop", "head", "input"}
    for ours, other in shared.values():
        np.testing.assert_array_equal(ours, other)


def test_the_copy_runs_under_the_same_autocast() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording({**EVERYTHING, "probes": {"eyes": {"samples": {"count": 2}}}}) as found:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(torch.randn(4, 4)), torch.randint(3, (4,)))
        loss.backward()
        optimizer.step()
    step, probe = found.steps
    names = {key: info.id for key, info in found.slots.items()}
    head = next(
        i for key, i in names.items() if key[:2] == ("0", "output") and key.pass_ == "forward"
    )
    assert probe.values[head].dtype == step.values[head].dtype == "bfloat16"
    assert (probe.values[head] == step.values[head][:2]).all()


# -- samples from elsewhere --------------------------------------------------------------------


def given(start: int) -> tuple[tuple[Tensor], dict[str, Any], list[int]]:
    return (torch.full((4, 1, 6, 6), float(start)),), {}, [0, 1, 2, 0]


def probed(probe: dict[str, Any], steps: int = 2, make: Callable[[], nn.Module] = Net) -> Recording:
    with recording({**EVERYTHING, "probes": {"eyes": probe}}) as found:
        train(make(), batches(steps))
    assert found.faults == []
    return found


def inputs_of(found: Recording) -> list[Any]:
    slots = {key.node: info.id for key, info in found.slots.items() if key.node == "input"}
    return [step.values[slots["input"]] for step in found.of(EYES)]


def test_samples_come_from_a_function_or_from_the_spec() -> None:
    function = {"_target_": f"{__name__}.given", "start": 7}
    found = probed({"batch": function, "samples": {"count": 3}})
    assert all((value == 7).all() and len(value) == 3 for value in inputs_of(found))
    assert found.of(EYES)[0].info.extra["labels"] == ["0", "1", "2"]
    image = np.arange(36.0).reshape(1, 6, 6).tolist()
    found = probed({"batch": {"x": [image, image]}, "labels": [2, 1]})
    slots = {key.role: info.id for key, info in found.slots.items() if key.node == "input"}
    value = found.of(EYES)[0].values[slots["input.x"]]
    assert (value == np.array([image, image])).all()
    whole = np.arange(36).reshape(1, 6, 6).tolist()  # what YAML makes of 1 instead of 1.0
    again = probed({"batch": {"x": [whole, whole]}, "labels": [2, 1]})
    assert (again.of(EYES)[0].values[slots["input.x"]] == value).all()


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ({"x": [[1.0], [1.0, 2.0]]}, "batch.x is not a regular list of numbers"),
        ({"x": 3.0}, "contains no tensor with a sample dimension"),
        ({"_target_": f"{__name__}.batches", "steps": 1}, "must return"),
        ({"_target_": f"{__name__}.batches", "steps": None}, "TypeError"),
    ],
)
def test_samples_that_are_none_are_refused_before_training(batch: Any, why: str) -> None:
    found = probed({"batch": batch})
    assert found.of(EYES) == []
    (warning,) = found.report["warnings"]
    assert why in warning


# -- models ------------------------------------------------------------------------------------


class Drawing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = (number for number in range(9))


class Scripted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.jit.script(nn.Dropout(0.5))  # type: ignore[assignment]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "why"),
    [(Drawing, "Drawing cannot be copied (TypeError: cannot pickle"), (Scripted, "is scripted")],
)
def test_a_model_that_cannot_be_copied_is_refused_with_the_reason(
    make: Callable[[], nn.Module], why: str
) -> None:
    found = probed({}, make=make)
    assert [step.info.type for step in found.steps] == ["train", "train"]
    assert any(why in warning for warning in found.report["warnings"])


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_model_is_probed_from_its_second_step_on() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.LazyLinear(3))

    found = probed({"schedule": {"every": 1}}, steps=3, make=make)
    assert [step.info.step for step in found.of(EYES)] == [1, 2]


def test_the_inside_of_a_wrapper_is_copied() -> None:
    found = probed({}, make=lambda: nn.DataParallel(Net()))
    nodes = {key.node for key in found.slots}
    (probe,) = found.of(EYES)
    names = {info.id: key.node for key, info in found.slots.items()}
    assert {names[i] for i in probe.values} == {"input", "conv", "bn", "drop", "head", "Net"}
    assert nodes == {"input", "conv", "bn", "drop", "head", "Net", "target", "loss"}


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group that contains only this process."""
    from torch import distributed

    place = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_the_inside_of_distributed_data_parallel_is_copied() -> None:
    found = probed({}, make=lambda: nn.parallel.DistributedDataParallel(Net()))
    (probe,) = found.of(EYES)
    names = {info.id: key.node for key, info in found.slots.items()}
    assert {names[i] for i in probe.values} == {"input", "conv", "bn", "drop", "head", "Net"}


@pytest.mark.usefixtures("one_process")
def test_a_sharded_model_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ProbeError, match="distributed over processes"):
        CleanCopy(model, {})


def test_one_of_several_models_is_chosen_by_its_class() -> None:
    class Critic(nn.Linear):
        pass

    model, critic = Net(), Critic(3, 1)
    parameters = [*model.parameters(), *critic.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    spec = {**EVERYTHING, "probes": {"eyes": {"model": "Critic", "samples": {"count": 2}}}}
    with recording(spec) as found:
        for x, _ in batches(2):
            optimizer.zero_grad()
            critic(model(x).detach()).sum().backward()
            optimizer.step()
    (probe,) = found.of(EYES)
    names = {info.id: key.node for key, info in found.slots.items()}
    assert {names[i] for i in probe.values} == {"input", "Critic"}


def test_samples_that_are_left_out_of_a_batch_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = next(iter(batches(1)))[0][:5]
    found = probed({"batch": {"x": x.tolist()}, "samples": {"count": 3}}, steps=1)
    assert [record.info.batch_size for record in found.of(EYES)] == [3]
    (warning,) = [text for text in caplog.messages if "samples.count" in text]
    assert "has 5 samples, but the probe keeps only the first 3" in warning


@pytest.mark.parametrize(("steps", "reported"), [(4, 3), (2, 2)])
def test_a_model_that_is_never_called_is_reported_once(
    steps: int, reported: int, caplog: pytest.LogCaptureFixture
) -> None:
    found = probed({"model": "Nett", "schedule": {"every": 1}}, steps=steps)
    assert found.of(EYES) == []
    (warning,) = [text for text in caplog.messages if "Nett" in text]
    assert f"none of the first {reported} recorded steps called Nett with a batch" in warning


def test_a_step_that_may_yet_be_dropped_has_no_probe() -> None:
    spec = {
        **EVERYTHING,
        "schedule": {"first": 0, "every": 3},
        "keep": {"ring": 2, "when": ["nonfinite"]},
        "probes": {"eyes": {"schedule": {"every": 1}}},
    }
    with recording(spec) as found:
        train(Net(), batches(7))
    assert [step.info.step for step in found.of(EYES)] == [0, 3, 6]


def test_a_probe_waits_until_its_share_of_the_time_has_paid_for_its_last_record() -> None:
    every: dict[str, Any] = {"every": 1}
    assert len(probed({"schedule": every}, steps=5).of(EYES)) == 5
    # a record that took a millisecond is paid for after 100 seconds
    found = probed({"schedule": {**every, "budget": {"time": "0.001%"}}}, steps=5)
    assert [step.info.step for step in found.of(EYES)] == [0]
    assert len(found.of("train")) == 5


def test_a_device_without_room_leaves_the_copy_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Tensor, "clone", full)
    copy = CleanCopy(nn.Linear(2, 2), {})
    monkeypatch.undo()
    assert copy.moved
    assert copy.run((torch.ones(1, 2),), {}).shape == (1, 2)


# -- the spec ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"pictures": {"a": {"method": "saliency", "of": "eyse"}}}, "did you mean 'eyes'"),
        ({"pictures": {"a": {"method": "salience", "of": "eyes"}}}, "did you mean 'saliency'"),
        ({"pictures": {"a b": {"method": "saliency", "of": "eyes"}}}, "is not a name"),
        ({"samples": {"count": 4}}, "must be between 1 and samples.count, which is 4, got 8"),
        ({"probes": {"eyes": {"labels": [1]}}}, "needs a batch"),
        ({"probes": {"eyes": {"schedule": {"budget": {"disk": "1GB"}}}}}, "has no disk budget"),
        (
            {"pictures": {"a": {"method": "occlusion", "of": "eyes", "window": [2], "stride": 3}}},
            "leaves parts of the input uncovered",
        ),
    ],
)
def test_mistakes_in_the_spec_are_found_before_training(spec: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        load_spec({"probes": {"eyes": {}}, **spec})


class TimeFirst(nn.Module):
    """A recurrent model that receives [time, samples, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][-1])


@pytest.mark.parametrize("transposes", [False, True])
def test_time_in_the_place_of_samples_is_reported(
    transposes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Transposing(TimeFirst):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.transpose(0, 1))

    model = Transposing() if transposes else TimeFirst()
    spec = {**EVERYTHING, "probes": {"eyes": {"samples": {"count": 4}}}}
    x = torch.randn(4, 7, 3) if transposes else torch.randn(9, 7, 3)
    with caplog.at_level("WARNING"), recording(spec) as found:
        model(x).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert found.faults == []
    said = [text for text in caplog.messages if "GRU with batch_first=False" in text]
    assert len(said) == (0 if transposes else 1)

"""Tracing Hydra applications that know nothing about comgra_decl."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from comgra_decl.doors.hydra import TraceCallback, job_context, job_spec
from comgra_decl.errors import SpecError
from comgra_decl.query import list_runs, open_run
from comgra_decl.spec import load_spec
from comgra_decl.spec.loading import presets
from tests.doors.conftest import FakeSession
from tests.support.forked import forked
from tests.support.programs import HYDRA_DATACLASS, HYDRA_YAML, loss_of, plain_loss
from tests.support.shortened import shortened


def composed(overlay: Any = None, **app: Any) -> Any:
    """A job's config as Hydra composes it, including the preset."""
    content = {
        **app,
        "hydra": {
            "callbacks": {"comgra": OmegaConf.load(presets()["debug"]), "other": {"_target_": "x"}},
            "job": {"name": "train", "num": 3},
            "runtime": {"cwd": "/started/here", "output_dir": "/elsewhere"},
        },
    }
    config = OmegaConf.create(content | ({} if overlay is None else {"comgra": overlay}))
    OmegaConf.set_struct(config, True)
    OmegaConf.set_readonly(config.hydra, True)
    return config


def task(cfg: Any) -> None:
    """A stand-in for the application."""


def test_a_preset_alone_is_the_spec() -> None:
    assert job_spec(composed()) == load_spec("debug")


def test_the_short_form_changes_single_keys() -> None:
    spec = job_spec(composed({"schedule": {"every": 10}, "nodes": {"weights": None}}))
    assert spec == load_spec("debug", ["schedule.every=10", "nodes.weights=null"])


def test_interpolations_reach_the_applications_config() -> None:
    spec = job_spec(composed({"run": {"name": "lr-${lr}", "group": "${hydra.job.name}"}}, lr=0.5))
    assert (spec.run.name, spec.run.group) == ("lr-0.5", "train")


def test_settings_are_taken_out_of_what_the_application_gets() -> None:
    config = composed({"schedule": {"every": 10}, "run": {"name": "lr-${lr}"}}, lr=0.5)
    TraceCallback().on_run_start(config)
    assert sorted(config) == ["hydra", "lr"]
    spec = job_spec(config)
    assert (spec.schedule.every, spec.run.name) == (10, "lr-0.5")
    untouched = composed(lr=0.5)
    TraceCallback().on_run_start(untouched)
    assert untouched == composed(lr=0.5)


def test_what_is_no_mapping_is_left_to_be_refused() -> None:
    config = composed(3)
    TraceCallback().on_run_start(config)
    with pytest.raises(SpecError, match="not a mapping"):
        job_spec(config)


def test_the_jobs_config_is_not_changed() -> None:
    config = composed({"graph": False})
    before = OmegaConf.to_container(config, resolve=False)
    job_spec(config)
    assert OmegaConf.to_container(config, resolve=False) == before


@pytest.mark.parametrize(
    ("overlay", "problem"),
    [
        ({"schedule": {"evry": 1}}, "comgra.schedule: unknown key 'evry'"),
        ({"run": {"name": "${nope}"}}, "comgra.run.name: Interpolation key 'nope' not found"),
        ("debug", "comgra: 'debug' is not a mapping"),
    ],
)
def test_what_is_wrong_is_said_with_the_key(overlay: Any, problem: str) -> None:
    with pytest.raises(SpecError) as raised:
        job_spec(composed(overlay))
    assert raised.value.problems[0].startswith(problem)


def test_the_circumstances_of_a_job() -> None:
    context = job_context(composed(lr=0.5), task)
    assert context.base == Path("/started/here")
    assert context.job == "train"
    assert context.config == {"lr": 0.5}
    assert context.script == Path(__file__)


def test_one_object_records_every_job_of_a_multirun(sessions: list[FakeSession]) -> None:
    callback = TraceCallback(schedule={"every": 1})
    for every in (2, 3):
        callback.on_job_start(composed({"schedule": {"every": every}}), task_function=task)
        callback.on_job_end(composed(), job_return=None)  # type: ignore[arg-type]
        callback.on_job_end(composed(), job_return=None)  # type: ignore[arg-type]
    assert [s.spec.schedule.every for s in sessions] == [2, 3]
    assert [s.calls for s in sessions] == [["start", "finish"]] * 2


def test_a_job_that_never_ended_is_finished_by_the_next(sessions: list[FakeSession]) -> None:
    callback = TraceCallback()
    callback.on_job_start(composed(), task_function=task)
    callback.on_job_start(composed(), task_function=task)
    assert [s.calls for s in sessions] == [["start", "finish"], ["start"]]


def test_a_launcher_may_send_the_object_to_another_process(sessions: list[FakeSession]) -> None:
    callback = TraceCallback()
    callback.on_job_start(composed(), task_function=task)
    copy = pickle.loads(pickle.dumps(callback))
    copy.on_job_end(composed(), job_return=None)
    copy.on_job_start(composed(), task_function=task)
    assert [s.calls for s in sessions] == [["start"], ["start"]], "its session stayed behind"


def test_a_wrong_spec_ends_the_program(sessions: list[FakeSession]) -> None:
    with pytest.raises(SystemExit, match="1 problem"):
        TraceCallback().on_job_start(composed({"graph": 1}), task_function=task)
    assert sessions == []


@pytest.fixture
def yaml_app(tmp_path: Path) -> Path:
    """A folder with a Hydra application whose config is plain YAML."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("lr: 0.1\nname: app\n")
    (tmp_path / "train.py").write_text(HYDRA_YAML)
    return tmp_path


@pytest.fixture
def dataclass_app(tmp_path: Path) -> Path:
    """A folder with a Hydra application whose config is a dataclass."""
    (tmp_path / "train.py").write_text(HYDRA_DATACLASS)
    return tmp_path


def test_one_word_on_the_command_line_records_a_training(yaml_app: Path) -> None:
    traced = forked(yaml_app, "train.py", "+comgra=debug")
    assert traced.returncode == 0, traced.stderr
    assert loss_of(traced.stdout) == plain_loss()
    assert "cfg {'lr': 0.1, 'name': 'app'}" in traced.stdout
    run = open_run(yaml_app / "runs" / "train")
    assert run.state == "finished"
    assert list(run.steps) == list(range(12))
    assert run.config == {"lr": 0.1, "name": "app"}
    assert run.facts["command"][-1] == "+comgra=debug"
    assert run.spec == load_spec("debug")
    assert f"recording to {run.path}" in traced.stdout


@pytest.mark.slow
def test_a_dataclass_config_keeps_its_keys(dataclass_app: Path) -> None:
    traced = forked(dataclass_app, "train.py", "+comgra=debug", "+comgra.schedule.steps=[0,5]")
    assert loss_of(traced.stdout) == plain_loss(), traced.stderr
    run = open_run(dataclass_app / "runs")
    assert list(run.steps) == [0, 5]
    assert run.config == {"lr": 0.1}


@pytest.mark.slow
def test_the_long_form_changes_the_spec_and_a_changed_folder_does_not_move_the_run(
    yaml_app: Path,
) -> None:
    long_form = [f"hydra.callbacks.comgra.{c}" for c in ("run.root=far", "schedule.every=4")]
    done = forked(yaml_app, "train.py", "+comgra=light", *long_form, "hydra.job.chdir=true")
    assert done.returncode == 0, done.stderr
    assert "outputs" in next(line for line in done.stdout.splitlines() if line.startswith("cwd"))
    assert list(open_run(yaml_app / "far" / "train").steps) == [0, 4, 8]


def test_each_job_of_a_sweep_is_a_run(yaml_app: Path) -> None:
    done = forked(yaml_app, "train.py", "-m", "+comgra=light", "+comgra.schedule.every=3,6")
    assert done.returncode == 0, done.stderr
    runs = [open_run(summary.path) for summary in list_runs(yaml_app / "runs")]
    assert sorted(list(run.steps) for run in runs) == [[0, 3, 6, 9], [0, 6]]
    assert all(run.state == "finished" for run in runs)


@pytest.fixture
def configs(tmp_path: Path) -> Iterator[Path]:
    """A folder of configs that Hydra composes without running anything."""
    (tmp_path / "config.yaml").write_text("lr: 0.1\n")
    with initialize_config_dir(str(tmp_path), version_base=None):
        yield tmp_path


def composed_by_hydra(*overrides: str) -> Any:
    config = compose("config", [*overrides], return_hydra_config=True)
    OmegaConf.resolve(config.hydra.callbacks)
    return config


@pytest.mark.usefixtures("configs")
@pytest.mark.parametrize("preset", ["debug", "light", "off"])
def test_hydra_and_the_other_doors_read_the_same_preset(preset: str) -> None:
    config = composed_by_hydra(f"+comgra={preset}")
    assert job_spec(config) == load_spec(preset)
    assert set(config) == {"lr", "hydra"}


def test_an_application_extends_a_preset(configs: Path) -> None:
    (configs / "comgra").mkdir()
    mine = configs / "comgra" / "mine.yaml"
    mine.write_text("# @package hydra.callbacks.comgra\ndefaults: [light, _self_]\ngraph: false\n")
    spec = job_spec(composed_by_hydra("+comgra=mine"))
    assert spec == load_spec("light", ["graph=false"]) == load_spec(mine)


def test_an_application_chooses_a_preset_in_its_defaults(configs: Path) -> None:
    (configs / "config.yaml").write_text("defaults: [{comgra: debug}, _self_]\nlr: 0.1\n")
    assert job_spec(composed_by_hydra()) == load_spec("debug")
    assert job_spec(composed_by_hydra("comgra=light")) == load_spec("light")


@pytest.mark.usefixtures("configs")
def test_both_forms_of_an_override_mean_the_same() -> None:
    changes = ["schedule.every=10", "run.name=x", "histogram=null", "nodes.all.capture=[output]"]
    short = job_spec(composed_by_hydra("+comgra=debug", *(f"+comgra.{c}" for c in changes)))
    long = (f"hydra.callbacks.comgra.{c}" for c in changes)
    assert short == job_spec(composed_by_hydra("+comgra=debug", *long))
    assert short == load_spec("debug", changes)


def test_a_wrong_spec_ends_the_application_before_the_training(yaml_app: Path) -> None:
    done = forked(
        yaml_app,
        "train.py",
        "+comgra=debug",
        "+comgra.schedule.evry=10",
        "+comgra.nodes.x={select: a..b}",
        "+comgra.nodes.all.capture=[grads]",
    )
    assert done.returncode == 1
    assert "loss" not in done.stdout
    assert "comgra: the spec has 3 problems:" in done.stderr
    assert "comgra.nodes.x.select: 'a..b' has an empty name between its dots" in done.stderr
    assert "did you mean 'every'?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("ending", "code"), shortened([("raise SystemExit(5)", 5), ("1 / 0", 1)], tried=1, several=True)
)
def test_a_run_is_complete_however_the_application_ends(
    yaml_app: Path, ending: str, code: int
) -> None:
    text = (yaml_app / "train.py").read_text()
    (yaml_app / "train.py").write_text(
        text.replace("    train()\n", f"    train()\n    {ending}\n")
    )
    traced = forked(yaml_app, "train.py", "+comgra=debug")
    assert traced.returncode == code
    assert loss_of(traced.stdout) == plain_loss()
    run = open_run(yaml_app / "runs")
    assert run.state == ("failed" if code == 1 else "finished")
    assert run.steps[-1] == 11

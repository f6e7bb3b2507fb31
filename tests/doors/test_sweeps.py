"""Each job of a sweep is a run of its own, whatever starts it, and a finding may end a job."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import comgra_decl as comgra
from comgra_decl.query import Group, open_group
from tests.support.programs import python

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
PACKAGES = {
    "joblib": "hydra_plugins.hydra_joblib_launcher",
    "ray": "hydra_plugins.hydra_ray_launcher",
    "submitit_local": "hydra_plugins.hydra_submitit_launcher",
}


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """A copy of the example."""
    return Path(shutil.copytree(EXAMPLE, tmp_path / "digits"))


def sweep(folder: Path, *words: str) -> Group:
    done = python(folder, "train.py", "-m", "steps=8", "+comgra=light", *words)
    assert done.returncode == 0, done.stderr
    (group,) = (folder / "runs").iterdir()
    return open_group(group)


@pytest.mark.parametrize(
    "launcher",
    [
        "basic",
        pytest.param("joblib", marks=pytest.mark.slow),
        pytest.param("ray", marks=pytest.mark.slow),
        pytest.param("submitit_local", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_the_jobs_are_runs_of_one_group_with_their_parameters(launcher: str, digits: Path) -> None:
    if launcher in PACKAGES:
        pytest.importorskip(PACKAGES[launcher])
    group = sweep(digits, "lr=0.1,0.01", "seed=0,1", f"hydra/launcher={launcher}")
    assert group.name == "train"
    assert len(set(group.names)) == len(group) == 4
    settings = group.differences()
    tried = settings.loc[["config.lr", "config.seed"]].T
    assert {tuple(pair) for pair in tried.to_numpy().tolist()} == {
        (lr, seed) for lr in (0.1, 0.01) for seed in (0, 1)
    }
    assert [run.state for run in group] == ["finished"] * 4


@pytest.mark.slow
def test_a_finding_ends_a_job_of_an_optuna_sweep_and_not_the_sweep(digits: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    group = sweep(
        digits,
        "hydra/sweeper=optuna",
        "lr=choice(0.002,1000)",
        "hydra/sweeper/sampler=random",
        "hydra.sweeper.sampler.seed=1",
        "hydra.sweeper.n_trials=4",
        "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.max_failure_rate=1",
        "steps=1500",
        "+comgra.schedule.every=5",
        "+comgra.on_finding.stop=error",
        "+comgra.on_finding.raises._target_=optuna.TrialPruned",
    )
    tried = group.differences().loc["config.lr"]
    assert set(tried) == {0.002, 1000}
    rows: Any = group.overview().itertuples()
    for lr, run in zip(tried, rows, strict=True):
        assert run.state == "finished"
        assert (run.steps < 1500) == (run.errors > 0) == (lr == 1000)


@pytest.mark.slow
def test_a_finding_prunes_a_trial(tmp_path: Path) -> None:
    optuna: Any = pytest.importorskip("optuna")
    import torch

    def train(lr: float) -> float:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        x = torch.randn(32, 3)
        for _ in range(200_000 if lr > 1 else 50):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    def objective(trial: Any) -> float:
        lr = trial.suggest_categorical("lr", [0.1, 1e3])
        stop = ["on_finding.stop=error", "on_finding.raises._target_=optuna.TrialPruned"]
        overrides = ["schedule.every=5", "store.commit_interval=0", *stop]
        with comgra.trace("light", overrides=overrides, root=tmp_path, config={"lr": lr}):
            return train(lr)

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.GridSampler({"lr": [0.1, 1e3]})
    study = optuna.create_study(sampler=sampler)
    study.optimize(objective, n_trials=2)
    states = {trial.params["lr"]: trial.state.name for trial in study.trials}
    assert states == {0.1: "COMPLETE", 1e3: "PRUNED"}

"""Every way to start multiple processes creates one run, and none waits because of tracing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import comgra_decl as comgra
from comgra_decl.query import Run
from comgra_decl.record.ranks import Rank, agreed_folder, current_rank
from tests.ranks.launching import free_port, run_ranks
from tests.support.forked import forked

TRAIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train(steps=4):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.full((3, 4), float(dist.get_rank() + step))
        model(x).square().mean().backward()
        optimizer.step()
"""

SCRIPT = (
    TRAIN
    + """
if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
"""
)

SPAWNING = (
    TRAIN
    + """
import sys
import comgra_decl as comgra

def work(rank, port, root):
    torch.set_num_threads(1)
    with comgra.trace("debug", root=root, group="g", overrides=["schedule.first=100"]) as session:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
        )
        train()
    print("recorded", rank, session.path, flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    import torch.multiprocessing as mp
    mp.spawn(work, (int(sys.argv[1]), sys.argv[2]), nprocs=2)
"""
)

HYDRA = (
    "import hydra\n"
    + TRAIN
    + """
@hydra.main(version_base=None, config_path=None)
def main(config):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
)


def the_run(root: Path) -> Run:
    """Returns the only run below a root, with two ranks that recorded four steps."""
    runs = comgra.open_group(root)
    assert len(runs) == 1, runs.names
    (run,) = runs
    assert run.ranks == [0, 1]
    assert list(run.steps) == [0, 1, 2, 3]
    assert run.state == "finished"
    assert run.rank_differences().empty
    # the input of rank r at step s is r + s everywhere, so its mean identifies the rank
    assert run.slot("input", role="input").series("mean").tolist() == [0.5, 1.5, 2.5, 3.5]
    assert run.slot("input", role="input").series("mean", over_batch="std").tolist() == [0.5] * 4
    return run


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


STARTERS = {
    "mpirun": {"RANK": "OMPI_COMM_WORLD_RANK", "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE"},
    "mpiexec": {"RANK": "PMI_RANK", "WORLD_SIZE": "PMI_SIZE"},
    "srun": {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS"},
}


@pytest.mark.slow
@pytest.mark.parametrize("starter", STARTERS)
def test_processes_with_the_environment_of_a_scheduler_are_one_run(
    starter: str, tmp_path: Path
) -> None:
    """The starters themselves are not installed here: only what they set is."""
    names = STARTERS[starter]
    script = tmp_path / "train.py"
    rank, size = (f"int(os.environ['{names[name]}'])" for name in ("RANK", "WORLD_SIZE"))
    asked = f'"gloo", rank={rank}, world_size={size}'
    script.write_text("import os\n" + SCRIPT.replace('"gloo"', asked))
    options = ["schedule.first=100", f"run.root={tmp_path / 'runs'}"]
    for code, text in run_ranks("-m", "comgra_decl", *options, script, names=names):
        assert code == 0, text
    the_run(tmp_path / "runs")


def test_torchrun_and_an_unmodified_script(tmp_path: Path, script: Path) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += [f"--master-port={free_port()}", "-m", "comgra_decl", "schedule.first=100"]
    done = forked(tmp_path, *command, f"run.root={tmp_path / 'runs'}", script)
    assert done.returncode == 0, done.stderr
    run = the_run(tmp_path / "runs")
    assert run.group == "train"
    facts = {"rank": 0, "world_size": 2, "recorded": [0, 1], "run": run.name}
    assert run.facts["ranks"] == facts
    assert Path(str(run.path), "spec.yaml").exists()


FAILING = """
import os, sys, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(model.parameters())
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
state = f"{sys.argv[1]}/{os.environ['RANK']}.pt"
if attempt:
    optimizer.load_state_dict(torch.load(state))
for step in range(3 * attempt, 6):
    if step == 3 and not attempt:
        torch.save(optimizer.state_dict(), state)
        sys.exit("out of luck")
    optimizer.zero_grad()
    model(torch.full((3, 2), float(step))).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_job_that_torchrun_restarts_is_one_run(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["--rdzv-id=job", f"--master-port={free_port()}", "-m", "comgra_decl"]
    command += ["schedule.first=100", f"run.root={tmp_path / 'runs'}", str(script), str(tmp_path)]
    done = forked(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    run = comgra.open_run(tmp_path / "runs")
    assert run.state == "finished"
    assert list(run.steps) == [0, 1, 2, 3, 4, 5]
    assert run.slot("input", role="input").series("mean").tolist() == [0, 1, 2, 3, 4, 5]
    assert run.rank(1).sessions["step"].tolist()[1:] == [3]
    assert (
        len([path for path in (tmp_path / "runs" / "failing").iterdir() if path.name != ".ranks"])
        == 1
    )


@pytest.mark.slow
def test_ranks_that_only_torch_distributed_knows(tmp_path: Path) -> None:
    """Tracing began before `init_process_group`, in processes that do not know their rank."""
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING)
    done = subprocess.run(
        [sys.executable, str(script), str(free_port()), str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = the_run(tmp_path / "runs")
    paths = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("recorded")]
    assert paths == [str(run.path)] * 2
    assert [path.name for path in (tmp_path / "runs" / "g").iterdir() if path.name[0] != "."] == [
        run.name
    ]


def test_hydra_and_one_word(tmp_path: Path) -> None:
    script = tmp_path / "app.py"
    script.write_text(HYDRA)
    words = ["+comgra=debug", "+comgra.schedule.first=100", "+comgra.run.root=runs"]
    words += ["hydra.run.dir=out", "hydra/job_logging=disabled"]
    for code, text in run_ranks(script, *words, cwd=tmp_path):
        assert code == 0, text
    the_run(tmp_path / "runs")


def test_a_rank_that_dies_hurts_neither_the_others_nor_what_is_recorded(tmp_path: Path) -> None:
    started = time.monotonic()
    codes = [code for code, _ in run_ranks("-m", "tests.ranks.worker", tmp_path, "dying")]
    assert codes[1] == 7
    assert time.monotonic() - started < 120
    run = comgra.open_run(tmp_path / "dying" / "run")
    assert list(run.rank(0).steps) == [0, 1, 2, 3]
    assert list(run.rank(1).steps) == [0, 1]
    assert (run.rank(0).state, run.rank(1).state, run.state) == ("finished", "stopped", "stopped")
    assert list(run.steps) == [0, 1]  # what all ranks have
    assert run.first_stopped is not None
    assert re.match(r"rank 1 of 2 stopped first, at or after step [12]", run.first_stopped)
    assert run.ending is not None
    assert run.ending.headline.startswith(run.first_stopped)
    assert [summary.error for summary in comgra.list_runs(tmp_path)] == [run.first_stopped]
    assert run.value("spare", 1).shape == (8, 6)


@pytest.mark.slow
def test_only_the_ranks_that_the_spec_names_are_recorded(tmp_path: Path, script: Path) -> None:
    """In separate processes; see `test_resumed_ranks` for a shorter form."""
    options = ["schedule.first=100", f"run.root={tmp_path / 'runs'}", "run.ranks=1"]
    for code, text in run_ranks("-m", "comgra_decl", *options, script):
        assert code == 0, text
    run = comgra.open_run(tmp_path / "runs")
    assert run.ranks == [1]
    assert list(run.steps) == [0, 1, 2, 3]
    assert run.slot("input", role="input").series("mean").tolist() == [1.0, 2.0, 3.0, 4.0]
    assert not Path(str(run.path), "ranks").exists()


# -- who is who ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "3", "WORLD_SIZE": "8"}, Rank(3, 8)),
        ({"RANK": "8", "WORLD_SIZE": "8"}, None),
        ({"RANK": "x", "WORLD_SIZE": "8"}, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Rank(1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Rank(1, 2)),
        ({"NODE_RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, Rank(1, 2)),
        ({"NODE_RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, None),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, Rank(1, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "MASTER_ADDR": "a"}, None),  # of sbatch
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, None),  # independent programs
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "MASTER_ADDR": "a"}, Rank(2, 4)),
    ],
)
def test_the_environment_may_say_the_rank(environment: dict[str, str], rank: Rank | None) -> None:
    assert current_rank(environment) == rank


class Launch:
    """Ranks of successive launches that request a folder in this process."""

    def __init__(self, group: Path) -> None:
        self.group = group
        self.made = 0

    def new(self) -> Path:
        self.made += 1
        folder = self.group / f"run {self.made}"
        folder.mkdir(parents=True)
        return folder

    def ask(self, rank: int, size: int = 2) -> str:
        return agreed_folder(self.group, Rank(rank, size), self.new).name


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return Launch(tmp_path)


def test_whoever_comes_first_makes_the_folder(launch: Launch) -> None:
    assert [launch.ask(1), launch.ask(0)] == ["run 1", "run 1"]
    assert launch.made == 1


def test_the_next_launch_gets_another_folder(launch: Launch) -> None:
    assert [launch.ask(rank) for rank in (0, 1, 1, 0, 0)] == [
        "run 1",
        "run 1",
        "run 2",
        "run 2",
        "run 3",
    ]


def test_a_restart_or_another_port_is_another_launch(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = launch.ask(0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second = launch.ask(1)
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert len({first, second, launch.ask(1)}) == 3


def test_nobody_joins_a_launch_whose_first_process_has_ended(launch: Launch) -> None:
    launch.ask(0)
    (claim,) = (launch.group / ".ranks").glob("*.json")
    content = json.loads(claim.read_text())
    content["writer"]["process_start"] = "0"  # its number was reused
    claim.write_text(json.dumps(content))
    assert launch.ask(1) == "run 2"


@pytest.mark.parametrize("ranks", [4, 64])
def test_each_rank_reads_as_many_files_however_many_ranks_there_are(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    touched: list[Path] = []

    def counting(name: str) -> None:
        original = getattr(Path, name)

        def method(path: Path, *args: object, **kwargs: object) -> object:
            touched.append(path)
            return original(path, *args, **kwargs)

        monkeypatch.setattr(Path, name, method)

    for name in ("open", "stat", "iterdir", "glob"):
        counting(name)
    assert {launch.ask(rank, ranks) for rank in range(ranks - 1)} == {"run 1"}
    touched.clear()
    assert launch.ask(ranks - 1, ranks) == "run 1"
    assert len([path for path in touched if launch.group in path.parents]) < 8


@pytest.mark.parametrize(
    ("job", "port", "found"),
    [
        ("mine", "29500", True),
        ("mine", "4711", True),
        ("none", "29500", True),
        ("none", "4711", False),
    ],
)
def test_processes_that_torchrun_restarts_go_on_with_their_run(
    job: str, port: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> Path:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        overrides = ["run.ranks=0", f"run.root={tmp_path}"]
        with comgra.trace("light", overrides=[*overrides, "schedule.every=1"]) as session:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
        assert session.path is not None
        return Path(str(session.path))

    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}
    environment |= {"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": job}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    first = trained()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("MASTER_PORT", port)
    second = trained()
    assert (second == first) is found
    run = comgra.open_run(second)
    assert list(run.steps) == ([0, 1, 2, 3, 4, 5] if found else [0, 1, 2])


def test_nobody_joins_a_launch_of_long_ago(launch: Launch) -> None:
    launch.ask(0)
    (claim,) = (launch.group / ".ranks").glob("*.json")
    content = json.loads(claim.read_text())
    claim.write_text(json.dumps({**content, "time": content["time"] - 4000}))
    assert launch.ask(1) == "run 2"


def test_what_was_left_long_ago_is_taken_away(launch: Launch) -> None:
    launch.ask(0)
    old = time.time() - 90000
    left = list((launch.group / ".ranks").iterdir())
    for path in left:
        os.utime(path, (old, old))
    launch.ask(0)
    assert len(list((launch.group / ".ranks").iterdir())) == len(left)

"""Multiple processes resume the run of multiple processes."""

from __future__ import annotations

from pathlib import Path

import pytest

import comgra_decl as comgra
from tests.ranks.launching import environment, run_ranks
from tests.ranks.test_resuming import traced, train

SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
first, last, checkpoint = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if first:
    saved = torch.load(checkpoint)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
for step in range(first, last):
    optimizer.zero_grad()
    model(torch.full((3, 4), float(dist.get_rank() + step))).square().mean().backward()
    optimizer.step()
    if step == 3 and dist.get_rank() == 0:
        torch.save((model.state_dict(), optimizer.state_dict()), checkpoint)
dist.barrier()
dist.destroy_process_group()
"""


def test_each_rank_goes_on_with_its_own_database(tmp_path: Path) -> None:
    """In separate processes; a shorter form follows."""
    script, checkpoint = tmp_path / "train.py", tmp_path / "checkpoint.pt"
    script.write_text(SCRIPT)
    options = ["schedule.first=100", f"run.root={tmp_path / 'runs'}", "run.resume=true"]
    for first, last in ((0, 6), (4, 8)):
        words: list[str | Path] = [*options, script, str(first), str(last), checkpoint]
        for code, text in run_ranks("-m", "comgra_decl", *words):
            assert code == 0, text
    runs = comgra.open_group(tmp_path / "runs")
    assert len(runs) == 1
    (run,) = runs
    assert run.ranks == [0, 1]
    assert list(run.steps) == list(range(8))
    means = [0.5 + step for step in range(8)]
    assert run.slot("input", role="input").series("mean").tolist() == means
    assert [len(run.rank(rank).sessions) for rank in run.ranks] == [2, 2]
    assert list(run.kpis()["step"]) == list(range(8))
    assert run.rank_differences().empty


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Makes this process one of two, as torchrun would."""
    for name, value in environment(rank, 2, 29500).items():
        monkeypatch.setenv(name, value)


def test_a_rank_resumes_what_it_has_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first, last in ((0, 6), (4, 8)):
        for rank in (0, 1):
            as_rank(monkeypatch, rank)
            with traced(tmp_path, resume=True, resume_step=first):
                train(range(first, last))
    (run,) = comgra.open_group(tmp_path)
    assert run.ranks == [0, 1]
    assert list(run.steps) == list(range(8))
    assert [len(run.rank(rank).sessions) for rank in run.ranks] == [2, 2]
    told = run.kpis()
    assert list(told[told["name"] == "told"]["step"]) == list(range(8))
    assert run.rank_differences().empty


def test_a_rank_that_the_spec_does_not_name_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    for rank in (0, 1):
        as_rank(monkeypatch, rank)
        with traced(tmp_path, ranks=1) as session:
            train(range(4))
        paths.append(session.path)
    run = comgra.open_run(tmp_path)
    assert paths == [None, run.path]
    assert run.ranks == [1]
    assert list(run.steps) == [0, 1, 2, 3]
    assert not Path(str(run.path), "ranks").exists()

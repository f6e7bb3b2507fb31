"""The short form of `make scripts`, and that its judge detects what it is meant to detect."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.scripts import fetching, page, running
from benchmarks.scripts.__main__ import try_entry
from benchmarks.scripts.catalogue import Entry, entries
from benchmarks.scripts.judging import Verdict, scheduled
from tests.support.shortened import shortened

SHORT = [entry for entry in reversed(entries().values()) if entry.short]


@pytest.mark.parametrize("entry", shortened(SHORT, tried=1), ids=[e.name for e in SHORT])
def test_a_public_script_trains_the_same_and_is_recorded_whole(
    entry: Entry, tmp_path: Path
) -> None:
    verdict = try_entry(entry, tmp_path, offline=True, launch=running.forked)
    if verdict.skipped:
        pytest.skip(verdict.skipped)
    assert verdict.broken == ""
    assert {name: p.wrong for name, p in verdict.promises.items() if p.wrong} == {}
    assert verdict.promises.keys() == set(page.PROMISES)
    assert all(verdict.promises[name].compared for name in page.PROMISES)


TRAINING = """
import os
import torch
from torch import nn

traced = "COMGRA" in os.environ
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(net.parameters())
for number in range(12):
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    loss = nn.functional.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if number == 5:
        net.eval()
        with torch.no_grad():
            net(x)
        net.train()
print(float(loss))
"""


def tried(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    """Tests a script that is in a mirror of its own."""
    commit = mirrored(script, folder, monkeypatch)
    entry = Entry(name="own", repo="some/one", commit=commit, command="train.py", target=True)
    return try_entry(entry, folder, launch=running.forked)


def mirrored(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Commits a script to a mirror's repository, and returns the commit."""
    repository = folder / "mirror" / "some+one"
    repository.mkdir(parents=True)
    (repository / "train.py").write_text(script)
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "a"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setenv(fetching.MIRROR, str(folder / "mirror"))
    monkeypatch.setenv(fetching.CACHE, str(folder / "cache"))
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return head.stdout.strip()


@pytest.mark.slow
def test_a_healthy_script_keeps_every_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = tried(TRAINING, tmp_path, monkeypatch)
    assert verdict.sound, page.line(page.stored(verdict))
    assert verdict.facts["steps"] == 12
    assert verdict.facts["evaluations wanted"] == 1


DISTURBANCES = {
    "another number of steps": ("range(12)", "range(12 - traced)", "records", "missing 11"),
    "another learning rate": (
        "Adam(net.parameters())",
        "Adam(net.parameters(), 1e-3 + 1e-9 * traced)",
        "neutral",
        "step 0: parameters",
    ),
    "another batch": ("torch.randn(6, 4),", "torch.randn(6, 4) + traced,", "numbers", "mean"),
    "another loss": ("loss.backward()", "(loss * (1 + traced)).backward()", "losses", "step 0"),
    "a frozen weight": (
        "optimizer =",
        "net[0].weight.requires_grad_(not traced)\noptimizer =",
        "gradients",
        "0.weight: no gradient",
    ),
    "a module that is passed over": (
        "net(x), y",
        "(net[0](x)[:, :1] if traced else net(x)), y",
        "numbers",
        "2: mean nan instead of",
    ),
}


@pytest.mark.parametrize("name", shortened(DISTURBANCES, tried=1))
def test_the_judge_sees(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, promise, text = DISTURBANCES[name]
    assert old in TRAINING
    verdict = tried(TRAINING.replace(old, new), tmp_path, monkeypatch)
    assert not verdict.sound
    assert any(text in line for line in verdict.promises[promise].wrong), verdict.promises


def test_what_cannot_be_had_is_left_out_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fetching.CACHE, str(tmp_path / "empty"))
    entry = Entry(name="own", repo="some/one", commit="0" * 40, command="train.py")
    assert "some/one is not in" in try_entry(entry, tmp_path, offline=True).skipped
    needs = entry.model_copy(update={"needs": ("no_such_package",)})
    assert "needs the no_such_package package" in try_entry(needs, tmp_path).skipped


def test_debug_records_ten_steps_and_then_ever_rarer() -> None:
    assert scheduled(7) == list(range(7))
    assert scheduled(24) == [*range(19), 20, 22]


def test_every_entry_names_its_commit_and_why_it_is_there() -> None:
    for entry in entries().values():
        assert len(entry.commit) == 40
        assert entry.shape

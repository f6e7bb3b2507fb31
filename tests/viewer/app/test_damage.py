"""A partly damaged run is shown without the damaged part, and the page says so."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.cli.main import main
from comgra_decl.query import open_run
from comgra_decl.rules import diagnose, health
from comgra_decl.store import Reader
from comgra_decl.store.layout import document_key, graph_key, step_key
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.state import SECTIONS
from tests.store.test_damage import overwrite
from tests.support.shortened import shortened

SEEDS = range(12)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with documents, graphs, values and histograms."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with comgra.trace("debug", root=tmp_path_factory.mktemp("recorded"), group="group") as session:
        for _ in range(12):
            loss = nn.functional.cross_entropy(model(torch.randn(4, 6)), torch.randint(3, (4,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert session.path is not None
    return Path(str(session.path))


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy of a recorded run, to be damaged."""
    return Path(shutil.copytree(recorded, tmp_path / "runs" / "group" / "run"))


def keys(run: Path) -> list[str]:
    """All documents and graphs of a run, and the JSON facts of its records."""
    view = Reader(run).view
    documents = [document_key(name) for name in view.documents]
    return [*documents, *map(graph_key, view.names("structure")), step_key(0)]


def flipped(run: Path, key: str, seed: int) -> None:
    """Flips bits of a random byte of a key's value."""
    rng = random.Random(seed)
    value = bytearray(Reader(run).database.read_bytes(key) or b"")
    value[rng.randrange(len(value))] ^= rng.randrange(1, 256)
    overwrite(run, key, bytes(value))


def opened(run: Path) -> Dashboard:
    """A page of the run, after all its sections and the first steps have been shown."""
    dashboard = Dashboard(Catalogue(run.parent.parent), query="?run=group/run")
    for section in SECTIONS:
        dashboard.change(section=section)
    for step in range(3):
        dashboard.change(step=step)
    return dashboard


def ended(*arguments: str) -> int:
    """Returns the exit code of a command."""
    with pytest.raises(SystemExit) as end:
        main([*arguments])
    return int(end.value.code or 0)


FOUND_LATER = ("graphs/", "steps/")
"""Damage to these is found once they are read."""

KINDS = ("findings", "modules", "report", *FOUND_LATER)


@pytest.mark.parametrize("kind", shortened(KINDS[::-1], tried=2))
@pytest.mark.parametrize("seed", shortened([0, 1], tried=1))
def test_the_rest_of_a_run_is_shown_and_the_damage_is_named(
    run: Path, kind: str, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (key, *_) = [key for key in keys(run) if kind in key]
    flipped(run, key, seed)
    again = open_run(run)
    if kind not in FOUND_LATER:
        assert any(key in loss for loss in again.damage)
    assert len(again.kpis())
    assert again.findings().empty or kind != "findings"
    again.modules, again.report, again.edges(), again.records
    screen = opened(run).screen
    assert screen.workspace.visible
    assert not screen.banner.visible, screen.banner.html
    assert screen.damage.visible
    assert key in screen.damage.html
    assert f"comgra-decl verify {run}" in screen.damage.html
    capsys.readouterr()
    assert ended("show", str(run)) == 0
    assert kind in FOUND_LATER or "comgra-decl verify" in capsys.readouterr().out


def test_a_whole_run_says_nothing_of_damage(run: Path) -> None:
    screen = opened(run).screen
    assert not screen.damage.visible
    assert not screen.banner.visible


def test_the_rules_check_what_is_not_damaged(
    run: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    view = Reader(run).view
    record = next(at for at in range(view.n) if view.stored_values(at))
    name = next(iter(view.stored_values(record)))
    zeros = "/".join("0" * (len(view.tables.forms[name].shape) - 1))
    overwrite(run, f"{name}/c/{record}/{zeros}", b"rubbish")
    overwrite(run, step_key(0), b"rubbish")
    found = diagnose(open_run(run))
    assert found.damage
    assert "green" not in {check.colour for check in health(found)}
    assert not [entry for entry in found.unchecked if "failed" in entry.reason]
    assert "Traceback" not in caplog.text
    capsys.readouterr()
    assert ended("diagnose", str(run), "--no-together", "--fail-on", "never") == 0
    capsys.readouterr()
    assert ended("diagnose", str(run), "--no-together") == 3
    told = capsys.readouterr().out
    assert told.index("is damaged") < told.index("records of training steps checked")
    assert "comgra-decl verify" in told


def test_a_run_that_lost_all_records_is_called_damaged(run: Path) -> None:
    for name in ("records", "kpi/row", "kpi/blk"):
        for key in Reader(run).database.keys(f"{name}/c/", f"{name}/d"):
            overwrite(run, key, b"rubbish")
    screen = opened(run).screen
    assert "This run is damaged" in screen.notice.html
    assert f"comgra-decl verify {run}" in screen.notice.html


@pytest.mark.parametrize("seed", shortened(SEEDS, tried=1))
def test_no_flipped_byte_of_any_file_keeps_the_page_from_opening(run: Path, seed: int) -> None:
    """It shows the rest of the run, or why the run cannot be opened."""
    rng = random.Random(seed)
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size)
    victim = rng.choices(files, [path.stat().st_size for path in files])[0]
    data = bytearray(victim.read_bytes())
    data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
    victim.write_bytes(data)
    screen = opened(run).screen
    assert not screen.banner.visible, screen.banner.html
    assert screen.workspace.visible or "damaged" in screen.notice.html

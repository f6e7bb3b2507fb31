"""`comgra-decl plot` draws every view of a run to a file that other programs open."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.cli.commands.plot import View
from comgra_decl.query import open_run
from comgra_decl.viewer import panes
from comgra_decl.viewer.panes.base import Pane
from tests.cli.test_commands import done
from tests.support.fake_run import FakeRun
from tests.support.traced import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plot") / "runs"
    fake = FakeRun(root / "group" / "run", nodes=("embed", "head"))
    fake.write(6, commit=3)
    fake.close()
    return root


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that differ in a setting, with values, a picture, an intervention and attention."""
    root = tmp_path_factory.mktemp("probed")
    spec = {
        "nodes": {"all": {"select": "**", "values": True}},
        "probes": {"eyes": {"samples": {"count": 2}, "schedule": {"first": 9}}},
        "pictures": {
            "seen": {"method": "occlusion", "of": "eyes", "target": 0, "window": [2, 2]},
            "valley": {"method": "loss_slice", "of": "eyes", "points": 5, "measure": 0},
        },
        "interventions": {"off": {"of": "eyes", "select": "0", "do": "zero", "measure": 0}},
        "memory": {"steps": [0, 0]},
        "profile": {"steps": [1, 1]},
    }
    for rate in (0.1, 0.2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
        config = {"rate": rate}
        with comgra.trace(spec, root=root, group="g", name=f"at {rate}", config=config):
            train(model, torch.randn(4, 1, 4, 4), steps=3)
    return root / "g"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--view", "preview", "--node", "0", "--sample", "1"], "0 at step 2"),
        (["--view", "picture", "--name", "seen", "--sample", "0"], "seen"),
        (["--view", "picture", "--name", "feature_maps", "--node", "0"], "feature_maps"),
        (["--view", "effects", "--name", "off"], "off"),
        (["--view", "distributions", "--statistic", "std"], "std (forward) at step 2"),
        (["--view", "landscape", "--name", "valley"], "valley: loss_slice at step 2"),
        (["--colour", "unusual"], "most unusual sample"),
        (["--colour", "difference", "--other", "{other}"], "difference \u00b7 forward \u00b7 std"),
        (["--view", "runs-kpi", "--name", "loss", "--x", "time"], "at 0.1"),
        (["--view", "runs-series", "--node", "2", "--statistic", "std"], "at 0.2"),
        (["--view", "runs-settings", "--setting", "config.rate", "--name", "loss"], "config.rate"),
        (["--view", "runs-parallel", "--name", "loss", "--setting", "config.rate"], "rate"),
        (["--view", "embedding", "--node", "2"], "2 at step 2 (probe:eyes): principal components"),
        (["--view", "memory", "--by", "moment"], "memory over step 0"),
        (["--view", "times"], "time of each profiled step"),
    ],
)
def test_so_do_those_of_values_probes_and_several_runs(
    probed: Path, tmp_path: Path, arguments: list[str], shown: str
) -> None:
    target = tmp_path / "view.svg"
    arguments = [each.format(other=probed / "at 0.1") for each in arguments]
    assert done("plot", str(probed), str(target), *arguments) == 0
    assert shown in texts(target)


def test_runs_of_different_folders_are_drawn_together(run: Path, tmp_path: Path) -> None:
    """Both are called `run`, so the group tells them apart."""
    fake = FakeRun(tmp_path / "elsewhere" / "run", nodes=("embed", "head"))
    fake.write(4)
    fake.close()
    target = tmp_path / "both.svg"
    arguments = ["--view", "runs-series", "--node", "head", "--other", str(fake.path)]
    assert done("plot", str(run), str(target), *arguments) == 0
    assert "group/run" in texts(target)
    assert "elsewhere/run" in texts(target)


def texts(path: Path) -> str:
    """Return all text of an SVG file, which Matplotlib writes as comments beside the outlines."""
    ET.parse(path)  # well-formed
    return path.read_text()


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], "head"),
        (["--statistic", "std", "--step", "3"], "std (forward) at step 3, "),
        (["--view", "heat", "--statistic", "l2", "--pass", "grad"], "l2 (grad)"),
        (["--view", "kpis", "--name", "loss", "--smoothing", "0.5"], "loss"),
        (["--view", "series", "--node", "head", "--statistic", "std"], "std"),
        (["--view", "samples", "--node", "head", "--statistic", "std"], "sample"),
        (["--view", "distribution", "--node", "head", "--pass", "grad"], "head, grad"),
        (["--view", "histogram", "--node", "head"], "head at step 5"),
        (["--view", "cloud", "--node", "head", "--step", "2"], "head at step 2"),
        (["--view", "picture", "--name", "spectra", "--node", "head"], None),
    ],
)
def test_every_view_becomes_a_vector_image(
    run: Path, tmp_path: Path, arguments: list[str], shown: str | None
) -> None:
    target = tmp_path / "view.svg"
    code = done("plot", str(run), str(target), *arguments)
    if shown is None:  # not in this run: the reason is said, and nothing is written
        assert code == 2
        assert not target.exists()
        return
    assert code == 0
    assert shown in texts(target)


VIEWS = {
    "AttentionPane": {"attention", "attention-lines", "attention-neurons"},
    "ComparePane": {"runs-series", "graph"},  # the tensors that differ colour the graph
    "CustomPane": None,  # what the program draws with any library
    "DataPane": {"preview"},
    "DistributionPane": {"distribution", "histogram"},
    "ExplorePane": {"series", "kpis", "distributions", "cloud", "embedding", "runs-kpi"},
    "GraphPane": {"graph"},
    "KpisPane": {"kpis", "memory", "times"},
    "OverviewPane": {"heat"},
    "PicturesPane": {"picture", "landscape", "text", "lens", "embedding", "effects", "induction"},
    "RunsPane": {"runs-kpi", "runs-series", "runs-settings", "runs-parallel"},
    "SeriesPane": {"series"},
    "SheetPane": {"preview"},
    "StatisticsPane": {"samples"},
    "ValuesPane": {"preview"},
}
"""The views of `comgra-decl plot` that draw what a pane of the viewer draws."""

TEXT = {"Between", "Facts", "Findings", "Modules", "Notes", "Run", "Selectors", "Steps", "Strip"}
"""Panes of text and tables, which are copied, or saved as CSV or JSON."""


def test_every_drawing_of_the_viewer_is_a_view_of_the_command() -> None:
    for module in pkgutil.iter_modules(panes.__path__, f"{panes.__name__}."):
        importlib.import_module(module.name)
    known = (pane for pane in Pane.__subclasses__() if pane.__module__.startswith(panes.__name__))
    names = {pane.__name__ for pane in known}
    assert names == VIEWS.keys() | {f"{name}Pane" for name in TEXT}
    drawn = set().union(*(views or set() for views in VIEWS.values()))
    assert drawn == {view.value for view in View}


@pytest.mark.slow
def test_other_formats_and_the_answer_as_json(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    formats = {"a.png": b"\x89PNG", "a.PDF": b"%PDF", "a.html": b"<!DOCTYPE"}
    for name, magic in formats.items():
        assert done("plot", str(run), str(tmp_path / name), "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert told == {
            "path": str(tmp_path / name),
            "source": str(open_run(run).path),
            "view": "graph",
            "left_out": {},
        }
        assert (tmp_path / name).read_bytes().lstrip()[: len(magic)] == magic


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["a.svg", "--view", "series"], "--view series needs --node"),
        (["a.svg", "--view", "heat"], "--view heat needs --statistic"),
        (["a.svg", "--view", "picture"], "--view picture needs --name"),
        (["a.svg", "--view", "kpis", "--node", "head"], "--view kpis has no --node"),
        (["a.svg", "--view", "heat", "--statistic", "l2", "--step", "1"], "heat has no --step"),
        (["a.svg", "--view", "series", "--node", "haed"], "did you mean 'head'"),
        (["a.svg", "--step", "77"], "step 77 was not recorded"),
        (["a.gif"], "path must end with one of .html, .png, .svg, .pdf, got 'a.gif'"),
        (["no/a.svg"], "does not exist"),
        (["a.svg", "--view", "tree"], "'tree' is not one of"),
        (["a.svg", "--view", "kpis", "--smoothing", "1"], "smoothing must be at least 0"),
        (["a.svg", "--view", "preview", "--node", "head", "--sample", "99"], "no sample 99"),
        (["a.svg", "--type", "probe:x"], "no step was recorded of type 'probe:x'; the types are"),
        (["a.svg", "--colour", "time"], "'time' does not colour this graph"),
        (["a.svg", "--other", "x", "--other", "y"], "--view graph takes only one --other"),
        (["a.svg", "--view", "heat", "--statistic", "l2", "--colour", "time"], "has no --colour"),
        (["a.svg", "--view", "text", "--name", "why"], "no record of a probe"),
        (["a.svg", "--pass", "grad"], "--pass of a graph needs --statistic or --colour"),
        (["a.svg", "--view", "attention"], "has no attention weights of single samples"),
        (["a.svg", "--view", "attention-lines"], "--view attention-lines needs --node"),
        (["a.svg", "--view", "attention-neurons"], "--view attention-neurons needs --node"),
        (["a.svg", "--view", "memory", "--by", "day"], "by must be 'step' or 'moment', got 'day'"),
        (["a.svg", "--view", "runs-parallel"], "--view runs-parallel needs --name"),
        (
            ["a.svg", "--view", "runs-settings", "--setting", "a", "--setting", "b"],
            "only one --set",
        ),
        (["a.svg", "--view", "runs-kpi"], "--view runs-kpi needs --name"),
        (["a.svg", "--view", "runs-kpi", "--name", "los"], "did you mean 'loss'"),
        (["a.svg", "--view", "runs-settings", "--name", "loss"], "needs --setting"),
        (["a.svg", "--view", "heat", "--other", "x"], "--view heat has no --other"),
        (["a.svg", "--view", "runs-kpi", "--name", "loss", "--x", "y"], "x must be one of"),
        (["a.svg", "--expand", "nowhere.0"], "'nowhere.0' is not a group that can be expanded"),
    ],
)
def test_what_cannot_be_drawn_is_explained(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert done("plot", str(run), *arguments) == 2
    told = " ".join(capsys.readouterr().err.replace("\u2502", " ").split())
    assert why in told
    assert not [*tmp_path.iterdir()]

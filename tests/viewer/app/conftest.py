"""Small runs for the viewer's tests, written once per test session through the real writer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from comgra_decl.query import open_run
from comgra_decl.viewer.model.runview import RunView
from tests.support.fake_run import FakeRun
from tests.viewer.app.served import Gallery, Start, Viewed

NODES = ("Transformer", "embed", "cell", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2", "head", "aux")
BROKEN_FROM = 9


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    """A finished run of 12 steps and one evaluation, with NaN from step 9 on in one module."""
    path = tmp_path_factory.mktemp("runs") / "group" / "small"
    fake = FakeRun(path, nodes=NODES, layers=1, nonfinite_from=BROKEN_FROM)
    fake.write(12)
    fake.close()
    return fake


@pytest.fixture
def view(fake: FakeRun) -> RunView:
    """The run as the view models see it."""
    return RunView(open_run(fake.path))


@pytest.fixture(scope="session")
def root(fake: FakeRun) -> Path:
    """The folder that contains the group that contains the run."""
    return fake.path.parents[1]


@pytest.fixture(scope="session")
def server(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gallery]:
    """One server for all tests that do not change what it serves; it starts in seconds."""
    folder = tmp_path_factory.mktemp("served")
    runs = folder / "runs" / "group"
    shutil.copytree(root / "group" / "small", runs / "small")
    shutil.copytree(root / "group" / "small", runs / "torn")
    for file in (runs / "torn").rglob("*"):
        if file.is_file():
            os.truncate(file, 3)
    server = Gallery(folder)
    yield server
    server.stop()


@pytest.fixture
def viewer(server: Gallery, open_page: Callable[..., Any]) -> Callable[..., Any]:
    """Opens the viewer with a query and waits until it is ready; options as for `open_page`."""

    def open_(
        query: str = "?section=inspect", shown: str = "article[data-step]", **options: Any
    ) -> Any:
        page = open_page(**options)
        page.goto(server.url + query)
        page.locator(shown).first.wait_for()
        page.wait_for_function("() => !!(window.Bokeh && Bokeh.documents[0].is_idle)")
        return page

    return open_


@pytest.fixture
def start(root: Path) -> Iterator[Start]:
    """Starts `comgra-decl view` with further arguments and returns the address that it prints."""
    running: list[Viewed] = []

    def start_(*arguments: str, **environment: str) -> str:
        running.append(Viewed(root, *arguments, **environment))
        return running[-1].url

    yield start_
    for viewed in running:
        viewed.stop()

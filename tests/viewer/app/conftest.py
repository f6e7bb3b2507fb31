"""Small runs for the viewer's tests, written once per test session through the real writer."""

from __future__ import annotations

from pathlib import Path

import pytest

from comgra_decl.query import open_run
from comgra_decl.viewer.model.runview import RunView
from tests.support.fake_run import FakeRun

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
    """The folder that holds the group that holds the run."""
    return fake.path.parents[1]

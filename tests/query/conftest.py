"""A synthetic run shared by the tests of the reading API."""

from __future__ import annotations

import pytest

from comgra_decl.query import Run, open_run
from tests.support.fake_run import FakeRun

STEPS = 24
NODES = ("Transformer", "embed", "cell", "blocks.0.mlp.fc2", "blocks.0.mlp.act", "head", "aux")


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    """24 training and 2 evaluation records; from step 20 on, `fc2` contains NaN."""
    path = tmp_path_factory.mktemp("runs") / "group" / "fake"
    fake = FakeRun(path, nodes=NODES, nonfinite_from=20)
    fake.write(STEPS, commit=5)
    fake.close()
    return fake


@pytest.fixture(scope="session")
def run(fake: FakeRun) -> Run:
    return open_run(fake.path)

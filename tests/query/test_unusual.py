"""How far a sample is from the rest of its batch, compared with numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Run
from comgra_decl.query.unusual import away
from tests.support.traced import traced

SAMPLES = 6
NODES = {"all": {"select": "**", "capture": ["input", "output"], "values": True}}


class Net(nn.Module):
    """Sample 2 becomes an outlier in `late`, not before."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late, self.last = nn.Linear(4, 8), Spoilt(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.late(self.early(x)))


class Spoilt(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 1.0, 50.0, 1.0, 1.0, 1.0])[:, None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(SAMPLES, 4)
    return traced(
        tmp_path_factory.mktemp("unusual"), NODES, step_of(model, x), samples={"count": SAMPLES}
    )


def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Returns a run of one step."""

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model(x).square().sum().backward()
        optimizer.step()

    return train


@pytest.mark.parametrize("statistic", ["std", "mean", "abs_max"])
@pytest.mark.parametrize("node", ["early", "late", "last"])
def test_a_sample_is_compared_with_the_others(run: Run, node: str, statistic: str) -> None:
    values = run.value(node, 0).astype(float).reshape(SAMPLES, -1)
    each = {"std": values.std(1), "mean": values.mean(1), "abs_max": np.abs(values).max(1)}[
        statistic
    ]
    others = [np.delete(each, i) for i in range(SAMPLES)]
    expected = [(x - rest.mean()) / rest.std() for x, rest in zip(each, others, strict=True)]
    found = run.unusual(0, statistic).xs((node, "output", 0, "forward"))
    np.testing.assert_allclose(found, expected, rtol=2e-3)


def test_an_outlier_begins_where_it_is_made(run: Run) -> None:
    found = run.unusual(0).xs(("output", 0, "forward"), level=("role", "iteration", "pass")).abs()
    assert (found.loc["early"] < 10).all()
    assert found.loc["late"].idxmax() == found.loc["last"].idxmax() == 2
    assert found.to_numpy().max() > 20


def test_a_record_that_is_older_than_many_slots_is_compared_all_the_same(tmp_path: Path) -> None:
    class Deep(nn.Module):
        """Calls more of its layers in each step."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(70))
            self.called = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[: self.called]:
                x = layer(x)
            self.called = len(self.layers)
            return x

    torch.manual_seed(0)
    model, x = Deep(), torch.randn(SAMPLES, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train() -> None:
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()

    found = traced(tmp_path, NODES, train, samples={"count": SAMPLES})
    for step, node in ((0, "layers.0"), (1, "layers.0")):
        values = found.value(node, step).mean(1)
        others = np.array([np.delete(values, i) for i in range(SAMPLES)])
        wanted = (values - others.mean(1)) / others.std(1)
        row = found.unusual(step, "mean").xs((node, "output"), level=("node", "role"))
        np.testing.assert_allclose(row.to_numpy()[0], wanted, rtol=1e-3)


def test_what_cannot_be_compared_is_missing(tmp_path: Path) -> None:
    run = traced(tmp_path, NODES, step_of(nn.Linear(3, 2), torch.randn(2, 3)))
    assert run.unusual(0).empty  # two samples: no spread of the others
    with pytest.raises(UnknownNameError, match="statistic 'sdt' was not recorded"):
        run.unusual(0, "sdt")
    with pytest.raises(UnknownNameError, match="step 7 was not recorded"):
        run.unusual(7)


def test_one_sample_apart_from_equal_others_is_infinitely_far() -> None:
    x = np.array([[1.0, 1.0, 1.0, 5.0], [2.0, 2.0, 2.0, 2.0]])
    found = away(x, x.mean(1), x.std(1), np.array([4.0, 4.0]))
    assert found[0, 3] == np.inf
    assert (np.abs(found[0, :3]) < 1).all()
    assert np.isnan(found[1]).all()

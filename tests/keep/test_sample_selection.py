"""Equal numbers of samples from each category."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from torch import nn

import comgra_decl as comgra
from comgra_decl.query import Run
from comgra_decl.stats.sample_selection import balanced

CLASSES, BATCH, COUNT = 3, 20, 5


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(0, 12))
def test_categories_get_equal_numbers_as_far_as_they_have_them(
    labels: list[int], count: int
) -> None:
    chosen = balanced(labels, count)
    assert len(chosen) == len(set(chosen)) == min(count, len(labels))
    given_, there = Counter(labels[i] for i in chosen), Counter(labels)
    for label in there:
        fewer = [other for other in there if given_[other] > given_[label] + 1]
        assert not fewer or given_[label] == there[label]
        mine = [i for i in chosen if labels[i] == label]
        assert mine == [i for i, other in enumerate(labels) if other == label][: len(mine)]


def test_categories_take_turns_in_ascending_order() -> None:
    assert balanced([10, 9, 10, 9, 2], 5) == [4, 1, 0, 3, 2]
    assert balanced(["b", "a", 3, "b"], 4) == [2, 1, 0, 3]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.b = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        del y
        return self.b(torch.relu(self.a(x)))


def signs(
    _module: nn.Module, args: Any, _kwargs: Any, output: torch.Tensor, *, names: Sequence[str]
) -> list[str]:
    assert output.shape == (BATCH, CLASSES)
    return [names[int(value > 0)] for value in args[0][:, 0]]


def record(
    folder: Path, by: Any, *, loss: Any = nn.functional.cross_entropy, given_y: bool = False
) -> tuple[Run, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Traces a classifier; returns the run, and the inputs and classes of each step."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.randn(BATCH, 4), torch.randint(0, CLASSES, (BATCH,))) for _ in range(4)]
    spec = {
        "nodes": {"all": {"select": "**", "values": True}},
        "samples": {"count": COUNT, "by": by},
    }
    with comgra.trace(spec, root=folder) as session:
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x, y) if given_y else model(x), y).backward()
            optimizer.step()
    assert session.path is not None
    return comgra.open_run(session.path), batches


BY_CLASS = [
    ("target", nn.functional.cross_entropy, False),
    ("target", nn.CrossEntropyLoss(), False),
    ("target", lambda out, y: nn.functional.nll_loss(out.log_softmax(1), y) * 2 + 1, False),
    ({"input": 1}, nn.functional.cross_entropy, True),
    ({"input": "y"}, nn.functional.cross_entropy, True),
]


@pytest.mark.parametrize(("by", "loss", "given_y"), BY_CLASS)
def test_samples_statistics_and_values_are_those_of_the_chosen(
    by: Any, loss: Any, given_y: bool, tmp_path: Path
) -> None:
    run, batches = record(tmp_path, by, loss=loss, given_y=given_y)
    plain, _ = record(tmp_path, None, loss=loss, given_y=given_y)
    for step, (x, y) in enumerate(batches):
        chosen = run.samples(step)
        places = chosen["place"].tolist()
        assert chosen["label"].tolist() == [str(y[i].item()) for i in places]
        assert places == balanced(y.tolist(), COUNT)
        value = run.slot("input", role="input").value(step)
        assert_array_equal(value, x[places].numpy())
        row = run.slot("a").row(step)
        output = run.value("a", step)
        assert output.shape == (COUNT, 8)
        np.testing.assert_allclose(row["mean"], output.mean(1), rtol=1e-5, atol=1e-6)
        assert row.attrs["batch_index"] == places
        assert plain.value("a", step).shape == (COUNT, 8)
        assert plain.samples(step)["place"].tolist() == list(range(COUNT))
        assert plain.samples(step)["label"].isna().all()
    for statistic in run.statistics:
        assert_array_equal(run.series("a", statistic), plain.series("a", statistic))


def test_gradients_are_those_of_the_same_samples(tmp_path: Path) -> None:
    run, batches = record(tmp_path, "target")
    x, y = batches[0]
    torch.manual_seed(0)
    model = Classifier()
    hidden = model.a(x)
    hidden.retain_grad()
    nn.functional.cross_entropy(model.b(torch.relu(hidden)), y).backward()
    assert hidden.grad is not None
    places = run.samples(0)["place"].tolist()
    assert_array_equal(run.slot("a", of="grad").value(0), hidden.grad[places].numpy())


def test_a_function_names_the_categories(tmp_path: Path) -> None:
    by = {"_target_": f"{__name__}.signs", "names": ["low", "high"]}
    run, batches = record(tmp_path, by)
    for step, (x, _) in enumerate(batches):
        labels = ["high" if value > 0 else "low" for value in x[:, 0]]
        assert run.samples(step)["place"].tolist() == balanced(labels, COUNT)
        assert set(run.samples(step)["label"]) == {"low", "high"}


@pytest.mark.parametrize(
    ("by", "said"),
    [
        ({"input": "z"}, "was not given 'z'"),
        ({"input": 0}, "one category per sample"),
    ],
)
def test_without_categories_the_first_samples_are_recorded_and_it_is_said(
    by: Any, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run, _ = record(tmp_path, by)
    assert said in caplog.text
    assert run.samples(3)["place"].tolist() == list(range(COUNT))
    assert run.value("a", 3).shape == (COUNT, 8)


def test_a_loss_without_classes_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run, _ = record(tmp_path, "target", loss=lambda out, y: (out.sum(1) * y).mean())
    assert "no loss received" in caplog.text
    assert run.samples(0)["place"].tolist() == list(range(COUNT))


def evaluated(folder: Path, by: Any) -> tuple[Run, torch.Tensor]:
    """Traces a step, an evaluation with known classes, and another step."""
    torch.manual_seed(0)
    model, loss = Classifier(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(BATCH, 4), torch.arange(BATCH) % CLASSES
    classes = y.flip(0) // 2
    spec = {"nodes": {"all": {"select": "**"}}, "samples": {"count": COUNT, "by": by}}
    with comgra.trace(spec, root=folder) as session:
        for _ in range(2):
            optimizer.zero_grad()
            loss(model(x, y), y).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                loss(model(x, classes), classes)
            model.train()
    assert session.path is not None
    return comgra.open_run(session.path), classes


def test_an_evaluation_has_categories_of_its_own(tmp_path: Path) -> None:
    run, classes = evaluated(tmp_path, {"input": "y"})
    places = run.samples(1, type="eval")["place"].tolist()
    assert places == balanced(classes.tolist(), COUNT)
    assert run.samples(1)["place"].tolist() != places


def test_an_evaluation_without_a_target_is_no_trouble(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run, _ = evaluated(tmp_path, "target")
    assert run.samples(1)["label"].notna().all()
    assert run.samples(1, type="eval")["label"].isna().all()
    assert caplog.text == ""

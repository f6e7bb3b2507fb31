"""Pictures of predictions, units, concepts and clouds, computed from the records of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Run

EYES = "probe:eyes"
CLASSES = 3
KNOWN, FOREIGN = 18, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 3)
        self.act = nn.ReLU()
        self.head = nn.Linear(5, CLASSES)
        with torch.no_grad():
            assert self.conv.bias is not None
            self.conv.bias[2] = -50.0  # a unit that is always dead

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.conv(x)).mean((2, 3)))


def images(classes: Tensor) -> Tensor:
    """Images with a bright column at the place of their class, in noise."""
    x = torch.randn(len(classes), 1, 6, 6)
    x[torch.arange(len(classes)), 0, :, classes + 1] += 1.0
    return x


def probe_batch() -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    """Samples of all classes, followed by those of a category that the model does not know."""
    torch.manual_seed(7)
    classes = torch.arange(KNOWN) % CLASSES
    x = torch.cat([images(classes), 0.1 * torch.randn(FOREIGN, 1, 6, 6)])
    return (x,), {}, [*map(str, classes.tolist()), *["letter"] * FOREIGN]


def trained(root: Path, **probe: Any) -> Run:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    spec: dict[str, Any] = {
        "nodes": {
            "all": {
                "select": "**",
                "capture": ["output", "output_grad", "parameter"],
                "values": True,
            }
        },
        "schedule": {"first": 100},
        "samples": {"count": KNOWN + FOREIGN, "by": "target"},
        "probes": {
            "eyes": {
                "samples": {"count": KNOWN + FOREIGN},
                "batch": {"_target_": f"{__name__}.probe_batch"},
                "schedule": {"every": 2},
                **probe,
            }
        },
    }
    with comgra.trace(spec, root=root) as session:
        for _ in range(6):
            optimizer.zero_grad()
            classes = torch.arange(12) % CLASSES
            F.cross_entropy(model(images(classes)), classes).backward()
            optimizer.step()
    assert session.path is not None
    return comgra.open_run(session.path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(tmp_path_factory.mktemp("runs"), foreign=["letter"])


def softmax(run: Run, step: int) -> Any:
    return torch.tensor(run.value("Net", step, type=EYES)).double().softmax(1).numpy()


# -- predictions


def test_confident_errors_are_the_wrong_predictions_in_descending_order(run: Run) -> None:
    found = run.picture("confident_errors", 2)
    assert found.labels["quantity"] == ["sample", "class", "predicted class", "confidence"]
    assert found.facts == {"samples": KNOWN}
    chances = softmax(run, 2)
    wanted = [
        (i, i % CLASSES, chances[i].argmax(), chances[i].max())
        for i in range(KNOWN)
        if chances[i].argmax() != i % CLASSES
    ]
    wanted.sort(key=lambda row: -row[3])
    assert 0 < len(wanted) < KNOWN
    np.testing.assert_allclose(found.values, wanted, rtol=1e-12)


def test_foreign_samples_are_told_apart_as_well_as_scikit_learn_says(run: Run) -> None:
    found = run.picture("foreign_auroc")
    assert found.labels["step"] == [0, 2, 4]
    assert found.facts == {"familiar": KNOWN, "foreign": FOREIGN}
    familiar = np.arange(KNOWN + FOREIGN) < KNOWN
    wanted = [roc_auc_score(familiar, softmax(run, step).max(1)) for step in (0, 2, 4)]
    np.testing.assert_allclose(found.values, wanted, rtol=1e-12)
    assert run.picture("foreign_auroc", 4).values.tolist() == found.values[2:].tolist()


def test_foreign_samples_are_left_out_where_classes_are_compared(run: Run) -> None:
    assert run.picture("confusion", 4).values.sum() == KNOWN
    assert run.picture("reliability", 4).values[:, 2].sum() == KNOWN
    assert run.picture("linear_probe", 4).facts == {"fitted": [KNOWN // 2], "tested": [KNOWN // 2]}


@pytest.mark.parametrize(
    ("foreign", "why"),
    [
        ([], "no categories are declared as foreign; declare them .* foreign: "),
        (["digit"], "0 of the 24 samples of step 0 are of the foreign categories digit"),
    ],
)
def test_without_foreign_samples_the_message_says_what_to_declare(
    foreign: list[str], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UnknownNameError, match=why):
        trained(tmp_path, foreign=foreign).picture("foreign_auroc")

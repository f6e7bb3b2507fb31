"""Each record stores what its loss calls receive: shapes, dtypes, origins, arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from comgra_decl.records import LOSS_CALLS
from tests.support.recording import EVERYTHING, Recording, recording

Loss = Callable[[torch.Tensor], torch.Tensor]

LABELS = torch.tensor([0, 1, 1, 0])
NUMBERS = torch.tensor([[0.5, 1.0], [2.0, -1.0], [0.0, 3.0], [1.5, 0.25]])
COLUMN = NUMBERS[:, 0].clone()
BINARY = (NUMBERS > 0).float()
SOFT = NUMBERS.softmax(1)
WEIGHT = torch.tensor([0.3, 0.7])
X = torch.tensor([[0.1, 0.2, 0.3], [-1.0, 0.5, 0.0], [2.0, 1.0, -1.0], [0.7, -0.7, 0.4]])


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def traced(loss_of: Loss, model: nn.Module | None = None) -> Recording:
    """Records one step of a network that returns [4, 2]."""
    model = net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with recording(EVERYTHING) as run:
        loss_of(model(X)).backward()
        optimizer.step()
    assert run.faults == []
    return run


def calls(run: Recording) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run.steps[0].info.extra[LOSS_CALLS]
    return found


def summary(call: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the prediction's function, shape and origin, and the target's shape and dtype."""
    prediction, target = call["prediction"], call["target"]
    origin = prediction.get("made_by"), prediction.get("dim")
    return call["function"], prediction["shape"], *origin, target["shape"], target["dtype"]


CASES: dict[str, tuple[Loss, tuple[Any, ...]]] = {
    "a function": (
        lambda out: F.cross_entropy(out, LABELS),
        ("cross_entropy", [4, 2], "Addmm", None, [4], "int64"),
    ),
    "a module": (
        lambda out: nn.SmoothL1Loss()(out, NUMBERS),
        ("smooth_l1_loss", [4, 2], "Addmm", None, [4, 2], "float32"),
    ),
    "by keyword": (
        lambda out: F.mse_loss(input=out, target=NUMBERS),
        ("mse_loss", [4, 2], "Addmm", None, [4, 2], "float32"),
    ),
    "by hand": (
        lambda out: (out - NUMBERS).square().mean(),
        ("sub", [4, 2], "Addmm", None, [4, 2], "float32"),
    ),
    "by hand, the target first": (
        lambda out: (NUMBERS - out).square().mean(),
        ("sub", [4, 2], "Addmm", None, [4, 2], "float32"),
    ),
    "soft targets": (
        lambda out: F.cross_entropy(out, SOFT),
        ("cross_entropy", [4, 2], "Addmm", None, [4, 2], "float32"),
    ),
    "targets of another dtype": (
        lambda out: F.mse_loss(out, NUMBERS.double()),
        ("mse_loss", [4, 2], "Addmm", None, [4, 2], "float64"),
    ),
    "broadcast": (
        lambda out: (out[:, :1] - COLUMN).square().mean(),
        ("sub", [4, 1], "Addmm", None, [4], "float32"),
    ),
    "squeeze": (
        lambda out: F.mse_loss(out[:, :1].squeeze(-1), COLUMN),
        ("mse_loss", [4], "Addmm", None, [4], "float32"),
    ),
    "index": (
        lambda out: F.mse_loss(out[:, 0], COLUMN),
        ("mse_loss", [4], "Addmm", None, [4], "float32"),
    ),
    "view": (
        lambda out: F.mse_loss(out.view(-1), NUMBERS.view(-1)),
        ("mse_loss", [8], "Addmm", None, [8], "float32"),
    ),
    "sigmoid": (
        lambda out: F.binary_cross_entropy(out.sigmoid(), BINARY),
        ("binary_cross_entropy", [4, 2], "Sigmoid", None, [4, 2], "float32"),
    ),
    "softmax": (
        lambda out: F.cross_entropy(out.softmax(-1), LABELS),
        ("cross_entropy", [4, 2], "Softmax", 1, [4], "int64"),
    ),
    "softmax over the batch": (
        lambda out: F.nll_loss(out.log_softmax(0), LABELS),
        ("nll_loss", [4, 2], "LogSoftmax", 0, [4], "int64"),
    ),
    "logarithm of a softmax": (
        lambda out: F.nll_loss(out.softmax(-1).log(), LABELS),
        ("nll_loss", [4, 2], "Log", None, [4], "int64"),
    ),
    "softmax, then turned": (  # its dimension is not one of what the loss receives
        lambda out: F.nll_loss(out.view(2, 2, 2).log_softmax(2).transpose(1, 2), LABELS.view(2, 2)),
        ("nll_loss", [2, 2, 2], "LogSoftmax", None, [2, 2], "int64"),
    ),
    "another function": (
        lambda out: F.huber_loss(out.pow(2), NUMBERS),
        ("huber_loss", [4, 2], "Pow", None, [4, 2], "float32"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loss_call_tells_what_it_gets(case: str) -> None:
    loss_of, expected = CASES[case]
    (call,) = calls(traced(loss_of))
    assert summary(call) == expected
    assert call["prediction"]["dtype"] == "float32"
    assert call["target"]["slot"] == 0


def chosen_by_gather(out: torch.Tensor) -> torch.Tensor:
    return out.gather(1, LABELS[:, None])  # [4, 1]


def chosen_by_index(out: torch.Tensor) -> torch.Tensor:
    return out[torch.arange(4), LABELS]  # [4]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("choose", "function", "shape"),
    [(chosen_by_gather, "gather", [4, 1]), (chosen_by_index, "__getitem__", [4])],
)
def test_values_that_are_chosen_by_class_are_compared_by_two_calls(
    choose: Loss, function: str, shape: list[int]
) -> None:
    choice, loss = calls(traced(lambda out: F.smooth_l1_loss(choose(out), COLUMN)))
    assert summary(choice) == (function, [4, 2], "Addmm", None, shape, "int64")
    assert summary(loss) == ("smooth_l1_loss", shape, "Addmm", None, [4], "float32")
    assert [call["target"]["slot"] for call in (choice, loss)] == [0, 1]


def test_two_losses_of_one_target_name_the_same_target() -> None:
    run = traced(lambda out: F.mse_loss(out, NUMBERS) + F.l1_loss(out, NUMBERS))
    assert [(c["function"], c["target"]["slot"]) for c in calls(run)] == [
        ("mse_loss", 0),
        ("l1_loss", 0),
    ]


def test_two_targets_have_numbers_of_their_own() -> None:
    run = traced(lambda out: F.mse_loss(out, NUMBERS) + F.cross_entropy(out, LABELS))
    assert [c["target"]["slot"] for c in calls(run)] == [0, 1]


def test_a_target_that_a_network_has_computed_is_told_though_it_is_not_recorded() -> None:
    """Soft targets from a teacher, or from the network itself."""
    (call,) = calls(traced(lambda out: F.cross_entropy(out, out.detach().softmax(1))))
    assert summary(call) == ("cross_entropy", [4, 2], "Addmm", None, [4, 2], "float32")
    assert call["target"]["slot"] is None


@pytest.mark.parametrize(
    ("loss_of", "expected"),
    [
        (
            lambda out: F.cross_entropy(out, LABELS, weight=WEIGHT, ignore_index=1),
            {"weight": True, "ignore_index": 1, "reduction": "mean", "label_smoothing": 0.0},
        ),
        (
            lambda out: nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum")(out, LABELS),
            {"weight": None, "ignore_index": -100, "reduction": "sum", "label_smoothing": 0.1},
        ),
        (
            lambda out: nn.BCEWithLogitsLoss(pos_weight=WEIGHT)(out, BINARY),
            {"weight": None, "pos_weight": True, "reduction": "mean"},
        ),
        (lambda out: F.huber_loss(out, NUMBERS, "none", 0.5).sum(), {"reduction": "none"}),
    ],
)
def test_arguments_are_told_by_name(loss_of: Loss, expected: dict[str, Any]) -> None:
    (call,) = calls(traced(loss_of))
    assert {name: call["arguments"][name] for name in expected} == expected
    assert not {"input", "target"} & set(call["arguments"])


def test_class_weights_are_told_unless_they_change() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with recording(EVERYTHING) as run:
        for weight in (WEIGHT, WEIGHT.clone(), WEIGHT.flip(0), 2 * WEIGHT, WEIGHT):
            F.cross_entropy(model(X), LABELS, weight).backward()
            optimizer.step()
    told = [step.info.extra[LOSS_CALLS][0].get("weights") for step in run.steps]
    assert told == [WEIGHT.tolist(), WEIGHT.tolist(), None, None, WEIGHT.tolist()]


def test_a_third_tensor_that_is_no_weight_is_not_told_as_weights() -> None:
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    (call,) = calls(traced(lambda out: F.margin_ranking_loss(out[:, 0], out[:, 1], signs)))
    assert "weights" not in call


def test_a_step_describes_sixteen_calls_at_most() -> None:
    def loss_of(out: torch.Tensor) -> torch.Tensor:
        return torch.stack([F.mse_loss(out, NUMBERS * k) for k in range(20)]).sum()

    assert len(calls(traced(loss_of))) == 16


def test_each_record_has_its_own_calls() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with recording(EVERYTHING) as run:
        for size in (4, 3):
            F.mse_loss(model(X[:size]), NUMBERS[:size]).backward()
            optimizer.step()
        model(X).square().mean().backward()
        optimizer.step()
    shapes = [[c["target"]["shape"] for c in s.info.extra.get(LOSS_CALLS, ())] for s in run.steps]
    assert shapes == [[[4, 2]], [[3, 2]], []]


@pytest.mark.parametrize(
    ("prediction_of", "loss"),
    [
        (lambda out: out.sigmoid(), lambda p: F.binary_cross_entropy(p, BINARY)),
        (lambda out: out[:, 0], lambda p: F.mse_loss(p, COLUMN)),
        (lambda out: out.t().reshape(-1), lambda p: F.mse_loss(p, NUMBERS.view(-1))),
    ],
)
def test_a_prediction_that_no_module_returned_is_recorded(prediction_of: Loss, loss: Loss) -> None:
    model = net()
    with torch.no_grad():
        expected = prediction_of(copy.deepcopy(model)(X)).numpy()
    run = traced(lambda out: loss(prediction_of(out)), model)
    (call,) = calls(run)
    assert call["prediction"]["slot"] == 0
    np.testing.assert_array_equal(run.value("prediction").reshape(expected.shape), expected)
    assert run.total("prediction") == pytest.approx(expected.sum(), rel=1e-6)
    assert {("Linear", "prediction"), ("prediction", "loss"), ("target", "loss")} <= run.edges()


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda out: F.mse_loss(out, NUMBERS),
        lambda out: F.mse_loss(out.view(-1), NUMBERS.view(-1)),
        lambda out: F.mse_loss(out.unsqueeze(1), NUMBERS.unsqueeze(1)),
    ],
)
def test_what_a_model_returned_is_not_recorded_again_whatever_its_shape(loss_of: Loss) -> None:
    run = traced(loss_of)
    assert [call["prediction"]["slot"] for call in calls(run)] == [None]
    assert not run.has("prediction")


def test_predictions_are_numbered_as_their_calls_are() -> None:
    run = traced(lambda out: F.mse_loss(out, NUMBERS) + F.mse_loss(out[:, 0], COLUMN))
    assert [call["prediction"]["slot"] for call in calls(run)] == [None, 1]
    assert run.value("prediction", iteration=1).shape == (4,)


@pytest.mark.parametrize("case", CASES)
def test_recording_loss_calls_changes_no_bit(case: str) -> None:
    def train() -> tuple[list[torch.Tensor], torch.Tensor]:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            CASES[case][0](model(X + 0.1 * torch.randn(4, 3))).backward()
            optimizer.step()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [*model.parameters(), *gradients], torch.get_rng_state()

    tensors, state = train()
    with recording(EVERYTHING) as run:
        again, state_again = train()
    assert run.faults == []
    assert all(LOSS_CALLS in step.info.extra for step in run.steps)
    assert len(tensors) == len(again) == 4
    assert all(torch.equal(a, b) for a, b in zip(tensors, again, strict=True))
    assert torch.equal(state, state_again)

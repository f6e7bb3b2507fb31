"""Which `eval()` of a part of a model is an evaluation, and which only freezes the part."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.recording import recording


class Task(nn.Module):
    """Wraps a model together with its loss, as timm and others do; stays in training mode."""

    def __init__(self, *, head: bool) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.head = nn.Linear(4, 1) if head else nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.model(inputs))
        return outputs.square().mean()


def evaluations() -> list[int]:
    """Trains for nine steps, evaluates the inner model after every third, and records two steps."""
    torch.manual_seed(0)
    task = Task(head=False)
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    with recording(schedule={"first": 1, "every": 5}) as traced:
        for _ in range(3):
            task.model.train()
            for _ in range(3):
                task(torch.randn(5, 3)).backward()
                optimizer.step()
            task.model.eval()
            with torch.no_grad():
                task.model(torch.randn(5, 3))
    assert traced.faults == []
    return [step.info.step for step in traced.of("eval")]


def test_a_wrapped_model_is_evaluated_though_its_wrapper_stays_in_training() -> None:
    assert evaluations() == [3, 6, 9]


def test_an_encoder_that_is_switched_is_no_evaluation() -> None:
    torch.manual_seed(0)
    task = Task(head=True)
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    with recording(schedule={"first": 10}) as traced:
        task.model.eval()
        for _ in range(4):
            task(torch.randn(5, 3)).backward()
            optimizer.step()
    assert traced.of("eval") == []
    assert [step.info.step for step in traced.of("train")] == [0, 1, 2, 3]

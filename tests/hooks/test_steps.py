"""When steps begin and end, and evaluations between them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.hooks.tiny import net, step
from tests.support.recording import EVERYTHING, recording


def test_recorded_steps_follow_the_schedule() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING, schedule={"first": 2, "every": 5}) as run:
        for _ in range(14):
            step(model, optimizer)
    assert [s.info.step for s in run.steps] == [0, 1, 5, 10]


def test_gradient_accumulation_is_one_step_with_iterations() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert len(run.steps) == 1
    assert run.has("0", iteration=2)
    assert run.has("0", iteration=2, pass_="grad")


def test_an_optimizer_closure_is_one_step() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        return loss

    with recording() as run:
        for _ in range(2):
            optimizer.step(closure)
    assert [s.info.step for s in run.steps] == [0, 1]
    assert run.has("0", "weight", pass_="grad")


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Critic(Generator):
    pass


def test_adversarial_training_is_one_step_per_pair_of_optimizers() -> None:
    generator, critic = Generator(), Critic()
    optimizers = [
        torch.optim.SGD(critic.parameters(), lr=0.1),
        torch.optim.SGD(generator.parameters(), lr=0.1),
    ]
    with recording() as run:
        for _ in range(3):
            fake = generator(torch.randn(4, 3))
            critic(fake.detach()).sum().backward()
            optimizers[0].step()
            critic(fake).sum().backward()
            optimizers[1].step()
    assert [s.info.step for s in run.steps] == [0, 1, 2]
    for number in range(3):
        assert run.has("Generator.linear", "weight", pass_="grad", step=number)
        assert run.has("Critic.linear", iteration=1, step=number)
    assert {key.node for key in run.slots} >= {"Generator", "Critic", "input", "loss"}


def test_a_wrapper_around_the_optimizer_is_not_waited_for() -> None:
    class Wrapper(torch.optim.SGD):
        """Shares the state of the optimizer it wraps, like Lightning's wrapper."""

        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.__dict__ = dict(inner.__dict__)

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = Wrapper(optimizer)
    with recording() as run:
        step(model, optimizer)
        step(model, optimizer)
    assert [s.info.step for s in run.steps] == [0, 1]
    assert wrapper.param_groups is optimizer.param_groups


def test_an_evaluation_phase_is_recorded_once_and_apart_from_training() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING, schedule={"first": 1, "every": 100}) as run:
        for _ in range(3):
            model.train()
            step(model, optimizer)
            model.eval()
            with torch.no_grad():
                for _ in range(4):
                    model(torch.randn(5, 3))
    assert [(s.info.type, s.info.step) for s in run.steps] == [
        ("train", 0),
        ("eval", 1),
        ("eval", 2),
        ("eval", 3),
    ]
    evaluation = run.of("eval")[0]
    assert evaluation.info.batch_size == 5
    assert not any(key.pass_ == "grad" for key in _keys(run, evaluation))


def _keys(run: Any, step_: Any) -> set[Any]:
    ids = set(step_.layout.slots.tolist())
    return {key for key, info in run.slots.items() if info.id in ids}


def test_evaluation_can_be_thinned_out_or_left_out() -> None:
    def train(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            step(model.train(), optimizer)
            with torch.no_grad():
                model.eval()(torch.randn(5, 3))

    with recording(EVERYTHING, schedule={"first": 1, "every": 9, "eval": {"every": 2}}) as thinned:
        train(net())
    with recording(EVERYTHING, schedule={"first": 1, "every": 9, "eval": None}) as none:
        train(net())
    assert [s.info.step for s in thinned.of("eval")] == [1, 3]
    assert none.of("eval") == []


def test_inference_without_any_step_is_one_record() -> None:
    model = net().eval()
    with recording() as run, torch.no_grad():
        model(torch.randn(6, 3))
    assert [(s.info.type, s.info.batch_size) for s in run.steps] == [("eval", 6)]
    assert run.has("1")


def test_backward_without_a_step_is_recorded_and_said(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    with caplog.at_level(logging.WARNING, "comgra_decl"), recording() as run:
        model(torch.randn(4, 3)).sum().backward()
    assert len(run.steps) == 1
    assert "no optimizer step was seen" in caplog.text


def test_an_interrupted_step_leaves_no_half_record() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        step(model, optimizer)
        model(torch.randn(4, 3)).sum().backward()
    assert [s.info.step for s in run.steps] == [0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_under_checkpointing_is_no_iteration(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.second, self.first(x), use_reentrant=reentrant)

    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        step(model, optimizer)
        step(model, optimizer)
    assert run.faults == []
    assert run.has("second", step=1)
    assert not any(key.node == "second" and key.iteration for key in run.slots)


def test_a_compiled_model_is_recorded_without_recompiling() -> None:
    graphs = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with recording(EVERYTHING, schedule={"first": 1, "every": 3}) as run:
        model = net()
        compiled: Any = torch.compile(model, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            step(compiled, optimizer)
    assert run.faults == []
    assert [s.info.step for s in run.steps] == [0, 3, 6]
    assert all(run.has("1", step=s) for s in range(3))
    assert len(graphs) == 1
    assert torch._dynamo.eval_frame._stance.stance == "default"

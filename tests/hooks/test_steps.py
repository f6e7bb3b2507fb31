"""Steps, evaluation passes, several models, and what is said about what did not happen."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.recording import EVERYTHING, recording


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int = 4) -> None:
    optimizer.zero_grad()
    model(torch.randn(batch, 3)).square().mean().backward()
    optimizer.step()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


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
        """Shares the state of the one it wraps, as Lightning's does."""

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


def test_one_model_and_a_loss_module_need_no_prefix() -> None:
    model, criterion = net(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        criterion(model(torch.randn(4, 3)), torch.zeros(4, 2)).backward()
        optimizer.step()
    assert run.nodes() == {"0", "1", "Sequential", "MSELoss", "input", "target", "loss"}


def test_what_a_loss_or_a_second_model_is_given_is_no_input() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder, self.criterion = (
                nn.Linear(3, 3),
                nn.Linear(3, 2),
                nn.MSELoss(),
            )

    model, x = Parts(), torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        out = model.decoder(model.encoder(x))
        model.criterion(out, torch.zeros(4, 2)).backward()
        optimizer.step()
    assert [key for key in run.slots if key.node == "input"] == [("input", "input", 0, "forward")]
    assert {("input", "encoder"), ("encoder", "decoder"), ("decoder", "criterion")} <= run.edges()
    assert ("criterion", "loss") in run.edges()


def test_a_transform_of_the_data_is_no_part_of_the_model() -> None:
    model, transform = net(), nn.Flatten(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        batch = torch.stack([transform(torch.randn(3, 1)) for _ in range(4)])
        model(batch).sum().backward()
        optimizer.step()
    assert "Flatten" not in run.nodes()
    assert "Flatten" not in {plan["node"] for plan in run.steps[0].documents["modules"]}


@pytest.mark.parametrize("built_before", [True, False])
def test_a_child_called_on_its_own_keeps_its_full_name(built_before: bool) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

    def train(wrapper: Wrapper) -> None:
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
        step(wrapper.net, optimizer)

    wrapper = Wrapper() if built_before else None
    with recording() as run:
        train(wrapper or Wrapper())
    assert run.nodes() == {"net", "net.0", "net.1", "input", "loss"}


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


def test_what_was_declared_and_did_not_happen_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(3, 3)
            self.unused = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    nodes = {
        "all": {"select": "**", "capture": ["output"]},
        "typo": {"select": "usde", "capture": ["output"]},
    }
    model = Idle()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "comgra_decl"), recording(nodes=nodes) as run:
        step(model, optimizer)
        step(model, optimizer)
    entries = run.report["entries"]
    assert (entries["all"]["matched"], entries["all"]["fired"]) == (3, 2)
    assert entries["all"]["never_called"] == ["unused"]
    assert (entries["typo"]["matched"], entries["typo"]["written"]) == (0, 0)
    assert len(run.report["unmatched"]) == 1
    assert "usde" in run.report["unmatched"][0]
    assert "'used'" in run.report["unmatched"][0]
    assert caplog.text.count("selected but never called in this step: unused") == 1


def test_the_report_counts_what_each_entry_wrote() -> None:
    nodes = {
        "outputs": {"select": "**", "capture": ["output", "output_grad"]},
        "weights": {"select": "**", "capture": ["parameter", "parameter_grad"]},
    }
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(nodes=nodes) as run:
        step(model, optimizer)
    outputs, weights = run.report["entries"]["outputs"], run.report["entries"]["weights"]
    assert (outputs["matched"], outputs["fired"], outputs["written"]) == (3, 3, 6)
    assert (weights["matched"], weights["fired"], weights["written"]) == (3, 2, 8)


def test_a_tensor_that_cannot_be_reduced_is_reported_and_the_rest_recorded() -> None:
    class Shapes(nn.Module):
        """Asks one of its layers only for the shape of what it would return."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.shape = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.linear(x)
            assert self.shape(result.to("meta")).shape == result.shape
            return result

    model = Shapes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        step(model, optimizer)
    assert run.faults == []
    assert run.has("linear")
    assert not run.has("shape")
    (refused,) = run.report["refused"].items()
    assert refused[0] == "shape output"
    assert "meta" in refused[1]
    assert any("shape output is not recorded" in text for text in run.report["warnings"])


def test_modules_document_lists_every_module_with_its_parameters() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        step(model, optimizer)
    modules = {m["path"]: m for m in run.steps[0].documents["modules"]}
    assert set(modules) == {"", "0", "1"}
    assert modules["1"]["class"] == "Linear"
    assert modules["1"]["parameters"]["weight"] == {
        "shape": [2, 3],
        "count": 6,
        "trainable": True,
        "tied_to": None,
    }


def test_modules_that_define_equality_are_told_apart_by_identity() -> None:
    class Metric(nn.Module):
        def __init__(self, *parts: Any) -> None:
            super().__init__()
            for number, part in enumerate(parts):
                self.add_module(str(number), part)

        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> Any:
            return Metric(self, other)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.train_metric = Metric()
            self.val_metric = Metric()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.linear(x)
            self.train_metric(out)
            return out

    with recording() as run:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer)
    assert run.faults == []
    assert run.nodes() == {"linear", "train_metric", "Model", "input", "loss"}

"""Whether a call to a model is training, evaluation, or a side computation during training."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from comgra_decl.hooks import HookManager
from comgra_decl.records import RawStep, ScalarBatch
from comgra_decl.spec import load_spec
from tests.support.recording import EVERYTHING, Recording, recording

Phases = list[tuple[int, str]]


def net(*, width: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 1))


def records(run: Recording) -> Phases:
    return [(s.info.step, s.info.type) for s in run.steps]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x)
    optimizer.zero_grad()
    out.square().mean().backward()
    optimizer.step()
    return out.detach().clone()


# -- without gradient, in training mode -----------------------------------------------------------


def test_a_test_without_eval_is_not_the_first_iteration_of_the_next_step() -> None:
    """Like super_resolution in torch's examples: a loop over test batches under no_grad."""
    model, tested, out = net(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        for _ in range(3):
            out += [trained(model, optimizer, torch.randn(4, 3)) for _ in range(2)]
            with torch.no_grad():
                tested.append([model(torch.randn(7, 3)) for _ in range(3)])
    assert run.faults == []
    assert records(run) == [*((k, "train") for k in range(6)), (6, "eval")]
    for number in range(6):
        np.testing.assert_array_equal(run.value("2", step=number), out[number].numpy())
        assert run.steps[number].info.batch_size == 4
        assert run.has("2", pass_="grad", step=number)
        assert not run.has("2", iteration=1, step=number)
        assert run.has("2", pass_="no_grad", step=number) == (number in (2, 4))
    for number, phase in ((2, tested[0]), (4, tested[1])):
        for iteration, expected in enumerate(phase):
            found = run.value("2", pass_="no_grad", iteration=iteration, step=number)
            np.testing.assert_array_equal(found, expected.numpy())


def test_a_long_test_without_eval_is_cut_and_this_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING), recording() as run:
        trained(model, optimizer, torch.randn(4, 3))
        with torch.no_grad():
            for _ in range(50):
                model(torch.randn(4, 3))
        trained(model, optimizer, torch.randn(4, 3))
    assert run.faults == []
    assert run.has("2", pass_="no_grad", iteration=7, step=1)
    assert not run.has("2", pass_="no_grad", iteration=8, step=1)
    assert run.has("2", pass_="grad", step=1)
    (message,) = [r.getMessage() for r in caplog.records if "no_grad" in r.getMessage()]
    assert message.startswith("Sequential is called without gradients more often")


def test_a_test_without_eval_after_the_last_step_is_an_evaluation() -> None:
    model, tested = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        for _ in range(2):
            trained(model, optimizer, torch.randn(4, 3))
        with torch.no_grad():
            tested += [model(torch.randn(7, 3)) for _ in range(2)]
    assert run.faults == []
    assert records(run) == [(0, "train"), (1, "train"), (2, "eval")]
    for iteration, expected in enumerate(tested):
        found = run.value("2", iteration=iteration, step=2)
        np.testing.assert_array_equal(found, expected.numpy())
    (slot,) = [s for key, s in run.slots.items() if key == ("2", "output", 1, "forward")]
    assert (slot.shape, slot.batch_dim) == ((7, 1), 0)


@pytest.mark.parametrize("training", [True, False])
def test_gradients_that_the_program_makes_itself_are_those_of_a_step(training: bool) -> None:
    """Evolution strategies: nothing is called with gradients, and an optimizer steps."""
    model = net().train(training)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nodes = {"all": {"select": "**", "capture": ["output", "parameter_grad", "update"]}}
    sums = []
    with recording(EVERYTHING, nodes=nodes) as run:
        for _ in range(3):
            with torch.no_grad():
                fitness = [model(torch.randn(4, 3)).square().mean() for _ in range(2)]
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter) * fitness[0]
            weight = next(model.parameters())
            assert weight.grad is not None
            sums.append(float(weight.grad.double().sum()))
            optimizer.step()
    assert run.faults == []
    if not training:
        assert {type_ for _, type_ in records(run)} == {"eval"}
        return
    assert records(run) == [(k, "train") for k in range(3)]
    for number, expected in enumerate(sums):
        found = run.total("0", role="weight", pass_="grad", step=number)
        assert found == pytest.approx(expected, abs=1e-5)
        assert run.has("2", pass_="no_grad", iteration=1, step=number)
        assert run.has("0", role="weight", pass_="update", step=number)


def test_what_a_model_says_of_itself_first_belongs_to_the_step() -> None:
    """Self-conditioning: the model's own output, without gradient, is an input in training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = []
    with recording() as run:
        for _ in range(4):
            x = torch.randn(4, 3)
            with torch.no_grad():
                first.append(model(torch.cat([x, torch.zeros_like(x)], 1)))
            trained(model, optimizer, torch.cat([x, first[-1]], 1))
    assert run.faults == []
    assert records(run) == [(k, "train") for k in range(4)]
    for number, expected in enumerate(first):
        found = run.value("0", pass_="no_grad", step=number)
        np.testing.assert_array_equal(found, expected.numpy())
        assert run.has("0", pass_="grad", step=number)


# -- networks that stay in evaluation mode --------------------------------------------------------


class Agent(nn.Module):
    """Never called as a whole; the target network follows the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.q = net()
        self.q_target = copy.deepcopy(self.q)


@pytest.mark.parametrize("evaluated", [True, False], ids=["eval", "train mode"])
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "in one module"])
def test_a_target_network_is_part_of_each_step(apart: bool, evaluated: bool) -> None:
    agent = Agent()
    q, target = (net(), net()) if apart else (agent.q, agent.q_target)
    if evaluated:
        target.eval()
    optimizer = torch.optim.Adam(q.parameters())
    said, acted = [], []
    with recording() as run:
        for _ in range(6):
            q.train()
            x = torch.randn(4, 3)
            with torch.no_grad():
                said.append(target(x))
            loss = F.mse_loss(q(x), 0.9 * said[-1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            q.eval()
            with torch.no_grad():
                acted.append(q(torch.randn(1, 3)))
    assert run.faults == []
    assert records(run) == [x for k in range(6) for x in ((k, "train"), (k + 1, "eval"))]
    names = ("Sequential", "Sequential#2") if apart else ("q_target", "q")  # by first calls
    for number in range(6):
        step, evaluation = 2 * number, 2 * number + 1
        found = run.value(names[0], pass_="no_grad", step=step)
        np.testing.assert_array_equal(found, said[number].numpy())
        np.testing.assert_array_equal(run.value(names[1], step=evaluation), acted[number].numpy())
        assert run.has(names[1], pass_="grad", step=step)
        assert not run.has(names[0], pass_="forward", step=step)
    assert {(names[0], "loss"), (names[1], "loss")} <= run.edges()
    assert ("input", f"{names[0]}.0") in run.edges()


def test_a_perceptual_loss_is_recorded_in_both_its_calls() -> None:
    made, judge = nn.Sequential(nn.Linear(3, 3)), net().eval().requires_grad_(False)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    with recording() as run:
        for _ in range(3):
            x = torch.randn(4, 3)
            with torch.no_grad():
                wanted = judge(x)
            optimizer.zero_grad()
            F.mse_loss(judge(made(x)), wanted).backward()
            optimizer.step()
    assert run.faults == []
    assert records(run) == [(k, "train") for k in range(3)]
    for number in range(3):
        assert run.has("Sequential", pass_="no_grad", step=number)
        assert run.has("Sequential", pass_="grad", step=number)
    assert {("Sequential#2", "Sequential.0"), ("Sequential", "loss")} <= run.edges()


def test_an_average_of_the_model_that_is_evaluated_instead_of_it() -> None:
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        for _ in range(3):
            model.train()
            for _ in range(2):
                trained(model, optimizer, torch.randn(4, 3))
                average.update_parameters(model)
            model.eval()
            average.eval()
            with torch.no_grad():
                for _ in range(5):
                    average(torch.randn(7, 3))
    assert run.faults == []
    assert [s.info.step for s in run.of("train")] == [*range(6)]
    assert [(s.info.step, s.info.batch_size) for s in run.of("eval")] == [(2, 7), (4, 7), (6, 7)]


class Task(nn.Module):
    """What is called in training, as in timm: it holds the model, and maybe an average of it."""

    def __init__(self, *, averaged: bool) -> None:
        super().__init__()
        self.model = net()
        self.average = copy.deepcopy(self.model) if averaged else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(x)
        return out


@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("first", [9, 1], ids=["dense", "sparse"])
def test_a_part_is_evaluated_of_what_trains_nothing_else(averaged: bool, first: int) -> None:
    task = Task(averaged=averaged)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
    with recording(EVERYTHING, schedule={"first": first, "eval": {"first": 9}}) as run:
        for _ in range(2):
            task.model.train()
            for _ in range(2):
                trained(task, optimizer, torch.randn(4, 3))
            task.model.eval()
            with torch.no_grad():
                task.model(torch.randn(7, 3))
    assert run.faults == []
    assert [(s.info.step, s.info.batch_size) for s in run.of("eval")] == [(2, 7), (4, 7)]


def test_a_part_is_only_frozen_of_what_trains_other_parts() -> None:
    task = Task(averaged=True)
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    with recording() as run:
        for _ in range(3):
            task.model.eval()
            trained(task, optimizer, torch.randn(4, 3))
    assert run.faults == []
    assert records(run) == [(k, "train") for k in range(3)]


def test_a_frozen_backbone_that_is_called_by_itself() -> None:
    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = net(width=5).eval().requires_grad_(False)
            self.head = nn.Linear(1, 1)

    model = Tuned()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with recording() as run:
        for _ in range(4):
            with torch.no_grad():
                features = model.backbone(torch.randn(4, 3))
            trained(model.head, optimizer, features)
    assert run.faults == []
    assert records(run) == [(k, "train") for k in range(4)]
    assert all(run.has("backbone", pass_="no_grad", step=k) for k in range(4))
    assert ("backbone", "head") in run.edges()


# -- before anything is trained -------------------------------------------------------------------


@pytest.mark.parametrize("without_gradient", [True, False])
def test_a_model_that_is_evaluated_before_it_is_trained(without_gradient: bool) -> None:
    """Like Lightning's sanity check."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        model.eval()
        with torch.set_grad_enabled(not without_gradient):
            checked = [model(torch.randn(5, 3)).detach() for _ in range(2)]
        model.train()
        out = [trained(model, optimizer, torch.randn(4, 3)) for _ in range(3)]
    assert run.faults == []
    assert records(run) == [(0, "eval"), (0, "train"), (1, "train"), (2, "train")]
    np.testing.assert_array_equal(run.value("2", step=0), checked[0].numpy())
    for number, expected in enumerate(out):
        np.testing.assert_array_equal(run.value("2", step=number + 1), expected.numpy())
        assert not run.has("2", iteration=1, step=number + 1)


def test_an_evaluation_of_two_models_before_each_is_trained_joins_them_in_no_step() -> None:
    """Each has its own optimizer, and both are evaluated before the first step."""
    models = [net(), net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with recording() as run:
        for model in models:
            model.eval()
            model(torch.randn(5, 3))
            model.train()
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                trained(model, optimizer, torch.randn(4, 3))
    assert run.faults == []
    assert records(run) == [(0, "eval"), *((k, "train") for k in range(6))]


@pytest.mark.parametrize("acting", [1, 2500])
def test_a_model_that_acts_for_long_leaves_room_for_another_one(acting: int) -> None:
    """As when training from a replay buffer, where the actor is called with gradients."""
    actor, target = net(), net()
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
    with recording(EVERYTHING, schedule={"first": 1, "max_iterations": 4}) as run:
        for _ in range(acting):
            actor(torch.randn(1, 3))
        aim = target(torch.randn(4, 3)).detach()
        F.mse_loss(actor(torch.randn(4, 3)), aim).backward()
        optimizer.step()
    assert run.faults == []
    np.testing.assert_array_equal(run.value("Sequential#2"), aim.numpy())
    assert run.has("Sequential.0", role="weight", pass_="grad")


def test_an_evaluation_before_the_training_may_be_left_out() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING, schedule={"first": 9, "eval": None}) as run:
        with torch.no_grad():
            model.eval()(torch.randn(5, 3))
        trained(model.train(), optimizer, torch.randn(4, 3))
    assert run.faults == []
    assert records(run) == [(0, "train")]
    assert run.has("2", pass_="grad")


@pytest.mark.parametrize("training", [True, False], ids=["train mode", "eval"])
@pytest.mark.parametrize("gradient", [True, False], ids=["with grad", "no_grad"])
def test_a_program_that_trains_nothing_is_one_evaluation_with_its_graph(
    training: bool, gradient: bool
) -> None:
    model = net().train(training)
    with recording() as run, torch.set_grad_enabled(gradient):
        out = [model(torch.randn(5, 3)).detach() for _ in range(3)]
    assert run.faults == []
    assert records(run) == [(0, "eval")]
    np.testing.assert_array_equal(run.value("2"), out[0].numpy())
    assert {("input", "0"), ("0", "1"), ("1", "2"), ("0.weight", "0")} <= run.edges()


def test_layers_with_native_kernels_compute_with_them_while_their_graph_is_followed() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Linear(3, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 1)).eval()
    x = torch.randn(4, 5, 3)
    with torch.no_grad():
        expected = model(x)
        with recording() as run:
            assert torch.equal(model(x), expected)
    assert run.faults == []
    edges = {(a.partition(".")[0], b.partition(".")[0]) for a, b in run.edges()}
    assert {("input", "0"), ("0", "1"), ("1", "2")} <= edges


def test_inputs_that_a_training_program_draws_before_it_trains_take_no_phase() -> None:
    """A teacher, called before its student for the first time, while no step is recorded."""
    teacher, student = net().eval(), net()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    schedule = {"first": 0, "steps": [2], "eval": {"first": 1, "every": None}}
    with recording(EVERYTHING, schedule=schedule) as run:
        teacher.eval()
        for _ in range(4):
            x = torch.randn(4, 3)
            with torch.no_grad():
                teacher(x)
            trained(student, optimizer, x)
        with torch.no_grad():
            student.eval()(torch.randn(7, 3))
    assert run.faults == []
    assert [(s.info.type, s.info.batch_size) for s in run.steps] == [("train", 4), ("eval", 7)]


# -- training in evaluation mode ------------------------------------------------------------------


def test_a_model_that_goes_on_to_train_in_evaluation_mode_is_trained() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        for epoch in range(2):
            model.train(epoch == 0)
            for _ in range(3):
                trained(model, optimizer, torch.randn(4, 3))
    assert run.faults == []
    assert records(run) == [(k, "train") for k in range(6)]
    assert all(run.has("2", pass_="grad", step=k) for k in range(6))


def test_an_evaluation_with_gradients_is_an_evaluation() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        for _ in range(3):
            trained(model.train(), optimizer, torch.randn(4, 3))
            model.eval()
            for _ in range(4):
                model(torch.randn(7, 3))
    assert run.faults == []
    expected = [x for k in range(3) for x in ((k, "train"), (k + 1, "eval"))]
    assert records(run) == expected
    assert [s.info.batch_size for s in run.of("eval")] == [7, 7, 7]


def style_transfer(
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], *, steps: int
) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """Returns the network's output and the gradients of the image, for each call in each step."""
    layers = [nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)]
    network = nn.Sequential()
    for number, layer in enumerate(layers):
        network.add_module(str(number), layer.eval())
        network(torch.randn(2, 3)).detach()  # the target for this layer
    network.eval().requires_grad_(False)
    image = torch.randn(2, 3, requires_grad=True)
    optimizer = make([image])
    said: list[list[torch.Tensor]] = []
    arrived: list[list[torch.Tensor]] = []

    def closure() -> float:
        optimizer.zero_grad()
        out = network(image)
        loss = (out - 1).square().mean()
        loss.backward()
        assert image.grad is not None
        said[-1].append(out.detach().clone())
        arrived[-1].append(image.grad.clone())
        return float(loss.detach())

    for _ in range(steps):
        said.append([])
        arrived.append([])
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return said, arrived


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=12), lambda p: torch.optim.Adam(p)],
    ids=["closure", "plain"],
)
@pytest.mark.parametrize("every", [1, 2])
def test_an_image_is_trained_by_a_network_that_was_called_while_it_was_built(
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], every: int
) -> None:
    """Neural style transfer; what builds the network are the first iterations of the first step."""
    with recording(EVERYTHING, schedule={"first": 1, "every": every}) as run:
        said, arrived = style_transfer(make, steps=3)
    assert run.faults == []
    numbers = [*range(0, 3, every)]
    assert records(run) == [(k, "train") for k in numbers]
    for position, number in enumerate(numbers):
        for k, out in enumerate(said[number]):
            called, given = (k + 1, k + 3) if number == 0 else (k, k)  # of 3 parts, then of 1 whole
            found = run.value("2", iteration=called, step=position)
            np.testing.assert_array_equal(found, out.numpy())
            found = run.value("input", "input", iteration=given, pass_="grad", step=position)
            np.testing.assert_array_equal(found, arrived[number][k].numpy())
    assert {key.pass_ for key in run.slots} == {"forward", "grad"}


@pytest.mark.parametrize("first", [0, 1])
def test_a_closure_is_no_evaluation_even_where_its_step_is_not_recorded(first: int) -> None:
    with recording(EVERYTHING, schedule={"first": first, "steps": [2]}) as run:
        style_transfer(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3), steps=4)
    assert run.faults == []
    assert records(run) == [(2, "train")]


def test_an_evaluation_with_gradients_before_the_training_is_none_of_its_calls() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        model(torch.randn(2, 3))  # to see whether it runs
        model.eval()
        model(torch.randn(7, 3))
        trained(model.train(), optimizer, torch.randn(4, 3))
    assert run.faults == []
    assert records(run) == [(0, "eval"), (0, "train")]
    assert run.steps[1].info.batch_size == 4
    assert not run.has("2", iteration=1, step=1)


# -- backward after the last step -----------------------------------------------------------------


@pytest.mark.parametrize("before", [False, True], ids=["trained plainly", "and adversarially"])
def test_what_backward_is_called_on_after_the_training_is_an_evaluation(before: bool) -> None:
    """Saliency, DeepDream, FGSM; adversarial examples may also have been made in the steps."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made, said = [], []
    with recording() as run:
        for _ in range(3):
            if before:
                x = torch.randn(4, 3, requires_grad=True)
                model.eval()(x).sum().backward()
            trained(model.train(), optimizer, torch.randn(4, 3))
        model.eval()
        image = torch.randn(5, 3, requires_grad=True)
        for _ in range(4):
            out = model(image)
            said.append(out.detach().clone())
            out.sum().backward()
            made.append(image.grad.clone() if image.grad is not None else None)
            image.data += 0.1
            image.grad = None
    assert run.faults == []
    assert records(run) == [(0, "train"), (1, "train"), (2, "train"), (3, "eval")]
    for iteration, (out, gradient) in enumerate(zip(said, made, strict=True)):
        np.testing.assert_array_equal(run.value("2", iteration=iteration, step=3), out.numpy())
        assert gradient is not None
        assert run.has("2", pass_="grad", iteration=iteration, step=3)
    passes = {key.pass_ for key in run.slots if key.node == "2" and key.role == "output"}
    assert "grad:autograd.grad" not in passes


def test_calls_with_gradients_in_a_recorded_phase_have_the_pass_of_their_backward() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = {"first": 1, "every": None, "eval": {"batches": 3}}
    with recording(EVERYTHING, schedule=schedule) as run:
        for _ in range(3):
            trained(model, optimizer, torch.randn(4, 3))
        model.eval()
        for k in range(3):
            out = model(torch.randn(5, 3))
            if k == 0:
                out.sum().backward()
            if k == 1:
                torch.autograd.grad(out.sum(), [*model.parameters()])
    assert run.faults == []
    assert records(run) == [(0, "train"), (3, "eval")]
    assert run.has("2", pass_="grad", iteration=0, step=1)
    assert not run.has("2", pass_="grad:autograd.grad", iteration=0, step=1)
    assert run.has("2", pass_="grad:autograd.grad", iteration=1, step=1)


def test_saliency_after_a_test_that_has_a_record_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING), recording() as run:
        trained(model, optimizer, torch.randn(4, 3))
        model.eval()
        with torch.no_grad():
            model(torch.randn(7, 3))
        model(torch.randn(5, 3)).sum().backward()
    assert run.faults == []
    assert [(*r, s.info.batch_size) for r, s in zip(records(run), run.steps, strict=True)] == [
        (0, "train", 4),
        (1, "eval", 7),
    ]
    (message,) = [r.getMessage() for r in caplog.records]
    assert message.startswith("the evaluation after the last step is recorded (step 1). Later")


def losses_said(schedule: dict[str, object], program: Callable[[], None]) -> list[tuple[int, str]]:
    """Returns the steps and types of all losses of a program."""
    said: list[ScalarBatch] = []
    faults: list[BaseException] = []
    spec = load_spec({**EVERYTHING, "schedule": schedule, "kpis": {"automatic": False}})
    manager = HookManager(spec, lambda _: None, on_fault=faults.append, scalars=said.append)
    manager.attach()
    try:
        program()
    finally:
        manager.detach()
    assert faults == []
    steps = [int(step) for part in said for step in part.steps]
    return list(zip(steps, [t for part in said for t in part.types], strict=True))


@pytest.mark.parametrize("schedule", [{"first": 9}, {"first": 1, "every": None}])
def test_losses_of_an_evaluation_after_the_last_step_are_those_of_no_step(
    schedule: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def program() -> None:
        for _ in range(2):
            trained(model, optimizer, torch.randn(4, 3))
        model.eval()
        for _ in range(2):
            model(torch.randn(4, 3)).sum().backward()

    with caplog.at_level(logging.WARNING):
        types = losses_said(schedule, program)
    assert types == [(0, "train"), (1, "train"), (2, "eval"), (2, "eval")]
    assert not caplog.records


@pytest.mark.parametrize("schedule", [{"first": 9}, {"first": 1, "every": None}, {"steps": [2]}])
@pytest.mark.parametrize("evaluated", [False, True], ids=["train mode", "tuned in eval mode"])
def test_a_step_that_the_program_does_not_end_is_said(
    schedule: dict[str, object], evaluated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As after Ctrl-C, or if the last batches of an epoch are not enough for an update."""
    model = net().train(not evaluated)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def program() -> None:
        for _ in range(2):
            trained(model, optimizer, torch.randn(4, 3))
        model(torch.randn(4, 3)).sum().backward()

    with caplog.at_level(logging.WARNING):
        types = losses_said(schedule, program)
    assert types == [(k, "train") for k in range(3)]
    (message,) = [r.getMessage() for r in caplog.records]
    assert message.startswith("step 2 was not completed: backward() was called after")


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [lambda: nn.MSELoss(), lambda: Halved()], ids=["torch", "own"])
def test_a_loss_that_is_made_anew_in_each_step_is_one_node(
    made: Callable[[], nn.Module],
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        for _ in range(5):
            optimizer.zero_grad()
            made()(model(torch.randn(4, 3)), torch.randn(4, 1)).backward()
            optimizer.step()
    assert run.faults == []
    name = type(made()).__name__
    assert {k.node for k in run.slots if name in k.node and "." not in k.node} == {name}
    assert all(run.has(name, step=k) for k in range(5))


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.L1Loss()

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 0.5 * self.inner(out, y)


def test_what_is_put_around_a_model_anew_in_each_step_is_one_node() -> None:
    """Like a program that wraps the same layers for each task or batch."""
    layers = nn.Linear(3, 5), nn.Linear(5, 1)
    optimizer = torch.optim.SGD([p for part in layers for p in part.parameters()], lr=0.1)
    with recording() as run:
        for _ in range(5):
            model = nn.Sequential(*layers)
            trained(model, optimizer, torch.randn(4, 3))
            del model
    assert run.faults == []
    assert not [key.node for key in run.slots if "#" in key.node]
    assert all(run.has("1", step=k) for k in range(5))


def test_a_loss_module_of_an_evaluation_is_none_of_the_next_step() -> None:
    model, criterion = net(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        for _ in range(3):
            optimizer.zero_grad()
            criterion(model(torch.randn(4, 3)), torch.randn(4, 1)).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                criterion(model(torch.randn(7, 3)), torch.randn(7, 1))
            model.train()
    assert run.faults == []
    assert [s.info.step for s in run.of("train")] == [0, 1, 2]
    assert [s.info.batch_size for s in run.of("eval")] == [7, 7, 7]
    assert not any(key.iteration or key.pass_ == "no_grad" for key in run.slots)
    modes = [step.info.mode for step in run.steps]
    assert all("MSELoss" in run.nodes(k) for k, mode in enumerate(modes) if mode == "train")


def test_two_models_of_one_class_have_nodes_and_modules_of_their_own() -> None:
    models = [net(), net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with recording() as run:
        out = [
            trained(model, optimizer, torch.randn(4, 3))
            for _ in range(2)
            for model, optimizer in zip(models, optimizers, strict=True)
        ]
    for position, expected in enumerate(out):
        node = ("2", "Sequential#2.2")[position % 2]
        np.testing.assert_array_equal(run.value(node, step=position), expected.numpy())
    described = [s.documents["modules"] for s in run.steps if "modules" in s.documents][-1]
    nodes = {module["node"] for module in described}
    assert {"0", "2", "Sequential#2", "Sequential#2.0", "Sequential#2.2"} <= nodes
    weights = {(k.node, k.role) for k, info in run.slots.items() if info.kind == "parameter"}
    assert {("2", "weight"), ("Sequential#2.2", "weight")} <= weights
    assert not any("#2#" in k.node or k.node.endswith(".2#2") for k in run.slots)


def test_ever_new_models_do_not_make_ever_new_nodes() -> None:
    """Like the clients of federated learning, each a copy that is dropped after its round."""
    server = net()
    with recording() as run:
        for _ in range(50):
            client = copy.deepcopy(server)
            optimizer = torch.optim.SGD(client.parameters(), lr=0.1)
            trained(client, optimizer, torch.randn(4, 3))
            del client, optimizer
    assert run.faults == []
    assert [s.info.step for s in run.steps] == [*range(50)]
    assert len({k.node.partition(".")[0] for k in run.slots if "#" in k.node}) < 35


def test_models_keep_their_names_when_the_spec_changes_meanwhile() -> None:
    models = [net(), net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    steps: list[RawStep] = []
    faults: list[BaseException] = []
    manager = HookManager(load_spec(EVERYTHING), steps.append, on_fault=faults.append)
    manager.attach()
    try:
        for number, order in enumerate([(0, 1), (1, 0), (1, 0)]):
            for which in order:
                trained(models[which], optimizers[which], torch.randn(4, 3))
            if not number:
                manager.replace(load_spec({**EVERYTHING, "exclude": ["1"]}), "changed")
    finally:
        manager.detach()
    assert faults == []
    made = {info.key.node for step in steps for info in step.new_slots}
    assert {"0", "2", "Sequential", "Sequential#2", "Sequential#2.0", "Sequential#2.2"} <= made
    assert not any(node.startswith(("Sequential.", "Sequential#3")) for node in made)
    weights = [_ids(step, steps, "weight") for step in steps]
    assert weights[0] == weights[3] == weights[5]
    assert weights[1] == weights[2] == weights[4]


def _ids(step: RawStep, steps: list[RawStep], role: str) -> set[int]:
    slots = {info.id: info.key for each in steps for info in each.new_slots}
    return {i for i in step.layout.slots.tolist() if slots[i].role == role}

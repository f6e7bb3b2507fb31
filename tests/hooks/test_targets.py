"""Targets are found automatically, whatever the loss is made of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import comgra_decl as comgra
from tests.support.recording import EVERYTHING, Recording, recording

Loss = Callable[[torch.Tensor], torch.Tensor]


def step(
    model: nn.Module, x: torch.Tensor, loss_of: Loss, *, steps: int = 1, **spec: object
) -> Recording:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with recording(EVERYTHING, **spec) as run:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            optimizer.step()
    assert run.faults == []
    return run


def targets(run: Recording) -> list[np.ndarray]:
    """Returns the recorded targets of the first step, in order."""
    keys = sorted(k.iteration for k, info in run.slots.items() if info.kind == "target")
    assert {k.node for k, info in run.slots.items() if info.kind == "target"} <= {"target"}
    return [run.value("target", "target", iteration=i) for i in keys]


LABELS = torch.tensor([0, 1, 1, 0])
NUMBERS = torch.tensor([[0.5, 1.0], [2.0, -1.0], [0.0, 3.0], [1.5, 0.25]])
CASES: dict[str, tuple[Loss, torch.Tensor]] = {
    "classification": (lambda out: F.cross_entropy(out, LABELS), LABELS),
    "classification by a module": (lambda out: nn.CrossEntropyLoss()(out, LABELS), LABELS),
    "weighted classes": (
        lambda out: F.cross_entropy(out, LABELS, weight=torch.tensor([0.3, 0.7])),
        LABELS,
    ),
    "by keyword": (lambda out: F.nll_loss(input=F.log_softmax(out, 1), target=LABELS), LABELS),
    "regression": (lambda out: F.mse_loss(out, NUMBERS), NUMBERS),
    "regression by a module": (lambda out: nn.SmoothL1Loss()(out, NUMBERS), NUMBERS),
    "regression by hand": (lambda out: (out - NUMBERS).square().mean(), NUMBERS),
    "binary by hand": (
        lambda out: -(NUMBERS * F.logsigmoid(out) + (1 - NUMBERS) * F.logsigmoid(-out)).mean(),
        NUMBERS,
    ),
    "adversarial": (
        lambda out: F.binary_cross_entropy_with_logits(out, torch.ones_like(out)),
        torch.ones(4, 2),
    ),
    "contrastive": (lambda out: F.cross_entropy(out @ out.T, torch.arange(4)), torch.arange(4)),
    "policy": (
        lambda out: -(F.log_softmax(out, 1)[torch.arange(4), LABELS]).mean(),
        LABELS,
    ),
}


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "no graph"])
@pytest.mark.parametrize("case", CASES)
def test_the_target_is_what_the_loss_compares_with(case: str, graph: bool) -> None:
    loss_of, expected = CASES[case]
    run = step(nn.Linear(3, 2), torch.randn(4, 3), loss_of, graph=graph)
    found = targets(run)
    assert len(found) == 1
    np.testing.assert_array_equal(found[0], expected.numpy())


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda out: out.square().mean(),
        lambda out: (out + torch.randn(4, 2)).square().mean(),
        lambda out: (out + torch.randn_like(out)).square().mean(),
        lambda out: ((out @ out.T) * (1 - torch.eye(4))).sum(),
        lambda out: out.masked_fill(torch.eye(4, 2, dtype=torch.bool), 0.0).sum(),
        lambda out: F.mse_loss(out, out.detach()),
        lambda out: F.cross_entropy(out, out.argmax(1)),
        lambda out: (out * torch.tensor(0.5)).sum(),
        lambda out: out.view_as(NUMBERS).sum(),
    ],
)
def test_noise_constants_masks_and_what_the_model_computed_are_no_targets(loss_of: Loss) -> None:
    assert targets(step(nn.Linear(3, 2), torch.randn(4, 3), loss_of)) == []


def test_a_target_is_recorded_at_every_step_also_without_a_new_graph() -> None:
    run = step(nn.Linear(3, 2), torch.randn(4, 3), lambda out: F.mse_loss(out, NUMBERS), steps=4)
    assert all(run.has("target", "target", step=s) for s in range(4))
    assert len(run.structures) == 1


def test_the_target_has_an_edge_to_the_loss() -> None:
    run = step(nn.Linear(3, 2), torch.randn(4, 3), lambda out: F.mse_loss(out, NUMBERS))
    assert ("target", "loss") in run.edges()
    graph = run.structures[0]
    names = [key.node for key in graph.keys]
    carries = {(names[s], names[t]): grad for s, t, grad in graph.edges}
    assert carries["target", "loss"] is False
    assert carries["Linear", "loss"] is True


def test_a_loss_module_stands_between_target_and_loss() -> None:
    run = step(nn.Linear(3, 2), torch.randn(4, 3), lambda out: nn.MSELoss()(out, NUMBERS))
    assert {("target", "MSELoss"), ("MSELoss", "loss")} <= run.edges()


def test_what_an_autoencoder_is_to_restore_is_its_input() -> None:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(3, 4), nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            mean, log_var = self.encode(x).chunk(2, 1)
            return self.decode(mean + torch.randn_like(mean) * log_var.exp()), mean, log_var

    model, x = Autoencoder(), torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with recording() as run:
        restored, mean, log_var = model(x)
        divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
        loss = F.mse_loss(restored, x) + divergence
        loss.backward()
        optimizer.step()
    assert targets(run) == []
    assert {("input", "loss"), ("Autoencoder", "loss")} <= run.edges()


def test_each_step_of_a_sequence_has_its_target() -> None:
    torch.manual_seed(0)
    encoder, decoder, head = nn.GRU(3, 4), nn.GRUCell(3, 4), nn.Linear(4, 5)
    model = nn.ModuleList([encoder, decoder, head])
    x, y = torch.randn(6, 2, 3), torch.randint(0, 5, (2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with recording() as run:
        hidden = encoder(x)[1][0]
        loss = torch.zeros(())
        for t in range(3):
            hidden = decoder(F.one_hot(y[:, t], 3 + 2)[:, :3].float(), hidden)
            loss = loss + F.cross_entropy(head(hidden), y[:, t])
        loss.backward()
        optimizer.step()
    assert run.faults == []
    found = targets(run)
    assert len(found) == 3
    for t in range(3):
        np.testing.assert_array_equal(found[t], y[:, t].numpy())


def test_a_tensor_that_is_filled_with_other_labels_is_another_target() -> None:
    """Like DCGAN, which has one tensor for the labels of real and of generated samples."""
    torch.manual_seed(0)
    model, label = nn.Linear(3, 1), torch.empty(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with recording(EVERYTHING) as run:
        for value in (1.0, 0.0, 0.0):
            if value or label[0]:
                label.fill_(value)
            F.binary_cross_entropy_with_logits(model(torch.randn(4, 3)), label).backward()
        optimizer.step()
    assert run.faults == []
    ones, zeros = targets(run)
    np.testing.assert_array_equal(ones, np.ones((4, 1)))
    np.testing.assert_array_equal(zeros, np.zeros((4, 1)))
    slots = [call["target"]["slot"] for call in run.steps[0].info.extra["loss_calls"]]
    assert slots == [0, 1, 1]


def test_adversaries_have_the_labels_of_their_losses_as_targets() -> None:
    generator, critic = nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 1))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (generator, critic)]
    with recording() as run:
        real, fake = torch.randn(4, 2), generator(torch.randn(4, 3))
        loss_d = F.binary_cross_entropy_with_logits(critic(real), torch.ones(4, 1))
        loss_d = loss_d + F.binary_cross_entropy_with_logits(
            critic(fake.detach()), torch.zeros(4, 1)
        )
        loss_d.backward()
        optimizers[1].step()
        loss_g = F.binary_cross_entropy_with_logits(critic(fake), torch.ones(4, 1))
        loss_g.backward()
        optimizers[0].step()
    assert run.faults == []
    assert [float(t.mean()) for t in targets(run)] == [1.0, 0.0, 1.0]
    assert {("target", "loss"), ("target", "loss:loss_g")} <= run.edges()


def test_a_target_used_twice_is_one() -> None:
    run = step(
        nn.Linear(3, 2),
        torch.randn(4, 3),
        lambda out: F.mse_loss(out, NUMBERS) + F.l1_loss(out, NUMBERS),
    )
    assert len(targets(run)) == 1


def test_an_evaluation_has_no_function_mode() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    with recording() as run:
        F.mse_loss(model(torch.randn(4, 3)), NUMBERS).backward()
        model.eval()
        model.register_forward_hook(lambda *_: seen.append(torch._C._len_torch_function_stack()))
        with torch.no_grad():
            model(torch.randn(4, 3))
        optimizer.step()
    assert seen == [0]
    assert torch._C._len_torch_function_stack() == 0
    assert run.faults == []


def test_a_target_that_the_program_names_is_not_found_again() -> None:
    model, y = nn.Linear(3, 2), NUMBERS.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with recording() as run:
        for _ in range(2):
            named = comgra.node(y, "label", kind="target")
            F.mse_loss(model(torch.randn(4, 3)), named).backward()
            optimizer.step()
    assert run.faults == []
    assert {key.node for key, info in run.slots.items() if info.kind == "target"} == {"label"}
    assert ("label", "loss") in run.edges()


def test_the_same_tensor_is_the_target_of_every_step() -> None:
    run = step(nn.Linear(3, 2), torch.randn(4, 3), lambda out: F.mse_loss(out, NUMBERS), steps=3)
    assert {k.iteration for k, info in run.slots.items() if info.kind == "target"} == {0}


@pytest.mark.parametrize("training", [True, False], ids=["in training mode", "in evaluation mode"])
def test_what_a_teacher_says_is_a_node_of_its_own(training: bool) -> None:
    student, teacher = nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2)).train(training)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01)
    said = []
    with recording() as run:
        for _ in range(3):
            x = torch.randn(4, 3)
            out = student(x)
            with torch.no_grad():
                said.append(teacher(x))
            F.mse_loss(out, said[-1]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.faults == []
    assert [(s.info.step, s.info.type) for s in run.steps] == [(k, "train") for k in range(3)]
    assert targets(run) == []
    assert {("Sequential", "loss"), ("Linear", "loss")} <= run.edges()
    for step_, expected in enumerate(said):
        found = run.value("Sequential", pass_="no_grad", step=step_)
        np.testing.assert_array_equal(found, expected.numpy())
    assert not run.has("Sequential", pass_="forward")

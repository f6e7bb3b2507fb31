"""Without a torch optimizer, every update ends a step and has the gradients that it used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import _unsafe_preserve_version_counter as unseen  # type: ignore[attr-defined]
from torch.nn import functional as F

import comgra_decl as comgra
from tests.support.recording import EVERYTHING, Recording, recording

SPARSE = {**EVERYTHING, "schedule": {"first": 1, "every": 5}}
LATE = {**EVERYTHING, "schedule": {"steps": [3, 4, 9]}}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def in_place(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    with torch.no_grad():
        parameter -= 0.1 * gradient


def through_data(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Like word_language_model: torch counts no change."""
    parameter.data.add_(gradient.data, alpha=-0.1)


def another_storage(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    parameter.data = parameter.data - 0.1 * gradient


def by_function(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """An optimizer without state, like `torch.optim` has for its own classes."""
    from torch.optim.sgd import sgd

    with torch.no_grad():
        sgd(
            [parameter], [gradient], [None], weight_decay=0, momentum=0, lr=0.1, dampening=0,
            nesterov=False, maximize=False,
        )  # fmt: skip


UPDATES = [in_place, through_data, another_storage, by_function]


def to_none(model: nn.Module) -> None:
    model.zero_grad()


def to_zero(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


class Training:
    """A loop without an optimizer, and what it used in each update."""

    def __init__(
        self,
        update: Callable[[torch.Tensor, torch.Tensor], None] = in_place,
        clear: Callable[[nn.Module], None] = to_none,
        *,
        cleared: str = "before forward",
        batches: int = 1,
        clip: float | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.model = net()
        self.update, self.clear, self.cleared = update, clear, cleared
        self.batches, self.clip = batches, clip
        self.used: list[np.ndarray[Any, Any]] = []
        self.losses: list[float] = []

    def step(self) -> None:
        if self.cleared == "before forward":
            self.clear(self.model)
        for _ in range(self.batches):
            loss = self.model(torch.randn(4, 3)).square().mean()
            if self.cleared == "before backward":
                self.clear(self.model)
            loss.backward()
            self.losses.append(loss.item())
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        gradient = self.model.get_parameter("2.weight").grad
        assert gradient is not None
        self.used.append(gradient.numpy().copy())
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            self.update(parameter, parameter.grad)
        if self.cleared == "after update":
            self.clear(self.model)

    def compare(self, run: Recording, steps: Iterator[int] | list[int]) -> None:
        assert run.faults == []
        assert [(s.info.step, s.info.mode) for s in run.steps] == [(k, "train") for k in steps]
        for position, record in enumerate(run.steps):
            found = run.value("2", "weight", pass_="grad", step=position)[0]
            np.testing.assert_array_equal(found, self.used[record.info.step])
            assert run.has("2", pass_="grad", step=position, iteration=self.batches - 1)
            assert not run.has("2", step=position, iteration=self.batches)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("clear", [to_none, to_zero])
@pytest.mark.parametrize("cleared", ["before forward", "before backward", "after update"])
def test_every_update_is_a_step(
    update: Callable[..., None], clear: Callable[[nn.Module], None], cleared: str
) -> None:
    training = Training(update, clear, cleared=cleared)
    with recording() as run:
        for _ in range(6):
            training.step()
    training.compare(run, [*range(6)])


@pytest.mark.parametrize("update", [in_place, through_data])
def test_accumulated_batches_are_one_step(update: Callable[..., None]) -> None:
    training = Training(update, batches=3)
    with recording() as run:
        for _ in range(4):
            training.step()
    training.compare(run, [*range(4)])


def test_gradients_are_recorded_as_they_were_used() -> None:
    training = Training(clip=1e-3)
    with recording() as run:
        for _ in range(4):
            training.step()
    training.compare(run, [*range(4)])


@pytest.mark.parametrize("update", [in_place, through_data])
@pytest.mark.parametrize(("spec", "steps"), [(SPARSE, [0, 5, 10, 15]), (LATE, [3, 4, 9])])
def test_steps_that_are_not_recorded_are_counted(
    update: Callable[..., None], spec: dict[str, Any], steps: list[int]
) -> None:
    training = Training(update, batches=2)
    with recording(spec) as run:
        for _ in range(18):
            training.step()
    training.compare(run, steps)


def test_the_loss_of_every_step_is_kept(tmp_path: Any) -> None:
    training = Training(cleared="after update")
    with comgra.trace(SPARSE, root=tmp_path, group="g") as session:
        for _ in range(13):
            training.step()
    assert session.path is not None
    losses = comgra.open_run(session.path).kpis().query("name == 'loss'")
    assert losses.step.tolist() == [*range(13)]
    np.testing.assert_array_equal(losses.value, np.array(training.losses))


def test_it_is_said_once_in_the_report(caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    with caplog.at_level(logging.INFO, "comgra_decl"), recording() as run:
        for _ in range(4):
            training.step()
    assert caplog.text.count("the program uses no torch optimizer") == 1
    assert "the parameters have changed" in run.report["choices"]["steps"]


def test_numbers_without_a_module_are_trained_in_steps(tmp_path: Any) -> None:
    weight = torch.zeros(3, requires_grad=True)
    with comgra.trace("debug", root=tmp_path, group="g") as session:
        for _ in range(7):
            (torch.randn(4, 3) @ weight - 1).square().mean().backward()
            with torch.no_grad():
                weight -= 0.1 * weight.grad  # type: ignore[operator]
                weight.grad = None
    assert session.path is not None
    losses = comgra.open_run(session.path).kpis().query("name == 'loss'")
    assert losses.step.tolist() == [*range(7)]


# -- what is not such a step ----------------------------------------------------------------------


def test_a_program_with_an_optimizer_is_left_to_it() -> None:
    """Weights that the program modifies between two batches, or before its first step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.randn(4, 3)).square().mean().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.clamp_(-1, 1).mul_(0.999)
            optimizer.step()
    assert run.faults == []
    assert [s.info.step for s in run.steps] == [0, 1, 2]
    assert all(run.has("2", iteration=1, step=k) for k in range(3))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("first", [5, 1], ids=["dense", "sparse"])
def test_samples_that_are_moved_by_hand_are_no_steps_beside_an_optimizer(
    frozen: bool, first: int
) -> None:
    """An energy is trained on samples moved by Langevin steps, while the energy is held fixed."""
    model, norms = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING, schedule={"first": first, "every": 3}) as run:
        for _ in range(5):
            model.requires_grad_(not frozen)
            sample = torch.rand(4, 3, requires_grad=True)
            for _ in range(3):
                model(sample).sum().backward()
                assert sample.grad is not None
                sample.data.add_(sample.grad, alpha=-0.1)
                sample.grad.zero_()
            model.requires_grad_(True)
            optimizer.zero_grad()
            (model(torch.randn(4, 3)) - model(sample.detach())).mean().backward()
            weight = next(model.parameters())
            assert weight.grad is not None
            norms.append(float(weight.grad.norm()))
            optimizer.step()
    assert run.faults == []
    steps = [s.info.step for s in run.steps]
    assert steps == ([*range(5)] if first == 5 else [0, 3])
    for position, number in enumerate(steps):
        found = run.value("0", role="weight", pass_="grad", step=position)
        assert np.linalg.norm(found) == pytest.approx(norms[number], rel=1e-5)


def test_samples_that_are_moved_before_anything_is_recorded_count_until_the_optimizer_steps() -> (
    None
):
    """Their first round cannot be told from manual training; the rest is correct."""
    model = net()
    with recording(EVERYTHING, schedule={"steps": [5, 6, 7]}) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            model.requires_grad_(False)
            sample = torch.rand(4, 3, requires_grad=True)
            for _ in range(3):
                model(sample).sum().backward()
                sample.data.add_(torch.as_tensor(sample.grad), alpha=-0.1)
                sample.grad = None
            model.requires_grad_(True)
            optimizer.zero_grad()
            model(sample.detach()).mean().backward()
            optimizer.step()
    assert run.faults == []
    assert [s.info.step for s in run.steps] == [5, 6, 7]
    for number in range(3):
        assert run.has("0", iteration=3, step=number)
        assert not run.has("0", iteration=4, step=number)


def test_an_average_that_follows_by_hand_is_no_step() -> None:
    student, teacher = net(), net().requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    with recording() as run:
        for _ in range(4):
            x = torch.randn(4, 3)
            optimizer.zero_grad()
            F.mse_loss(student(x), teacher(x)).backward()
            optimizer.step()
            with torch.no_grad():
                for new, old in zip(student.parameters(), teacher.parameters(), strict=True):
                    old.lerp_(new, 0.1)
    assert [s.info.step for s in run.steps] == [0, 1, 2, 3]


def test_steps_of_an_optimizer_after_a_training_by_hand() -> None:
    training = Training()
    with recording() as run:
        for _ in range(3):
            training.step()
        optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            training.model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
    assert run.faults == []
    assert [s.info.step for s in run.steps] == [*range(6)]
    assert not any(key.iteration for key in run.slots)


@pytest.mark.parametrize("by_hand", [True, False])
def test_what_to_do_is_said_where_updates_by_hand_may_come_after_those_of_an_optimizer(
    tmp_path: Any, by_hand: bool
) -> None:
    """Not after a step of two batches that ends halfway, if every earlier step had two."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comgra.trace(EVERYTHING, root=tmp_path, group="g") as session:
        for batch in range(9):
            model(torch.randn(4, 3)).square().mean().backward()
            if batch >= 4 and by_hand:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    in_place(parameter, parameter.grad)
                model.zero_grad()
            elif batch % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert session.path is not None
    (warning,) = comgra.open_run(session.path).report["warnings"]
    assert "was not completed" in warning
    assert ("It has 3 more losses than any earlier step" in warning) == by_hand
    assert ("call comgra.step() where a step ends" in warning) == by_hand


def test_numbers_that_are_freed_between_their_uses_are_no_update() -> None:
    """As when FSDP frees the parameters that it has gathered."""
    model, sizes = net(), {}

    def free(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            storage = parameter.untyped_storage()
            sizes[parameter] = (storage.size(), parameter.detach().clone())
            storage.resize_(0)

    def gather(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter in sizes:
                size, kept = sizes.pop(parameter)
                parameter.untyped_storage().resize_(size)
                with torch.no_grad(), unseen(parameter):
                    parameter.copy_(kept)

    with recording() as run:
        for _ in range(3):
            for _ in range(2):
                for part in model:
                    gather(part)
                loss = model(torch.randn(4, 3)).square().mean()
                free(model[0])
                handle = model.get_parameter("2.weight").register_hook(lambda _: gather(model[0]))
                loss.backward()
                handle.remove()
                free(model[2])
            for part in model:
                gather(part)
            comgra.step()
    assert run.faults == []
    assert [s.info.step for s in run.steps] == [0, 1, 2]


def test_the_programs_word_ends_steps_where_it_is_given() -> None:
    training = Training(batches=1)
    with recording(EVERYTHING, schedule={"step": "explicit", "first": 99}) as run:
        for number in range(6):
            training.step()
            if number % 2:
                comgra.step()
    assert run.faults == []
    assert [s.info.step for s in run.steps] == [0, 1, 2]
    assert all(run.has("2", iteration=1, step=k) for k in range(3))


@pytest.mark.parametrize("update", [in_place, through_data])
@pytest.mark.parametrize("first", ["hand", "torch"])
@pytest.mark.parametrize("spec", [EVERYTHING, SPARSE])
def test_what_is_updated_by_hand_beside_an_optimizer_has_its_gradients(
    spec: Any, first: str, update: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    """From the second record on, only a parameter that changes shows that something updates it."""
    torch.manual_seed(0)
    model = net()
    by_hand = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], 0.1)
    truth: list[dict[str, float]] = []

    def write() -> None:
        for parameter in by_hand:
            assert parameter.grad is not None
            update(parameter, parameter.grad)

    with recording(spec) as run:
        for _ in range(12):
            model(torch.randn(4, 3)).square().mean().backward()
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            truth.append({name: grad.sum().item() for name, grad in grads.items()})
            if first == "hand":
                write()
            optimizer.step()
            if first == "torch":
                write()
            model.zero_grad()
    steps = [step.info.step for step in run.steps]
    assert len(steps) > 2
    for number, step in list(enumerate(steps))[1:]:
        for name, expected in truth[step].items():
            node, role = name.split(".")
            seen = run.total(node, role, step=number, pass_="grad")
            assert seen == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_gradients_that_nobody_uses_are_none_of_the_record() -> None:
    """A pretrained part that was not frozen gets gradients, but no optimizer holds it."""
    model = net()
    optimizer = torch.optim.SGD(model[2].parameters(), 0.1)
    with recording(EVERYTHING) as run:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
    graded = {key.node for key in run.slots if key.pass_ == "grad" and key.role == "weight"}
    assert graded == {"2"}


@pytest.mark.parametrize("turn", [True, False])
def test_a_parameter_that_is_trained_by_turns_or_later_is_no_frozen_one(turn: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model[0].requires_grad_(turn)
    model[2].weight.requires_grad_(False)
    with recording(EVERYTHING) as run:
        for step in range(6):
            if turn or step == 3:
                model[0].requires_grad_(True)
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            if turn:  # as a GAN does with its discriminator
                model[0].requires_grad_(False)
            optimizer.step()
    told = [step.documents["modules"] for step in run.steps if "modules" in step.documents]
    assert trainable(told[0]) == {"0": turn, "2": False}
    assert trainable(told[-1]) == {"0": True, "2": False}


def trainable(modules: Any) -> dict[str, bool]:
    """Whether each weight is reported as trained."""
    return {m["node"]: m["parameters"]["weight"]["trainable"] for m in modules if m["parameters"]}


def test_backward_is_heard_closely_no_longer_than_until_an_optimizer_is_known(
    tmp_path: Path,
) -> None:
    """Otherwise each step without a record would pay for it."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with comgra.trace({"schedule": {"steps": [0]}}, root=tmp_path, group="g") as session:
        assert session._hooks is not None
        losses = session._hooks._losses
        heard = [losses._before is not None]  # until then, manual updates may end steps
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            heard.append(losses._before is not None)
            optimizer.step()
        assert heard == [True, False, False]

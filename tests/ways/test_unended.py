"""Training whose steps never end is detected while it runs, at no lasting cost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.cli.main import main
from comgra_decl.hooks import HookManager, step_state
from comgra_decl.query.report import remarks
from comgra_decl.spec import load_spec
from comgra_decl.viewer.model.about import about
from comgra_decl.viewer.model.runview import RunView
from tests.support.recording import EVERYTHING, Recording
from tests.ways.models import Net, batches

ONCE = {**EVERYTHING, "schedule": {"first": 1, "every": 1_000}}


@pytest.fixture
def seen() -> Iterator[tuple[Recording, HookManager]]:
    """A program that is followed, with all of its steps recorded."""
    recording = Recording()
    manager = HookManager(
        load_spec(EVERYTHING), recording.steps.append, on_fault=recording.faults.append
    )
    manager.attach()
    yield recording, manager
    manager.detach()
    assert recording.faults == []


def losses(model: nn.Module, count: int) -> Iterator[torch.Tensor]:
    for x, y in batches(count):
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        yield loss


def test_steps_without_hooks_are_told_apart_once_they_are_noticed(
    seen: tuple[Recording, HookManager], caplog: pytest.LogCaptureFixture
) -> None:
    recording, manager = seen
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "comgra_decl"):
        for number, _ in enumerate(losses(model, 12)):
            hidden(optimizer)
            if number < 4:
                manager.look()
    assert recording.faults == []
    (said,) = recording.report["warnings"]
    assert "no step has ended since step 0 began" in said
    assert "comgra.step()" in said
    assert caplog.text.count("no step has ended") == 1
    assert [step.info.step for step in recording.steps] == [*range(len(recording.steps))]
    assert 7 <= len(recording.steps) <= 9
    assert not recording.has("head", iteration=1, step=1)


def test_a_step_that_cannot_be_seen_to_change_anything_ends_after_many_calls(
    seen: tuple[Recording, HookManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program keeps the parameters itself, and passes others to the model in each call."""
    monkeypatch.setattr(step_state, "MAX_ROOT_CALLS", 5)
    recording, manager = seen
    model = Net()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    for x, y in batches(9):
        lent = {name: p.requires_grad_() for name, p in parameters.items()}
        loss = F.cross_entropy(torch.func.functional_call(model, lent, (x,)), y)
        loss.backward()
        slopes = [p.grad for p in lent.values() if p.grad is not None]
        pairs = zip(lent.items(), slopes, strict=True)
        parameters = {name: (p - 0.1 * slope).detach() for (name, p), slope in pairs}
        manager.look()
    (step,) = recording.steps
    assert step.info.mode == "train"
    assert recording.has("head", iteration=4)
    assert not recording.has("head", iteration=5)
    assert any("no optimizer step was seen" in text for text in recording.report["warnings"])


@pytest.mark.parametrize("ends", ["last_optimizer", "explicit"])
def test_slow_steps_of_optimizers_that_end_no_step_of_the_training_are_no_hidden_ones(
    ends: str,
) -> None:
    """A critic takes five steps, of a second or more each, per step of its generator."""
    recording = Recording()
    spec = {**EVERYTHING, "schedule": {"first": 100, "step": ends}}
    manager = HookManager(load_spec(spec), recording.steps.append, on_fault=recording.faults.append)
    manager.attach()
    generator, critic = nn.Linear(3, 3), nn.Linear(3, 1)
    rest, last = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (critic, generator))
    for _ in range(4):
        for _ in range(5):
            rest.zero_grad()
            critic(generator(torch.randn(4, 3))).sum().backward()
            rest.step()
            manager.look()
        last.zero_grad()
        critic(generator(torch.randn(4, 3))).sum().backward()
        last.step()
        manager.look()
        if ends == "explicit":
            comgra.step()
    manager.detach()
    assert recording.faults == []
    assert [step.info.step for step in recording.steps] == [0, 1, 2, 3]
    assert not any("no step has ended" in text for text in recording.report["warnings"])


def hidden(optimizer: torch.optim.Optimizer) -> None:
    """Steps like compiled code: no hook is called."""
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]


def compiled(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    step: Callable[[], None] = torch.compile(optimizer.step, backend="eager")
    return step


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "really", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["hidden", "compiled"]
)
def test_steps_without_hooks_are_said_in_the_log_the_run_and_the_viewer(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    really: bool,
) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compiled(optimizer) if really else None
    with (
        caplog.at_level(logging.WARNING, "comgra_decl"),
        comgra.trace(ONCE, root=tmp_path, group="g") as session,
    ):
        for number, _ in enumerate(losses(model, 8)):
            if step is not None:
                step()
            elif number:
                hidden(optimizer)
            else:
                optimizer.step()
            assert session._hooks is not None
            session._hooks.look()
    assert "no step has ended since step 1 began" in caplog.text
    assert session.path is not None
    run = comgra.open_run(session.path)
    assert run.steps[0] == 0
    (said,) = [text for text in remarks(run.report) if "no step has ended" in text]
    assert said in about(RunView(run)).remarks
    assert said in [*run.notes().text]
    with pytest.raises(SystemExit):
        main(["show", str(session.path)])
    assert "no step has ended since step 1 began" in " ".join(capsys.readouterr().out.split())


def test_what_is_no_step_is_no_reason_to_say_so(
    seen: tuple[Recording, HookManager], caplog: pytest.LogCaptureFixture
) -> None:
    _, manager = seen
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=8)
    data = [*batches(1)]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data[0][0]), data[0][1])
        loss.backward()
        manager.look()  # in the meantime, the optimizer updates the parameters
        return loss

    for _ in losses(model, 6):
        manager.look()
    optimizer.step(closure)
    for _ in losses(model, 6):  # gradients are accumulated for a long time
        manager.look()
    assert "no step has ended" not in caplog.text

"""What ends a step, and which evaluation phases are recorded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from tests.support.recording import EVERYTHING, Recording, recording


def forward_and_backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.randn(4, 3)).sum().backward()


def adversarial() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    models: list[nn.Module] = [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 1))]
    return models, [
        torch.optim.SGD(models[0].parameters(), lr=0.1),
        torch.optim.Adam(models[1].parameters(), lr=0.1),
    ]


@pytest.mark.parametrize(
    ("rule", "steps"), [("Adam", 3), (1, 3), ("1", 3), ("any", 18), ("SGD", 15), (0, 15)]
)
def test_a_critic_may_step_more_often_than_its_generator(rule: str | int, steps: int) -> None:
    (critic, generator), (often, seldom) = adversarial()
    with recording(EVERYTHING, schedule={"step": rule, "first": 100}) as run:
        for _ in range(3):
            for _ in range(5):
                forward_and_backward(critic)
                often.step()
            forward_and_backward(generator)
            seldom.step()
    assert run.faults == []
    assert [s.info.step for s in run.steps if s.info.mode == "train"] == [*range(steps)]
    if rule == "Adam":
        assert run.has("Linear", iteration=4, step=2)
        assert run.has("Sequential.0", "weight", pass_="grad", step=2)


SPARSE = {**EVERYTHING, "schedule": {"first": 1, "every": 7}}


def trained(run: Recording, node: str, role: str = "weight") -> list[int]:
    """The numbers of the recorded steps in which a parameter was trained."""
    return [
        s.info.step for i, s in enumerate(run.steps) if run.has(node, role, pass_="grad", step=i)
    ]


@pytest.mark.parametrize("spec", [EVERYTHING, SPARSE], ids=["dense", "sparse"])
def test_models_one_after_another_have_steps_of_their_own(spec: dict[str, Any]) -> None:
    """Like the folds of a cross-validation; all of them stay alive."""
    models = [nn.Sequential(nn.Linear(3, 2)), nn.Linear(3, 2), nn.Bilinear(3, 3, 2)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    with recording(spec) as run:
        for model, optimizer in zip(models, optimizers, strict=True):
            for _ in range(10):
                inputs = [torch.randn(4, 3)] * (2 if isinstance(model, nn.Bilinear) else 1)
                model.zero_grad()
                model(*inputs).sum().backward()
                optimizer.step()
    assert run.faults == []
    numbers = [*range(30)] if spec is EVERYTHING else [0, 7, 14, 21, 28]
    assert [s.info.step for s in run.steps] == numbers
    nodes = ("0", "Linear", "Bilinear")  # the others were unknown when the first was named
    for node, steps in zip(nodes, (range(10), range(10, 20), range(20, 30)), strict=True):
        assert trained(run, node) == [n for n in numbers if n in steps]
    assert not any(key.iteration for key in run.slots)


def adversarial_step(models: Sequence[nn.Module], updates: Sequence[torch.optim.Optimizer]) -> None:
    critic, generator = models
    fake = generator(torch.randn(4, 3))
    critic.zero_grad()
    critic(fake.detach()).sum().backward()
    updates[0].step()
    generator.zero_grad()
    critic(fake).sum().backward()
    updates[1].step()


@pytest.mark.parametrize("spec", [EVERYTHING, SPARSE], ids=["dense", "sparse"])
def test_adversaries_one_after_another_are_one_step_per_pair(
    spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # calls are not watched where compiled code would encounter the hook; another test may have
    # compiled
    monkeypatch.setattr("comgra_decl.hooks.steps.anything_compiled", lambda: False)
    pairs = []
    for _ in range(2):
        models: list[nn.Module] = [nn.Linear(3, 1), nn.Sequential(nn.Linear(3, 3))]
        pairs.append((models, [torch.optim.Adam(model.parameters()) for model in models]))
    with recording(spec) as run:
        for models, updates in pairs:
            for _ in range(12):
                adversarial_step(models, updates)
    assert run.faults == []
    # while nothing is recorded, a new optimizer ends a step until its calls are watched
    assert run.steps[-1].info.step == (23 if spec is EVERYTHING else 21)
    for position in range(len(run.steps)):
        name = "Linear" if run.has("Linear", step=position) else "Linear#2"
        assert run.has(name, iteration=1, step=position)
        assert run.has(name, "weight", pass_="grad", step=position)


def test_a_critic_that_steps_five_times_and_its_generator_are_one_step() -> None:
    (critic, generator), (often, seldom) = adversarial()
    with recording() as run:
        for _ in range(4):
            for _ in range(5):
                with torch.no_grad():
                    fake = generator(torch.randn(4, 3))
                critic.zero_grad()
                critic(torch.cat([fake, fake, fake], 1)).sum().backward()
                often.step()
            forward_and_backward(generator)
            seldom.step()
    assert run.faults == []
    assert [s.info.step for s in run.steps] == [0, 1, 2, 3]
    for number in range(4):
        assert run.has("Linear", iteration=4, step=number)
        assert run.has("Sequential.0", "weight", pass_="grad", step=number)


def adversarial_round(
    models: Sequence[nn.Module],
    updates: Sequence[torch.optim.Optimizer],
    *,
    made: str,
    frozen: bool,
) -> None:
    """One round of a GAN: D, D, G; `made` determines how the critic's fakes are created."""
    critic, generator = models
    for _ in range(2):
        critic.requires_grad_(True)
        generator.requires_grad_(not frozen)
        with torch.set_grad_enabled(made != "no_grad"):
            fake = generator(torch.randn(4, 3))
        critic.zero_grad()
        critic(fake.detach() if made == "detached" else fake).sum().backward()
        updates[0].step()
    critic.requires_grad_(not frozen)
    generator.requires_grad_(True)
    generator.zero_grad()
    critic(generator(torch.randn(4, 3))).sum().backward()
    updates[1].step()


LATE = {**EVERYTHING, "schedule": {"steps": [10, 12]}}


@pytest.mark.parametrize("spec", [EVERYTHING, SPARSE, LATE], ids=["dense", "sparse", "late"])
@pytest.mark.parametrize("frozen", [True, False], ids=["requires_grad in turns", "always"])
@pytest.mark.parametrize("made", ["no_grad", "detached"])
def test_each_round_of_adversaries_is_one_step(
    made: str,
    frozen: bool,
    spec: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If nothing is recorded yet, the first step counts as two, which is reported."""
    monkeypatch.setattr("comgra_decl.hooks.steps.anything_compiled", lambda: False)
    models = [nn.Linear(3, 1), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))]
    updates = [torch.optim.Adam(model.parameters()) for model in models]
    with caplog.at_level(logging.WARNING), recording(spec) as run:
        for _ in range(15):
            adversarial_round(models, updates, made=made, frozen=frozen)
    assert run.faults == []
    numbers = {id(EVERYTHING): [*range(15)], id(SPARSE): [0, 7, 14], id(LATE): [10, 12]}
    assert [s.info.step for s in run.steps] == numbers[id(spec)]
    for position in range(len(run.steps)):
        assert run.has("Linear", iteration=2, step=position)
        assert not run.has("Linear", iteration=3, step=position)
    said = [r.getMessage() for r in caplog.records if "take turns" in r.getMessage()]
    assert len(said) == (spec is LATE)
    assert all("step numbers are at least 1 higher" in message for message in said)


@pytest.mark.parametrize("spec", [EVERYTHING, SPARSE], ids=["dense", "sparse"])
def test_layers_that_are_trained_one_after_another(spec: dict[str, Any]) -> None:
    layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
    with recording(spec) as run:
        for depth, optimizer in enumerate(optimizers):
            for _ in range(6):
                x = torch.randn(4, 3)
                with torch.no_grad():
                    for layer in layers[:depth]:
                        x = layer(x)
                layers[depth](x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert run.faults == []
    numbers = [*range(18)] if spec is EVERYTHING else [0, 7, 14]
    assert [s.info.step for s in run.steps] == numbers
    for depth in range(3):
        steps = range(6 * depth, 6 * depth + 6)
        assert trained(run, str(depth)) == [n for n in numbers if n in steps]


def test_a_network_called_whole_and_trained_layer_by_layer() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    with recording() as run:
        for optimizer in optimizers:
            for _ in range(4):
                forward_and_backward(model)
                optimizer.step()
    assert [s.info.step for s in run.steps] == [*range(8)]
    assert trained(run, "0") == [0, 1, 2, 3]
    assert trained(run, "1") == [4, 5, 6, 7]


class Agent(nn.Module):
    def __init__(self, *, owned: bool) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(3, 2), nn.Linear(5, 1)
        number = torch.zeros(1, requires_grad=True)
        self.temperature = nn.Parameter(number.detach()) if owned else number


def test_a_third_optimizer_that_trains_both_models_ends_the_step() -> None:
    """As in InfoGAN: the last of three optimizers trains parts of what the first two train.

    Only after two rounds is it known to come next each time.
    """
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    parameters = [*generator.parameters(), *critic.parameters()]
    optimizers = [
        torch.optim.SGD(generator.parameters(), lr=0.1),
        torch.optim.SGD(critic.parameters(), lr=0.1),
        torch.optim.SGD(parameters, lr=0.1),
    ]
    with recording() as run:
        for _ in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad()
                critic(generator(torch.randn(4, 2))).square().mean().backward()
                optimizer.step()
    assert run.faults == []
    assert [s.info.step for s in run.steps] == [*range(2 + 2 + 3)]
    for step in (4, 5, 6):
        assert run.has("Linear#2", iteration=2, step=step)
        assert not run.has("Linear#2", iteration=3, step=step)


@pytest.mark.parametrize("owned", [True, False], ids=["in its module", "on its own"])
@pytest.mark.parametrize("last", [True, False], ids=["last", "first"])
def test_a_temperature_belongs_to_the_step_of_actor_and_critic(owned: bool, last: bool) -> None:
    agent = Agent(owned=owned)
    parts = [[agent.temperature], agent.critic.parameters(), agent.actor.parameters()]
    temperature, critics, actors = (torch.optim.Adam(part) for part in parts)

    def heat(chances: torch.Tensor) -> None:
        temperature.zero_grad()
        (agent.temperature.exp() * chances.detach().mean()).backward()
        temperature.step()

    with recording() as run:
        for _ in range(5):
            states = torch.randn(4, 3)
            chances = agent.actor(states)
            if not last:
                heat(chances)
            with torch.no_grad():
                actions = agent.actor(states)
            critics.zero_grad()
            agent.critic(torch.cat([states, actions], 1)).square().mean().backward()
            critics.step()
            actors.zero_grad()
            agent.critic(torch.cat([states, agent.actor(states)], 1)).mean().backward()
            actors.step()
            if last:
                heat(chances)
    assert run.faults == []
    assert [s.info.step for s in run.steps] == [0, 1, 2, 3, 4]


def test_an_optimizer_that_is_not_there_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING), recording(EVERYTHING, schedule={"step": "Adam"}):
        for _ in range(100):
            forward_and_backward(model)
            optimizer.step()
    assert (
        "schedule.step: 'Adam' has not ended any step in the last 100 optimizer steps"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("rule", "said"),
    [("Adm", "are SGD"), ("SDG", "are SGD; did you mean 'SGD'?"), (7, "are 0 SGD")],
)
def test_a_run_without_a_record_says_why_in_its_report(
    tmp_path: Path, rule: str | int, said: str
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comgra.trace({**EVERYTHING, "schedule": {"step": rule}}, root=tmp_path, name="run"):
        for _ in range(3):
            forward_and_backward(model)
            optimizer.step()
    report = comgra.open_run(tmp_path).report
    assert report["unmatched"] == []
    assert {entry["written"] for entry in report["entries"].values()} == {0}
    assert [line for line in report["warnings"] if said in line and repr(rule) in line]


def test_a_run_that_never_trained_has_a_report(tmp_path: Path) -> None:
    with comgra.trace("debug", root=tmp_path, name="run"):
        pass
    report = comgra.open_run(tmp_path).report
    assert report["unmatched"] == report["warnings"] == []


def without_optimizer(model: nn.Module, count: int) -> Iterator[None]:
    for _ in range(count):
        forward_and_backward(model)
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
        yield


def test_the_program_may_end_its_steps_itself() -> None:
    model = nn.Linear(3, 2)
    with recording(EVERYTHING, schedule={"first": 2, "every": 3}) as run:
        for _ in without_optimizer(model, 7):
            comgra.step()
    assert [s.info.step for s in run.steps] == [0, 1, 3, 6]
    assert run.has("Linear", pass_="grad", step=3)


def test_the_programs_word_wins_over_optimizers_and_this_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING), recording() as run:
        for _ in range(3):
            forward_and_backward(model)
            optimizer.step()
            comgra.step()
    assert [s.info.step for s in run.steps] == [0, 1, 2]
    assert sum("comgra.step()" in record.message for record in caplog.records) == 1


def test_several_optimizer_steps_are_one_where_the_program_says_so() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING, schedule={"step": "explicit"}) as run:
        for _ in range(2):
            for _ in range(3):
                forward_and_backward(model)
                optimizer.step()
            comgra.step()
    assert len(run.steps) == 2
    assert run.has("Linear", iteration=2, step=1)


def test_a_step_inside_a_call_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    class Impatient(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            comgra.step()
            return super().forward(x)

    model = Impatient(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING), recording() as run:
        forward_and_backward(model)
        optimizer.step()
    assert [s.info.step for s in run.steps] == [0]
    assert "inside a module's forward" in caplog.text


def test_a_call_that_never_returned_does_not_hold_up_the_steps() -> None:
    class Interrupted(nn.Linear):
        interrupted = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.interrupted:
                raise KeyboardInterrupt
            return super().forward(x)

    model = Interrupted(3, 2)
    with recording(EVERYTHING, schedule={"step": "explicit"}) as run:
        model.interrupted = True
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(4, 3))
        model.interrupted = False
        for _ in range(3):
            forward_and_backward(model)
            comgra.step()
    assert [s.info.step for s in run.steps] == [0, 1, 2]


# -- evaluation -----------------------------------------------------------------------------------


def evaluated(phases: int, *, calls: int = 1, switch: str = "eval", **evaluation: Any) -> Recording:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = {"first": 1, "every": 1000, "eval": evaluation}
    with recording(EVERYTHING, schedule=schedule) as run:
        for _ in range(phases):
            model.train()
            for _ in range(3):
                forward_and_backward(model)
                optimizer.step()
            model.eval() if switch == "eval" else model.train(False)
            with torch.no_grad():
                for _ in range(calls):
                    model(torch.randn(4, 3))
    assert run.faults == []
    return run


@pytest.mark.parametrize("switch", ["eval", "train(False)"])
def test_an_evaluation_between_recorded_steps_is_seen_however_it_begins(switch: str) -> None:
    run = evaluated(4, switch=switch)
    assert [s.info.step for s in run.of("eval")] == [3, 6, 9, 12]


@pytest.mark.parametrize(
    ("cadence", "recorded"),
    [
        ({"every": 3}, [0, 3, 6]),
        ({"first": 2, "every": 4}, [0, 1, 4]),
        ({"steps": [2, 5]}, [2, 5]),
        ({"first": 0, "every": None, "windows": [[3, 4]]}, [3, 4]),
        ({"every": 1, "backoff": 2}, [0, 1, 2, 4]),
    ],
)
def test_phases_are_counted_by_the_same_words_as_steps(
    cadence: dict[str, Any], recorded: list[int]
) -> None:
    run = evaluated(8, **cadence)
    assert [s.info.step // 3 - 1 for s in run.of("eval")] == recorded


@pytest.mark.parametrize(("batches", "recorded"), [(None, 1), (2, 2), (9, 5), ("all", 5)])
def test_more_than_the_first_batch_of_a_phase(batches: int | str | None, recorded: int) -> None:
    run = evaluated(2, calls=5, batches=batches)
    assert len(run.of("eval")) == 2
    position = [i for i, step in enumerate(run.steps) if step.info.type == "eval"][-1]
    assert [k for k in range(6) if run.has("0", iteration=k, step=position)] == [*range(recorded)]


def test_parts_that_are_frozen_are_no_evaluation() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING, schedule={"first": 1, "every": 1000}) as run:
        for _ in range(3):
            model.train()
            model[1].eval()
            assert (len(nn.modules.module._global_forward_hooks) > 0) == (len(run.steps) == 0)
            forward_and_backward(model)
            optimizer.step()
    assert len(run.steps) == 1

"""Threads that train concurrently: all steps of each are counted, and records are complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.hooks.other_threads import this_thread
from comgra_decl.query import Run

SPEC = {
    "nodes": {
        "all": {
            "select": "**",
            "capture": ["output", "output_grad", "parameter", "parameter_grad"],
            "values": True,
        }
    },
    "schedule": {"first": 10_000},
}
STEPS = 20


class Trained:
    """What one thread did: its model and the loss of each of its steps."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        self.number = number
        self.data = [torch.randn(8, 3, generator=generator) for _ in range(STEPS)]
        with torch.random.fork_rng():
            torch.manual_seed(number)
            self.model = nn.Sequential(
                nn.Linear(3, 4 + number), nn.Tanh(), nn.Linear(4 + number, 1)
            )
        self.losses: list[float] = []
        self.gradients: list[np.ndarray[Any, Any]] = []

    def note(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())
        gradient = self.model[2].bias.grad
        assert isinstance(gradient, torch.Tensor)
        self.gradients.append(gradient.numpy().copy())


def with_optimizer(trained: Trained) -> Iterator[None]:
    optimizer = torch.optim.SGD(trained.model.parameters(), lr=0.1)
    for x in trained.data:
        optimizer.zero_grad()
        loss = trained.model(x).square().mean()
        loss.backward()
        trained.note(loss)
        optimizer.step()
        comgra.kpi("thread", trained.number)
        yield


def by_hand(trained: Trained) -> Iterator[None]:
    for x in trained.data:
        loss = trained.model(x).square().mean()
        loss.backward()
        trained.note(loss)
        with torch.no_grad():
            for parameter in trained.model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
        trained.model.zero_grad()
        yield


def by_word(trained: Trained) -> Iterator[None]:
    """Two optimizers step in each step, and the program declares where it ends."""
    optimizers = [
        torch.optim.SGD(part.parameters(), lr=0.1) for part in trained.model if [*part.parameters()]
    ]
    for x in trained.data:
        loss = trained.model(x).square().mean()
        loss.backward()
        trained.note(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        comgra.step()
        yield


def traced(
    root: Path, trained: list[Trained], train: Callable[[Trained], Iterator[None]], **spec: Any
) -> Run:
    """All at once, as far as the interpreter allows."""

    def work(one: Trained) -> None:
        for _ in train(one):
            pass

    with comgra.trace({**SPEC, **spec}, root=root, group="g") as session:
        threads = [threading.Thread(target=work, args=(one,)) for one in trained]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert session.path is not None
    return comgra.open_run(session.path)


def compare(run: Run, trained: list[Trained], *, records: int = 1) -> None:
    """Every step of every thread, and each record as the thread itself saw that step."""
    losses = run.kpis().query("name == 'loss'")
    assert sorted(losses.step) == list(range(STEPS * len(trained)))
    assert sorted(losses.value) == sorted(loss for one in trained for loss in one.losses)
    by_loss = {loss: (one, k) for one in trained for k, loss in enumerate(one.losses)}
    assert run.state == "finished"
    assert len(run.steps) >= records
    assert list(run.steps) == sorted(set(run.steps))
    for step in run.steps:
        one, k = by_loss[losses[losses.step == step].value.item()]
        nodes = set(run.row(step).index.get_level_values("node")) - {"input", "loss"}
        models = {name.split(".")[0] for name in nodes}
        assert models == {"Sequential", "0", "1", "2"} or len(models) == 1, nodes
        assert len(nodes) == 4, nodes
        node = next(name for name in nodes if name.split(".")[-1] == "2")
        np.testing.assert_array_equal(
            run.slot(node, role="bias", of="grad").value(step)[0], one.gradients[k]
        )


SHORT = [(2, by_hand), (3, by_word), (4, with_optimizer)]
LONG = [(n, way) for n in (2, 4, 8) for way in (with_optimizer, by_hand, by_word)]


@pytest.mark.parametrize(
    ("threads", "train"),
    [*SHORT, *(pytest.param(*each, marks=pytest.mark.slow) for each in LONG if each not in SHORT)],
)
def test_every_step_of_every_thread_is_a_step(
    tmp_path: Path, threads: int, train: Callable[[Trained], Iterator[None]]
) -> None:
    schedule = {"first": 10_000, "step": "explicit"} if train is by_word else SPEC["schedule"]
    trained = [Trained(number) for number in range(threads)]
    run = traced(tmp_path, trained, train, schedule=schedule)
    compare(run, trained, records=3)
    assert any("multiple threads train" in w for w in run.report["warnings"])


def test_what_a_thread_says_is_about_its_own_steps(tmp_path: Path) -> None:
    trained = [Trained(number) for number in range(3)]
    run = traced(tmp_path, trained, with_optimizer)
    said = run.kpis().pivot_table(index="step", columns="name", values="value")
    assert len(said) == 3 * STEPS
    for one in trained:
        assert sorted(said[said.thread == one.number].loss) == sorted(one.losses)


def test_threads_take_turns_where_few_steps_are_recorded(tmp_path: Path) -> None:
    """In lockstep, so that each of them has a step whenever a record is due."""
    trained = [Trained(number) for number in range(3)]
    barrier = threading.Barrier(3)

    def in_step(one: Trained) -> Iterator[None]:
        for _ in with_optimizer(one):
            barrier.wait()
            yield

    run = traced(tmp_path, trained, in_step, schedule={"every": 6})
    compare(run, trained, records=5)
    said = run.kpis().query("name == 'thread'").set_index("step").value
    assert {said[step] for step in run.steps} == {0, 1, 2}


def test_threads_one_after_another_are_recorded_from_their_first_step(tmp_path: Path) -> None:
    trained = [Trained(number) for number in range(3)]
    with comgra.trace(SPEC, root=tmp_path, group="g") as session:
        for one in trained:
            thread = threading.Thread(target=lambda one=one: [*with_optimizer(one)])
            thread.start()
            thread.join()
    assert session.path is not None
    run = comgra.open_run(session.path)
    assert list(run.steps) == [*range(3 * STEPS)]
    compare(run, trained, records=3 * STEPS)


def test_a_thread_that_waits_for_others_holds_no_record_back(tmp_path: Path) -> None:
    """The main thread trains first, and then starts threads that do."""
    first, *others = (Trained(number) for number in range(3))
    with comgra.trace(SPEC, root=tmp_path, group="g") as session:
        for _ in with_optimizer(first):
            pass
        with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as other:
            one, two = map(with_optimizer, others)
            for _ in range(STEPS):
                for own, steps in ((pool, one), (other, two)):
                    own.submit(next, steps).result()
    assert session.path is not None
    run = comgra.open_run(session.path)
    compare(run, [first, *others], records=STEPS + 2)


def test_a_thread_that_ends_before_the_record_meant_for_it_leaves_no_number_out(
    tmp_path: Path,
) -> None:
    first, second = (Trained(number) for number in range(2))
    one, two = with_optimizer(first), with_optimizer(second)
    pools = [ThreadPoolExecutor(1) for _ in range(2)]
    with comgra.trace({**SPEC, "schedule": {"every": 6}}, root=tmp_path, group="g") as session:
        hooks = session._hooks
        assert hooks is not None
        while len(second.losses) < 2 or not hooks._state.armed:
            for pool, steps in zip(pools, (one, two), strict=True):
                pool.submit(next, steps).result()
        ended = pools[0].submit(lambda: this_thread.number).result() == hooks._lanes.followed.thread
        for _ in range(STEPS // 4):  # the other one continues as long as it waits
            pools[ended].submit(next, (one, two)[ended]).result()
        for pool in pools:
            pool.shutdown()
    assert session.path is not None
    losses = comgra.open_run(session.path).kpis().query("name == 'loss'")
    assert sorted(losses.step) == list(range(len(first.losses + second.losses)))


def test_a_thread_that_rests_in_a_recorded_step_lets_the_steps_of_others_be_seen(
    tmp_path: Path,
) -> None:
    """If a debugger holds it, for example, others continue, and a check runs once a second."""
    resting, going = Trained(0), Trained(1)
    begun, ended = threading.Event(), threading.Event()

    def rest() -> None:
        steps = with_optimizer(resting)
        while not (hooks._state.armed and hooks._lanes.followed.thread == this_thread.number):
            next(steps)
        resting.model(resting.data[0])  # a record has begun
        begun.set()
        ended.wait()
        for _ in steps:
            pass

    with comgra.trace(SPEC, root=tmp_path, group="g") as session:
        assert session._hooks is not None
        hooks = session._hooks
        steps = with_optimizer(going)
        next(steps)  # recorded, so that its parameters are known
        thread = threading.Thread(target=rest)
        thread.start()
        assert begun.wait(60)
        for _ in steps:
            hooks.look()
        ended.set()
        thread.join()
    assert session.path is not None
    run = comgra.open_run(session.path)
    assert not any("no step has ended" in text for text in run.report["warnings"])
    losses = run.kpis().query("name == 'loss'")
    assert sorted(losses.step) == list(range(2 * STEPS))
    assert sorted(losses.value) == sorted(resting.losses + going.losses)


def test_steps_in_threads_are_bit_for_bit_those_without_tracing(tmp_path: Path) -> None:
    plain, trained = ([Trained(number) for number in range(4)] for _ in range(2))
    for one in plain:
        for _ in with_optimizer(one):
            pass
    traced(tmp_path, trained, with_optimizer)
    for one, other in zip(plain, trained, strict=True):
        assert one.losses == other.losses
        for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(a, b)
    assert torch._C._len_torch_function_stack() == 0


def test_a_step_of_another_thread_that_begins_as_a_record_ends_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    """A thread iterates over torch's hooks while one is removed for good: no record follows."""
    trained, other = Trained(0), Trained(1)
    begun, ended = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        begun.set()
        ended.wait()

    def step() -> None:
        optimizer = torch.optim.SGD(other.model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(hold)
        optimizer.step()

    with comgra.trace({**SPEC, "schedule": {"steps": [0, 1]}}, root=tmp_path, group="g") as session:
        steps = with_optimizer(trained)
        next(steps)
        thread = threading.Thread(target=step)
        thread.start()
        assert begun.wait(60)
        next(steps)
        ended.set()
        thread.join()
        for _ in steps:
            pass
    assert session.path is not None
    assert comgra.open_run(session.path).state == "finished"

"""One training loop whose parts run in separate threads, in sequence: the same records."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import combinations
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.query import Run
from tests.support.shortened import combined, shortened

EVERYTHING = ["input", "output", "output_grad", "parameter", "parameter_grad", "update"]
SPEC = {
    "nodes": {"all": {"select": "**", "capture": EVERYTHING, "values": True}},
    "schedule": {"first": 100},
}
Alone = Callable[..., tuple[Run, list[float]]]
PARTS = [set(c) for n in (1, 2, 3) for c in combinations(("forward", "backward", "step"), n)]
STEPS = 8


def _named(value: set[str] | bool) -> str:
    if isinstance(value, bool):
        return "new threads" if value else "pools"
    return "+".join(sorted(value))


class Threads:
    """Runs parts of a step in threads: one for each part, or a new one each time.

    Threads that do nothing take the identifiers of those that have ended.
    """

    def __init__(self, parts: set[str], *, fresh: bool) -> None:
        self._fresh = fresh
        self._pools = {part: ThreadPoolExecutor(1) for part in parts}
        self._idle: list[ThreadPoolExecutor] = []
        self.taken: list[bool] = []

    def call(self, part: str, function: Callable[[], Any]) -> Any:
        if part not in self._pools:
            return function()
        if self._fresh:  # the next begins before the last one ends, so it has another identifier
            before, self._pools[part] = self._pools[part], ThreadPoolExecutor(1)
            ended = before.submit(get_ident).result()
            self._pools[part].submit(int).result()
            before.shutdown()
            self._idle.append(ThreadPoolExecutor(1))
            self.taken.append(self._idle[-1].submit(get_ident).result() == ended)
        return self._pools[part].submit(function).result()

    def close(self) -> None:
        for pool in [*self._pools.values(), *self._idle]:
            pool.shutdown()


def train(
    root: Path | None,
    parts: set[str],
    *,
    fresh: bool = False,
    by_hand: bool = False,
    evaluate: bool = False,
    **spec: Any,
) -> tuple[Run | None, list[float]]:
    """Returns what was recorded, and the losses and parameters as the program has them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own: list[float] = []

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(x), y)

    def write() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)

    with ExitStack() as stack:
        session = None
        if root is not None:
            session = stack.enter_context(comgra.trace({**SPEC, **spec}, root=root, group="g"))
        threads = Threads(parts, fresh=fresh)
        stack.callback(threads.close)
        if by_hand:
            del optimizer
        for _ in range(STEPS):
            x, y = torch.randn(5, 4), torch.randn(5, 2)
            loss = threads.call("forward", partial(forward, x, y))
            model.zero_grad()
            threads.call("backward", loss.backward)
            own.append(loss.item())
            threads.call("step", write if by_hand else lambda: optimizer.step())
            if evaluate:
                model.eval()
                with torch.no_grad():
                    model(torch.randn(7, 4))
                model.train()
    assert any(threads.taken) == bool(parts and fresh), "a case that should occur does not"
    own += [number for p in model.parameters() for number in p.flatten().tolist()]
    assert torch._C._len_torch_function_stack() == 0
    if session is None:
        return None, own
    assert session.path is not None
    return comgra.open_run(session.path), own


def traced(root: Path, parts: set[str], **how: Any) -> tuple[Run, list[float]]:
    run, own = train(root, parts, **how)
    assert run is not None
    return run, own


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Returns what is recorded without threads, trained once per set of arguments."""
    found: dict[str, tuple[Run, list[float]]] = {}

    def of(**how: Any) -> tuple[Run, list[float]]:
        if str(how) not in found:
            found[str(how)] = traced(tmp_path_factory.mktemp("alone"), set(), **how)
        return found[str(how)]

    return of


def said(run: Run) -> dict[str, Any]:
    """Returns everything that was recorded, without what depends on the machine."""
    kpis = run.kpis().query("name == 'loss'")
    return {
        "steps": [*run.steps],
        "slots": run.slots[["node", "role", "iteration", "pass", "kind"]].values.tolist(),
        "edges": sorted(run.edges()),
        "losses": [*zip(kpis.step, kpis.value, strict=True)],
        "warnings": run.report["warnings"],
        "state": run.state,
    }


def assert_same(run: Run, other: Run) -> None:
    assert said(run) == said(other)
    passes = {*run.slots["pass"]}
    assert passes == {"forward", "grad", "update"} or passes == {"forward", "grad"}
    for pass_ in passes:
        for statistic in ("l2", "mean"):
            ours, theirs = run.heat(statistic, of=pass_), other.heat(statistic, of=pass_)
            np.testing.assert_array_equal(ours.to_numpy(), theirs.to_numpy())
            assert not np.isnan(ours.to_numpy()).any()


@pytest.mark.parametrize(("parts", "fresh"), combined(PARTS, [False, True], rounds=1), ids=_named)
def test_parts_of_a_step_in_threads_are_recorded_as_in_one(
    tmp_path: Path, alone: Alone, parts: set[str], fresh: bool
) -> None:
    _, untraced = train(None, set())
    expected, own_alone = alone()
    run, own = traced(tmp_path, parts, fresh=fresh)
    assert own == own_alone == untraced
    assert_same(run, expected)
    assert run.report["warnings"] == []
    assert [*run.steps] == [*range(STEPS)]


@pytest.mark.parametrize("fresh", shortened([True, False], tried=1), ids=_named)
@pytest.mark.parametrize("parts", shortened(PARTS[::-1], tried=3), ids=_named)
def test_also_where_few_steps_are_recorded(
    tmp_path: Path, alone: Alone, parts: set[str], fresh: bool
) -> None:
    how: dict[str, Any] = {"schedule": {"first": 1, "every": 3}}
    expected, own_alone = alone(**how)
    run, own = traced(tmp_path, parts, fresh=fresh, **how)
    assert own == own_alone
    assert_same(run, expected)
    assert run.report["warnings"] == []
    assert len(run.steps) == 3


@pytest.mark.parametrize("parts", shortened(PARTS[::-1], tried=3), ids=_named)
def test_updates_by_hand_end_the_same_steps(tmp_path: Path, alone: Alone, parts: set[str]) -> None:
    expected, own_alone = alone(by_hand=True)
    run, own = traced(tmp_path, parts, by_hand=True)
    assert own == own_alone
    assert_same(run, expected)


@pytest.mark.parametrize("parts", shortened(PARTS[:-1], tried=3), ids=_named)
def test_a_thread_that_does_one_part_may_evaluate(
    tmp_path: Path, alone: Alone, parts: set[str]
) -> None:
    expected, own_alone = alone(evaluate=True)
    run, own = traced(tmp_path, parts, evaluate=True)
    assert own == own_alone
    assert_same(run, expected)
    assert "eval" in expected.types
    assert run.types == expected.types
    for type_ in expected.types:
        np.testing.assert_array_equal(
            run.heat("l2", type=type_).to_numpy(), expected.heat("l2", type=type_).to_numpy()
        )


def test_a_first_record_that_comes_late_finds_who_calls_the_model(tmp_path: Path) -> None:
    """Until then, only `backward` and the optimizer's step were seen."""
    how: dict[str, Any] = {"schedule": {"steps": [3, 4, 5]}}
    alone, _ = traced(tmp_path / "alone", set(), **how)
    run, _ = traced(tmp_path / "threads", {"backward"}, **how)
    assert_same(run, alone)
    assert run.report["warnings"] == []


def test_threads_that_share_a_model_and_train_side_by_side_stay_two(tmp_path: Path) -> None:
    """One begins a step between the forward and backward of the other, which it never helps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    own: list[float] = []

    def forward() -> torch.Tensor:
        return model(torch.randn(5, 4)).square().mean()

    def backward(loss: torch.Tensor) -> None:
        loss.backward()
        own.append(loss.item())

    with (
        ThreadPoolExecutor(1) as one,
        ThreadPoolExecutor(1) as two,
        comgra.trace(SPEC, root=tmp_path, group="g") as session,
    ):
        for _ in range(STEPS):
            first = one.submit(forward).result()
            second = two.submit(forward).result()
            model.zero_grad()
            two.submit(backward, second).result()
            one.submit(backward, first).result()
            for pool, optimizer in zip((two, one), optimizers, strict=True):
                pool.submit(optimizer.step).result()
    assert session.path is not None
    run = comgra.open_run(session.path)
    assert any("multiple threads train" in text for text in run.report["warnings"])
    losses = run.kpis().query("name == 'loss'")
    assert sorted(losses.value) == sorted(own)
    assert sorted(losses.step) == [*range(2 * STEPS)]
    assert run.state == "finished"


@pytest.mark.parametrize("every", [1, 3])
def test_a_loss_that_is_scaled_in_one_thread_and_backwarded_in_another_is_kept_unscaled(
    tmp_path: Path, every: int
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    own: list[float] = []
    with (
        ThreadPoolExecutor(1) as pool,
        comgra.trace(
            {**SPEC, "schedule": {"first": 1, "every": every}}, root=tmp_path, group="g"
        ) as session,
    ):
        for _ in range(STEPS):
            loss = model(torch.randn(5, 4)).square().mean()
            own.append(loss.item())
            optimizer.zero_grad()
            pool.submit(scaler.scale(loss).backward).result()
            scaler.step(optimizer)
            scaler.update()
    assert session.path is not None
    run = comgra.open_run(session.path)
    assert run.kpis().query("name == 'loss'").value.tolist() == own
    assert run.report["warnings"] == []
    assert len(run.steps) == len(range(0, STEPS, every))

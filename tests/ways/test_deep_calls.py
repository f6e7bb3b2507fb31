"""Modules nested as deeply as Python lets a program nest them."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.hooks.graph.lineage import Lineage

DEPTH = 220  # of about 240 that a program can have
LIMIT = 1000


class Nest(nn.Module):
    def __init__(self, inner: nn.Module | None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x if self.inner is None else x + self.inner(x)


def trained(depth: int = DEPTH) -> list[float]:
    torch.manual_seed(0)
    model: nn.Module | None = None
    for _ in range(depth):
        model = Nest(model)
    assert model is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_an_empty_stack(work: Callable[[], Any]) -> Any:
    """In a thread, whose calls start at the bottom of the stack, with Python's default limit."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001
            found.append(error)

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(LIMIT)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert sys.getrecursionlimit() == LIMIT
    finally:
        sys.setrecursionlimit(before)
    return found[0]


@functools.cache
def deepest() -> int:
    """As deep as modules can be nested, except for the one extra frame of `traced`."""
    fine, too_deep = DEPTH, DEPTH + 64
    while too_deep - fine > 1:
        depth = (fine + too_deep) // 2
        failed = isinstance(on_an_empty_stack(partial(trained, depth)), RecursionError)
        fine, too_deep = (fine, depth) if failed else (depth, too_deep)
    return fine - 1


def traced(root: Path, *changes: str, depth: int = DEPTH) -> list[float]:
    with comgra.trace("debug", root=root, group="g", overrides=["rules=off", *changes]):
        return trained(depth)


@pytest.mark.parametrize(
    ("change", "recorded"),
    [
        ("schedule.first=3", [0, 1, 2]),
        pytest.param("schedule={steps: [2]}", [2], marks=pytest.mark.slow),
        pytest.param("schedule={steps: [0]}", [0], marks=pytest.mark.slow),
        pytest.param(
            "schedule={first: 1, every: 1, budget: {time: '1%'}}", [0], marks=pytest.mark.slow
        ),
        pytest.param(
            "schedule={first: 1, every: 2, eval: {every: 1}}", [0, 2], marks=pytest.mark.slow
        ),
    ],
)
def test_a_program_may_nest_as_deeply_as_without_tracing(
    tmp_path: Path, change: str, recorded: list[int]
) -> None:
    depth = deepest()
    found = on_an_empty_stack(lambda: traced(tmp_path, change, depth=depth))
    assert found == on_an_empty_stack(lambda: trained(depth))
    run = comgra.open_run(tmp_path)
    assert list(run.steps) == recorded
    assert run.error is None


def test_it_may_so_when_tracing_fails_in_the_depth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of our frames are below all that follow."""
    calls, union = 0, Lineage.union

    def fails(self: Lineage, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == DEPTH:
            raise RuntimeError("a fault of ours")
        return union(self, *given)

    monkeypatch.setattr(Lineage, "union", fails)
    assert on_an_empty_stack(lambda: traced(tmp_path)) == trained()
    assert "a fault of ours" in str(comgra.open_run(tmp_path).error)


@pytest.mark.slow
def test_one_that_nests_deeper_fails_as_it_does_without_tracing(tmp_path: Path) -> None:
    def too_deep() -> list[float]:
        with comgra.trace("debug", root=tmp_path, group="g", overrides=["rules=off"]):
            return trained(2 * DEPTH)

    assert isinstance(on_an_empty_stack(lambda: trained(2 * DEPTH)), RecursionError)
    assert isinstance(on_an_empty_stack(too_deep), RecursionError)

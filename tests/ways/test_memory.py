"""Recording causes no memory growth in training, and keeps none of its objects alive."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.hooks import HookManager
from comgra_decl.records import RawStep
from comgra_decl.spec import load_spec
from tests.support.forked import forked
from tests.support.freezing import set_aside
from tests.support.recording import recording
from tests.support.shortened import shortened
from tests.ways.models import Net
from tests.ways.proof import FULL

CAPTURED = ["output", "output_grad", "parameter", "parameter_grad", "update"]

SPEC: dict[str, Any] = {
    **FULL,
    "nodes": {"all": {"select": "**", "capture": CAPTURED, "values": True}},
    "graph": True,
    "keep": {"ring": 20, "when": ["nonfinite"], "values": True},
}
"""Every step, with values, the graph and a ring of steps that may be kept."""

SIZES = (8, 8, 5, 8, 3, 1)
"""The batch sizes, repeatedly: the last batch of an epoch is smaller."""


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Excludes the objects of other tests from the counts."""
    logging.disable(logging.WARNING)
    set_aside()
    yield
    logging.disable(logging.NOTSET)


class _Heap(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usm fsm uordblks fordblks keep".split()
    ]


def allocated() -> int:
    """Returns the bytes that malloc has allocated in all threads, without those held in reserve.

    If the C library does not report this (glibc 2.33 and newer do), returns the resident bytes.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    library.mallinfo2.restype = _Heap
    found = library.mallinfo2()
    return int(found.uordblks) + int(found.hblkhd)


class Growth:
    """What the process holds, measured occasionally after a warm-up."""

    def __init__(self, first: int, every: int) -> None:
        self._first, self._every = first, every
        self.settle: Callable[[], None] = lambda: None  # waits until nothing is in flight
        self.steps: list[int] = []
        self.bytes: list[int] = []
        self.objects: list[int] = []
        self.tensors: list[int] = []

    def look(self, step: int) -> None:
        if step < self._first or (step - self._first) % self._every:
            return
        self.settle()
        gc.collect()
        known = gc.get_objects()
        self.objects.append(len(known))
        self.tensors.append(sum(issubclass(type(thing), torch.Tensor) for thing in known))
        del known
        self.bytes.append(allocated())
        self.steps.append(step)

    def __str__(self) -> str:
        slopes = [self.per_step(held) for held in (self.bytes, self.objects, self.tensors)]
        return (
            f"steps {self.steps[0]} to {self.steps[-1]}, per recorded step: {slopes[0]:.0f} bytes, "
            f"{slopes[1]:.3f} objects, {slopes[2]:.5f} tensors; "
            f"{[held >> 10 for held in self.bytes]} KiB, tensors {self.tensors}"
        )

    def per_step(self, held: list[int]) -> float:
        """Returns the slope of a straight line through the measurements (least squares)."""
        return float(np.polyfit(self.steps, held, 1)[0])


def train(growth: Growth, steps: int) -> None:
    """Trains with batches of changing size."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        size = SIZES[step % len(SIZES)] + 1  # a batch norm needs two
        loss = F.cross_entropy(model(torch.randn(size, 6)), torch.randint(3, (size,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        growth.look(step)


def hooked(growth: Growth, steps: int, _: Path) -> None:
    """Trains with everything captured, and each record discarded."""
    faults: list[BaseException] = []
    manager = HookManager(load_spec(SPEC), settled, on_fault=faults.append)
    manager.attach()
    train(growth, steps)
    manager.detach()
    assert faults == []


def settled(raw: RawStep) -> None:
    """Takes a record, does the writer thread's initial work, and discards it."""
    if raw.wait is not None:
        raw.wait()


def written(growth: Growth, steps: int, folder: Path) -> None:
    """Trains with everything recorded and written at once; a ring would fill up legitimately."""
    with comgra.trace({**SPEC, "keep": None}, root=folder, group="g") as session:
        writer = session._writer
        assert writer is not None
        idle = cast("Any", writer._work)._waiters  # the thread, which waits for work
        growth.settle = lambda: until(lambda: writer._bytes == 0 and len(idle) > 0)
        train(growth, steps)
    assert session.path is not None
    assert len(comgra.open_run(session.path).records) == steps


def until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "the writer thread is stuck"
        time.sleep(0.005)


WAYS = pytest.mark.parametrize("way", shortened([hooked, written], tried=1))


ALONE = """
from pathlib import Path
from tests.ways.test_memory import Growth, hooked, written
growth = Growth(first=64, every=64)
{}(growth, 193, Path({!r}))
assert len(growth.steps) == 3
assert max(growth.tensors) - min(growth.tensors) <= 2, growth
assert growth.objects[-1] - growth.objects[0] < 2 * 128, growth  # fewer than two per step
"""


@WAYS
def test_some_hundred_recorded_steps_leave_nothing_behind(way: Any, tmp_path: Path) -> None:
    """In a separate process, because servers and browsers of other tests would create objects."""
    done = forked(Path(__file__).parents[2], "-c", ALONE.format(way.__name__, str(tmp_path)))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@WAYS
def test_ten_thousand_recorded_steps_do_not_grow(
    way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data waiting for the writer comes and goes, so each measurement waits for the writer first.

    The same applies to the open block of 256 records, which is equally full at each measurement.
    The writer's cache of the index is smaller here, so that it is full by then.
    """
    monkeypatch.setattr("comgra_decl.store.writer._NODE_CACHE", 1 << 20)
    growth = Growth(first=2_048, every=512)
    way(growth, 10_000, tmp_path)
    print(f"{way.__name__}: {growth}")  # noqa: T201
    assert max(growth.tensors) - min(growth.tensors) <= 2
    assert abs(growth.per_step(growth.objects)) < 0.1
    assert growth.per_step(growth.bytes) < 1_000


class Watched(nn.Module):
    """Holds weak references to what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.seen: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.layer(x))
        result = torch.tanh(hidden * 2)
        self.seen += [weakref.ref(hidden), weakref.ref(result)]
        return result


class Witness:
    """Lives as long as the autograd node that it was attached to."""


def one_step(model: Watched, optimizer: torch.optim.Optimizer) -> list[weakref.ref[Any]]:
    """Takes one step; returns references to everything that only this step computed."""
    x = torch.randn(5, 6)
    loss = model(x).square().mean()
    assert loss.grad_fn is not None
    witness = loss.grad_fn.metadata["witness"] = Witness()
    references: list[weakref.ref[Any]] = [weakref.ref(x), weakref.ref(loss), weakref.ref(witness)]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return references + list(model.seen)


def alive(references: list[weakref.ref[Any]]) -> list[Any]:
    return [type(thing) for reference in references if (thing := reference()) is not None]


@pytest.mark.parametrize("keep", [None, SPEC["keep"]], ids=["all", "ring"])
def test_nothing_of_a_step_is_alive_after_it(keep: Any) -> None:
    model = Watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.disable()  # not even in a cycle that only the collector would find
    try:
        with recording({**SPEC, "keep": keep}) as run:
            for _ in range(3):
                references = one_step(model, optimizer)
                assert alive(references) == []
                model.seen.clear()
    finally:
        gc.enable()
    assert run.faults == []
    assert len(run.steps) == 3


def test_nothing_of_a_step_that_failed_is_alive_after_the_next() -> None:
    model = Watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(SPEC) as run:
        one_step(model, optimizer)
        model.seen.clear()
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            model(torch.randn(5, 6)) @ torch.randn(3, 3)
        failed = list(model.seen)
        model.seen.clear()
        one_step(model, optimizer)
        gc.collect()
        assert alive(list(failed)) == []
    assert run.faults == []


def test_the_model_and_its_optimizer_go_when_the_program_drops_them(tmp_path: Path) -> None:
    model = Watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    references: list[weakref.ref[Any]] = [
        weakref.ref(thing) for thing in (model, model.layer, model.layer.weight, optimizer)
    ]
    with comgra.trace(SPEC, root=tmp_path, group="g") as session:
        for _ in range(3):
            references += one_step(model, optimizer)
    model.seen.clear()
    del model, optimizer
    gc.collect()
    assert alive(references) == []
    assert session.path is not None

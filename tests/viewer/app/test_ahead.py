"""Data likely to be requested next is read while idle, and never delays a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from comgra_decl.errors import ComgraError
from comgra_decl.query.arrays import Arrays
from comgra_decl.query.slot import Slot
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.prefetching import Ahead


@pytest.fixture
def dashboard(root: Path) -> Dashboard:
    return Dashboard(Catalogue(root))


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comgra_decl.viewer.prefetching._REST", 0.02)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Every query that the run answers: what, and about which node or step."""
    asked: list[tuple[str, Any]] = []

    def listen(owner: type, name: str, question: str, about: Callable[..., Any]) -> None:
        method: Callable[..., Any] = getattr(owner, name)

        def ask(self: Any, *given: Any, **by: Any) -> Any:
            answer = method(self, *given, **by)  # gradients have no values here, which is quick
            asked.append((question, about(self, *given)))
            return answer

        monkeypatch.setattr(owner, name, ask)

    listen(Arrays, "row", "row", lambda _, step: step)
    listen(Slot, "row", "sample_row", lambda slot, _: slot.node)
    for name in ("series", "histograms", "preview"):
        listen(Slot, name, name, lambda slot, *_: slot.node)
    return asked


def run(work: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine in a thread, because browser tests leave a running loop in the main one."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, work).result()


def rested(dashboard: Dashboard, act: Callable[[], None]) -> None:
    """Acts within an event loop and waits until nothing is left to be read ahead."""

    async def wait() -> None:
        act()
        while dashboard._ahead._work:
            await asyncio.sleep(0.005)

    run(wait())


def test_the_next_steps_are_read_ahead(dashboard: Dashboard, reads: list[tuple[str, Any]]) -> None:
    rested(dashboard, lambda: dashboard.change(step=6, node="embed"))
    reads.clear()
    dashboard.change(step=5)
    assert reads == []
    rested(dashboard, lambda: dashboard.change(step=4))
    assert {2, 1} <= {step for name, step in reads if name == "row"}  # 3 was one of those before


def test_a_node_under_the_pointer_is_read_ahead(
    dashboard: Dashboard, reads: list[tuple[str, Any]]
) -> None:
    look = dashboard.screen.graph.view._handle_msg
    rested(dashboard, lambda: look({"look": "head"}))
    assert {"series", "histograms", "preview"} <= {name for name, what in reads if what == "head"}
    assert dashboard.state.node != "head"
    reads.clear()
    dashboard.screen.graph.view._handle_msg({"select": "head"})
    assert reads == []
    assert dashboard.state.node == "head"


async def finished(ahead: Ahead) -> None:
    """Waits until everything planned is done, including the cleanup after a rest."""
    while ahead._next is not None:
        await asyncio.sleep(0.001)


def test_newer_plans_take_the_place_of_older_ones() -> None:
    done: list[str] = []

    async def plan() -> None:
        ahead = Ahead()
        ahead.plan([lambda: done.append("old")] * 3, soon=True)
        ahead.plan([lambda: done.append("new"), lambda: done.append("newer")], soon=True)
        await finished(ahead)

    run(plan())
    assert done == ["new", "newer"]


def test_what_cannot_be_read_is_left_to_whoever_asks() -> None:
    done: list[str] = []

    def fail() -> None:
        raise ComgraError("gone")

    async def plan() -> None:
        ahead = Ahead()
        ahead.plan([fail, lambda: done.append("after")], soon=True)
        await finished(ahead)
        ahead.plan([lambda: done.append("again")], soon=True)
        await finished(ahead)

    run(plan())
    assert done == ["again"]


def test_process_memory_is_collected_in_a_rest_of_the_viewers_own_process_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr("comgra_decl.viewer.memory._BETWEEN", 0.0)
    monkeypatch.setattr("gc.collect", lambda: done.append("collected"))

    async def plan(ahead: Ahead) -> None:
        ahead.plan([lambda: done.append("read")] * 2, soon=True)
        await finished(ahead)

    monkeypatch.setattr("comgra_decl.viewer.memory._last", None)  # a notebook's
    run(plan(Ahead()))
    assert done == ["read", "read"]
    monkeypatch.setattr("comgra_decl.viewer.memory._last", 0.0)
    run(plan(Ahead()))
    assert done == ["read", "read", "read", "read", "collected"]
    monkeypatch.setattr("comgra_decl.viewer.memory._BETWEEN", 1e9)
    run(plan(Ahead()))
    assert done[-2:] == ["read", "read"]


def test_without_an_event_loop_nothing_is_read() -> None:
    ahead = Ahead()
    work = [lambda: pytest.fail("nothing could have called this")]
    with ThreadPoolExecutor(1) as thread:  # browser tests leave a running loop in the main one
        thread.submit(ahead.plan, work).result()
    assert not ahead._work


@pytest.mark.parametrize("wanted", [{"statistic": "l2"}, {"batch": "1"}, {"batch": "0"}])
def test_other_statistics_and_samples_of_a_tensor_are_read_ahead(
    dashboard: Dashboard, reads: list[tuple[str, Any]], wanted: dict[str, str]
) -> None:
    rested(dashboard, lambda: dashboard.change(node="head", step=6))
    dashboard.change(**wanted)
    reads.clear()
    dashboard.change(statistic="max")
    assert reads == []


def test_scales_of_a_painted_graph_are_read_ahead(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    statistics = dashboard._view.run.statistics  # type: ignore[union-attr]
    heat = Arrays.heat

    def ask(self: Arrays, name: str, **by: Any) -> Any:
        asked.append(name)
        return heat(self, name, **by)

    monkeypatch.setattr(Arrays, "heat", ask)
    rested(dashboard, lambda: dashboard.change(section="inspect", node="head", colour="kind"))
    assert asked == []
    rested(dashboard, lambda: dashboard.change(colour="forward"))
    assert set(asked) | {dashboard.state.statistic} == set(statistics)
    asked.clear()
    dashboard.change(statistic="max")
    assert asked == []

"""The step bar in a real browser, and how steps are transferred to it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import comgra_decl.viewer.components as components
from comgra_decl.viewer.components.stepbar import StepBar, arithmetic_runs
from comgra_decl.viewer.model.numbers import count
from tests.viewer.components.conftest import Shown

expect = pytest.importorskip("playwright.sync_api").expect
Show = Callable[..., Shown]

#: Ten steps one by one, then every tenth, then a gap.
STEPS = [*range(10), *range(10, 1000, 10), 2000]


def bar(**params: Any) -> StepBar:
    return StepBar(**{"steps": STEPS, "index": 5, "width": 1100, "height": 54, **params})


def shows(page: Any, index: int, steps: list[int] = STEPS) -> None:
    expect(page.locator(".number")).to_have_text(count(steps[index]))
    expect(page.locator(".position")).to_have_text(f"{count(index + 1)} / {count(len(steps))}")
    expect(page.get_by_role("slider")).to_have_attribute("aria-valuenow", str(steps[index]))


def point(page: Any, step: float, steps: list[int] = STEPS) -> tuple[float, float]:
    """Returns where a step is on the axis, on the screen."""
    axis = page.locator(".axis").bounding_box()
    share = (step - steps[0]) / (steps[-1] - steps[0])
    return axis["x"] + share * axis["width"], axis["y"]


def test_it_shows_the_current_step_and_its_position(show: Show, page: Any) -> None:
    shown = show(bar)
    shows(page, 5)
    expect(page.get_by_role("slider")).to_have_attribute("aria-valuetext", "step 5, 6 of 110")
    shown.set(index=109)
    shows(page, 109)

    def is_at_the_step() -> bool:
        handle = page.locator(".handle").bounding_box()
        return bool(abs(handle["x"] + handle["width"] / 2 - point(page, 2000)[0]) < 1.5)

    shown.until(is_at_the_step)  # the axis gets shorter where the number gets longer


@pytest.mark.slow
def test_a_message_that_is_lost_is_sent_again(
    show: Show, page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = show(bar)
    receive, received = shown.component.on_browser_message, []

    def lossy(data: Any) -> None:
        received.append(data)
        if len(received) > 1:
            receive(data)

    monkeypatch.setattr(shown.component, "on_browser_message", lossy)
    page.keyboard.press(".")
    shown.until(lambda: bool(shown.messages))
    shown.heard({"index": 6})
    first, second = received
    assert first == second


def test_a_message_that_arrives_twice_is_handled_once() -> None:
    shown, heard = bar(), []
    shown.on_message(lambda message: heard.append(dict(message)))
    for serial in ("a:1", "a:1", "b:1", "a:2", "a:1"):
        shown.on_browser_message({"index": 7, "serial": serial})
    shown.on_browser_message({"index": 8, "serial": [1]})
    shown.on_browser_message({"index": 9})
    assert heard == [{"index": 7}] * 3 + [{"index": 8}, {"index": 9}]
    assert shown.ack == len(heard)


def test_keys_move_from_anywhere_on_the_page(show: Show, page: Any) -> None:
    shown = show(lambda: bar(index=20))
    keys = {".": 21, ",": 19, "Shift+.": 30, "Shift+,": 10, ">": 30, "<": 10}
    for key, index in keys.items():
        shown.set(index=20)
        shows(page, 20)
        page.keyboard.press(key)
        shows(page, index)
        shown.heard({"index": index})
    page.locator("#other").click()
    for key in keys:
        page.keyboard.press(key)
    shown.heard()  # typing moves nothing


def test_arrow_keys_home_and_end_move_the_focused_bar(show: Show, page: Any) -> None:
    shown = show(bar)
    page.get_by_role("slider").focus()
    moves = [("ArrowRight", 6), ("Shift+ArrowRight", 16), ("PageDown", 6), ("ArrowLeft", 5)]
    for key, index in [*moves, ("End", 109), ("Home", 0)]:
        page.keyboard.press(key)
        shows(page, index)
        shown.heard({"index": index})
    page.keyboard.press("ArrowLeft")
    shown.heard()  # there is nothing before the first


def test_buttons_step_and_stop_at_the_ends(show: Show, page: Any) -> None:
    shown = show(lambda: bar(index=1))
    back, forth = (page.get_by_role("button", name=name) for name in ("Previous", "Next"))
    back.click()
    shows(page, 0)
    expect(back).to_be_disabled()
    forth.click(modifiers=["Shift"])
    shows(page, 10)
    shown.heard({"index": 0}, {"index": 10})
    shown.set(index=109)
    expect(forth).to_be_disabled()


def test_a_click_goes_to_the_nearest_recorded_step(show: Show, page: Any) -> None:
    shown = show(bar)
    shows(page, 5)
    for step, index in ((511, 60), (516, 61), (1400, 108), (1600, 109)):
        page.mouse.click(*point(page, step))
        shows(page, index)
        shown.heard({"index": index})


def test_a_drag_moves_along_and_the_last_place_counts(show: Show, page: Any) -> None:
    shown = show(bar)
    x, y = point(page, 100)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(*point(page, 700), steps=25)
    page.mouse.up()
    shows(page, STEPS.index(700))
    shown.until(lambda: shown.messages[-1:] == [{"index": STEPS.index(700)}])
    assert shown.messages[-1] == {"index": STEPS.index(700)}
    assert shown.component.index == STEPS.index(700)


def test_marks_are_flags_that_can_be_clicked(show: Show, page: Any) -> None:
    marks = [
        {"index": 60, "color": "#ff0000", "title": "<b>loss spike</b>"},
        {"index": 80, "color": "url(http://example.com)", "title": "odd"},
        {"index": 999, "color": "#ff0000", "title": "not a step"},
    ]
    shown = show(lambda: bar(marks=marks))
    expect(page.locator(".mark")).to_have_count(2)
    expect(page.locator(".mark title").first).to_have_text("<b>loss spike</b>")
    page.locator(".mark").first.click()
    shown.heard({"index": 60})


def test_moving_away_from_the_newest_step_ends_following(show: Show, page: Any) -> None:
    shown = show(lambda: bar(index=109))
    follow = page.get_by_role("button", name="newest recorded step")
    expect(follow).to_have_attribute("aria-pressed", "false")
    follow.click()
    expect(follow).to_have_attribute("aria-pressed", "true")
    shown.heard({"follow": True})
    page.keyboard.press(",")
    expect(follow).to_have_attribute("aria-pressed", "false")
    shown.heard({"follow": False}, {"index": 108})


def test_new_steps_appear_without_moving_what_is_looked_at(show: Show, page: Any) -> None:
    shown = show(lambda: bar(steps=STEPS[:50], index=20))
    shows(page, 20, STEPS[:50])
    shown.set(steps=np.array(STEPS))
    shows(page, 20)
    shown.set(steps=[*STEPS, 2001], index=110)
    shows(page, 110, [*STEPS, 2001])


def test_without_steps_it_says_so(show: Show, page: Any) -> None:
    shown = show(lambda: bar(steps=[], index=-1))
    expect(page.locator(".position")).to_have_text("no steps recorded yet")
    page.keyboard.press(".")
    page.mouse.click(600, 25)
    shown.heard()
    shown.set(steps=[7], index=0)
    shows(page, 0, [7])


def test_a_hundred_thousand_steps_are_a_few_numbers_and_a_few_ticks(show: Show, page: Any) -> None:
    steps = list(range(0, 1_000_000, 10))
    shown = show(lambda: bar(steps=steps, index=50_000))
    assert shown.component.runs == [0, 10, 100_000]
    shows(page, 50_000, steps)
    ticks = page.locator(".ticks").get_attribute("d").count("M")
    assert 100 < ticks < 600
    page.keyboard.press(".")
    shows(page, 50_001, steps)
    shown.heard({"index": 50_001})


def test_ticks_stand_where_the_steps_are(show: Show, page: Any) -> None:
    steps = [0, 10, 100, 1000]
    show(lambda: bar(steps=steps, index=0))
    shows(page, 0, steps)
    drawn = [float(x) for x in re.findall(r"M([\d.]+)", page.locator(".ticks").get_attribute("d"))]
    start, end = drawn[0], drawn[-1]
    shares = [(x - start) / (end - start) for x in drawn]
    assert shares == pytest.approx([0, 0.01, 0.1, 1], abs=1e-3)


@pytest.mark.parametrize(
    "message",
    [
        {"index": 110},
        {"index": -1},
        {"index": 1.0},
        {"index": True},
        {"follow": 1},
        {"step": 3},
        [],
    ],
)
def test_messages_that_mean_nothing_are_ignored(message: Any) -> None:
    view = bar()
    heard: list[Any] = []
    view.on_message(heard.append)
    view._handle_msg(message)
    assert (heard, view.index, view.follow, view.ack) == ([], 5, False, 1)


# ---- how steps are transferred

ascending = st.lists(st.integers(1, 60), max_size=60).map(lambda gaps: np.cumsum(gaps).tolist())
regular = st.lists(
    st.tuples(st.integers(1, 50), st.integers(1, 20)), min_size=1, max_size=6
).map(lambda parts: np.cumsum([gap for gap, n in parts for _ in range(n)]).tolist())  # fmt: skip


@given(ascending | regular)
def test_runs_say_exactly_which_steps_there_are(steps: list[int]) -> None:
    runs = arithmetic_runs(steps)
    triples = [runs[i : i + 3] for i in range(0, len(runs), 3)]
    assert [first + stride * i for first, stride, n in triples for i in range(n)] == steps
    assert all(n > 0 for *_, n in triples)


def test_runs_of_a_usual_schedule_are_short() -> None:
    assert arithmetic_runs(range(100_000)) == [0, 1, 100_000]
    assert arithmetic_runs([]) == []
    assert arithmetic_runs([5]) == [5, 0, 1]
    assert arithmetic_runs([0, 1, 2, 3, 13, 23, 33]) == [0, 1, 4, 13, 10, 3]


@pytest.mark.parametrize("seed", range(3))
def test_the_browser_counts_steps_as_numpy_does(open_page: Any, seed: int) -> None:
    page = open_page()
    chance = np.random.default_rng(seed)
    gaps = np.repeat(chance.integers(1, 40, 40), chance.integers(1, 30, 40))
    steps = np.cumsum(gaps)
    asked = chance.uniform(-50, steps[-1] + 50, 300).round(3)
    folder = Path(components.__file__).parent
    code = (folder / "stepbar.js").read_text().replace("export ", "")
    got = page.evaluate(
        f"""([runs, asked]) => {{ {code}
        const steps = new Steps(runs);
        return [steps.count, asked.map((value) => steps.nearest(value)),
                Array.from({{ length: steps.count }}, (_, i) => steps.step(i))] }}""",
        [arithmetic_runs(steps), asked.tolist()],
    )
    assert got[0] == len(steps)
    assert got[2] == steps.tolist()
    distance = np.abs(steps[None, :] - asked[:, None])
    assert (distance[np.arange(300), got[1]] == distance.min(axis=1)).all()

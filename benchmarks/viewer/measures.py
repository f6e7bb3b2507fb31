"""The measurements of each run. All times are in milliseconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import cycle, islice, pairwise
from typing import Any

from benchmarks.viewer.screen import ANSWERED, Screen
from benchmarks.viewer.served import Served
from benchmarks.viewer.trained import HEADS, LAYERS, RECORDS, SAMPLES

CHANGES = 30
LOADS = 5
_TABS = 5
_QUICK, _BURSTS = 10, 10
_MEMORY_CHANGES = 500
_REST = 2000  # ms
_FILLING = 450  # changes before measuring, which fill most of the caches

Times = dict[str, list[float]]


def everyday(chromium: Any, server: Served) -> dict[str, Any]:
    """Measure common actions: loading, all kinds of changes, and painting."""
    figures = loading(chromium, server.url)
    screen = Screen(chromium, server.url)
    figures["nothing"] = list(nothing(screen, CHANGES))
    figures["step"] = list(steps(screen, CHANGES))
    figures |= clicks(screen, CHANGES)
    figures["sample"] = [
        screen.choose("batch", value, f'article[data-batch="{value}"]')
        for value in islice(cycle("0123"), CHANGES)
    ]
    figures["statistic"] = [
        screen.choose("statistic", name, f'article[data-statistic="{name}"]')
        for name in islice(cycle(("l2", "max", "mean", "abs_mean", "std")), CHANGES)
    ]
    figures |= painting(screen, CHANGES)
    screen.close()
    return figures


def loading(chromium: Any, url: str, loads: int = LOADS) -> dict[str, Any]:
    """Measure opening the page: the first time, then until it paints anything and can be used."""
    screens = [_opened(chromium, url) for _ in range(1 + loads)]
    return {
        "first load": [screens[0].usable],
        "first paint": [screen.painted for screen in screens[1:]],
        "usable": [screen.usable for screen in screens[1:]],
    }


def _opened(chromium: Any, url: str) -> Screen:
    screen = Screen(chromium, url)
    screen.close()
    return screen


def _load(chromium: Any, url: str) -> float:
    return _opened(chromium, url).usable


def nothing(screen: Screen, count: int) -> Iterator[float]:
    """Select the section that is already shown, which takes only a message, a reply and a frame."""
    tab = screen.page.locator('[role="tab"][aria-selected="true"]')
    for _ in range(count):
        yield screen.change("click", tab.click, ANSWERED)["all"]


def steps(screen: Screen, count: int) -> Iterator[float]:
    """Step backwards from the last step by key."""
    for _ in range(count):
        wanted = f'article[data-step="{int(screen.at["step"]) - 1}"]', ANSWERED
        yield screen.change("keydown", lambda: screen.page.keyboard.press(","), *wanted)["all"]


def clicks(screen: Screen, count: int) -> Times:
    """Click on visible boxes; measure until one is highlighted and until all panes show it."""
    times: Times = {"highlight": [], "node": []}
    nodes = _clickable(screen)
    for node, (x, y) in islice(
        cycle(nodes.items()), 1, count + 1
    ):  # the first one is already selected
        highlight = f'.node.selected[data-id="{node}"]'
        screen.page.mouse.move(x, y)  # a real pointer arrives before it clicks
        took = screen.change(
            "pointerdown",
            lambda x=x, y=y: screen.page.mouse.click(x, y),  # type: ignore[misc]
            highlight,
            f'article[data-node="{node}"]',
            ANSWERED,
            first=highlight,
        )
        times["node"].append(took["all"])
        times["highlight"].append(took["first"])
    return times


def _clickable(screen: Screen) -> dict[str, tuple[float, float]]:
    """Return the centres of visible boxes that are single nodes."""
    boxes = screen.page.evaluate(_IN_VIEW)
    found = {name: (x, y) for name, x, y in boxes[:12]}
    assert len(found) > 1, "fewer than two nodes are visible"
    return found


_IN_VIEW = """() => {
  const root = probe.roots.find((root) => root.querySelector(".stage"));
  const stage = root.querySelector(".stage").getBoundingClientRect();
  const middle = (box) => [box.x + box.width / 2, box.y + box.height / 2];
  const inside = ([x, y]) => x > stage.x + 20 && x < stage.right - 200
    && y > stage.y + 40 && y < stage.bottom - 80;
  const boxes = [...root.querySelectorAll(".node.kind-computed:not(:has(.stack))")];
  const reached = ([id, ...at]) => // bands and buttons cover some
    root.elementFromPoint(...at)?.closest(".node")?.dataset.id === id;
  return boxes.map((box) => [box.dataset.id, ...middle(box.getBoundingClientRect())])
    .filter(([id, ...at]) => inside(at) && reached([id, ...at]));
}"""


def painting(screen: Screen, count: int) -> Times:
    """Paint the graph by one statistic after another, then step while it is painted."""
    screen.page.locator('[data-field="colour"] select').select_option("forward")
    screen.page.locator('.legend[data-painted^="forward"]').wait_for()
    painted = [
        screen.choose("statistic", name, f'.legend[data-painted$="{name}"]')
        for name in islice(cycle(("l2", "max", "mean", "abs_mean", "std")), count)
    ]
    return {"painting": painted, "step, painted": list(steps(screen, count))}


def large(chromium: Any, server: Served) -> dict[str, Any]:
    """Measure a graph with every scope open: first render, clicks, painting."""
    url = f"{server.url}?{_all_open(chromium, server.url)}"
    figures: dict[str, Any] = {"first render, all open": [_load(chromium, url) for _ in range(3)]}
    figures["first render, folded"] = [_load(chromium, server.url) for _ in range(3)]
    screen = Screen(chromium, url)
    figures["boxes"] = screen.page.locator(".node").count()
    figures |= clicks(screen, CHANGES)
    figures["step"] = list(steps(screen, CHANGES))
    figures |= painting(screen, CHANGES)
    figures["new colours"] = screen.page.evaluate("probe.recolour(30)")
    screen.close()
    return figures


def _all_open(chromium: Any, url: str) -> str:
    """Return the query that opens every scope, found by opening folded boxes level by level."""
    screen = Screen(chromium, url)
    opened: set[str] = set()
    while True:
        folded = set(screen.page.evaluate(_FOLDED)) - opened
        if not folded:
            break
        opened |= folded
        screen.close()
        screen = Screen(chromium, f"{url}?{_query(opened)}")
    screen.close()
    return _query(opened)


def _query(opened: set[str]) -> str:
    return "&".join(f"open={scope}" for scope in sorted({*opened, "blocks"}))


_FOLDED = """() => {
  const root = probe.roots.find((root) => root.querySelector(".stage"));
  return [...root.querySelectorAll(".node:has(.stack)")].map((node) => node.dataset.id);
}"""


def long(chromium: Any, server: Served) -> dict[str, Any]:
    """Measure a very long run: loading, single steps, and dragging along the slider."""
    figures: dict[str, Any] = {"first load": [_load(chromium, server.url)]}
    figures["usable"] = [_load(chromium, server.url) for _ in range(LOADS)]
    screen = Screen(chromium, server.url)
    figures["step"] = list(steps(screen, CHANGES))
    figures |= clicks(screen, CHANGES)
    figures |= _drag(screen)
    screen.close()
    return figures


def _drag(screen: Screen) -> Times:
    """Drag the handle along the slider for a while, at the speed of a user."""
    track = screen.page.locator(".track").bounding_box()
    y = track["y"] + track["height"] / 2
    at = [track["x"] + 40 + (track["width"] - 80) * i / 120 for i in range(120)]
    screen.page.mouse.move(at[0], y)
    screen.page.mouse.down()
    screen.page.evaluate("probe.frames()")
    for x in at:
        screen.page.mouse.move(x, y)
        screen.page.wait_for_timeout(16)
    frames: list[float] = screen.page.evaluate("probe.stop()")
    wanted = int(screen.page.locator(".track").get_attribute("aria-valuenow") or 0)
    released = screen.change("pointerup", screen.page.mouse.up, f'article[data-step="{wanted}"]')
    return {"frame while dragging": frames, "after letting go": [released["all"]]}


def memory(chromium: Any, server: Served) -> dict[str, Any]:
    """Measure the server's memory over many changes, then with a growing number of sessions."""
    screen = Screen(chromium, server.url)
    screen.page.evaluate("probe.drive(20, 0)")
    figures: dict[str, Any] = {"memory at first": [server.memory()]}
    deque(steps_quickly(screen, _FILLING), maxlen=0)
    held = [_at_rest(screen, server)]
    for _ in range(5):
        deque(steps_quickly(screen, _MEMORY_CHANGES // 5), maxlen=0)
        held.append(_at_rest(screen, server))
    figures["memory over 500 changes"] = held
    screens = [screen]
    sessions = [server.memory()]
    while len(screens) < _TABS:
        screens.append(Screen(chromium, server.url))
        sessions.append(server.memory())
    figures["memory per session"] = [b - a for a, b in pairwise(sessions)]
    figures["step, 5 sessions at once"] = _together(screens)
    for screen in screens:
        screen.close()
    return figures


def pictures(chromium: Any, server: Served) -> dict[str, Any]:
    """Measure the Pictures section, and the attention weights of all heads of a model."""
    last = RECORDS - 1
    shown = 'h2[data-step="{}"]'.format
    url = f"{server.url}?run=group/cnn&node=20&step={last}"
    screen = Screen(chromium, url, ready=[shown(last), ".node"], section="pictures")
    figures: dict[str, Any] = {"usable": [screen.usable], "step": [], "step, pictures drawn": []}

    def press(key: str, step: int, pause: int = 150) -> dict[str, float]:
        return screen.change(
            "keydown",
            lambda: screen.page.keyboard.press(key),
            shown(step),
            ANSWERED,
            first=shown(step),
            pause=pause,
        )

    for step in range(last - 1, last - 1 - CHANGES, -1):
        took = press(",", step)
        figures["step"].append(took["all"])
        figures["step, pictures drawn"].append(took["first"])
    back = [press(".", step) for step in range(last - CHANGES + 1, last + 1)]
    figures["step back"] = [took["all"] for took in back]
    figures["step back, pictures drawn"] = [took["first"] for took in back]
    figures["last of ten quick steps"] = []
    for burst in range(1, _BURSTS + 1):
        step = last - burst * _QUICK
        for _ in range(_QUICK - 1):
            screen.page.keyboard.press(",")
        figures["last of ten quick steps"].append(press(",", step, pause=0)["all"])
    tiles = screen.page.locator("button.tile")
    figures["sample"] = [
        screen.change(
            "pointerdown",
            tiles.nth(sample).click,
            f'button.tile[data-send="sample:{sample}"][aria-pressed="true"]',
            ANSWERED,
        )["all"]
        for sample in islice(cycle(range(1, SAMPLES)), CHANGES)
    ]
    screen.close()
    url = f"{server.url}?run=group/heads"
    opened = []
    for _ in range(LOADS):
        screen = Screen(chromium, url, ready=[".attention canvas"], section="attention")
        model = screen.page.get_by_role("button", name="Model", exact=True)
        all_heads = f"tr:nth-child({LAYERS}) td:nth-child({HEADS + 1}) canvas"
        opened.append(screen.change("pointerdown", model.click, all_heads)["all"])
        screen.close()
    figures["144 heads, 128 tokens"] = opened
    return figures


def _at_rest(screen: Screen, server: Served) -> float:
    """Return the server's memory in MB after a moment without requests."""
    screen.page.wait_for_timeout(_REST)
    return server.memory()


def steps_quickly(screen: Screen, count: int) -> Iterator[None]:
    """Step backwards without timing, showing no step twice."""
    for _ in range(count):
        wanted = int(screen.at["step"]) - 1
        screen.page.keyboard.press(",")
        screen.page.evaluate("(s) => probe.painted([s])", f'article[data-step="{wanted}"]')
        yield


def _together(screens: list[Screen]) -> list[float]:
    for screen in screens:
        screen.page.evaluate("() => { probe.result = probe.drive(30, 100); }")
    return [time for screen in screens for time in screen.page.evaluate("probe.result")]

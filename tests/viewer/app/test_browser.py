"""The whole viewer in a real browser, served by `panel serve` in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import comgra_decl
from tests.viewer.app.conftest import BROKEN_FROM
from tests.viewer.conftest import HARMLESS

pytestmark = pytest.mark.browser

VIEWER = Path(comgra_decl.__file__).parent / "viewer"
REPOSITORY = Path(__file__).resolve().parents[3]
PATIENCE = 60  # seconds for a server to start, on a busy machine

WRITER = """
import sys, time
from tests.support.fake_run import FakeRun
fake = FakeRun(sys.argv[1], nodes=["embed", "head"], layers=1)
print("created", flush=True)
for _ in range(int(sys.argv[2])):
    sys.stdin.readline()
    fake.write(1, evals=False)
    print("written", flush=True)
fake.close()
"""


class Server:
    """A `panel serve viewer` of its own."""

    def __init__(self, root: Path, log: Path, *more: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "panel", "serve", str(VIEWER), "--port", "0"]
        command += ["--address", "127.0.0.1", "--args", str(root), *more]
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        self.url = _announced(log, r"app running at: (http://127\.0\.0\.1:\d+/viewer)")

    def stop(self) -> None:
        """Ends the server; fails if it logged an error."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(PATIENCE)
        blocks = self.log.read_text().split("Task exception was never retrieved")
        errors = [b for b in blocks if "Traceback" in b and not HARMLESS.search(b)]
        errors += [line for line in self.log.read_text().splitlines() if " ERROR" in line]
        assert not errors, "the server logged errors:\n" + "\n".join(errors)


def _announced(log: Path, pattern: str) -> str:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        found = re.search(pattern, log.read_text())
        if found:
            return found[1]
        time.sleep(0.05)
    raise AssertionError(f"the server did not start:\n{log.read_text()}")


@pytest.fixture(scope="module")
def server(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves one good run and one damaged one to all tests of this file."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(root, folder / "runs")
    shutil.copytree(root / "group" / "small", folder / "runs" / "group" / "torn")
    for file in (folder / "runs" / "group" / "torn").rglob("*"):
        if file.is_file():
            os.truncate(file, 3)
    server = Server(folder / "runs", folder / "log")
    yield server
    server.stop()


@pytest.fixture
def open_page(open_page: Callable[..., Any]) -> Callable[..., Any]:
    """Opens pages that are patient: a whole page takes its time on a busy machine."""

    def patient(**options: Any) -> Any:
        page = open_page(**options)
        page.set_default_timeout(30_000)
        return page

    return patient


@pytest.fixture
def viewer(server: Server, page: Any) -> Callable[..., Any]:
    """Opens the viewer with a query and waits until it is usable."""

    def open_(query: str = "", shown: str = "article[data-step]") -> Any:
        page.goto(server.url + query)
        page.locator(shown).first.wait_for()
        page.wait_for_function("() => !!(window.Bokeh && Bokeh.documents[0].is_idle)")
        return page

    return open_


def shows(page: Any, *, node: str | None = None, step: int | None = None) -> None:
    """Waits until the table shows a node at a step."""
    mark = f'[data-node="{node}"]' if node else ""
    mark += f'[data-step="{step}"]' if step is not None else ""
    page.locator(f"article{mark}").wait_for()


def query(page: Any, key: str) -> str | None:
    """Returns a field of the page's address."""
    return parse_qs(urlsplit(page.url).query).get(key, [None])[0]


def find(page: Any, text: str) -> None:
    """Searches for a node by keyboard."""
    page.keyboard.press("/")
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def test_the_page_opens_with_everything_in_view(viewer: Callable[..., Any]) -> None:
    page = viewer()
    shows(page, step=11)
    for node in ("input", "embed", "head", "head.weight", "loss"):
        assert page.locator(f'.node[data-id="{node}"]').count() == 1
    assert page.locator("canvas").count() >= 6  # six figures
    assert page.locator("table.stats tbody tr").count() == 9
    assert page.locator("table.samples tbody tr").count() == 4
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) == 0


def test_a_click_on_a_node_shows_it(viewer: Callable[..., Any]) -> None:
    page = viewer()
    page.locator('.node[data-id="head"]').click()
    shows(page, node="head", step=11)
    page.wait_for_url(re.compile("node=head"))


def test_a_node_is_found_by_name(viewer: Callable[..., Any]) -> None:
    page = viewer()
    find(page, "fc1")
    shows(page, node="blocks.0.mlp.fc1")


def test_keys_walk_through_the_steps(viewer: Callable[..., Any]) -> None:
    page = viewer("?step=5")
    shows(page, step=5)
    page.keyboard.press(".")
    shows(page, step=6)
    for _ in range(4):
        page.keyboard.press(",")
    shows(page, step=2)
    page.keyboard.press("Shift+>")
    shows(page, step=11)


def test_a_click_on_a_series_jumps_to_that_step(viewer: Callable[..., Any]) -> None:
    page = viewer("?node=embed&step=11")
    box = page.locator(".bk-Figure").first.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.5)
    page.locator('article[data-step]:not([data-step="11"])').wait_for()
    assert 3 <= int(page.locator("article").get_attribute("data-step")) <= 8


def test_selectors_choose(viewer: Callable[..., Any]) -> None:
    page = viewer("?node=cell&step=5")
    page.locator('[data-field="iteration"] select').select_option("2")
    page.wait_for_url(re.compile("iteration=2"))
    page.locator('[data-field="batch"] select').select_option("3")
    page.locator('tr.chosen[data-send="batch:mean"]').wait_for()
    page.locator('[data-field="statistic"] select').select_option("l2")
    page.locator('tr.chosen[data-send="statistic:l2"]').wait_for()
    page.locator('[data-field="colour"] select').select_option("grad")
    page.get_by_text("gradient · l2", exact=True).first.wait_for()
    page.locator('[data-field="type"] select').select_option("eval")
    shows(page, node="cell", step=10)
    assert query(page, "batch") == "3"


def test_a_click_on_a_finding_jumps_to_its_node_and_step(viewer: Callable[..., Any]) -> None:
    page = viewer("?section=findings&step=2&node=embed", "article.finding")
    finding = page.locator('article[data-rule="nonfinite"]')
    finding.locator("button.go").first.click()
    page.wait_for_url(re.compile(f"node=(?!embed).*step={BROKEN_FROM}"))
    page.locator('.mark[data-index="9"]').first.wait_for(state="attached")
    page.get_by_role("button", name="Paint the graph").click()
    page.locator(".legend", has_text="findings").wait_for()
    finding.locator("button.inspect").click()
    shows(page, node=query(page, "node"), step=BROKEN_FROM)


def test_a_row_of_the_table_chooses_by_keyboard(viewer: Callable[..., Any]) -> None:
    page = viewer()
    page.locator('tr[data-send="statistic:min"]').focus()
    page.keyboard.press("Enter")
    page.locator('tr.chosen[data-send="statistic:min"]').wait_for()


def test_a_link_restores_the_view_and_back_goes_back(viewer: Callable[..., Any]) -> None:
    page = viewer("?node=cell&iteration=1&step=7&batch=2&stat=l2&scale=log&colour=forward")
    shows(page, node="cell", step=7)
    assert page.locator('[data-field="iteration"] select').input_value() == "1"
    assert page.locator('[data-field="batch"] select').input_value() == "2"
    page.locator('.node[data-id="head"]').click()
    shows(page, node="head", step=7)
    page.wait_for_url(re.compile("node=head"))
    page.keyboard.press(".")
    shows(page, node="head", step=8)
    page.wait_for_url(re.compile("step=8"))
    page.go_back()
    shows(page, node="cell", step=7)
    page.go_forward()
    shows(page, node="head", step=8)


def test_a_hostile_link_is_harmless(viewer: Callable[..., Any]) -> None:
    page = viewer("?run=../../etc/passwd&node=<script>alert(1)</script>&step=999&section=x")
    shows(page, step=11)
    page.wait_for_url(lambda url: "passwd" not in url and "script" not in url)
    assert query(page, "run") == "group/small"


def test_all_sections_are_there(viewer: Callable[..., Any]) -> None:
    page = viewer()
    page.get_by_role("tab", name="Run").click()
    page.get_by_text("max_elements").first.wait_for()
    page.locator("table.entries").wait_for()
    page.get_by_role("tab", name="KPIs").click()
    page.locator(".bk-Figure >> visible=true").first.wait_for()
    page.get_by_role("tab", name="Inspect").click()
    shows(page, step=11)
    page.wait_for_url(lambda url: "section" not in url)


def test_a_click_in_the_overview_selects_tensor_and_step(viewer: Callable[..., Any]) -> None:
    page = viewer("?step=11&node=head")
    page.get_by_role("tab", name="Overview").click()
    page.wait_for_url(lambda url: "section=overview" in url)
    figure = page.locator(".bk-Figure >> visible=true").first
    figure.wait_for()
    box = figure.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.15)
    page.wait_for_url(lambda url: "node=head" not in url and "step=11" not in url)
    chosen = re.search(r"step=(\d+)", page.url)
    assert chosen is not None
    assert 2 <= int(chosen[1]) <= 8


def test_dark_and_light(viewer: Callable[..., Any]) -> None:
    page = viewer()
    colour = "() => getComputedStyle(document.querySelector('body')).backgroundColor"
    light = page.evaluate(colour)
    page.get_by_label("Toggle theme").click()
    page.wait_for_function(f"before => ({colour})() !== before", arg=light)


def test_a_damaged_run_says_why_and_others_stay_usable(viewer: Callable[..., Any]) -> None:
    page = viewer("?run=group/torn", shown=".notice")
    page.get_by_text("This run is damaged").wait_for()
    page.locator('[data-field="run"] select').select_option("group/small")
    shows(page, step=11)


def test_it_fits_a_laptop(server: Server, open_page: Callable[..., Any]) -> None:
    page = open_page(viewport={"width": 1280, "height": 720})
    page.goto(server.url)
    shows(page, step=11)
    figure = page.locator(".bk-Figure").first.bounding_box()
    assert figure["y"] + figure["height"] <= 720
    assert page.evaluate("document.documentElement.scrollHeight") <= 720


def test_two_tabs_are_independent(server: Server, open_page: Callable[..., Any]) -> None:
    one, other = open_page(), open_page()
    for page in (one, other):
        page.goto(server.url)
        shows(page, step=11)
    one.bring_to_front()
    one.keyboard.press(",")
    shows(one, step=10)
    other.bring_to_front()
    shows(other, step=11)


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Server]:
    """Serves a folder that does not exist yet."""
    server = Server(tmp_path / "runs", tmp_path / "log")
    yield server
    server.stop()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Callable[[int], None]]:
    """Returns what makes a training in another process write a number of records."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "runs" / "live"), "6"],
        cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def write(records: int) -> None:
        for _ in range(records):
            stdin.write("\n")
            stdin.flush()
            stdout.readline()

    with process:
        yield write
        process.kill()


def test_a_page_fills_and_follows_while_training(
    empty: Server, tmp_path: Path, page: Any, training: Callable[[int], None]
) -> None:
    page.goto(empty.url)
    page.get_by_text("Waiting for the first record").wait_for()
    page.get_by_text("live has started").wait_for()
    training(2)
    shows(page, step=1)  # by itself, and it follows
    training(2)
    shows(page, step=3)
    page.keyboard.press(",")
    shows(page, step=2)  # now someone looks: nothing moves any more
    training(2)
    page.get_by_text("finished \u00b7 6 records").wait_for()
    shows(page, step=2)
    shutil.rmtree(tmp_path / "runs" / "live")
    page.get_by_role("heading", name="This run is gone").wait_for()


def test_serve_prints_its_address_and_ends_cleanly(root: Path, tmp_path: Path) -> None:
    code = f"from comgra_decl.viewer.serve import serve; serve({str(root)!r})"
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=out, stderr=out)
    address = _announced(log, r"viewer: (http://127\.0\.0\.1:\d+/viewer)\s")
    assert urlsplit(address).port
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 0
    assert "Traceback" not in log.read_text()

"""Each state of a folder of runs is explained, in a real browser."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tornado.websocket import WebSocketClosedError

from comgra_decl.viewer.closed_tabs import forgive_hangups
from comgra_decl.viewer.page import create_page
from tests.faults.failing import FailingDisk
from tests.store.test_damage import change_json
from tests.support.shortened import shortened
from tests.viewer.app.served import CODE, REPOSITORY, Gallery

pytestmark = pytest.mark.browser

WRITER = """
import sys, time
from tests.support.fake_run import FakeRun
fake = FakeRun(sys.argv[1], nodes=["embed", "head"], layers=1)
fake.write(2, evals=False)
print("written", flush=True)
time.sleep(600)
"""
Show = Callable[..., Any]


@pytest.fixture
def runs(root: Path, tmp_path: Path) -> Path:
    """A separate folder with the small run."""
    shutil.copytree(root, tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comgra_decl.viewer.model.catalogue._BETWEEN_LISTS", 0.2)
    monkeypatch.setattr("comgra_decl.viewer.model.catalogue._SHARE", 2)


@pytest.fixture
def show(serve: Callable[[Callable[[], Any]], str], runs: Path, page: Any) -> Show:
    """Opens the viewer on the folder, with a query."""

    def show(query: str = "") -> Any:
        page.goto(serve(lambda: create_page([str(runs)])) + (query + "&section=inspect"))
        return page

    return show


def heading(page: Any, text: str) -> None:
    page.get_by_role("heading", name=text).wait_for()


@pytest.mark.slow
def test_a_run_of_a_newer_format_says_to_upgrade(runs: Path, show: Show) -> None:
    newer = runs / "group" / "newer"
    shutil.copytree(runs / "group" / "small", newer)
    change_json(newer, "meta/run.json", version=9, min_reader=9)
    page = show("?run=group/newer")
    heading(page, "This run was written in another format")
    page.get_by_text("Upgrade comgra-decl").wait_for()
    page.get_by_text("choose one on the left").wait_for()
    page.locator('[data-field="run"] select').select_option("group/small")
    page.locator('article[data-step="11"]').wait_for()


@pytest.mark.slow
def test_a_run_whose_writer_died_is_shown_and_said_to_have_stopped(runs: Path, show: Show) -> None:
    command = [sys.executable, "-c", WRITER, str(runs / "group" / "killed")]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        page = show("?run=group/killed")
        page.get_by_text("live \u00b7 2 records").wait_for()
        process.send_signal(signal.SIGKILL)
    page.locator(".state.stopped", has_text="stopped unexpectedly \u00b7 2 records").wait_for()
    page.locator('article[data-step="1"]').wait_for()


@pytest.mark.slow
def test_a_new_run_is_offered_without_moving_what_is_looked_at(runs: Path, show: Show) -> None:
    page = show("?step=4&node=head")
    page.locator('article[data-step="4"]').wait_for()
    shutil.copytree(runs / "group" / "small", runs / "group" / "another")
    page.locator('[data-field="run"] option[value="group/another"]').wait_for(state="attached")
    assert page.locator("article").get_attribute("data-step") == "4"
    assert page.locator("article").get_attribute("data-node") == "head"


@pytest.mark.parametrize(
    "gone", shortened(["group/small", "group/small/trace.ocdbt/manifest.ocdbt"], tried=1)
)
@pytest.mark.slow
def test_a_run_that_goes_away_while_it_is_viewed_comes_back(
    gone: str, runs: Path, tmp_path: Path, show: Show
) -> None:
    page = show("?node=head")
    page.locator('.node[data-id="head"]').wait_for()
    (runs / gone).rename(tmp_path / "aside")
    page.locator(".notice").first.wait_for()
    (tmp_path / "aside").rename(runs / gone)
    page.locator('.node[data-id="head"]').wait_for()
    page.wait_for_function("() => !document.querySelector('.notice.big')?.checkVisibility()")


@pytest.mark.slow
def test_a_disk_that_fails_is_said_in_the_page_and_not_the_end(
    runs: Path, tmp_path: Path, show: Show
) -> None:
    data = runs / "group" / "small" / "trace.ocdbt" / "d"
    data.rename(tmp_path / "aside")
    page = show("?node=head")
    page.locator(".notice").first.wait_for()
    (tmp_path / "aside").rename(data)
    page.reload()
    page.locator('.node[data-id="head"]').wait_for()


@pytest.mark.slow
def test_a_viewer_outlives_read_errors_of_its_disk(
    runs: Path, tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    disk = FailingDisk(tmp_path / "disk", under=runs)
    command = [sys.executable, "-c", CODE, "view", str(runs), "--port", "0", "--no-show"]
    with (tmp_path / "said").open("w") as said:
        viewer = subprocess.Popen(
            command, cwd=REPOSITORY, env=disk.environment, stdout=said, stderr=said
        )
    try:
        url = _address(tmp_path / "said", viewer)
        disk.fail("read")
        page = open_page()
        page.goto(f"{url}?node=head&section=inspect")
        page.locator(".notice", has_text="Input/output error").first.wait_for()
        disk.recover()
        page.reload()
        page.locator('.node[data-id="head"]').wait_for()
        assert viewer.poll() is None
    finally:
        viewer.send_signal(signal.SIGINT)
        viewer.wait()
    assert "Traceback" not in (tmp_path / "said").read_text()


def _address(said: Path, viewer: subprocess.Popen[bytes]) -> str:
    while viewer.poll() is None:
        if found := re.search(r"(http://\S+)\s", said.read_text()):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(said.read_text())


@pytest.mark.slow
def test_among_many_runs_one_is_found_by_typing(runs: Path, show: Show) -> None:
    for number in range(24):
        shutil.copytree(runs / "group" / "small", runs / f"sweep{number % 2}" / f"lr-{number:02d}")
    page = show("?run=group/small")
    find = page.locator('[data-field="run"] input.finder')
    find.fill("sweep1 lr-1")
    values = "(all) => all.map((option) => option.value)"
    found = page.locator('[data-field="run"] option').evaluate_all(values)
    assert sorted(found) == ["", *(f"sweep1/lr-{n}" for n in (11, 13, 15, 17, 19))]
    shutil.copytree(runs / "group" / "small", runs / "sweep1" / "lr-1-later")
    page.locator('[data-field="run"] option[value="sweep1/lr-1-later"]').wait_for(state="attached")
    assert page.locator('[data-field="run"] select').count() == 1
    assert find.input_value() == "sweep1 lr-1"
    find.fill("sweep1 17")
    find.press("Enter")
    page.wait_for_url(lambda url: "lr-17" in url)
    page.locator(".head .name", has_text="sweep1/lr-17").wait_for()
    assert find.input_value() == ""


@pytest.mark.slow
def test_a_thousand_runs_are_listed_and_one_is_found(runs: Path, show: Show) -> None:
    for number in range(999):
        folder = runs / f"sweep{number % 10}" / f"lr-{number:03d}"
        shutil.copytree(runs / "group" / "small", folder, copy_function=os.link)
    page = show("?run=group/small&step=4")
    page.locator('article[data-step="4"]').wait_for()
    assert page.locator('[data-field="run"] option').count() == 1000
    page.locator('[data-field="run"] input.finder').fill("lr-777")
    page.locator('[data-field="run"] input.finder').press("Enter")
    page.locator(".head .name", has_text="sweep7/lr-777").wait_for()
    page.get_by_label("Previous recorded step").click()
    page.locator('article[data-step="3"]').wait_for()


@pytest.mark.slow
def test_a_tab_closed_in_mid_update_leaves_no_traceback(
    server: Gallery, open_page: Callable[..., Any]
) -> None:
    before = len(server.said)
    for _ in range(3):
        page = open_page()
        page.goto(f"{server.url}?section=inspect")
        page.locator("article[data-step]").wait_for()
        page.evaluate("""() => { for (let i = 0; i < 40; i += 1) setTimeout(() =>
            document.body.dispatchEvent(new KeyboardEvent("keydown",
              { key: i % 8 < 4 ? "," : ".", bubbles: true, composed: true })), i * 5); }""")
        page.wait_for_timeout(60)
        page.close()
    page = open_page()
    # a later request is answered: what the others left has been dealt with
    page.goto(f"{server.url}?section=inspect")
    page.locator("article[data-step]").wait_for()
    assert "Traceback" not in server.said[before:]


def test_hangups_alone_are_forgiven(caplog: pytest.LogCaptureFixture) -> None:
    forgive_hangups()
    forgive_hangups()
    log = logging.getLogger("asyncio")
    for error in (WebSocketClosedError(), ValueError("a fault of ours")):
        log.error("Task exception was never retrieved", exc_info=error)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError]

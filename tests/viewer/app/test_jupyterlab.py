"""The viewer and plots in JupyterLab, in a real browser; skipped where it is not installed."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.support.fake_run import FakeRun

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CELLS = """
import comgra_decl as comgra, holoviews as hv
hv.extension("bokeh", inline=True)
run = comgra.open_run({path!r})
---
run.view(node="head")
---
run.plot.kpis("loss")
"""


@pytest.fixture
def lab(fake: FakeRun, tmp_path: Path) -> Iterator[str]:
    """The address of a notebook in a JupyterLab of its own."""
    pytest.importorskip("jupyterlab")
    cells: list[dict[str, Any]] = [
        {"cell_type": "code", "source": text.strip(), "metadata": {}, "outputs": [],
         "execution_count": None, "id": f"cell{i}"}
        for i, text in enumerate(CELLS.format(path=str(fake.path)).split("---"))
    ]  # fmt: skip
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    book = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "book.ipynb").write_text(json.dumps(book))
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1",
               f"--port={port}", "--ServerApp.token=", "--allow-root",
               f"--ServerApp.root_dir={tmp_path}", "--LabApp.news_url="]  # fmt: skip
    with (tmp_path / "lab.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{address}/api", server)
        yield f"{address}/lab/tree/book.ipynb?reset"
    finally:
        server.terminate()
        server.wait(timeout=30)


def _wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    """Waits until a server answers; fails if it ends."""
    for _ in range(600):
        assert server.poll() is None, "JupyterLab did not start"
        try:
            with urlopen(address, timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    pytest.fail("JupyterLab does not answer")


def test_the_viewer_answers_and_plots_zoom(lab: str, chromium: Any) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    context = chromium.new_context(viewport={"width": 1500, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(lab)
    page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    page.get_by_role("button", name=re.compile(r"\| Idle$")).wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text(re.compile("^Run All Cells$")).click()
    step = page.locator(".number").first
    expect(step).to_have_text("11", timeout=120_000)
    page.get_by_role("slider").first.focus()
    page.keyboard.press("ArrowLeft")
    expect(step).to_have_text("10")
    expect(page.locator("article[data-step='10']")).to_have_count(1)
    assert page.locator(".jp-OutputArea-output[data-mime-type*='error']").count() == 0
    assert page.locator(".bk-Canvas").count() > 4
    context.close()

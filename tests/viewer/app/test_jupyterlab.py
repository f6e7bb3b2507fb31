"""`run.view()` and plots in JupyterLab, where a kernel answers clicks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comgra_decl.query import open_run
from tests.support.fake_run import FakeRun
from tests.viewer.app.test_plotting import ZOOMING
from tests.viewer.conftest import LOCAL, PATIENCE

pytest.importorskip("jupyterlab")
nbformat = pytest.importorskip("nbformat")
pytestmark = [pytest.mark.browser, pytest.mark.slow]

STEPS = 900
STARTING = 120  # seconds, on a busy machine
SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}
}
OPTIONS = (
    "--no-browser", "--ip=127.0.0.1", "--allow-root", "--LabApp.extension_manager=readonly",
)  # fmt: skip
LOOK = """(title) => {
  const [view] = Bokeh.index.query((each) => each.model.type === "Figure"
    && String(each.model.title?.text).startsWith(title));
  if (!view) return null;
  view.el.scrollIntoView({ block: "center" });
  const { x, y, width, height } = view.el.getBoundingClientRect();
  const { x_range, renderers } = view.model;
  const data = Object.assign({}, ...renderers.map((each) => each.data_source?.data));
  return { at: [x, y, width, height], span: x_range.end - x_range.start,
    data: Object.fromEntries(Object.entries(data).map(([name, column]) => [name, [...column]])) };
}"""
"""Scrolls to the figure whose title begins with a text; returns its place, x range and data."""


def extensions() -> Path:
    """Returns the folder from which JupyterLab loads the extension of `pyviz_comms`."""
    mine = [file for file in files("pyviz_comms") or [] if "labextensions" in file.parts]
    folder = Path(str(mine[0].locate())).resolve()
    return next(up.parent for up in folder.parents if up.name == "labextensions")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with more steps than a figure has columns."""
    path = tmp_path_factory.mktemp("runs") / "group" / "long"
    fake = FakeRun(path, nodes=["embed", "head"], layers=1, samples=1, bins=8, values=False)
    fake.write(STEPS, commit=100, evals=False)
    fake.close()
    return path


@pytest.fixture(scope="module")
def lab(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a notebook that plots a series and shows the viewer, in a JupyterLab."""
    folder = tmp_path_factory.mktemp("lab")
    sources = [
        f"import comgra_decl as comgra\nrun = comgra.open_run({str(recorded)!r})",
        "run.plot.series('head', 'mean')",
        "run.view(node='head')",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in sources])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "python3"}
    (folder / "work").mkdir()
    nbformat.write(book, folder / "work" / "look.ipynb")
    (folder / "config" / "labconfig").mkdir(parents=True)
    settings = folder / "config" / "labconfig" / "default_setting_overrides.json"
    settings.write_text(json.dumps(SETTINGS))
    own = {f"JUPYTER_{name.upper()}_DIR": str(folder / name) for name in ("config", "data")}
    own |= {"JUPYTER_RUNTIME_DIR": str(folder / "runtime"), "IPYTHONDIR": str(folder / "ipython")}
    own["JUPYTER_PATH"] = str(extensions())
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *OPTIONS, "--port=0"],
            cwd=folder / "work", env={**os.environ, **own}, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        at = address(server, folder)
        yield f"{at['url']}lab/tree/look.ipynb?token={at['token']}"
    finally:
        server.terminate()  # and its kernels
        server.wait(STARTING)


def address(server: subprocess.Popen[bytes], folder: Path) -> dict[str, Any]:
    """Waits until a server has written where it listens."""
    file, until = folder / "runtime" / f"jpserver-{server.pid}.json", time.monotonic() + STARTING
    while time.monotonic() < until and server.poll() is None:
        if file.exists() and (text := file.read_text()).endswith("}"):
            found: dict[str, Any] = json.loads(text)
            return found
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not start:\n{(folder / 'log').read_text()}")


@pytest.fixture(scope="module")
def notebook(lab: str, chromium: Any) -> Iterator[Any]:
    """The page of the notebook, with all of its cells run and in view."""
    context = chromium.new_context(viewport={"width": 1600, "height": 2000})
    page = context.new_page()
    page.set_default_timeout(2 * PATIENCE)
    dirt: list[str] = []
    page.on("pageerror", lambda error: dirt.append(str(error)))
    page.on("request", lambda sent: None if LOCAL.match(sent.url) else dirt.append(sent.url))
    page.goto(lab)
    page.get_by_text("(ipykernel) | Idle").wait_for()  # cells run earlier would be forgotten
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.locator('.node[data-id="head"]').first.wait_for()
    yield page
    context.close()
    assert not dirt


def zoom(page: Any, title: str) -> None:
    """Zooms to a fifth of a figure, by a drag with the tool for it."""
    page.evaluate(ZOOMING)
    x, y, width, height = page.evaluate(LOOK, title)["at"]
    page.mouse.move(x + width * 0.4, y + height / 2)
    page.mouse.down()
    page.mouse.move(x + width * 0.6, y + height * 0.6, steps=5)
    page.mouse.up()


def test_a_plot_shows_the_recorded_series_and_zooms(notebook: Any, recorded: Path) -> None:
    series = open_run(recorded).series("head", "mean")
    shown = notebook.evaluate(LOOK, "head")
    np.testing.assert_allclose(shown["data"]["mean"], series, rtol=1e-6)
    zoom(notebook, "head")
    notebook.wait_for_function(
        f"([title, most]) => ({LOOK})(title).span < most", arg=["head", shown["span"] / 2]
    )


def test_the_viewer_answers_a_click_on_a_node_and_another_step(notebook: Any) -> None:
    select(notebook, "embed")
    step = int(notebook.locator('article[data-node="embed"]').get_attribute("data-step"))
    notebook.get_by_role("slider", name="Step").first.press("ArrowLeft")
    notebook.locator(f'article[data-node="embed"][data-step="{step - 1}"]').wait_for()


def test_the_kernel_redraws_a_distribution_for_the_part_that_is_zoomed(notebook: Any) -> None:
    select(notebook, "embed")
    title = "forward \u00b7 distribution"
    (width,) = notebook.evaluate(LOOK, title)["data"]["dw"]
    assert width == STEPS - 1  # from the first to the last
    zoom(notebook, title)
    notebook.wait_for_function(
        f"([title, most]) => ({LOOK})(title).data.dw[0] < most", arg=[title, width / 2]
    )


def select(page: Any, node: str) -> None:
    page.locator(f'.node[data-id="{node}"]').first.click()
    page.locator(f'article[data-node="{node}"]').wait_for()

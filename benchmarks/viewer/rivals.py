"""The same two actions in TensorBoard and in comgra's own viewer, on the same machine in one run.

TensorBoard has the statistics of the run with 308 nodes and 1,000 steps, and an image and a
histogram for the nodes that are shown. comgra has one number for each tensor of a network of the
same size over 32 steps, because it takes half a minute to record one in full. A *step* shows
another step of the same node, and a *node* another node at the same step: in TensorBoard the slider
of an image, and the filter of tags.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import numpy as np
import torch

from benchmarks.nets import Gpt, Training, next_token_loss
from benchmarks.peers import VIEWER_FOLDER, install, install_viewer
from benchmarks.tools.comgra_peer import COMGRA, GROUP
from benchmarks.viewer.measures import Times, clicks, loading, steps
from benchmarks.viewer.screen import FIRST_PAINT, PATIENCE, SIZE, Screen
from benchmarks.viewer.served import Served
from tests.support.fake_model import modules_of

CHANGES, LOADS = 12, 3
_STEPS, _COMGRA_STEPS = 1_000, 32
_SHOWN = tuple(f"blocks.{i}.mlp.fc1" for i in range(12))
"""Nodes that are selected in turn."""

_COMPARED = ("first paint", "usable", "step", "node")
_FOLDERS: dict[str, Path] = {}


def prepare(folder: Path) -> None:
    """Write the runs of the rivals below `folder`, unless they exist; install comgra's viewer.

    Raises:
        RuntimeError: comgra cannot be installed.
    """
    if not (install() and install_viewer()):
        raise RuntimeError("comgra and its viewer cannot be installed into build/")
    for name, write in (("tensorboard", _write_tensorboard), ("comgra", _write_comgra)):
        _FOLDERS[name] = folder / f"rival-{name}"
        done = _FOLDERS[name] / "done"
        if not done.exists():
            _FOLDERS[name].mkdir(parents=True, exist_ok=True)
            write(_FOLDERS[name])
            done.touch()


def measured(chromium: Any, server: Served) -> dict[str, Any]:
    """Measure opening the page, the next step and another node in all three viewers."""
    figures: Times = {}
    screen = Screen(chromium, server.url)
    ours: Times = {"step": list(steps(screen, CHANGES)), **clicks(screen, CHANGES)}
    screen.close()
    opened = loading(chromium, server.url, LOADS)
    ours |= {what: opened[what] for what in ("first paint", "usable")}
    figures |= _named("comgra_decl", {what: ours[what] for what in _COMPARED})
    for name, serve, measure in (
        ("TensorBoard", _tensorboard, _in_tensorboard),
        ("comgra", _comgra, _in_comgra),
    ):
        with serve() as address:
            figures |= _named(name, measure(chromium, address))
    return figures


def _named(name: str, times: Times) -> Times:
    return {f"{name}: {what}": taken for what, taken in times.items()}


# -- any page --------------------------------------------------------------------------------------

_PROBE = """() => {
  const later = (act) => {
    const channel = new MessageChannel(); // after the paint of this frame, unlike a timeout
    channel.port1.onmessage = act;
    channel.port2.postMessage(0);
  };
  const painted = (holds, patience) => new Promise((resolve, reject) => {
    const until = performance.now() + patience;
    const look = () => {
      if (holds()) return later(() => resolve(performance.now()));
      if (performance.now() > until) return reject(new Error(`never came: ${holds}`));
      requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
  });
  const compiled = (condition) => new Function(`return (${condition})`);
  window.rival = {
    opened: (condition) => painted(compiled(condition), 60000),
    // Waits for the next event of a type, then for a condition.
    expect(type, condition) {
      rival.result = new Promise((resolve, reject) => {
        window.addEventListener(type, (event) => {
          painted(compiled(condition), 30000).then((end) => resolve(end - event.timeStamp), reject);
        }, { capture: true, once: true });
        setTimeout(() => reject(new Error(`no ${type}`)), 60000);
      });
    },
  };
}"""


class _Page:
    """A tab with a page of a rival."""

    def __init__(self, chromium: Any, address: str, ready: str) -> None:
        self._context = chromium.new_context(viewport=SIZE)
        self.page = self._context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.page.add_init_script(f"({_PROBE})()")
        self.page.goto(address, wait_until="commit")
        self.usable: float = self.page.evaluate("(ready) => rival.opened(ready)", ready)
        self.painted: float = self.page.evaluate(FIRST_PAINT)

    def change(self, event: str, act: Callable[[], None], condition: str) -> float:
        """Return ms from an event until a condition holds and is painted."""
        self.page.wait_for_timeout(150)
        self.page.evaluate("([event, wanted]) => { rival.expect(event, wanted); }",
                           [event, condition])  # fmt: skip
        act()
        took: float = self.page.evaluate("rival.result")
        return took

    def close(self) -> None:
        self._context.close()


def _loading(chromium: Any, address: str, ready: str) -> Times:
    pages = []
    for _ in range(1 + LOADS):  # the first one also fills the caches of the server
        pages.append(_Page(chromium, address, ready))
        pages[-1].close()
    return {
        "first paint": [page.painted for page in pages[1:]],
        "usable": [page.usable for page in pages[1:]],
    }


@contextmanager
def _process(command: list[str], port: int, **environment: str) -> Iterator[str]:
    """Run a server until the context exits; yield its address when it answers."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + PATIENCE / 1000
        while not _answers(address):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{command[:4]} does not answer")
            time.sleep(0.1)
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):  # comgra's server has a child
            os.killpg(process.pid, 15)
        process.wait(30)


def _answers(address: str) -> bool:
    try:
        with urlopen(address, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# -- TensorBoard -----------------------------------------------------------------------------------


def _write_tensorboard(folder: Path) -> None:
    """Write an event per step with two scalars per node, and images and histograms of some."""
    events = import_module("tensorboard.compat.proto.event_pb2")
    summaries = import_module("tensorboard.compat.proto.summary_pb2")
    writing = import_module("tensorboard.summary.writer.record_writer")
    rng = np.random.default_rng(0)
    nodes = [module.path for module in modules_of(25)]
    with (folder / "events.out.tfevents.1.local").open("wb") as file:
        writer = writing.RecordWriter(file)
        writer.write(events.Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString())
        for step in range(_STEPS):
            values = [
                summaries.Summary.Value(tag=f"{node}/{name}", simple_value=rng.normal())
                for node in nodes
                for name in ("mean", "std")
            ]
            for node in _SHOWN:
                counts = rng.poisson(40, 32).astype(float)
                histogram = summaries.HistogramProto(
                    min=-3, max=3, num=counts.sum(), sum=0, sum_squares=counts.sum(),
                    bucket_limit=np.linspace(-3, 3, 33)[1:], bucket=counts,
                )  # fmt: skip
                values.append(summaries.Summary.Value(tag=f"{node}/values", histo=histogram))
                image = summaries.Summary.Image(
                    height=64, width=64, colorspace=1, encoded_image_string=_png(rng)
                )
                values.append(summaries.Summary.Value(tag=f"{node}/map", image=image))
            event = events.Event(
                wall_time=float(2 + step), step=step, summary=summaries.Summary(value=values)
            )
            writer.write(event.SerializeToString())
        writer.flush()


def _png(rng: np.random.Generator) -> bytes:
    from io import BytesIO

    from PIL import Image

    file = BytesIO()
    Image.fromarray(rng.integers(0, 256, (64, 64), np.uint8)).save(file, "png", compress_level=1)
    return file.getvalue()


@contextmanager
def _tensorboard() -> Iterator[str]:
    port = _free_port()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(_FOLDERS["tensorboard"])]
    command += ["--host", "127.0.0.1", "--port", str(port), "--reload_interval", "0"]
    command += ["--samples_per_plugin", f"images={_STEPS},scalars={_STEPS},histograms=100"]
    with _process(command, port) as address:
        until = time.monotonic() + PATIENCE / 1000
        tags = f"{address}/data/plugin/timeseries/tags"
        while True:  # until all events are read
            with urlopen(tags, timeout=30) as reply:
                if _SHOWN[-1].encode() in reply.read():
                    break
            if time.monotonic() > until:
                raise RuntimeError("TensorBoard reads no events")
            time.sleep(0.5)
        time.sleep(5)
        yield address


_CARDS = """(() => {{
  const cards = [...document.querySelectorAll("metrics-filtered-view card-view")];
  const images = cards.map((card) => card.querySelector("image-card img")).filter((x) => x);
  return cards.length === 4 && images.length === 1 && images[0].complete
    && images[0].naturalWidth > 0 && images[0].src !== {before!r}
    && cards.every((card) => card.innerHTML.includes({node!r})
      && !card.querySelector("mat-spinner"))
    && !!document.querySelector("metrics-filtered-view scalar-card :is(canvas, svg path)");
}})()"""
"""All four cards of a node are drawn, with another image than before."""

_IMAGE = 'document.querySelector("metrics-filtered-view image-card img").src'


def _in_tensorboard(chromium: Any, address: str) -> Times:
    node = _SHOWN[0]
    url = f"{address}/?tagFilter={quote(_filter(node))}#timeseries"
    ready = _CARDS.format(node=node, before="")
    times = _loading(chromium, url, ready)
    tab = _Page(chromium, url, ready)
    slider = tab.page.locator("image-card input[type=range]").first
    slider.focus()

    def step() -> float:
        wanted = _CARDS.format(node=node, before=tab.page.evaluate(_IMAGE))
        return tab.change("keydown", lambda: tab.page.keyboard.press("ArrowLeft"), wanted)

    times["step"] = [step() for _ in range(CHANGES)]
    tags = tab.page.locator("metrics-tag-filter input").first

    def select(node: str) -> float:
        wanted = _CARDS.format(node=node, before=tab.page.evaluate(_IMAGE))
        return tab.change("input", lambda: tags.fill(_filter(node)), wanted)

    times["node"] = [select(node) for node in islice(cycle(_SHOWN), 1, 1 + CHANGES)]
    tab.close()
    return times


def _filter(node: str) -> str:
    return f"^{node}/".replace(".", r"\.")


# -- comgra ----------------------------------------------------------------------------------------


def _write_comgra(folder: Path) -> None:
    """Record a transformer with 308 nodes over 32 steps, with one number for each tensor."""
    torch.manual_seed(0)
    model = Gpt(tokens=64, width=16, blocks=30, heads=2, context=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    texts = [torch.randint(0, 64, (8, 9)) for _ in range(4)]
    batches = [(text[:, :-1], text[:, 1:]) for text in texts]
    training = Training(model, optimizer, next_token_loss, batches)
    with COMGRA[0].attach(training, folder) as step:
        for _ in range(_COMGRA_STEPS):
            step()


@contextmanager
def _comgra() -> Iterator[str]:
    port = _free_port()
    command = [sys.executable, "-m", "scripts.server", "--path", str(_FOLDERS["comgra"] / GROUP)]
    with _process([*command, "--port", str(port)], port, PYTHONPATH=_peers_path()) as address:
        yield address


def _peers_path() -> str:
    """Return an import path on which comgra and the versions that its viewer needs come first."""
    return os.pathsep.join([str(VIEWER_FOLDER), os.environ.get("PYTHONPATH", "")])


_DETAILS = """(() => {{
  const shown = document.querySelector("#selected-item-details-container")?.innerText ?? "";
  return shown.length > 50 && shown !== {before!r};
}})()"""
"""The table of the selected tensor is drawn, with another content than before."""

_TEXT = """document.querySelector("#selected-item-details-container").innerText"""


def _in_comgra(chromium: Any, address: str) -> Times:
    ready = _DETAILS.format(before="")
    times = _loading(chromium, address, ready)
    tab = _Page(chromium, address, ready)

    def change(act: Callable[[], None]) -> float:
        tab.page.wait_for_timeout(500)  # a change takes two requests; the second one may follow
        wanted = _DETAILS.format(before=tab.page.evaluate(_TEXT))
        return tab.change("click", act, wanted)

    button = tab.page.locator("#increment-training-step-button")
    nodes = tab.page.locator('.node[title*="mlp.0"]')
    some = min(len(_SHOWN), nodes.count())
    assert some > 1, "comgra shows too few nodes"
    places = [nodes.nth(i) for i in range(some)]
    times["step"] = [change(button.click) for _ in range(CHANGES)]
    times["node"] = [
        change(partial(place.dispatch_event, "click"))
        for place in islice(cycle(places), 1, 1 + CHANGES)
    ]
    tab.close()
    return times

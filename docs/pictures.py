"""Recreate the screenshots of the documentation: train, record, and capture the viewer.

Those of families of pictures show some cards of the Pictures section only.

    .venv/bin/python docs/pictures.py                    # all screenshots, to docs/images
    .venv/bin/python docs/pictures.py viewer             # a single screenshot
    .venv/bin/python docs/pictures.py --runs runs/docs   # keep and reuse the runs

Requires Chromium (`$CHROMIUM`, or on `PATH`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml
from PIL import Image
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
IMAGES = Path(__file__).with_name("images")
SIZE = {"width": 1600, "height": 960}
TABLET = {"width": 800, "height": 800}
LAPTOP = {"width": 1280, "height": 800}
TALL = {"width": 1600, "height": 3200}  # a section that need not scroll shows all of its cards
COLOURS = 256  # per screenshot; the viewer uses few colours, and a palette keeps files small
PATIENCE = 60_000  # milliseconds

RUNS = {  # name: script and its arguments
    "tutorial/with-bug": ("tutorial",),
    "tutorial/without-bug": ("tutorial", "model.activation_on_last_layer=false"),
    "watermark/marked": ("watermark",),
    "characters/gpt": ("characters", "steps=600"),
    "starved/waiting": ("starved",),
    "starved/mended": ("starved", "augment=batch"),
    "digits/pictures": ("digits", "steps=300"),
    "characters/pictures": ("characters", "steps=300"),
}

SPECS: dict[str, dict[str, Any]] = {  # of runs whose example has no spec for a screenshot
    "digits/pictures": {
        "defaults": ["vision", "_self_"],
        "nodes": {
            "kernels": {"select": "*.conv", "capture": ["parameter"], "values": True},
        },
        "values": {"max_elements": 8192},
        "samples": {"count": 20},
        "probes": {"images": {"samples": {"count": 20, "by": "target"}}},
        "pictures": {
            "guided": {"method": "guided_backprop", "of": "images", "target": "top"},
            "cover": {
                "method": "occlusion",
                "of": "images",
                "target": "top",
                "window": [2, 2],
                "stride": 1,
            },
            "dream": {"method": "maximise", "of": "images", "select": "block2.conv"},
            "bend": {"method": "hessian", "of": "images", "top": 3, "lowest": 1},
            "valley": {"method": "loss_slice", "of": "images", "directions": ["random", "random"]},
        },
    },
    "characters/pictures": {
        **yaml.safe_load((ROOT / "examples/characters/letters.yaml").read_text()),
        "pictures": {
            "lens": {"method": "logit_lens", "of": "sequences", "target": "next"},
            "each": {
                "method": "input_x_gradient",
                "of": "sequences",
                "target": {"token": "next", "position": [7, 15, 31, 62]},
            },
        },
    },
}

Address = dict[str, str | int | list[str]]
"""Query parameters of the viewer's URL."""

BUG: Address = {"run": "tutorial/with-bug", "node": "out", "iteration": 4, "stat": "min"}

SECTIONS: dict[str, Address] = {  # for docs/viewer.md, at the size of a laptop screen
    "viewer-verdict": {"run": "tutorial/with-bug"},
    "viewer-walk": {"run": "tutorial/with-bug"},
    "viewer-narrow": {**BUG, "section": "values"},
    "viewer-overview": {**BUG, "section": "overview", "stat": "std"},
    "viewer-inspect": {**BUG, "section": "inspect"},
    "viewer-values": {**BUG, "section": "values"},
    "viewer-data": {"run": "watermark/marked", "section": "data"},
    "viewer-compare": {**BUG, "section": "compare", "other": "tutorial/without-bug"},
    "viewer-runs": {**BUG, "section": "runs", "smoothing": "0.9", "node": "answer", "stat": "std"},
    "viewer-explore": {**BUG, "section": "explore", "stat": "std", "graph": "hidden"},
    "viewer-kpis": {**BUG, "section": "kpis"},
    "viewer-modules": {**BUG, "section": "modules"},
    "viewer-findings": {**BUG, "section": "findings"},
    "viewer-notes": {**BUG, "section": "notes"},
    "viewer-dark": {**BUG, "section": "inspect", "colour": "forward"},
}

FIGURES = {  # the beginning of the title of the only figure of the section to show
    "starved-waiting": "time per profiled step",
    "around-memory": "memory over step",
}

DARK = {"viewer-dark"}
NARROW = {"viewer-narrow"}

CLICKS = {"viewer-walk": ("Show me", "Next"), "pictures-heads": ("Model",)}
"""Buttons to click before the screenshot."""

PICTURES: dict[str, Address] = {  # name: query parameters
    **SECTIONS,
    "viewer": {
        "run": "characters/gpt",
        "node": "blocks.1.attention.weights",
        "stat": "std",
        "open": ["blocks", "blocks.1", "blocks.1.attention"],
    },
    "watermark": {"run": "watermark/marked", "node": "conv3", "section": "pictures"},
    "starved-waiting": {"run": "starved/waiting", "section": "kpis"},
    "around-memory": {"run": "starved/mended", "section": "kpis"},
    "around-graph": {"run": "starved/mended", "section": "inspect", "colour": "memory"},
    "tutorial-overview": {
        "run": "tutorial/with-bug",
        "node": "input",
        "role": "input",
        "stat": "std",
    },
    "tutorial-answer": {
        "run": "tutorial/with-bug",
        "node": "answer",
        "iteration": 4,
        "stat": "mean",
    },
    "tutorial-out": {
        "run": "tutorial/with-bug",
        "node": "out",
        "iteration": 4,
        "stat": "min",
    },
    "tutorial-out-last": {
        "run": "tutorial/with-bug",
        "node": "out.last",
        "iteration": 4,
        "stat": "min",
    },
    "tutorial-fixed": {
        "run": "tutorial/without-bug",
        "node": "answer",
        "iteration": 4,
        "stat": "mean",
    },
}


_DIGITS: Address = {"run": "digits/pictures", "section": "pictures"}
_LETTERS: Address = {"run": "characters/pictures", "section": "pictures"}

CARDS: dict[str, tuple[Address, tuple[str, ...]]] = {  # name: query parameters, titles of cards
    "pictures-feature-maps": (
        {**_DIGITS, "node": "block2.conv"},
        ("feature maps", "filters", "dead units", "dream"),
    ),
    "pictures-attribution": (
        {**_DIGITS, "node": "block2.conv"},
        ("cam: grad_cam, block2.conv", "edges", "paths", "guided", "cover"),
    ),
    "pictures-clouds": (
        {**_DIGITS, "node": "block2"},
        ("cloud", "similarity of layers", "similarity of steps", "linear probe"),
    ),
    "pictures-predictions": (
        {**_DIGITS, "step": 20, "node": "head"},
        ("confusion", "reliability", "most confident errors"),
    ),
    "pictures-landscapes": (
        {**_DIGITS, "node": "block2.conv"},
        ("bend", "valley", "gradient flow", "weight spectrum"),
    ),
    "pictures-rollout": (_LETTERS, ("read",)),
    "pictures-tokens": (_LETTERS, ("why", "each")),
    "pictures-lens": (_LETTERS, ("lens",)),
}
PARTS = {  # of a section, as selectors of CSS
    "pictures-attention": ".attention",
    "pictures-heads": ".attention",
}

_WEIGHTS: Address = {
    **_LETTERS,
    "section": "attention",
    "node": "blocks.1.attention.weights.softmax",
}

PICTURES |= {name: address for name, (address, _) in CARDS.items()}
PICTURES |= dict.fromkeys(PARTS, _WEIGHTS)

_ONLY = """async (cards, titles) => {
  for (const card of [...cards.children]) {
    const title = card.querySelector("h3")?.textContent ?? "";
    if (!titles.some((each) => title.startsWith(each))) card.remove();
  }
  await Promise.all([...cards.querySelectorAll("img")].map((image) => image.decode()));
  return cards.children.length;
}"""
"""Removes the cards with other titles, waits for the images, and returns the number of cards."""

_FRAME = """cards => {
  const boxes = [...cards.children].map((card) => card.getBoundingClientRect());
  const [left, top] = ["left", "top"].map((side) => Math.min(...boxes.map((box) => box[side])));
  const [right, bottom] =
    ["right", "bottom"].map((side) => Math.max(...boxes.map((box) => box[side])));
  return { x: left - 8, y: top - 8, width: right - left + 16, height: bottom - top + 16 };
}"""
"""Returns the place on the page of all cards together."""


def command(name: str, runs: Path, *, spec: Path | None = None) -> list[str]:
    """Return the arguments of Python that train and record a run below `runs`.

    The spec is the given one, or that of the example, or else the preset `debug`.
    """
    example, *arguments = RUNS[name]
    group, run = name.split("/")
    script, usual = (ROOT / "examples" / example / each for each in ("train.py", "look.yaml"))
    spec = spec or (usual if usual.exists() else None)
    keys, values = ("root", "group", "name"), (str(runs), group, run)
    where = "hydra.callbacks.comgra.run" if spec is None else "run"
    pairs = [f"{where}.{key}={value}" for key, value in zip(keys, values, strict=True)]
    if spec is not None:
        return ["-m", "comgra_decl", "--spec", str(spec), *pairs, str(script), *arguments]
    return [str(script), "+comgra=debug", *pairs, *arguments]


def record(name: str, runs: Path) -> None:
    """Train and record a run for the screenshots, unless it exists."""
    if (runs / name).exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.yaml" if name in SPECS else None
        if spec is not None:
            spec.write_text(yaml.safe_dump(SPECS[name]))
        arguments = command(name, runs, spec=spec)
        subprocess.run([sys.executable, *arguments], cwd=folder, check=True)


@contextmanager
def viewer(runs: Path) -> Iterator[str]:
    """Serve the runs and yield the viewer's URL."""
    code = "from comgra_decl.cli.main import main; main()"
    command = [sys.executable, "-c", code, "view", str(runs), "--port", "0", "--no-show"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()


@contextmanager
def browser_page() -> Iterator[Page]:
    """Yield a page of a headless Chromium."""
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=flags)
        yield browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
        browser.close()


_PLACE = """title => {
  const [view] = Bokeh.index.query((each) => each.model.title?.text?.startsWith(title));
  view.el.scrollIntoView({ block: "center" });
  const { x, y, width, height } = view.el.getBoundingClientRect();
  return [x, y, width, height];
}"""
"""Scrolls to a figure and returns its place on the page."""


def photograph(page: Page, address: str, name: str) -> None:
    """Open the viewer at a screenshot's URL and save the screenshot."""
    size = TABLET if name in NARROW else LAPTOP if name in SECTIONS else SIZE
    size = TALL if name in CARDS or name in PARTS else size
    page.set_viewport_size(size)  # type: ignore[arg-type]
    page.emulate_media(color_scheme="dark" if name in DARK else "light")
    page.goto(f"{address}?{urlencode(PICTURES[name], doseq=True)}")
    page.locator('[role="tab"][aria-selected="true"]').wait_for(timeout=PATIENCE)
    for button in CLICKS.get(name, ()):
        page.get_by_role("button", name=button, exact=True).click()
        page.wait_for_timeout(1000)
    page.wait_for_timeout(4000)  # until the graph has moved to the node and the charts are drawn
    picture = Image.open(BytesIO(_screenshot(page, name)))
    # MAXCOVERAGE selects colours that are far apart, so that the few red pixels of a mark count as
    # much as a large background; kmeans then restores the exact colour of the background.
    method = Image.Quantize.MAXCOVERAGE
    small = picture.convert("RGB").quantize(COLOURS, method=method, kmeans=1)
    small.save(IMAGES / f"{name}.png", optimize=True)
    sys.stdout.write(f"{name}.png\n")


def _screenshot(page: Page, name: str) -> bytes:
    """Return a PNG of the page, or of some cards or a figure in it."""
    if name in FIGURES:
        x, y, width, height = page.evaluate(_PLACE, FIGURES[name])
        page.wait_for_timeout(500)
        return page.screenshot(clip={"x": x, "y": y, "width": width, "height": height})
    if name in PARTS:
        return page.locator(PARTS[name]).first.screenshot()
    if name not in CARDS:
        return page.screenshot()
    cards = page.locator(".cards").first
    titles = CARDS[name][1]
    found = cards.evaluate(_ONLY, titles)
    if found < len(titles):
        raise RuntimeError(f"{name}: {found} cards begin with one of the titles {titles}")
    cards.scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    return page.screenshot(clip=cards.evaluate(_FRAME))


def main() -> None:
    """Take the screenshots named on the command line."""
    parser = argparse.ArgumentParser(description="Recreate the screenshots of the documentation.")
    parser.add_argument(
        "names", nargs="*", choices=[*PICTURES, []], help="screenshots to take; all by default"
    )
    parser.add_argument("--runs", type=Path, help="store the runs here, and reuse existing ones")
    options = parser.parse_args()
    names = options.names or list(PICTURES)
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = (options.runs or Path(folder)).resolve()
        for run in dict.fromkeys(str(PICTURES[name]["run"]) for name in names):
            record(run, runs)
        with viewer(runs) as address, browser_page() as page:
            for name in names:
                photograph(page, address, name)


if __name__ == "__main__":
    main()

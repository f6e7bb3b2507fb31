"""Record trainings with one bug each, and write what the viewer says of them as HTML files.

Each bug gets two files that need no network: the walk through the evidence, as exported by the
viewer, and interactive plots of the run; and the run itself. A healthy classifier is shown from
within: pictures of its samples, effects of interventions, and a circuit.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn

import comgra_decl as comgra
from benchmarks.bugs.case import BUGS, built
from benchmarks.bugs.collection import cases
from benchmarks.bugs.setup import train
from comgra_decl.viewer.model.headline import headline
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.story import story_of
from comgra_decl.viewer.model.verdicts import look
from comgra_decl.viewer.model.walk import finding_at, walk_of
from comgra_decl.viewer.plotting import plotted, save

SHOWN = {
    "wrong_sign": "the sign of the loss is wrong",
    "softmax_twice": "a softmax before a loss that applies one",
    "rectified_answer": "a ReLU after the last layer",
    "silent_broadcasting": "predictions [B, 1] are compared with targets [B]",
    "log_of_zero": "the logarithm of zero",
    "half_overflows": "half precision overflows",
    "rate_too_high": "the learning rate is too high",
    "zero_grad_missing": "gradients are never cleared",
    "frozen_by_mistake": "layers are frozen",
    "detached_features": "features are detached",
    "left_in_evaluation_mode": "the model stays in evaluation mode",
    "dead_rectifier": "a bias that kills every unit",
}
"""The bugs in the gallery, and what each one is."""

_HEAD = """\
# Gallery

Each of these trainings has one bug. *Evidence* is what the viewer's walk exports: the finding,
where it began, what it caused and what to do. *Plots* are interactive: the metrics, and the
standard deviation of all tensors over the recorded steps. The files need no network. *Run* is the
recorded run; unzip it, and open the folder with `comgra-decl view`.

| bug | what was found first | |
| --- | --- | --- |
"""

_INSIDE = """\

## Inside a network

A network with a convolution and three residual blocks learns handwritten digits, without a bug.
[The pictures](gallery/inside.html) are the viewer's *Pictures* section at the last step: twenty
samples with their predictions, what the first one's prediction depends on (Grad-CAM, saliency),
the effect of replacing each block by its mean, and the circuit of the strongest paths between
blocks. [The run](gallery/inside.zip) has the other samples, layers and steps, too.
"""

_LOOK = {
    "nodes": {"all": {"select": "**", "capture": ["output"], "values": True}},
    "samples": {"count": 20},
    "probes": {"digits": {"samples": {"count": 20, "by": "target"}, "schedule": {"every": 4}}},
    "pictures": {
        "cam": {"method": "grad_cam", "of": "digits", "select": "conv", "target": "top"},
        "edges": {"method": "saliency", "of": "digits", "target": "top"},
    },
    "interventions": {
        "blocks": {"of": "digits", "select": "block*", "do": "mean", "sweep": "node"},
        "paths": {
            "of": "digits",
            "select": ["stem", "block*"],
            "do": "mean",
            "into": ["block*", "head"],
            "sweep": ["node", "into"],
        },
    },
    "schedule": {"first": 1, "every": 10},
}


class DigitsNet(nn.Module):
    """A convolution, three residual blocks and a linear layer for images of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.stem = nn.Linear(8 * 64, 32)
        for name in ("block1", "block2", "block3"):
            layers = nn.Sequential(
                nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)
            )
            self.add_module(name, layers)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [n, 10] of images [n, 1, 8, 8]."""
        x: Tensor = self.stem(F.relu(self.conv(images)).flatten(1))
        for name in ("block1", "block2", "block3"):
            x = x + self.get_submodule(name)(x)
        logits: Tensor = self.head(x)
        return logits


def write(folder: Path, *, names: Sequence[str] = (*SHOWN,), inside: bool = True) -> Path:
    """Record the trainings and write the files; return the page that lists them.

    Args:
        folder: an existing folder for `gallery.md` and the files, which are in `gallery/`.
        names: the bugs, as in `SHOWN`.
        inside: whether to show a network from within, too.
    """
    cases()  # registers the bugs
    files = folder / "gallery"
    files.mkdir()
    lines = [_line(name, files) for name in names]
    if inside:
        _look_inside(files)
    page = folder / "gallery.md"
    page.write_text(_HEAD + "".join(lines) + _INSIDE * inside)
    return page


@contextmanager
def _quietly() -> Iterator[str]:
    """Yield a folder for runs; ignore warnings, which are about the bugs."""
    torch.manual_seed(0)
    logging.getLogger("comgra_decl").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield root


def _look_inside(files: Path) -> None:
    """Train a network on digits, and write pictures of it, and its run."""
    with _quietly() as root:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        labels = torch.tensor(digits.target)
        with comgra.trace(_LOOK, root=root, group="gallery", name="inside") as session:
            model = DigitsNet()
            optimizer = torch.optim.Adam(model.parameters(), 0.003)
            for _ in range(81):
                batch = torch.randperm(len(images))[:200]
                optimizer.zero_grad()
                F.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
        run = comgra.open_run(str(session.path))
        shown = run.view("pictures", node="conv", step=int(run.steps[-1]), height=1700)
        shown.save(files / "inside.html")
        shutil.make_archive(str(files / "inside"), "zip", str(run.path))


def _line(name: str, files: Path) -> str:
    """Record one training and write its files; return its row of the table."""
    with _quietly() as root:
        setup, _ = built(BUGS[name], "tune")
        with comgra.trace("debug", root=root, overrides=BUGS[name].records) as session:
            train(setup, comgra.kpi)
        run = comgra.open_run(str(session.path))
        view = RunView(run)
        look(view).wait()
        finding = finding_at(view, 0)
        assert finding is not None, f"nothing was found in {name}"
        story = story_of(view, walk_of(view, finding), finding, run=name, said=headline(view))
        (files / f"{name}.html").write_bytes(story)
        save(plotted(run).kpis() + plotted(run).heat("std"), files / f"{name}-plots.html")
        shutil.make_archive(str(files / name), "zip", str(run.path))
    links = (
        f"[evidence](gallery/{name}.html), [plots](gallery/{name}-plots.html), "
        f"[run](gallery/{name}.zip)"
    )
    return f"| {SHOWN[name]} | {finding.rule}: {finding.message} | {links} |\n"

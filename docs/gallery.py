"""Record trainings with one bug each, and write what the viewer says of them as HTML files.

Each bug gets two files that need no network: the walk through the evidence, as exported by the
viewer, and interactive plots of the run.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

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
standard deviation of all tensors over the recorded steps. The files need no network.

| bug | what was found first | |
| --- | --- | --- |
"""


def write(folder: Path, *, names: Sequence[str] = (*SHOWN,)) -> Path:
    """Record the trainings and write the files; return the page that lists them.

    Args:
        folder: an existing folder for `gallery.md` and the files, which are in `gallery/`.
        names: the bugs, as in `SHOWN`.
    """
    cases()  # registers the bugs
    files = folder / "gallery"
    files.mkdir()
    lines = [_line(name, files) for name in names]
    page = folder / "gallery.md"
    page.write_text(_HEAD + "".join(lines))
    return page


def _line(name: str, files: Path) -> str:
    """Record one training and write its files; return its row of the table."""
    torch.manual_seed(0)
    setup, _ = built(BUGS[name], "tune")
    logging.getLogger("comgra_decl").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the bug
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
    links = f"[evidence](gallery/{name}.html), [plots](gallery/{name}-plots.html)"
    return f"| {SHOWN[name]} | {finding.rule}: {finding.message} | {links} |\n"

"""HoloViews elements of runs, tensors and groups: `run.plot`, `slot.plot` and `group.plot`.

Each method reads the same table as the method of the same name on `Run`, `Slot` or `Group`, and
returns an element whose dimensions have the table's names. The elements therefore compose with `+`
and `*`, link with `holoviews.link_selections`, and return their numbers as a table (`dframe`).

Curves and points become an image by Datashader if there are more than `MOST_POINTS`; its numbers
are in `image[()].dataset`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, overload

import holoviews as hv
import numpy as np
import pandas as pd
import panel as pn
from numpy.typing import NDArray

from comgra_decl.errors import MissingPackageError, UnknownNameError, did_you_mean, shown
from comgra_decl.query import Group, Run, at_steps, clock_of, compare, differences
from comgra_decl.query.compare import unique_names
from comgra_decl.query.slot import Slot
from comgra_decl.records import PROBE_PREFIX
from comgra_decl.viewer.elements import (
    HIGHEST,
    LINE,
    NAME_ROOM,
    SHORT,
    as_lines,
    banded,
    bars_against_diagonal,
    cells_of,
    distributions_of,
    edges_of,
    heads_of,
    lines_over_names,
    neurons_of,
    overlaid,
    parallel,
    picture_of,
    points_by,
    side_by_side,
    stacked,
    styled,
    tokens_joined,
    worded,
    written,
)
from comgra_decl.viewer.graph.layout import Outline, Room, Scene
from comgra_decl.viewer.graph.places import cut
from comgra_decl.viewer.graph_figure import GRAPH_SIZE, graph_figure
from comgra_decl.viewer.model import verdicts
from comgra_decl.viewer.model.attention import (
    Attention,
    attention,
    layers,
    neurons,
    thumbnails,
)
from comgra_decl.viewer.model.clouds import METHOD_NAMES
from comgra_decl.viewer.model.compare import DIFFERENCE
from comgra_decl.viewer.model.comparison_target import Other
from comgra_decl.viewer.model.distribution import cumulative, quantile
from comgra_decl.viewer.model.drawing import Drawing, draw
from comgra_decl.viewer.model.edge_paint import EFFECTS
from comgra_decl.viewer.model.findings import RULE
from comgra_decl.viewer.model.fitting import GENERAL
from comgra_decl.viewer.model.graph import Graph, graph_of, heat_of, node_values, scale_of, value_of
from comgra_decl.viewer.model.landscapes import Landscape, landscape
from comgra_decl.viewer.model.lenses import lenses
from comgra_decl.viewer.model.library import XAxis
from comgra_decl.viewer.model.memory_use import MEMORY, memory_moments, memory_steps, part_colours
from comgra_decl.viewer.model.painting import colours, painted
from comgra_decl.viewer.model.pictures import cards_of
from comgra_decl.viewer.model.runs import scale_of as scale_of_settings
from comgra_decl.viewer.model.runs import short_names
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, nearest
from comgra_decl.viewer.model.series import bounds, flat, smoothed, thin
from comgra_decl.viewer.model.stretches import candidates, line_of_slot
from comgra_decl.viewer.model.time_use import TIME, phases
from comgra_decl.viewer.model.unusual import UNUSUAL
from comgra_decl.viewer.notebook import Look, load_in_notebook
from comgra_decl.viewer.palette import (
    BLUE,
    INK,
    LINES,
    colour_at,
    signed_colour,
)
from comgra_decl.visible import visible

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles that `SlotPlots.distribution` shows."""

_DENSITY = ("#a9c3ea", BLUE)
"""Colours for few and for many points in an image."""

MOST_POINTS = 100_000
"""Number of points above which an image is drawn instead."""


_COLOUR = (colour_at, signed_colour)
_PLACES = (np.linspace(0, 1, 128).tolist(), np.linspace(-1, 1, 128).tolist())
"""Colours of a scale, and of one that diverges from zero, and their places on it."""

_ONE_BY_ONE = {"sample": 1, "unit": 2, "category": 2}
"""Axes of which one entry is drawn if the picture has more axes than this."""

_ALIKE = 30
"""Largest ratio of the sizes of metrics that share an axis."""

_FEW_STEPS = 12  # each has a tick

_DPI = 144  # of PNG files

_STATIC = {".png": "png", ".svg": "svg", ".pdf": "pdf"}


@overload
def plotted(recorded: Run) -> RunPlots: ...
@overload
def plotted(recorded: Slot) -> SlotPlots: ...
@overload
def plotted(recorded: Group | Sequence[Run]) -> GroupPlots: ...
def plotted(recorded: Run | Slot | Group | Sequence[Run]) -> RunPlots | SlotPlots | GroupPlots:
    """Return the plots of a run, a recorded tensor, a group or several runs."""
    load_in_notebook(elements=True)  # first: HoloViews loads nothing after `use` in the same cell
    use("bokeh")
    if find_spec("matplotlib") is not None:  # an element gets its image style when it is created
        use("matplotlib")
    if isinstance(recorded, Slot):
        return SlotPlots(recorded)
    return RunPlots(recorded) if isinstance(recorded, Run) else GroupPlots(recorded)


class RunPlots:
    """Plots of one run.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def series(
        self,
        node: str,
        statistic: str = "mean",
        *,
        over_batch: str = "mean",
        type: str | None = None,
    ) -> hv.Curve:
        """Return a statistic of a node's output by step: `slot(node).plot.series(statistic)`."""
        slot = self._run.slot(node)
        return SlotPlots(slot).series(statistic, over_batch=over_batch, type=type)

    def heat(
        self,
        statistic: str,
        *,
        of: str = "forward",
        over_batch: str = "mean",
        type: str | None = None,
    ) -> hv.QuadMesh:
        """Return a statistic for all tensors in a pass, by tensor (rows) and step (columns).

        The dimensions are `step`, `slot` (index of the column of `Run.heat`), the statistic, and
        `tensor` (name of the tensor). Cells without a record are transparent. Colours follow the
        same rules as in the viewer: at each end of the scale, one percent of the values is clipped,
        and positive values of very different magnitudes have a logarithmic scale. If there is no
        room for all names, some are omitted; the tooltip contains every name. From 65,536 records
        on, a cell shows the value of largest magnitude of 256 records, at the step of the first.

        Raises:
            UnknownNameError: the run has no such statistic, or no tensor in this pass.
        """
        slots = [slot for slot in self._run.arrays.slots if slot.key.pass_ == of]
        if not slots:
            self._check_pass(of)
        names = [_name(slot.key.node, slot.key.role, slot.key.iteration) for slot in slots]
        rows = np.arange(len(names))
        steps, values, _ = candidates(
            RunView(self._run), of, [slot.id for slot in slots], (statistic, over_batch, type or "")
        )
        tensors = np.repeat(np.array(names, object)[:, None], len(steps), axis=1)
        mesh = hv.QuadMesh(
            (edges_of(steps), edges_of(rows), values, tensors),
            kdims=["step", "slot"],
            vdims=[statistic, "tensor"],
            label=f"{statistic} ({of})",
        )
        scale = scale_of(values[np.isfinite(values)])
        height = min(max(200, LINE * len(names)), HIGHEST)
        every = -(-LINE * len(names) // height)  # lines with a label
        look = {
            "cmap": [_COLOUR[scale.diverging](place) for place in _PLACES[scale.diverging]],
            "clim": (scale.low, scale.high),
            "logz": scale.logarithmic,
            "colorbar": True,
            "yticks": [(row, cut(names[row], NAME_ROOM)) for row in rows[::every].tolist()],
            "invert_yaxis": True,
            "ylabel": "",
        }
        if len(steps) <= _FEW_STEPS:
            look["xticks"] = [(float(at), str(at)) for at in steps.tolist()]
        return styled(
            mesh,
            "QuadMesh",
            look,
            bokeh={"height": height, "tools": ["hover"]},
            matplotlib={"fig_inches": (7, height / 70), "aspect": "auto", "cformatter": SHORT},
        )

    def _check_pass(self, of: str) -> None:
        passes = [*dict.fromkeys(self._run.slots["pass"])]
        if of not in passes:
            hint = did_you_mean(of, passes) or "."
            raise UnknownNameError(
                f"{shown(of)} is not a pass of this run{hint} "
                f"It has: {', '.join(map(repr, passes)) or 'none'}."
            )

    def graph(
        self,
        *,
        step: int | None = None,
        statistic: str | None = None,
        of: str = "forward",
        over_batch: str = "mean",
        type: str | None = None,
        expanded: Iterable[str] | None = None,
        size: tuple[int, int] = GRAPH_SIZE,
        colour: str | None = None,
        other: Run | None = None,
    ) -> hv.Overlay:
        """Return the dependency graph at a step, drawn as in the viewer.

        The boxes are `hv.Rectangles` with the dimensions `box` (name of the node or folded group),
        `kind` and, if a statistic is chosen, that statistic. A folded group has the value of its
        own module or, if that was not recorded, the largest magnitude inside. Dashed edges carry no
        gradient.

        Args:
            step: the step; by default, the last one.
            statistic: statistic that colours the boxes, on the viewer's scale for all steps; by
                default, boxes are coloured by kind.
            of: pass of the statistic.
            over_batch: aggregate over the batch: "mean", "std" or "abs_max".
            type: type of execution or tag; by default, all training steps.
            expanded: module groups to expand, such as "blocks.0", together with the groups around
                them; by default, as many as can be read.
            size: width and height of the drawing in pixels at which its text should be readable;
                long drawings are wrapped into rows.
            colour: what colours the boxes instead: "time" or "memory" of modules; "findings", or
                "rule:NAME" for those of one rule; "unusual" for the distance of each node's most
                unusual sample from the others; "difference" from `other`; or "effects:NAME" for
                the effects of an intervention, on the edges. The statistic is that of "unusual"
                and "difference", by default the standard deviation.
            other: the run to compare with, at its record nearest to the step.

        Raises:
            UnknownNameError: the step was not recorded, or there is no such statistic, pass, group
                or colour.
            ValueError: `colour` has no statistic, or "difference" has no other run.
        """
        view = RunView(self._run)
        steps = [int(each) for each in view.steps(type or "")]
        if not steps or (step is not None and step not in steps):
            types = ", ".join(map(repr, self._run.types)) or "none"
            if not steps:
                what = f"of type {shown(type)}; the types are {types}" if type else "at all"
                raise UnknownNameError(f"no step was recorded {what}.")
            near = sorted(sorted(steps, key=lambda each: abs(each - (step or 0)))[:3])
            raise UnknownNameError(
                f"step {step} was not recorded; nearest: {', '.join(map(str, near))}."
            )
        if statistic is not None or colour is not None:
            self._check_pass(of)
        if colour is not None:
            _check_colour(view, colour, statistic=statistic, other=other)
            statistic = statistic or GENERAL[0]
        at = Selection(
            type=type or "",
            step=steps[-1] if step is None else step,
            statistic=statistic or "",
            batch=over_batch,
        )
        graph, room = graph_of(view, at), Room(*map(float, size))
        if not graph.nodes:
            raise UnknownNameError(
                f"the run {self._run.name!r} has no tensors, so there is no graph to draw."
            )
        outline = Outline(graph.nodes, graph.edges)
        first = outline.folding(room)
        opened = first.expanded if expanded is None else frozenset(_with_outer(expanded))
        scene = outline.scene(opened, room=room, limit=first.limit)
        asked = frozenset(expanded or ())
        if wrong := sorted(asked - {band.id for band in scene.bands}):
            folded = [box.id for box in scene.boxes if box.folded and not box.plain]
            raise UnknownNameError(
                f"{shown(wrong[0])} is not a group that can be expanded"
                f"{did_you_mean(wrong[0], folded) or '.'} Folded groups: "
                f"{', '.join(map(repr, folded)) or 'none'}."
            )
        title = f"{self._run.name} at step {at.step}"
        if not graph.edges:
            title += " \u00b7 no edges were recorded"
        if statistic is None:
            return graph_figure(scene, None, title)
        if colour is not None:
            return _coloured(view, at, graph, scene=scene, colour=colour, of=of, other=other)
        paint, scale = heat_of(view, at, graph, scene=scene, pass_=of)
        numbers = node_values(view, at, graph, of)
        values = {box.id: value_of(box.members, numbers) for box in scene.boxes}
        kind = ", logarithmic" if scale["log"] else ""
        ends = f"colours from {scale['low']} to {scale['high']}{kind}"
        title = f"{statistic} ({of}) at step {at.step}, {ends}"
        return graph_figure(scene, paint, title, values={statistic: values})

    def kpis(
        self,
        *names: str,
        smoothing: float = 0.0,
        type: str | None = None,
        apart: bool | None = False,
    ) -> hv.NdOverlay | hv.Layout:
        """Return metrics by step: an overlay of curves of `value`, keyed by `metric`.

        Args:
            names: names of the metrics, including automatic ones such as "lr"; by default, all
                that the program logs.
            smoothing: weight of earlier values in an exponential moving average, from 0 (no
                smoothing) to less than 1.
            type: type of execution; by default, all.
            apart: whether each metric has a small figure of its own, in a layout. None: if there
                are more than eight, or if one is over thirty times larger than another, which would
                be flat beside it.

        Raises:
            UnknownNameError: the run has no metric with this name, or no metrics.
        """
        table = self._run.kpis(automatic=bool(names))
        if type is not None:
            table = table[table["type"] == type]
        there = list(dict.fromkeys(table["name"]))
        for name in names:
            _check_metric(name, there)
        if not there:
            what = f" of type {type!r}" if type else ""
            raise UnknownNameError(f"the run has no metrics{what}.")
        chosen = names or tuple(there)
        curves = {
            visible(n): _metric(table[table["name"] == n], "value", smoothing) for n in chosen
        }
        if apart or (apart is None and not _are_alike(curves)):
            return side_by_side({name: _drawable(curve) for name, curve in curves.items()})
        return _drawable(overlaid(curves, "metric"))

    def picture(
        self,
        name: str,
        *,
        step: int | None = None,
        node: str | None = None,
        sample: int = 0,
        type: str | None = None,
    ) -> hv.Image | hv.Curve | hv.Overlay:
        """Return a picture of one sample, or one that shows several nodes or steps: `Run.picture`.

        Rows and columns are an image, or a heat map if they have names, such as nodes or steps;
        leading axes, such as channels, are added up. One row of numbers is a curve, or bars.
        `reliability` is bars against the diagonal, and `linear_probe` a line over the layers for
        each step (for five steps if there are more).

        Args:
            name: name of the picture.
            step: the step; by default, the last one that has the picture.
            node: the node; required if the picture shows several.
            sample: number of the sample, unit or category, if the picture has an image for each.
            type: type of execution, such as "probe:eyes"; by default, the first probe.

        Raises:
            UnknownNameError: there is no such picture, step, node or sample.
        """
        found = self._run.picture(name, step, node, type=type)
        values, axes = np.asarray(found.values, np.float64), [*found.axes]
        at = found.step
        if not values.size:
            raise UnknownNameError(f"the picture {name!r} has no numbers to draw at step {at}.")
        if axes[0] == "step" and values.ndim > 2:  # such as the confusion matrix
            at, values, axes = found.labels["step"][-1], values[-1], axes[1:]
        several = len(axes) > _ONE_BY_ONE.get(axes[0], len(axes))
        values, axes = _one_image(values, axes, sample)
        when = "" if at is None else f"step {at}"
        one = f"{found.axes[0]} {sample}" if several else ""
        wild = int(np.count_nonzero(~np.isfinite(values)))
        gaps = f"{wild} of {values.size} values not finite" if wild else ""
        label = " \u00b7 ".join(filter(None, [name, found.node, one, when, gaps]))
        labels = [found.labels.get(axis) for axis in axes]
        if name == "reliability":
            return bars_against_diagonal(values, label)
        if name == "linear_probe":
            steps, nodes = found.labels["step"], found.labels["node"]
            return lines_over_names(values, nodes, steps, label, value="accuracy")
        if values.ndim == 2 and (any(labels) or name == "confusion"):
            names = [
                [*map(str, mine if mine else range(size))]
                for mine, size in zip(labels, values.shape, strict=True)
            ]
            return cells_of(values, axes, names, label)
        if values.ndim == 2:
            return picture_of(Drawing("map", values, "", down=axes[0], across=axes[1]), label)
        places = labels[0] or [*range(len(values))]
        table = pd.DataFrame({axes[0]: places, name: values})
        if any(isinstance(place, str) for place in places):
            bars = hv.Bars(table, axes[0], name, label=label)
            size = {"fig_inches": (max(6.0, 0.2 * len(places)), 5.0), "aspect": "auto"}
            look = {"color": BLUE, "xrotation": 90}
            return styled(bars, "Bars", look, bokeh={"height": 360}, matplotlib=size)
        return as_lines(hv.Curve(table, axes[0], name, label=label))

    def landscape(
        self, name: str, *, step: int | None = None, type: str | None = None
    ) -> hv.Curve | hv.Overlay | hv.Layout:
        """Return the curvature of the loss, or a slice through it, as in the viewer.

        A slice along one direction is a curve, one along two a `QuadMesh` of `loss` by the
        coordinates `first` (rows) and `second` (columns), with the way of the training as a path if
        it is known. The curvature is the largest eigenvalue by step and the density of the
        eigenvalues.

        Args:
            name: name of a picture with the method `loss_slice` or `hessian`.
            step: the step; by default, the last one that has the picture.
            type: type of execution, such as "probe:eyes"; by default, the first probe.

        Raises:
            UnknownNameError: there is no such picture or step, or it is not of the whole model.
        """
        picture = self._run.picture(name, step, type=type)
        steps = picture.labels.get("step") or [picture.step]
        at = int(steps[-1] if step is None else step)
        kind = self._probe_of(type)
        shown = landscape(RunView(self._run), name, kind, at)
        if shown is None:
            raise UnknownNameError(
                f"the picture {name!r} does not show the whole model; draw it as a picture."
            )
        title = f"{shown.title} at step {at}"
        if shown.grid is not None:
            facts = self._run.picture(name, at, type=type).facts
            return _heights(shown, facts, title)
        curves = [
            as_lines(hv.Curve((each.x, each.y), each.across, each.value, label=each.name))
            for each in shown.curves
        ]
        return curves[0].relabel(title) if len(curves) == 1 else hv.Layout(curves).opts(title=title)

    def text(
        self,
        name: str,
        *,
        node: str | None = None,
        step: int | None = None,
        sample: int = 0,
        type: str | None = None,
    ) -> hv.Overlay | hv.QuadMesh:
        """Return the tokens of a sample, coloured by what a picture found for each of them.

        Each token is one of `hv.Rectangles` with the dimensions `token`, `position` and `value`. If
        the picture explains several positions, a heat map has a row for each of them.

        Args:
            name: name of a picture of a model that reads tokens, such as one of saliency.
            node: the node; required if the picture shows several.
            step: the step; by default, the last one of the probe.
            sample: number of the sample.
            type: type of execution, such as "probe:words"; by default, the first probe.

        Raises:
            UnknownNameError: there is no such picture, node, step or sample, or it has no numbers
                for tokens.
        """
        view, kind, at = self._sampled(step, sample, type)
        cards = [card for card in cards_of(view, kind, at, sample) if card.words]
        mine = [card for card in cards if card.name == name and node in (None, card.node)]
        if len(mine) != 1:
            there = ", ".join(f"{card.name!r} of {card.node!r}" for card in cards) or "none"
            what = "several nodes" if mine else f"no picture {shown(name)} with tokens"
            at_node = f" of {shown(node)}" if node is not None else ""
            raise UnknownNameError(
                f"sample {sample} at step {at} has {what}{at_node}. Pictures with tokens: {there}."
            )
        (card,) = mine
        title = f"{card.title}, sample {sample} at step {at}"
        if card.rows:
            rows = [label for label, _ in card.rows]
            words = [f"{i} {visible(word)}" for i, word in enumerate(card.words)]
            values = np.array([shares for _, shares in card.rows]) * card.high
            return cells_of(values, ["explained", "token"], [rows, words], title)
        return written(card.words, np.array(card.shares) * card.high, title)

    def _sampled(self, step: int | None, sample: int, type: str | None) -> tuple[RunView, str, int]:
        """Return the view, the type and the step of a probe's record that has the sample."""
        view, kind = RunView(self._run), self._probe_of(type)
        steps = [int(each) for each in view.steps(kind)] if kind else []
        if not steps:
            raise UnknownNameError("this run has no record of a probe.")
        at = steps[-1] if step is None else step
        if at not in steps:
            there = ", ".join(map(str, steps[-3:]))
            raise UnknownNameError(f"step {at} has no record of a probe; the last ones: {there}.")
        count = len(self._run.samples(at, type=kind))
        if not 0 <= sample < count:
            raise UnknownNameError(f"there is no sample {sample} at step {at}; there are {count}.")
        return view, kind, at

    def _probe_of(self, type: str | None) -> str:
        probes = [each for each in self._run.types if each.startswith(PROBE_PREFIX)]
        return type if type is not None else next(iter(probes), "")

    def lens(
        self, name: str, *, step: int | None = None, sample: int = 0, type: str | None = None
    ) -> hv.Overlay:
        """Return what each layer of a language model would predict, as in the viewer.

        A row for each layer and a column for each position; a cell contains the token that the
        layer would predict. Its colour, the dimension `probability`, is the one that the layer
        gives to the explained token.

        Args:
            name: name of a picture with the method `logit_lens`.
            step: the step; by default, the last one of the probe.
            sample: number of the sample.
            type: type of execution, such as "probe:words"; by default, the first probe.

        Raises:
            UnknownNameError: there is no such picture, step or sample.
        """
        view, kind, at = self._sampled(step, sample, type)
        found = {each.name: each for each in lenses(view, kind, at, sample, {})}
        if name not in found:
            there = ", ".join(map(repr, found)) or "none"
            raise UnknownNameError(
                f"there is no logit lens {shown(name)}{did_you_mean(name, found) or '.'} "
                f"Logit lenses at step {at}: {there}."
            )
        layers, words = found[name].layers, found[name].words
        values = np.array([[share for _, share in cells] for _, cells in layers])
        columns = [f"{i} {visible(word)}" for i, word in enumerate(words)]
        names = [[visible(node) for node, _ in layers], columns]
        title = f"{found[name].title}, sample {sample} at step {at}"
        cells = cells_of(
            values, ["layer", "position"], names, title, value="probability", signed=False
        )
        return worded(cells, [[word for word, _ in line] for _, line in layers], title)

    def attention(
        self,
        node: str | None = None,
        *,
        head: int | None = None,
        step: int | None = None,
        sample: int = 0,
        type: str | None = None,
    ) -> hv.Image | hv.QuadMesh:
        """Return attention weights of a sample: all layers and heads, or one head.

        Without a node, there is a small map for each layer (rows) and head (columns), in which the
        largest weight of each head is 1. With a node and a head, the weights are cells, with the
        queries as rows and the keys as columns, and their tokens as names. `slot.plot.preview`
        draws all heads of a node. Where a record has no weights, a preview of another step is
        drawn, and its step is named.

        Args:
            node: the node whose output or recomputed weights are drawn.
            head: the head; by default 0.
            step: the step; by default, the last one.
            sample: number of the sample.
            type: type of execution; by default, training.

        Raises:
            UnknownNameError: the run has no attention weights, or there is no such node, head,
                step or sample.
        """
        view, at = self._selected(step, sample, type)
        if node is not None:
            found = self._attention_of(view, node, at)
            self._check_head(found, head or 0)
            names = [[*found.queries], [*found.keys]]
            names = [[f"{i} {visible(word)}" for i, word in enumerate(each)] for each in names]
            title = f"{node}, head {head or 0}, sample {sample} at step {found.step}"
            values = found.weights[head or 0].astype(np.float64)
            return cells_of(values, ["query", "key"], names, title, value="weight", signed=False)
        if head is not None:
            raise UnknownNameError("a head needs a node")
        every = [(slot, attention(view, slot, at)) for slot in self._layers(view)]
        known = [
            (f"{slot.node} (step {found.step})" if found.step != at.step else slot.node,
             thumbnails(found))
            for slot, found in every if found is not None
        ]  # fmt: skip
        if not known:
            raise UnknownNameError(
                f"no attention weights of sample {sample} were recorded at step {at.step}."
            )
        title = f"attention, sample {sample} at step {at.step}"
        return heads_of([maps for _, maps in known], [name for name, _ in known], title)

    def attention_lines(
        self,
        node: str,
        *,
        head: int | None = None,
        step: int | None = None,
        sample: int = 0,
        type: str | None = None,
    ) -> hv.Overlay:
        """Return attention as lines from each query to the keys that it attends to.

        As in the head view of BertViz (Vig 2019), each head has a colour, and the lines of large
        weights are opaque. The arguments are those of `attention`; by default, all heads are drawn.
        """
        view, at = self._selected(step, sample, type)
        found = self._attention_of(view, node, at)
        weights, which = found.weights, "all heads"
        if head is not None:
            self._check_head(found, head)
            weights, which = weights[head : head + 1], f"head {head}"
        title = f"{node}, {which}, sample {sample} at step {found.step}"
        return tokens_joined(weights, found.queries, found.keys, title)

    def attention_neurons(
        self,
        node: str,
        *,
        query: int = 0,
        head: int | None = None,
        step: int | None = None,
        sample: int = 0,
        type: str | None = None,
    ) -> hv.Layout:
        """Return the vector of a query, those of all keys, and their products, number by number.

        The products of a row, summed and scaled, are the score from which the weight of its key
        follows. It needs recomputed weights of fused attention, with the values of its inputs.

        Args:
            node: the node whose weights were recomputed.
            query: the position of the query.
            head: the head; by default 0.
            step: the step; by default, the last one.
            sample: number of the sample.
            type: type of execution; by default, training.

        Raises:
            UnknownNameError: there is no such node, head, query, step or sample, or its queries
                and keys were not recorded.
        """
        view, at = self._selected(step, sample, type)
        whole = self._attention_of(view, node, at)
        self._check_head(whole, head or 0)
        made = (neurons(view, slot, at, head or 0) for slot in layers(view) if slot.node == node)
        found = next((each for each in made if each is not None), None)
        if found is None:
            raise UnknownNameError(
                f"the queries and keys of {node!r} were not recorded at step {at.step}. They are "
                "inputs of fused attention: select `F.scaled_dot_product_attention` with `capture: "
                "[input, output]`, `values: true` and `attention: {recompute: true}`."
            )
        if not 0 <= query < len(found.query):
            raise UnknownNameError(f"there is no query {query}; there are {len(found.query)}.")
        words = [whole.queries[query], *whole.keys]
        numbers = [query, *range(len(whole.keys))]
        names = [f"{i} {visible(word)}" for i, word in zip(numbers, words, strict=True)]
        return neurons_of(
            found.query[query], found.key, whole.weights[head or 0][query], names,
            f"{node}, head {head or 0}, query {query}, sample {sample} at step {at.step}",
        )  # fmt: skip

    def _selected(
        self, step: int | None, sample: int, type: str | None
    ) -> tuple[RunView, Selection]:
        view = RunView(self._run)
        steps = [int(each) for each in view.steps(type or "")]
        if not steps:
            raise UnknownNameError("no step was recorded.")
        if step is not None and step not in steps:
            there = ", ".join(map(str, steps[-3:]))
            raise UnknownNameError(f"step {step} was not recorded; the last ones: {there}.")
        at = steps[-1] if step is None else step
        return view, Selection(type=type or "", step=at, batch=str(sample))

    def _layers(self, view: RunView) -> list[Any]:
        found = layers(view)
        if not found:
            raise UnknownNameError(
                f"the run {self._run.name!r} has no attention weights of single samples; the "
                "preset `attention` records them."
            )
        return found

    def _attention_of(self, view: RunView, node: str, at: Selection) -> Attention:
        every = self._layers(view)
        mine = [slot for slot in every if slot.node == node]
        if not mine:
            names = [*dict.fromkeys(slot.node for slot in every)]
            raise UnknownNameError(
                f"{shown(node)} has no attention weights{did_you_mean(node, names) or '.'} "
                f"They are recorded of: {', '.join(map(repr, names))}."
            )
        found = next((made for slot in mine if (made := attention(view, slot, at))), None)
        if found is None:
            raise UnknownNameError(
                f"no attention weights of {node!r} for sample {at.sample} were recorded at step "
                f"{at.step}."
            )
        return found

    def _check_head(self, found: Attention, head: int) -> None:
        if not 0 <= head < len(found.weights):
            raise UnknownNameError(f"there is no head {head}; there are {len(found.weights)}.")

    def embedding(
        self,
        node: str,
        *,
        step: int | None = None,
        method: str = "pca",
        type: str | None = None,
    ) -> hv.NdOverlay:
        """Return the samples of a node as points in the plane: `Run.embedding`.

        The points of each label have a colour, and the axes are the same at all steps. The
        dimensions are `first`, `second`, `sample` and the key `label`.

        Args:
            node: the node.
            step: the step; by default, the last one.
            method: "pca", "tsne" or "umap"; the others need the extra `projections`.
            type: type of execution; by default, the first probe, or training without one.

        Raises:
            UnknownNameError: the values of the node were not recorded, or not at this step, or
                there is no such method.
            MissingPackageError: openTSNE or umap-learn is not installed.
        """
        found = self._run.embedding(node, method=method, type=type)
        steps = found.labels["step"]
        at = steps[-1] if step is None else step
        if at not in steps:
            raise UnknownNameError(
                f"step {at} has no values of {node!r}; the last ones: "
                f"{', '.join(map(str, steps[-3:]))}."
            )
        every, points = found.values, found.values[steps.index(at)]
        labels = ["" if each is None else str(each) for each in found.labels["sample"]]
        table = pd.DataFrame(points, columns=["first", "second"])
        table["sample"], table["label"] = np.arange(len(points)), labels
        groups = {
            visible(str(label)): hv.Points(mine, ["first", "second"], ["sample"])
            for label, mine in table.groupby("label", sort=True)
        }
        kind = type or self._probe_of(None) or "training"
        title = f"{cut(visible(node), NAME_ROOM)} at step {at} ({kind}): {METHOD_NAMES[method]}"
        frame = np.nanmin(every, axis=(0, 1)), np.nanmax(every, axis=(0, 1))
        return points_by(groups, "label", title, frame)

    def memory(self, by: str = "step") -> hv.Overlay:
        """Return what the memory contains in each measured step, or over one: `Run.memory`.

        Bars of parts on top of each other, in MB, as in the viewer's *KPIs* section.

        Args:
            by: "step", or "moment" for the course of the fullest measured step.

        Raises:
            UnknownNameError: memory was not measured.
            ValueError: `by` is neither of them.
        """
        if by not in ("step", "moment"):
            raise ValueError(f"by must be 'step' or 'moment', got {by!r}")
        view = RunView(self._run)
        title, table = "memory of each measured step", memory_steps(view)
        if by == "moment" and (moments := memory_moments(view)):
            title, table = f"memory over step {moments[0]}", moments[1]
        if table is None or table.empty:
            self._run.memory()  # says why there is none
            raise UnknownNameError(f"the memory of the run {self._run.name!r} was not measured.")
        return stacked(table, part_colours(map(str, table)), title, value="MB")

    def times(self) -> hv.Overlay:
        """Return the time of each phase of the profiled steps: `Run.profile(by="step")`.

        Bars of phases on top of each other, in milliseconds, as in the viewer's *KPIs* section.

        Raises:
            UnknownNameError: the run has no profile.
        """
        table = phases(RunView(self._run))
        if table is None or table.empty:
            self._run.profile()  # says why there is none
            raise UnknownNameError(f"the run {self._run.name!r} has no profile.")
        colours = part_colours(map(str, table))
        return stacked(table, colours, "time of each profiled step", value="ms")

    def effects(
        self,
        name: str,
        *,
        step: int | None = None,
        share: bool = False,
        strongest: int | None = None,
    ) -> hv.QuadMesh | hv.Overlay:
        """Return the mean effects of an intervention: `Run.effects`.

        For a sweep, a heat map of one step: the first axis of the sweep (rows) and the others
        (columns), whose names are dimensions, too. Without a sweep, or with `strongest`, curves of
        the effects by step, with bands of one standard error of the mean over the samples.

        Args:
            name: name of the intervention.
            step: the step of a sweep; by default, the last one.
            share: see `Run.effects`.
            strongest: the number of places of a sweep to draw as curves: those with the largest
                effects at the step or, by default, at any step.

        Raises:
            UnknownNameError: there is no such intervention or step, or nothing was measured.
            ValueError: `strongest` is less than 1.
        """
        table = self._run.effects(name, share=share)
        axes = [str(axis) for axis in table.index.names if axis != "step"]
        if not axes:
            return banded({name: _by_step(table)}, "effect", name)
        if strongest is not None:
            found = self._strongest(name, table, axes, strongest, step)
            return banded(found, "effect", name)
        at = int(table.index.get_level_values("step").max()) if step is None else step
        now = self._run.effects(name, at, share=share)["mean"].droplevel("step")
        rows, *others = ([*map(str, now.index.get_level_values(axis))] for axis in axes)
        columns = [", ".join(each) for each in zip(*others, strict=True)] or [""] * len(now)
        names = [[*dict.fromkeys(rows)], [*dict.fromkeys(columns)]]
        places = [{label: i for i, label in enumerate(each)} for each in names]
        values = np.full([len(each) for each in names], np.nan)
        for row, column, value in zip(rows, columns, now.to_numpy(np.float64), strict=True):
            values[places[0][row], places[1][column]] = value
        across = ", ".join(axes[1:]) or "effect of each"
        return cells_of(values, [axes[0], across], names, f"{name} at step {at}", value="effect")

    def _strongest(
        self, name: str, table: pd.DataFrame, axes: list[str], most: int, step: int | None
    ) -> dict[str, pd.DataFrame]:
        """Return the effects in the strongest places of a sweep by step, the strongest first."""
        if most < 1:
            raise ValueError(f"strongest must be at least 1, got {most}")
        ranked = table if step is None else self._run.effects(name, step)
        sizes = ranked["mean"].abs().groupby(level=axes, sort=False).max()
        chosen = sizes.sort_values(ascending=False, kind="stable").index[:most]
        found = {}
        for place in chosen:
            values = place if isinstance(place, tuple) else (place,)
            label = ", ".join(
                str(value) if axis in ("node", "into") else f"{axis} {value}"
                for axis, value in zip(axes, values, strict=True)
            )
            here = table.xs(values, level=axes)
            assert isinstance(here, pd.DataFrame)
            found[label] = _by_step(here)
        return found

    def induction(self, *, strongest: int = 8, type: str | None = None) -> hv.Overlay:
        """Return the induction scores of attention heads by step, as curves: `Run.induction`.

        Args:
            strongest: the number of heads to draw: those with the highest score at any step.
            type: type of execution; by default, training.

        Raises:
            UnknownNameError: the records lack values of attention weights or of tokens.
            ValueError: `strongest` is less than 1.
        """
        if strongest < 1:
            raise ValueError(f"strongest must be at least 1, got {strongest}")
        scores = self._run.induction(type=type)["score"]
        heads = scores.groupby(level=["node", "iteration", "head"], sort=False).max()
        chosen = heads.sort_values(ascending=False, kind="stable").index[:strongest]
        several = scores.index.get_level_values("iteration").max() > 0
        curves = {}
        for node, iteration, head in chosen:
            label = f"{node}, head {head}" + (f", iteration {iteration}" if several else "")
            here = scores.xs((node, iteration, head), level=("node", "iteration", "head"))
            curves[label] = pd.DataFrame(
                {"step": here.index, "score": here.to_numpy(), "error": np.nan}
            )
        return banded(curves, "score", "induction")

    def cloud(
        self,
        node: str,
        *,
        step: int,
        x: str = "mean",
        y: str = "std",
        type: str | None = None,
    ) -> hv.Points:
        """Return the recorded samples of a node's output: `slot(node).plot.cloud(step)`."""
        return SlotPlots(self._run.slot(node)).cloud(step, x=x, y=y, type=type)

    def distributions(
        self,
        statistic: str = "std",
        *,
        step: int | None = None,
        of: str = "forward",
        iteration: int | None = None,
        type: str | None = None,
    ) -> hv.Overlay:
        """Return the distribution of a statistic over the recorded samples, for each tensor.

        Each sample is a point, and a box with a line shows the quartiles and the median. The
        dimensions of the points are `layer` (position of the tensor in execution order), the
        statistic, `sample` and `tensor` (its name). Tensors for which fewer than two samples were
        recorded, such as parameters, are left out. The axis is logarithmic under the same
        conditions as the colours of `heat`; then, samples at 0 are below the figure. Of more than
        `MOST_POINTS` samples, only some are points, as the title says; the boxes count all.

        Args:
            statistic: statistic of each sample.
            step: the step; by default, the last one.
            of: pass of the tensors.
            iteration: iteration of the tensors, or the nearest one; by default, all iterations.
            type: type of execution or tag; by default, all training steps.

        Raises:
            UnknownNameError: there is no such step, statistic or pass, or no tensor with samples.
        """
        self._check_pass(of)
        if step is None:
            steps = self._run.heat(statistic, of=of, type=type).index
            step = int(steps[-1]) if len(steps) else None
        numbers = np.full((0, 0), np.nan)
        if step is not None:
            numbers = self._run.arrays.samples(step, statistic, type=type)
        slots = self._run.arrays.slots
        found: dict[tuple[str, str, int], tuple[int, int]] = {}
        for i in np.flatnonzero(np.isfinite(numbers).sum(axis=1) > 1).tolist():
            key = slots[i].key
            away = 0 if iteration is None else abs(key.iteration - iteration)
            place = (key.node, key.role, key.iteration if iteration is None else 0)
            if key.pass_ == of and (place not in found or away < found[place][0]):
                found[place] = away, i
        if not found:
            raise UnknownNameError(f"no tensor of pass {shown(of)} has recorded samples.")
        rows = sorted(i for _, i in found.values())
        keys = [slots[i].key for i in rows]
        names = [_name(k.node, k.role, k.iteration if iteration is None else 0) for k in keys]
        call = "" if not iteration else f", iteration {iteration}"
        label = f"{statistic} ({of}) at step {step}{call}"
        every = -(-np.isfinite(numbers[rows]).sum() // MOST_POINTS)
        if every > 1:
            label += f" \u00b7 points: one of {every} samples"
        return distributions_of(numbers[rows], names, statistic, label, every=every)


def _coloured(
    view: RunView,
    at: Selection,
    graph: Graph,
    *,
    scene: Scene,
    colour: str,
    of: str,
    other: Run | None,
) -> hv.Overlay:
    """Return a graph with one of the viewer's colours, whose scale is in the title."""
    beside = None
    if other is not None:
        there = RunView(other)
        beside = Other(other.name, there, nearest(there.steps(at.type), at.step))
    found = painted(view, at, graph, scene=scene, colour=colour, pass_=of, other=beside)
    legend = found.legend or {}
    ends = " to ".join(filter(None, (legend.get("low"), legend.get("high"))))
    title = legend.get("title", colour)
    # Times and memory are those of other steps, and effects have the step of their record.
    if colour not in (TIME, MEMORY) and not colour.startswith(EFFECTS):
        title += f" at step {at.step}"
    return graph_figure(scene, found.boxes, title + f", {ends}" * bool(ends), flow=found.edges)


def _check_colour(view: RunView, colour: str, *, statistic: str | None, other: Run | None) -> None:
    """Check what colours a graph, and find out what is wrong with the run if that colours it."""
    if (colour == "findings" or colour.startswith(RULE)) and (
        verdicts.found(view).diagnosis is None
    ):
        verdicts.look(view).wait()
    there = colours(view, colour)
    if colour not in there:
        raise UnknownNameError(
            f"{shown(colour)} does not colour this graph{did_you_mean(colour, there) or '.'} "
            f"What does: {', '.join(map(repr, there))}, and 'rule:NAME' for a rule with findings."
        )
    if statistic is not None and colour not in (DIFFERENCE, UNUSUAL):
        raise ValueError(f"a graph coloured by {colour!r} has no statistic, got {statistic!r}")
    if (colour == DIFFERENCE) != (other is not None):
        raise ValueError(
            "a graph needs another run if and only if it is coloured by 'difference': `other`, or "
            "--other on the command line"
        )


def _heights(shown: Landscape, facts: Mapping[str, Any], title: str) -> hv.Overlay:
    """Return the losses on a grid, and the way of the training through it."""
    assert shown.grid is not None
    places = np.asarray(facts["coordinates"], np.float64)
    axes = {"kdims": ["second", "first"], "vdims": ["loss"]}
    edges = edges_of(places)
    mesh = styled(
        hv.QuadMesh((edges, edges, shown.grid), **axes), "QuadMesh",
        {"cmap": [colour_at(place) for place in _PLACES[0]], "colorbar": True, "title": title,
         "clim": (shown.low, shown.high), "invert_yaxis": True},
        bokeh={"height": 420, "tools": ["hover"]}, matplotlib={"aspect": 1, "cformatter": SHORT},
    )  # fmt: skip
    way = facts.get("way")
    if way is None:
        return mesh * hv.Overlay([])
    rows, columns = np.asarray(way["coordinates"], np.float64).T
    line = styled(hv.Path([(columns, rows)], ["second", "first"]), "Path", {"color": INK})
    dots = hv.Points((columns, rows, way["steps"]), ["second", "first"], "step")
    dots = styled(
        dots, "Points", {"color": INK}, bokeh={"size": 5, "tools": ["hover"]}, matplotlib={"s": 9}
    )
    return mesh * line * dots


def _by_step(effects: pd.DataFrame) -> pd.DataFrame:
    """Return the effects in one place with the columns that `banded` draws."""
    columns = {"step": effects.index, "effect": effects["mean"], "error": effects["error"]}
    return pd.DataFrame({key: np.asarray(column) for key, column in columns.items()})


class SlotPlots:
    """Plots of one recorded tensor.

    Args:
        slot: the tensor.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def series(
        self, statistic: str = "mean", *, over_batch: str = "mean", type: str | None = None
    ) -> hv.Curve:
        """Return one statistic by step, with gaps where the tensor was not recorded.

        From 65,536 records on, the curve has the lowest and the highest value of every 256 records.
        """
        steps, values = line_of_slot(self._slot, statistic, over_batch, type)
        table = pd.DataFrame({"step": steps, statistic: values})
        curve = hv.Curve(table, "step", statistic, label=_label(self._slot))
        return _drawable(as_lines(curve))

    def samples(self, statistic: str = "mean", *, type: str | None = None) -> hv.NdOverlay:
        """Return a statistic for each recorded sample by step, keyed by `sample`."""
        table = self._slot.samples(statistic, type=type).dropna(axis="columns", how="all")
        curves = {
            number: hv.Curve(
                pd.DataFrame({"step": table.index, statistic: table[number].to_numpy()}),
                "step",
                statistic,
            )
            for number in table.columns
        }
        look = {"title": _label(self._slot)}
        overlay = overlaid(curves, "sample")
        return _drawable(styled(overlay, "NdOverlay", look, bokeh={"height": 300}))

    def cloud(
        self, step: int, *, x: str = "mean", y: str = "std", type: str | None = None
    ) -> hv.Points:
        """Return the recorded samples at a step as points, with one statistic per axis.

        The dimensions are the statistics, `sample` and `category` (the sample's category, or "").

        Raises:
            UnknownNameError: there is no such step or statistic.
        """
        table = self._slot.row(step, type=type)
        for name in (x, y):
            if name not in table:
                hint = did_you_mean(name, table.columns) or "."
                there = ", ".join(map(repr, table.columns))
                raise UnknownNameError(
                    f"there is no statistic {shown(name)}{hint} The statistics are: {there}."
                )
        labels = table.attrs.get("labels") or [None] * len(table)
        points = table[[x, y]].assign(
            sample=np.arange(len(table)),
            category=["" if label is None else label for label in labels],
        )
        found = hv.Points(
            points.reset_index(drop=True),
            kdims=[x, y],
            vdims=["sample", "category"],
            label=f"{_label(self._slot)} at step {step}{_without(points[[x, y]])}",
        )
        look: dict[str, Any] = {"color": "category", "cmap": list(LINES)}
        if not any(points["category"]):
            look = {"color": BLUE}
        for axis, values in (("x", points[x].to_numpy()), ("y", points[y].to_numpy())):
            if not np.isfinite(values).any():
                look[f"{axis}lim"] = 0, 1  # else Matplotlib fails
            elif flat(float(values.min()), float(values.max())):
                look[f"{axis}lim"] = bounds(values)
        points = styled(
            found,
            "Points",
            look,
            bokeh={"size": 6, "tools": ["hover"]},
            matplotlib={"s": 20, "xticks": 5},
        )
        return _drawable(points)

    def histogram(self, step: int, *, type: str | None = None) -> hv.Histogram:
        """Return the histogram of the values at a step; its dimensions are `value` and `count`."""
        counts, edges = self._slot.histogram(step, type=type)
        label = f"{_label(self._slot)} at step {step}{_without(edges)}"
        found = hv.Histogram((edges, counts), kdims=["value"], vdims=["count"], label=label)
        return styled(
            found, "Histogram", {"color": BLUE}, bokeh={"line_color": None, "height": 300}
        )

    def preview(
        self, step: int, *, sample: int | None = None, type: str | None = None
    ) -> hv.Image | hv.RGB | hv.Curve | hv.Bars:
        """Return a picture of the values at a step, or of a preview of them, as in the viewer.

        Feature maps, heads and kernels become tiles, separated by transparent gaps; inputs with
        three channels become colours; one value per sample becomes bars. The dimensions have the
        names of the axes.

        Args:
            step: the step; without values, the newest preview up to this step is drawn.
            sample: number of a recorded sample; None: all, or the first one if there is room for
                only one.
            type: type of execution or tag.

        Raises:
            UnknownNameError: the step was not recorded, or there are neither values nor previews.
        """
        found = self._slot.preview(step, type=type)
        there = found.values.shape[0] if found.axes[:1] == ("sample",) else 0
        if sample is not None and not 0 <= sample < there:
            what = f"samples 0 to {there - 1}" if there else "no samples"
            raise UnknownNameError(
                f"there is no sample {sample}: the picture at step {found.step} has {what}."
            )
        drawing = draw(found, sample=sample, picture=self._slot.kind == "input")
        wild = int(np.count_nonzero(~np.isfinite(found.values)))
        size = f"{found.values.size} values" + " in all samples" * (there > 1)
        facts = f"{drawing.facts} \u00b7 {wild} of {size} not finite" if wild else drawing.facts
        label = f"{_label(self._slot)} at step {found.step}: {facts}"
        return picture_of(drawing, label)

    def distribution(self, *, type: str | None = None) -> hv.Overlay:
        """Return the values' distribution by step: median, quartiles, and 5% and 95% quantiles.

        The quantiles are estimated from the histograms by linear interpolation within a bin.
        """
        steps, counts, edges = self._slot.histograms(type=type)
        shares = cumulative(counts)
        known = np.isfinite(edges).all(axis=1) & ~np.isnan(shares[:, -1])
        found = np.full((len(steps), len(QUANTILES)), np.nan)
        for column, q in enumerate(QUANTILES):
            found[known, column] = quantile(shares[known], edges[known], q)
        table = pd.DataFrame(found, columns=["p5", "p25", "p50", "p75", "p95"])
        table.insert(0, "step", steps)
        if len(table) == 1:  # a band needs a width
            table = pd.concat([table, table]).assign(step=[steps[0] - 0.4, steps[0] + 0.4])
        bands = [
            styled(
                hv.Area(table, "step", [low, high], label=label),
                "Area",
                {"color": BLUE, "alpha": alpha, "show_legend": True},
                bokeh={"line_color": None},
                matplotlib={"facecolor": BLUE, "linewidth": 0},
            )
            for low, high, label, alpha in (
                ("p5", "p95", "5% to 95%", 0.2),
                ("p25", "p75", "25% to 75%", 0.35),
            )
        ]
        median = hv.Curve(table, "step", "p50", label="median")
        overlay = bands[0] * bands[1] * styled(median, "Curve", {"color": BLUE})
        look = {"title": _label(self._slot), "ylabel": "value", "show_legend": True}
        return styled(overlay, "Overlay", look, bokeh={"height": 300})


class GroupPlots:
    """Plots of several runs.

    Args:
        group: the runs, from one folder or from several.
    """

    def __init__(self, group: Group | Sequence[Run]) -> None:
        self._group = group

    @property
    def _names(self) -> list[str]:
        """A name for each run; runs of the same name have that of their group, too."""
        group = self._group
        return group.unique_names if isinstance(group, Group) else unique_names(group)

    def kpi(
        self, name: str, *, smoothing: float = 0.0, x: XAxis = "step", type: str | None = None
    ) -> hv.NdOverlay:
        """Return a metric of each run by step, as an overlay of curves keyed by `run`.

        Runs without the metric are left out.

        Args:
            name: name of the metric, which may be an automatic one such as "lr".
            smoothing: weight of earlier values in an exponential moving average, from 0 (no
                smoothing) to less than 1.
            x: "step", "time" (seconds since the start of the run) or "samples" (samples seen);
                interpolated between records.
            type: type of execution; by default, all.

        Raises:
            UnknownNameError: no run has a metric with this name.
        """
        if x not in get_args(XAxis):
            there = ", ".join(map(repr, get_args(XAxis)))
            raise ValueError(f"x must be one of {there}, got {x!r}")
        names = self._names
        tables = {
            run: each.kpis(automatic=True) for run, each in zip(names, self._group, strict=True)
        }
        if type is not None:
            tables = {run: table[table["type"] == type] for run, table in tables.items()}
        _check_metric(name, list(dict.fromkeys(n for t in tables.values() for n in t["name"])))
        mine = {run: table[table["name"] == name] for run, table in tables.items()}
        clocks = {
            run: clock_of(each) for run, each in zip(names, self._group, strict=True) if x != "step"
        }
        curves = {}
        for run, table in mine.items():
            if len(table):
                steps = table["step"].to_numpy(np.int64)
                places = steps if x == "step" else at_steps(clocks[run], steps, x)
                curves[run] = _metric(table.assign(**{x: places}), name, smoothing, x=x)
        return _drawable(overlaid(curves, "run"))

    def series(
        self,
        node: str,
        statistic: str = "mean",
        *,
        over_batch: str = "mean",
        type: str | None = None,
    ) -> hv.NdOverlay:
        """Return a statistic of a node's output in each run, keyed by `run`."""
        how: dict[str, Any] = {"over_batch": over_batch, "type": type}
        group = self._group
        if isinstance(group, Group):
            table = group.compare(node, statistic, **how)
        else:
            table = compare(group, node, statistic, **how)
        steps = table.index
        curves = {
            str(run): hv.Curve(
                pd.DataFrame({"step": steps, statistic: table[run].to_numpy()}).dropna(),
                "step",
                statistic,
            )
            for run in table.columns
        }
        return _drawable(overlaid(curves, "run"))

    def settings(self, setting: str, kpi: str) -> hv.Points:
        """Return the runs as points, with a setting on one axis and the last value of a metric.

        The dimensions are the setting, the metric and `run`.

        Raises:
            UnknownNameError: the runs do not differ in this setting, or have no such metric.
        """
        group = self._group
        table = group.differences() if isinstance(group, Group) else differences(group)
        _check_setting(setting, table)
        rows = [(table.loc[setting, name], value, name) for name, value in self._last(kpi).items()]
        points = pd.DataFrame(rows, columns=[setting, kpi, "run"])
        found = hv.Points(points, kdims=[setting, kpi], vdims=["run"])
        return styled(
            found,
            "Points",
            {"color": BLUE},
            bokeh={"size": 8, "tools": ["hover"]},
            matplotlib={"s": 30},
        )

    def parallel(self, kpi: str, *settings: str) -> hv.Overlay:
        """Return the runs as lines over parallel axes: settings, and the last value of a metric.

        The lines are an `hv.Path` with the dimensions `run` and `place`, the height on the axis of
        the metric, which colours them. Runs without the metric are left out.

        Args:
            kpi: name of the metric.
            settings: the settings; by default, all in which the runs differ.

        Raises:
            UnknownNameError: the runs do not differ in one of the settings or in any, or have no
                such metric.
        """
        group = self._group
        table = group.differences() if isinstance(group, Group) else differences(group)
        for setting in settings:
            _check_setting(setting, table)
        chosen = [*settings] or [*map(str, table.index)]
        if not chosen:
            raise UnknownNameError("the runs do not differ in any setting.")
        last = self._last(kpi)
        short = short_names(chosen)
        scales = [
            scale_of_settings(short[each], [table.loc[each, run] for run in last])
            for each in chosen
        ]
        scales.append(scale_of_settings(kpi, [*last.values()]))
        return parallel([*last], scales, f"settings and {kpi}")

    def _last(self, kpi: str) -> dict[str, float]:
        """Return the last value of a metric of each run that has it."""
        last, there = {}, []
        for name, run in zip(self._names, self._group, strict=True):
            metrics = run.kpis(automatic=True)
            mine = metrics[metrics["name"] == kpi]
            if len(mine):
                last[name] = float(mine["value"].iloc[-1])
            there += metrics["name"].unique().tolist()
        if not last:
            _check_metric(kpi, list(dict.fromkeys(there)))
        return last


def save(element: Any, path: str | Path) -> Path:
    """Save an element as a self-contained HTML file, or as PNG, SVG or PDF; return the path.

    Images are drawn with Matplotlib (`pip install 'comgra-decl[plot]'`).

    Args:
        element: anything that a `plot` method returns, or a composition of such elements.
        path: where to save; its suffix selects the format.

    Raises:
        ValueError: the suffix is unknown.
        FileNotFoundError: the folder does not exist.
        MissingPackageError: an image was requested and Matplotlib is not installed.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if not target.parent.is_dir():
        raise FileNotFoundError(f"folder {str(target.parent)!r} does not exist")
    if suffix == ".html":
        use("bokeh")
        # unlike the page that HoloViews saves, it loads nothing from the network
        pane = pn.pane.HoloViews(element, backend="bokeh")  # type: ignore[no-untyped-call]
        Look(pane).save(target, title=target.stem)
    elif suffix in _STATIC:
        try:
            use("matplotlib")
        except ImportError as error:
            raise MissingPackageError(
                f"saving {target.name!r} needs Matplotlib: pip install 'comgra-decl[plot]'; "
                "'.html' needs no other package"
            ) from error
        sharp = {"dpi": _DPI} if suffix == ".png" else {}
        import matplotlib as mpl

        with (
            mpl.rc_context({"text.parse_math": False}),  # a dollar sign in a name is no formula
            warnings.catch_warnings(),
        ):
            # tensors without finite values, and characters that the font does not have
            warnings.filterwarnings("ignore", "All-NaN|Mean of empty|Glyph", RuntimeWarning)
            warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
            plain = target.with_suffix(suffix)  # HoloViews would add a suffix to "c.SVG"
            hv.save(_at_rest(element), plain, fmt=_STATIC[suffix], backend="matplotlib", **sharp)
            plain.replace(target)
    else:
        names = ", ".join([".html", *_STATIC])
        raise ValueError(f"path must end with one of {names}, got {target.name!r}")
    return target


def _at_rest(element: Any) -> Any:
    """Return an element as it is now, because only a browser can redraw images by Datashader."""
    if isinstance(element, hv.Layout):
        return element.clone([(path, _at_rest(part)) for path, part in element.items()])
    return element[()] if isinstance(element, hv.DynamicMap) and not element.kdims else element


def shaded(element: Any, *, dynamic: bool = True) -> Any:
    """Return an element of more than 100,000 points as an image drawn by Datashader.

    Browsers take too long to draw that many points, and do not show where they are dense. Smaller
    elements are returned unchanged.

    Args:
        element: curves or points, or an overlay of them.
        dynamic: whether to redraw after zooming, which needs a running kernel or server.

    Raises:
        MissingPackageError: the element is large, and Datashader is not installed.
    """
    parts = element.traverse(lambda part: part, [lambda part: isinstance(part, hv.Element)])
    if sum(map(len, parts)) <= MOST_POINTS:
        return element
    use("bokeh")  # options can be set only for backends that are loaded
    try:
        import datashader
        from holoviews.operation.datashader import datashade
    except ImportError as error:
        raise MissingPackageError(
            "drawing this many points needs Datashader: pip install 'comgra-decl[big]'"
        ) from error
    colours: dict[str, Any] = {"cmap": list(_DENSITY)}
    if isinstance(element, hv.NdOverlay):
        key = str(element.kdims[0])
        many = -(-len(element) // len(LINES))
        colours = {
            "aggregator": datashader.by(key, datashader.count()),
            "color_key": [*LINES] * many,
        }
    image = datashade(element, dynamic=dynamic, **colours)
    return styled(image, "RGB", {}, bokeh={"height": 300})


def _drawable(element: Any) -> Any:
    """Return an element with at most `MOST_POINTS` points, or an image of it by Datashader.

    Without Datashader, some of the points are left out, evenly spaced (of curves: except extremes),
    and the title and a warning say so.
    """
    parts = element.traverse(lambda part: part, [lambda part: isinstance(part, hv.Element)])
    size = sum(map(len, parts))
    if size <= MOST_POINTS:
        return element
    if find_spec("datashader") is not None:
        return shaded(element)
    every = -(-size // MOST_POINTS)
    warnings.warn(
        f"only one of {every} points is drawn; to draw all {size:,}, install Datashader: "
        "pip install 'comgra-decl[big]'",
        stacklevel=3,
    )
    element = element.map(lambda part: _thinned(part, every), [hv.Element])
    title = " \u00b7 ".join(filter(None, [element.label, f"one of {every} points"]))
    kind = type(element).__name__
    return styled(element, kind, {"title": title}, bokeh={"height": 300})


def _thinned(part: hv.Element, every: int) -> hv.Element:
    if isinstance(part, hv.Curve):
        return part.iloc[thin(np.asarray(part.dimension_values(1), float), len(part) // every)]
    return part.iloc[::every]


def use(backend: str) -> None:
    """Load a HoloViews backend but keep the program's choice, or Bokeh if there is none."""
    chosen = hv.Store.current_backend if hv.Store.renderers else "bokeh"
    if backend not in hv.Store.renderers:
        hv.renderer(backend)
    if chosen in hv.Store.renderers:
        hv.Store.set_current_backend(chosen)


def _are_alike(curves: Mapping[str, hv.Curve]) -> bool:
    """Return whether curves can be told apart, and read, on one axis."""
    if len(curves) > len(LINES):
        return False
    values = [np.abs(curve.dimension_values(1)) for curve in curves.values()]
    largest = [float(each[np.isfinite(each)].max(initial=0.0)) for each in values]
    known = [each for each in largest if each > 0]
    return not known or max(known) <= _ALIKE * min(known)


def _metric(table: pd.DataFrame, dimension: str, smoothing: Any, *, x: str = "step") -> hv.Curve:
    if not isinstance(smoothing, (int, float)) or not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be at least 0 and less than 1, got {smoothing!r}")
    values = table["value"].astype(float)
    smooth = smoothed(np.asarray(values, np.float64), smoothing)
    points = pd.DataFrame({x: table[x].to_numpy(), dimension: smooth})
    return hv.Curve(points, x, dimension)


def _one_image(
    values: NDArray[np.float64], axes: list[str], sample: int
) -> tuple[NDArray[np.float64], list[str]]:
    """Return at most two axes of a picture: those of one sample, with leading axes added up."""
    if len(axes) > _ONE_BY_ONE.get(axes[0], len(axes)):
        if not 0 <= sample < len(values):
            raise UnknownNameError(f"there is no {axes[0]} {sample}; there are {len(values)}.")
        values, axes = values[sample], axes[1:]
    while values.ndim > 2:
        values, axes = values.sum(0), axes[1:]
    return values, axes


def _check_setting(setting: str, table: pd.DataFrame) -> None:
    if setting not in table.index:
        there = [*map(str, table.index)]
        raise UnknownNameError(
            f"the runs do not differ in a setting {shown(setting)}"
            f"{did_you_mean(setting, there) or '.'} They differ in: "
            f"{', '.join(map(repr, there)) or 'none'}."
        )


def _check_metric(name: str, there: Iterable[str]) -> None:
    known = [*there]
    if name not in known:
        raise UnknownNameError(
            f"there is no metric {shown(name)}{did_you_mean(name, known) or '.'} "
            f"The metrics are: {', '.join(map(repr, known)) or 'none'}."
        )


def _without(values: Any) -> str:
    """Return what to add to the title of an empty figure."""
    return "" if np.isfinite(np.asarray(values, np.float64)).any() else ": no finite values"


def _with_outer(groups: Iterable[str]) -> Iterator[str]:
    """Yield the groups and those that contain them."""
    for group in groups:
        parts = group.split(".")
        yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _label(slot: Slot) -> str:
    """Return the name of a tensor for a title."""
    return cut(_name(slot.node, slot.role, slot.iteration, slot.pass_name), NAME_ROOM)


def _name(node: str, role: str, iteration: int, pass_: str = "forward") -> str:
    """Return the name of a tensor, without the parts that have default values."""
    parts = [
        node,
        role if role != "output" else "",
        f"iteration {iteration}" if iteration else "",
        pass_ if pass_ != "forward" else "",
    ]
    return visible(", ".join(filter(None, parts)))

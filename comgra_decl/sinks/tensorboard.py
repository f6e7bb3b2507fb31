"""TensorBoard: writes event files with TensorBoard's own writer; needs no TensorFlow."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import needed

from .api import About, Moment
from .graph import Graph
from .points import Points
from .projector import write_points

EXTRA = "tensorboard"


class TensorBoardSink:
    """Write one run into a folder, as `tensorboard --logdir` reads it.

    Raises:
        MissingPackageError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.fspath(folder)
        self._writer = needed("tensorboard.summary.writer.event_file_writer", EXTRA).EventFileWriter
        self._event = needed("tensorboard.compat.proto.event_pb2", EXTRA).Event
        self._summary = needed("tensorboard.compat.proto.summary_pb2", EXTRA)
        self._file: Any = None
        self._last = Moment(0, 0.0)

    def begin(self, about: About) -> None:
        """Open the event file and writes the settings of the program as hyperparameters."""
        self._file = self._writer(self._folder)
        at = self._last = Moment(0, about.started)
        # In the run's own file: `SummaryWriter.add_hparams` would show it as a second run.
        hparams = needed("tensorboard.plugins.hparams.plugin_data_pb2", EXTRA)
        start = hparams.SessionStartInfo(group_name=about.name, start_time_secs=at.time)
        for name, value in about.settings.items():
            _set(start.hparams[name], value)
        self._hparams(at, "session_start_info", start)
        self.text(at, "run", f"{about.group}/{about.name}, recorded in `{about.path}`")

    @property
    def link(self) -> dict[str, str]:
        """The log folder."""
        return {"where": self._folder}

    def scalars(self, at: Moment, values: Mapping[str, float]) -> None:
        """Write numbers, which TensorBoard stores as float32."""
        with np.errstate(over="ignore"):
            numbers = np.array([*values.values()], np.float64).astype(np.float32)
        value = self._summary.Summary.Value
        named = zip(values, numbers.tolist(), strict=True)
        self._add(
            at,
            self._summary.Summary(
                value=[value(tag=name, simple_value=number) for name, number in named]
            ),
        )

    def histogram(
        self, at: Moment, name: str, counts: NDArray[np.int64], edges: NDArray[np.float64]
    ) -> None:
        """Write a histogram with its own edges; sums are those of values in the bins' middles."""
        middles = (edges[:-1] + edges[1:]) / 2
        histogram = self._summary.HistogramProto(
            min=edges[0],
            max=edges[-1],
            num=int(counts.sum()),
            sum=float(counts @ middles),
            sum_squares=float(counts @ middles**2),
            bucket_limit=edges[1:].tolist(),
            bucket=counts.tolist(),
        )
        value = self._summary.Summary.Value(tag=name, histo=histogram)
        self._add(at, self._summary.Summary(value=[value]))

    def image(self, at: Moment, name: str, pixels: NDArray[np.uint8]) -> None:
        """Write a picture as PNG."""
        file = io.BytesIO()
        needed("PIL.Image", EXTRA).fromarray(pixels).save(file, "PNG")
        height, width, _ = pixels.shape
        image = self._summary.Summary.Image(
            height=height, width=width, colorspace=3, encoded_image_string=file.getvalue()
        )
        value = self._summary.Summary.Value(tag=name, image=image)
        self._add(at, self._summary.Summary(value=[value]))

    def text(self, at: Moment, name: str, text: str) -> None:
        """Write a text, which TensorBoard shows as Markdown."""
        metadata = needed("tensorboard.plugins.text.metadata", EXTRA).create_summary_metadata(
            display_name="", description=""
        )
        tensor = needed("tensorboard.util.tensor_util", EXTRA).make_tensor_proto(
            np.array(text.encode(), object)
        )
        value = self._summary.Summary.Value(tag=name, metadata=metadata, tensor=tensor)
        self._add(at, self._summary.Summary(value=[value]))

    def graph(self, at: Moment, graph: Graph) -> None:
        """Write the graph; parts of a path become nested scopes."""
        self._file.add_event(
            self._event(wall_time=at.time, graph_def=_graph_def(graph).SerializeToString())
        )

    def points(self, records: Sequence[Points]) -> None:
        """Write points for the projector, which are files beside the event file."""
        write_points(records, self._folder)

    def artifact(self, folder: Path) -> None:
        """Do nothing: TensorBoard has no artifacts."""

    def end(self, state: str) -> None:
        """Close the event file."""
        if self._file is None:
            return
        hparams = needed("tensorboard.plugins.hparams.plugin_data_pb2", EXTRA)
        status = needed("tensorboard.plugins.hparams.api_pb2", EXTRA).Status
        code = status.Value("STATUS_SUCCESS" if state == "finished" else "STATUS_UNKNOWN")
        ended = hparams.SessionEndInfo(status=code, end_time_secs=self._last.time)
        self._hparams(self._last, "session_end_info", ended)
        file, self._file = self._file, None
        file.close()

    def _hparams(self, at: Moment, part: str, content: Any) -> None:
        """Write a part of the facts from which TensorBoard builds its HParams page."""
        metadata = needed("tensorboard.plugins.hparams.metadata", EXTRA)
        data = needed("tensorboard.plugins.hparams.plugin_data_pb2", EXTRA)
        told = metadata.create_summary_metadata(data.HParamsPluginData(**{part: content}))
        tag = f"_hparams_/{part}"
        value = self._summary.Summary.Value(tag=tag, metadata=told)
        self._add(at, self._summary.Summary(value=[value]))

    def _add(self, at: Moment, summary: Any) -> None:
        self._last = at
        self._file.add_event(self._event(wall_time=at.time, step=at.step, summary=summary))


def _set(field: Any, value: Any) -> None:
    """Set a `google.protobuf.Value` to a setting."""
    if isinstance(value, bool):
        field.bool_value = value
    elif isinstance(value, int | float):
        field.number_value = value
    else:
        field.string_value = str(value)


_SPECIAL = re.compile(r"[ :/]")


def _graph_def(graph: Graph) -> Any:
    graph_def = needed("tensorboard.compat.proto.graph_pb2", EXTRA).GraphDef
    node_def = needed("tensorboard.compat.proto.node_def_pb2", EXTRA).NodeDef
    versions = needed("tensorboard.compat.proto.versions_pb2", EXTRA).VersionDef(producer=22)
    attr = needed("tensorboard.compat.proto.attr_value_pb2", EXTRA).AttrValue
    shapes = needed("tensorboard.compat.proto.tensor_shape_pb2", EXTRA).TensorShapeProto
    names = _scoped([node.name for node in graph.nodes])
    sources: dict[str, list[str]] = {}
    for edge in graph.edges:
        sources.setdefault(edge.sink, []).append(names[edge.source])
    nodes = []
    for node in graph.nodes:
        attributes = {"kind": attr(s=node.kind.encode())}
        if node.dtype:
            attributes["dtype"] = attr(s=node.dtype.encode())
        attributes |= {
            role: attr(s=str(list(shape)).encode()) for role, shape in node.attributes.items()
        }
        if node.shape is not None:
            shape = shapes(dim=[shapes.Dim(size=size) for size in node.shape])
            attributes["_output_shapes"] = attr(list=attr.ListValue(shape=[shape]))
        nodes.append(
            node_def(
                name=names[node.name],
                op=node.label,
                input=sources.get(node.name, []),
                attr=attributes,
            )
        )
    return graph_def(node=nodes, versions=versions)


def _scoped(names: list[str]) -> dict[str, str]:
    """Return paths in TensorBoard's form, each of them different.

    TensorBoard gives spaces, colons and slashes a meaning of its own, so they are replaced. If this
    makes a name, or a part that other names share, equal to another one, it is numbered: `a_b` and
    `a b` become `a_b` and `a_b_2`.
    """
    paths = {"": ""}
    taken: set[str] = set()
    for name in sorted(names, key=lambda name: len(_SPECIAL.findall(name))):  # stable
        for end in (found.start() for found in re.finditer(r"\.|$", name)):
            above, _, part = name[:end].rpartition(".")
            if name[:end] in paths:
                continue
            text = path = "/".join(filter(None, (paths[above], _SPECIAL.sub(_replacement, part))))
            number = 1
            while path in taken:
                number += 1
                path = f"{text}_{number}"
            taken.add(path)
            paths[name[:end]] = path
    return {name: paths[name] for name in names}


def _replacement(found: re.Match[str]) -> str:
    return "|" if found[0] == "/" else "_"

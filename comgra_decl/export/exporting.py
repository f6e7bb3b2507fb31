"""Export a run to formats for other programs; the target appears only when complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from comgra_decl.errors import StoreError, UnknownNameError, did_you_mean, is_one_of, shown
from comgra_decl.query import Remote, location
from comgra_decl.sinks import Selection
from comgra_decl.store.beside import refuse_within
from comgra_decl.store.drafts import drafted

from .content import Content

if TYPE_CHECKING:
    from comgra_decl.query import Circuit, EdgeEffects, Run

FORMATS: Mapping[str, str] = {
    "parquet": "a folder of Parquet tables (needs the 'parquet' extra)",
    "csv": "a folder of CSV tables",
    "zarr": "a zarr v3 group: statistics, samples, histograms and values as arrays",
    "npz": "one file of numpy arrays: like zarr, but without values",
    "trace": "one time line of records, metrics and profiled steps, for Perfetto or Chrome",
    "tensorboard": "a log folder of TensorBoard (needs the 'tensorboard' extra)",
    "onnx": "the graph as an ONNX file for viewers such as Netron (needs the 'onnx' extra)",
    "graphml": "the graph as GraphML",
    "json": "the graph as node-link JSON",
    "dot": "the graph in the language of Graphviz",
    "mermaid": "the graph as a Mermaid flowchart",
}
"""The formats and their descriptions."""

CIRCUITS = ("graphml", "json", "dot", "mermaid")
"""The formats that can contain a circuit."""

Progress = Callable[[str, int, int], None]


def export_run(
    run: Run,
    to: str | os.PathLike[str],
    format_: str = "parquet",
    *,
    nodes: str | None = None,
    selection: Selection | None = None,
    circuit: Circuit | EdgeEffects | None = None,
    profile: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Export a run to a format that other programs read.

    Args:
        run: an open run; a live one is exported as of its last refresh.
        to: target file or folder; never overwritten.
        format_: one of `FORMATS`.
        nodes: the pattern of nodes to export, as in a spec: `blocks.*`, `**.attention`.
        selection: the series to export to TensorBoard, instead of `nodes`; other formats use only
            its `nodes`.
        circuit: a graph of paths from `Run.circuit`, instead of the recorded graph; or effects from
            `Run.edge_effects`, to which the recorded graph is reduced.
        profile: a file that the program has written with `export_chrome_trace` of torch.profiler,
            whose events become part of a "trace".
        progress: called with the current action, the amount done, and the total.

    Returns:
        The path written.

    Raises:
        UnknownNameError: the format does not exist, or cannot contain a circuit, or no node matches
            the pattern.
        PatternError: the pattern is invalid.
        SelectionError: the format is for a limited number of series, and more are selected.
        MissingPackageError: the format needs a missing package; the message names the extra.
        FormatError: `profile` is not such a file.
        StoreError: the target exists, is in a bucket, is inside the run, or cannot be written.
    """
    if not is_one_of(format_, FORMATS):
        raise UnknownNameError(
            f"there is no format {shown(format_)}{did_you_mean(format_, FORMATS) or '.'} "
            f"Choose one of {', '.join(FORMATS)}."
        )
    if circuit is not None and format_ not in CIRCUITS:
        raise UnknownNameError(
            f"a circuit cannot be exported as {format_}; choose one of {', '.join(CIRCUITS)}."
        )
    if profile is not None and format_ != "trace":
        raise UnknownNameError(f"a profile is part of the format trace, not of {format_}.")
    write = _writer(format_)
    selection = selection or Selection(nodes)
    content = Content(
        run,
        selection=selection,
        circuit=circuit,
        profile=None if profile is None else Path(profile),
        progress=progress,
    )
    place = location(to)
    if isinstance(place, Remote):
        raise StoreError(f"an export is a file or a folder; it cannot be written to {str(place)!r}")
    target = place.absolute()
    refuse_within(run.path.absolute(), target)
    if target.exists() or target.is_symlink():
        raise StoreError(f"{str(target)!r} already exists; choose another target.")
    with drafted(target, "exporting") as draft:
        written = draft / target.name
        write(content, written)
        written.rename(target)
    return target


def _writer(format_: str) -> Callable[[Content, Path], None]:
    """Import and return the function that writes a format."""
    from .graph_files import WRITERS

    if format_ in WRITERS:
        return WRITERS[format_]
    found: Callable[[Content, Path], None] = import_module(f".{format_}", __package__).write
    return found

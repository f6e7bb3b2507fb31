"""Write the figures into `docs/store.md`, between two markers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.store.exports import RECORDS, SLOTS

PAGE = Path(__file__).parents[2] / "docs" / "store.md"
_QUIET = 0.5  # load
BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->\n"


def write(figures: dict[str, Any]) -> None:
    """Replace the figures on the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n" + tables(figures) + "\n" + END + after)


def tables(figures: dict[str, Any]) -> str:
    """Return all tables as Markdown."""
    machine, hand = figures["machine"], figures["handover"]
    load = ""
    if figures.get("alone"):
        load = " Nothing else was running."
    elif machine["load_before"] > _QUIET:
        load = " **The machine was busy, so times are upper bounds. Sizes and counts are exact.**"
    usage, peers_size = hand["usage"], figures["peers_size"]
    return f"""\
Measured on {figures["date"]} with `python -m benchmarks.store`: {machine["processor"]},
{machine["cores"]} cores, system load of {machine["load_before"]} before the run.{load} Times in ms.
A run contains nine statistics, aggregated in three ways and for two samples. Eight records share a
commit. Each read is repeated with different columns. The table shows the first read (in a new
process, from the page cache) / the median / the 95th percentile. Opening is repeated 20 times, each
time bypassing all caches except the page cache. The table shows the median / the 95th percentile.

{_table(_run_lines(figures["runs"]))}

*raw* is the number of bytes on disk divided by the size of the statistics as float32. *reader MB*
is the resident memory at three points: before all these reads / after them and two readings of the
heat maps of all 27 columns / after four more readings of the heat maps. The chunk cache accounts
for 128 MB of it.

The following table shows the speed of writing as fast as possible, which never happens in training:

{_table(_writer_lines(figures["runs"]))}

The following table shows how long it takes to read part of a tensor of 10 million float32 values
(40 MB):

{_table(_large_lines(figures["large"]))}

{_exports(figures.get("exports", {}))}\
{hand["steps"]:,} steps of {handover_slots()} slots were passed to the writer, one every 5 ms. Each
step took the training thread {hand["median"]:.0f} µs (median) or {hand["p99"]:.0f} µs (99th
percentile). The run has {hand["files"]} files and takes
{hand["bytes_per_step"] / hand["raw_bytes_per_step"]:.2f} times the raw bytes. The writer took
{usage["share"]:.0%} of a core, and training waited {usage["waited"]:.2f} s.

The next table compares ways to store the same statistics one step at a time, for
{peers_size["records"]:,} steps of {peers_size["slots"]} slots. comgra_decl's writer thread would
combine fast steps into one commit; this is disabled here.

{_table(_peer_lines(figures["peers"]))}

`~` means extrapolated from every fiftieth file. comgra's rows are emulated with a msgpack file per
step and nine fields per number. HDF5 and comgra do not wait for the disk. comgra_decl and SQLite
do.
"""


def _exports(seconds: dict[str, float]) -> str:
    """Return a paragraph; nothing if exports were not measured."""
    if not seconds:
        return ""
    times = ", ".join(f"{name} {spent:.1f} s" for name, spent in seconds.items())
    return f"Exports of {RECORDS} records of {SLOTS} tensors with values: {times}.\n\n"


def handover_slots() -> int:
    """Return the number of slots in each step that is handed over."""
    from benchmarks.store.handover import SLOTS

    return SLOTS


def _run_lines(runs: Iterable[dict[str, Any]]) -> list[Sequence[str]]:
    reads = ("open", "cell", "step", "series", "sample series", "heat map")
    lines: list[Sequence[str]] = [("steps x slots", "", *reads, "raw", "files", "reader MB")]
    for run in (run for run in runs if "read" in run):
        lines.append((run["name"], "live", *_read(run["read"], run["ratio"], run["files"])))
        if "compacted_read" not in run:
            continue
        compacted = _read(run["compacted_read"], run["compacted_ratio"], run["compacted_files"])
        lines.append(("", "compacted", *compacted))
    return lines


def _read(read: dict[str, Any], ratio: float, files: int) -> tuple[str, ...]:
    names = ("cell", "step", "series", "sample series", "heat map")
    reads = [_spent(read["reads"][name], "first", "median", "p95") for name in names]
    opened = _spent(read["open"], "median", "p95")
    held = " / ".join(f"{memory:.0f}" for memory in read["memory"])
    return (opened, *reads, f"{ratio:.2f}", f"{files:,}", held)


def _spent(times: dict[str, float], *which: str) -> str:
    return " / ".join(f"{times[name]:.1f}" for name in which)


def _writer_lines(runs: Iterable[dict[str, Any]]) -> list[Sequence[str]]:
    head = (
        "steps x slots",
        "commit, first half",
        "second half",
        "cores",
        "writer MB at a fifth",
        "at the end",
    )
    lines: list[Sequence[str]] = [head]
    for run in runs:
        times = (f"{run[f'commit_ms_{half}_half']:.1f}" for half in ("first", "second"))
        cores = f"{run['cpu'] / run['seconds']:.2f}"
        held = (f"{run[f'memory_at_{when}']:.0f}" for when in ("a_fifth", "the_end"))
        lines.append((run["name"], *times, cores, *held))
    return lines


def _large_lines(large: dict[str, dict[str, float]]) -> list[Sequence[str]]:
    lines: list[Sequence[str]] = [("", "ms", "MB read")]
    lines += [(name, f"{r['ms']:.1f}", f"{r['megabytes']:.1f}") for name, r in large.items()]
    return lines


def _peer_lines(peers: Iterable[dict[str, Any]]) -> list[Sequence[str]]:
    lines: list[Sequence[str]] = [("", "write a step", "read a step", "series", "raw", "files")]
    for peer in peers:
        series = f"{'~' * peer['extrapolated']}{peer['series']:.1f}"
        numbers = (f"{peer['write']:.2f}", f"{peer['step']:.2f}", series, f"{peer['ratio']:.2f}")
        lines.append((peer["name"], *numbers, f"{peer['files']:,}"))
    return lines


def _table(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = lines
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rest))

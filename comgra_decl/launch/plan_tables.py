"""A plan as people read it."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from comgra_decl.launch.plan import Plan
from comgra_decl.launch.tables import console

_UNITS = ("B", "kB", "MB", "GB", "TB")


def print_plan(plan: Plan) -> None:
    """Prints a plan to the standard output."""
    out = console()
    if plan.tensors:
        out.print(Text("What the spec catches", style="bold"))
        for table in (_entries(plan), _tensors(plan), _bytes(plan), _forecast(plan)):
            out.print(table, "", sep="\n")
    for sentence in plan.unmatched:
        out.print(Text(f"matches nothing: {sentence}", style="red"))
    for sentence in plan.warnings:
        out.print(Text(f"warning: {sentence}", style="yellow"))
    for place in plan.cuts:
        out.print(Text(f"graph cut: {place}", style="yellow"))
    for sentence in plan.remarks:
        out.print(Text(f"note: {sentence}"))
    if plan.tensors:
        out.print("This was a dry run: the program was ended, and nothing was kept.")


def size_text(size: float | None) -> str:
    """Returns a number of bytes as people write it: "42 kB"."""
    if size is None:
        return "-"
    unit = 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"


def _entries(plan: Plan) -> Table:
    table = _table("entry", "selected", "seen", "series", "never called", right=(1, 2, 3))
    for name, entry in plan.entries.items():
        silent = entry["never_called"]
        shown = ", ".join(silent[:4]) + (f", ... ({len(silent)})" if len(silent) > 4 else "")
        counts = [str(entry[key]) for key in ("matched", "fired", "written")]
        table.add_row(name, *counts, shown or "-")
    return table


def _tensors(plan: Plan) -> Table:
    table = _table("node", "role", "passes", "kind", "type", "shape", "samples", right=(6,))
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for tensor in plan.tensors:
        key = (tensor["node"], tensor["role"])
        line = lines.setdefault(key, {**tensor, "passes": {}, "last": 0})
        line["passes"][tensor["pass"]] = None
        line["last"] = max(line["last"], tensor["iteration"])
    for (node, role), line in lines.items():
        shape = "x".join(map(str, line["shape"])) or "-"
        times = f" ({line['last'] + 1} iterations)" if line["last"] else ""
        samples = "-" if line["samples"] is None else str(line["samples"])
        passes = ", ".join(line["passes"])
        table.add_row(node, role + times, passes, line["kind"], line["dtype"], shape, samples)
    return table


def _bytes(plan: Plan) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    parts = [f"{name} {size_text(n)}" for name, n in plan.bytes.items() if name != "on_disk"]
    table.add_row("a record", ", ".join(parts) + " before compression")
    table.add_row("on disk", f"{size_text(plan.bytes['on_disk'])} per record, as measured")
    table.add_row("series", f"{len(plan.tensors)}, with {plan.edges} connections")
    if plan.price is None:
        table.add_row("price", "not measured: the program ended too early")
    else:
        plain, recorded = plan.price["plain_ms"], plan.price["recorded_ms"]
        added = plan.price["added_ms"]
        text = f"{added:.3g} ms per recorded step ({recorded:.3g} ms; {plain:.3g} ms without)"
        if plan.price["device_added_ms"] is not None:
            text += f", by the device's clock; {plan.price['host_added_ms']:.3g} ms on the host"
        table.add_row("price", text)
    return table


def _forecast(plan: Plan) -> Table:
    table = _table("steps", "records", "disk", "share of time", right=(0, 1, 2, 3))
    for line in plan.forecast:
        share = "-" if line["share"] is None else f"{line['share']:.2%}"
        records = f"{line['records']:,}"
        table.add_row(f"{line['steps']:,}", records, size_text(line["bytes"]), share)
    return table


def _table(*headings: str, right: tuple[int, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index in right else "left", overflow="fold")
    return table
